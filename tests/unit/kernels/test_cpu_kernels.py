"""The compiled kernels against the plain torch ones, at the edges of their tiles, lanes, chunks and splits."""

from itertools import product
from unittest.mock import patch

import pytest
import torch

from baton.engine.kernels.base import HeadNorms, Rotation
from baton.engine.kernels.cpu.attention import CompiledAttention, Sizes
from baton.engine.kernels.cpu.compiler import load_library
from baton.engine.kernels.cpu.kernel_choice import Choice, Ideas, Profile
from baton.engine.kernels.cpu.ops import ELEMENTS, CpuKernels
from baton.engine.kernels.torch_attention import PagedAttention
from baton.engine.kernels.torch_reference import TorchKernels, TorchLinear
from tests.support.compiled_kernels import compiled_or_skip
from tests.support.cpu_levels import on_levels
from tests.support.paged_attention import batch_over, paged

DTYPES = list(ELEMENTS)
BLOCK = 16

pytestmark = on_levels("avx512-bf16", "avx512", "avx2")  # VNNI is for quantised weights only
FLAT, TALL = Choice(1 << 20, tall=True), Choice(0, tall=True)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def kernels(request, level: str) -> CpuKernels:
    made = compiled_or_skip(lambda: CpuKernels(request.param, Profile(static=FLAT)))
    assert level in (made.level, "native")
    return made


@pytest.fixture
def dtype(kernels: CpuKernels) -> torch.dtype:
    return kernels.dtype


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Check for equality up to rounding: float32 to about 1e-5, bfloat16 to its last bits."""
    atol, rtol = (2e-5, 1e-4) if dtype is torch.float32 else (8e-3, 1.6e-2)
    torch.testing.assert_close(found.float(), expected.float(), atol=atol * scale, rtol=rtol)


@pytest.fixture
def normal(dtype: torch.dtype, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(dtype)


CHOICES = pytest.mark.parametrize("choice", [FLAT, TALL], ids=["flat", "tall"])


def test_rows_of_w_may_be_longer_than_a_piece(dtype, normal):
    k = (1 << 17) + 1 if dtype is torch.bfloat16 else (1 << 16) + 1
    weight, x, before = normal(8, k), normal(1, k), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = CpuKernels(dtype, Profile(static=FLAT)).linear(weight)(x, torch.empty(1, 8, dtype=dtype))
    finally:
        torch.set_num_threads(before)
    close(found, x.float() @ weight.float().T, dtype, scale=100)


@pytest.mark.sample(4)
@pytest.mark.parametrize("k", [1, 31, 32, 33, 100, 2048, 2049, 5632])
@CHOICES
def test_linear_equals_torch(dtype, normal, k: int, choice: Choice):
    kernels = CpuKernels(dtype, Profile(static=choice))
    for width, rows in product((1, 3, 4, 71, 130), (*range(1, 10), 50, 130)):
        weight, bias, x = normal(width, k), normal(width), normal(rows, k)
        exact = x.double() @ weight.double().t()
        for b in (None, bias):
            found = kernels.linear(weight, b)(x, torch.full((rows, width), torch.nan, dtype=dtype))
            close(found, exact if b is None else exact + b.double(), dtype, scale=k**0.5)
        wide = kernels.linear(weight)(x, torch.full((rows, width), torch.nan))
        torch.testing.assert_close(wide.double(), exact, atol=1e-4 * k**0.5, rtol=1e-3)


@pytest.mark.parametrize("k", [700, 2048, 4500])
@CHOICES
def test_rows_of_a_linear_layer_do_not_depend_on_their_company(dtype, normal, k: int, choice: Choice):
    layer = CpuKernels(dtype, Profile(static=choice)).linear(normal(77, k))
    x = normal(70, k)
    whole = layer(x, torch.empty(70, 77, dtype=dtype))
    for first, rows in ((0, 1), (69, 1), *((2 * n, n) for n in range(2, 11)), (1, 33)):
        part = layer(x[first : first + rows], torch.empty(rows, 77, dtype=dtype))
        assert torch.equal(part, whole[first : first + rows])


@CHOICES
def test_linear_leaves_what_lies_around_its_output_alone(dtype, choice: Choice):
    layer = CpuKernels(dtype, Profile(static=choice)).linear(torch.ones(13, 20, dtype=dtype))
    for rows in (1, 2, 5):
        around = torch.full((9, 40), 7.0, dtype=dtype)
        layer(torch.ones(rows, 20, dtype=dtype), around[2 : 2 + rows, 10:23])
        assert (around[2 : 2 + rows, 10:23] == 20).all()
        assert int((around == 7).sum()) == 9 * 40 - rows * 13


@pytest.mark.parametrize("width", [1, 15, 16, 17, 48, 64, 1000])
def test_norms_equal_torch(kernels: CpuKernels, dtype, normal, width: int):
    plain = TorchKernels()
    for rows in (1, 3, 40):
        x, delta, weight = normal(rows, width), normal(rows, width), normal(width)
        other = x.clone()
        found = kernels.rms_norm(x, None, weight, 1e-5, torch.empty_like(x))
        close(found, plain.rms_norm(x, None, weight, 1e-5, x.clone()), dtype)
        found = kernels.rms_norm(x, delta, weight, 1e-5, torch.empty_like(x))
        close(found, plain.rms_norm(other, delta, weight, 1e-5, torch.empty_like(x)), dtype)
        assert torch.equal(x, other)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("width", [1, 16, 33, 700])
def test_gates_equal_torch(kernels: CpuKernels, dtype, normal, width: int, activation: str):
    gate_up = normal(5, 2 * width) * 4
    gate_up[0, 0], gate_up[1, 0] = 100, -100  # the ends of exp
    found = kernels.gate(gate_up, activation, torch.empty(5, width, dtype=dtype))
    close(found, TorchKernels().gate(gate_up, activation, torch.empty(5, width, dtype=dtype)), dtype, scale=4)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("inner", [1, 15, 16, 33, 96, 97, 250])
def test_gated_products_equal_torch(dtype, normal, inner: int, activation: str):
    kernels, plain = CpuKernels(dtype, Profile(static=Choice(2, tall=True))), TorchKernels()
    for k, biased in ((40, False), (33, True), (4200, True)):
        weight, bias = normal(2 * inner, k) * k**-0.5, normal(2 * inner) if biased else None
        for rows in (1, 3, 64, 70):
            x = normal(rows, k)
            room, out = torch.empty(rows, 2 * inner, dtype=dtype), torch.full((rows, inner), torch.nan, dtype=dtype)
            found = kernels.gated(kernels.linear(weight, bias), x, activation, room, out)
            expected = plain.gated(plain.linear(weight, bias), x, activation, room.clone(), out.clone())
            close(found, expected, dtype, scale=4)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (6, 2, 48), (8, 1, 64), (3, 3, 10)])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_cache_equal_torch(kernels: CpuKernels, dtype, normal, heads, kv_heads, dim, normed):
    rows = 9
    qkv, angles = normal(rows, heads + 2 * kv_heads, dim), normal(rows, dim // 2).float() * 3
    rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
    norms = HeadNorms(normal(dim), normal(dim), 1e-6) if normed else None
    slots = normal(5 * BLOCK).argsort()[:rows]
    results = []
    for one in (kernels, TorchKernels()):
        # Views of a wider cache, as in a rank of a tensor-parallel group.
        wide = torch.zeros(2, 5, BLOCK, kv_heads + 3, dim, dtype=dtype)
        query = one.rotate_and_store(qkv.clone(), rotation, norms, slots, *wide[:, :, :, 1 : 1 + kv_heads])
        results.append((query, wide))
    for found, expected in zip(*results, strict=True):
        close(found, expected, dtype, scale=2)


def case(seed: int, lengths, heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype):
    made = paged(seed, lengths, heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim, block=BLOCK, dtype=dtype)
    return made.batch, made.query, made.keys, made.values


def attend(kernels: CpuKernels, data, window, *, unified=None, splits=None, fallbacks=0, **options) -> torch.Tensor:
    """Return the result of compiled attention, after a check of its number of fall-backs."""
    batch, query, keys, values = data
    element = ELEMENTS[query.dtype]
    attention = CompiledAttention(load_library(element), element, window, unified, splits, **options)
    out = torch.full((len(query), query.shape[1] * values.shape[3]), torch.nan, dtype=query.dtype)
    attention.bind(batch, BLOCK, query.shape[2] ** -0.5)(query, keys, values, out)
    assert attention.fallbacks == fallbacks
    return out


def reference(data, window) -> torch.Tensor:
    """Compute attention in float32, because a bfloat16 reference would have the same rounding errors."""
    batch, query, keys, values = data
    out = torch.empty(len(query), query.shape[1] * values.shape[3])
    scale = query.shape[2] ** -0.5
    return PagedAttention(batch, BLOCK, window, scale)(query.float(), keys.float(), values.float(), out)


LENGTHS = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 63), (1, 64), (1, 65), (1, 300), (2, 2), (5, 64), (40, 40), (30, 97)]
HEADS = [(4, 4, 64, 64), (12, 4, 48, 48), (8, 1, 128, 128), (32, 2, 16, 16), (4, 1, 96, 64), (130, 1, 32, 32)]
MANY_TASKS = [(1, 5)] * 300 + [(90, 90)]
WITHOUT_ROOM = [(2, 2, 10, 10), (2, 2, 640, 640), (2, 2, 32, 20)]  # torch computes such heads


@pytest.mark.parametrize(
    ("lengths", "shape", "window"),
    [
        *product([LENGTHS], HEADS, (None, 1, 20, 64)),
        *product([[(1, 20), (7, 30)]], WITHOUT_ROOM, [None]),
        (MANY_TASKS, (4, 4, 16, 16), None),
    ],
)
def test_attention_equals_the_reference(kernels, dtype, seed, lengths, shape, window):
    heads, kv_heads, dim, value_dim = shape
    data = case(seed, lengths, heads, kv_heads, dim, value_dim, dtype)
    close(attend(kernels, data, window), reference(data, window), dtype)


SPLIT = [(1, 1), (1, 64), (1, 65), (1, 700), (3, 70)]


@pytest.mark.parametrize("splits", [1, 2, 3, 9, 100])
@pytest.mark.parametrize("unified", [None, 0.0, 3.0])
def test_splits_change_nothing_even_where_some_are_empty(kernels, dtype, seed, splits, unified):
    data = case(seed, SPLIT, 6, 2, 64, 64, dtype)
    for window in (None, 100):
        close(attend(kernels, data, window, splits=splits, unified=unified), reference(data, window), dtype)


@pytest.mark.parametrize("outlier", [3000.0, -3000.0, 90.0])
def test_a_row_outside_the_unified_range_falls_back_alone(kernels, dtype, seed, outlier):
    """One sequence's scores are far from the preset constant. It is still right, and the others' bits do not change."""
    batch, query, keys, values = case(seed, [(1, 40), (1, 130), (2, 70)], 4, 2, 64, 64, dtype)
    calm = attend(kernels, (batch, query, keys, values), None, unified=0.0)
    loud = query.clone()
    positions = keys[batch.block_tables[1, 0].item(), 3, 0]  # a key of the second sequence
    loud[1, 0] = (positions * outlier / positions.float().square().sum() * 8).to(dtype)
    found = attend(kernels, (batch, loud, keys, values), None, unified=0.0, fallbacks=1)
    close(found, reference((batch, loud, keys, values), None), dtype)
    others = [0, 2, 3]
    assert torch.equal(found[others], calm[others])
    assert not torch.equal(found[1], calm[1])
    assert torch.equal(found[1, 64:], calm[1, 64:])  # the same row's other heads


@pytest.mark.parametrize("unified", [400.0, -400.0])
def test_all_rows_fall_back_if_all_weights_are_zero_or_infinite(kernels, dtype, seed, unified):
    data = case(seed, SPLIT, 6, 2, 64, 64, dtype)
    for splits, parts in ((1, 1), (2, 2)):  # the first two sequences have one split that is not empty
        rows = 4 * parts + 3 - 2 * (parts - 1)
        close(
            attend(kernels, data, None, unified=unified, splits=splits, fallbacks=6 * rows),
            reference(data, None),
            dtype,
        )


def test_kernels_count_the_fallbacks_of_all_windows(dtype, seed):
    batch, query, keys, values = case(seed, [(1, 40), (3, 70)], 4, 2, 64, 64, dtype)
    query[0, 1] *= 1000
    for unified, count in ((True, 3), (False, 0)):
        kernels = CpuKernels(dtype, Ideas(unified_max=unified).applied(Profile()))
        for window in (None, 30, None):
            kernels.attention(batch, BLOCK, window, 0.2)(query, keys, values, torch.empty(4, 4 * 64, dtype=dtype))
        assert kernels.fallbacks == count


def test_one_attention_serves_batch_after_batch(kernels, dtype, seed):
    made = kernels.attention
    for lengths, (heads, kv_heads) in product(([(1, 9)] * 3, [(50, 60)], [(1, 200)]), ((2, 2), (8, 2))):
        batch, query, keys, values = case(seed, lengths, heads, kv_heads, 32, 32, dtype)
        out = torch.empty(len(query), heads * 32, dtype=dtype)
        made(batch, BLOCK, None, 0.2)(query, keys, values, out)
        expected = PagedAttention(batch, BLOCK, None, 0.2)(query, keys, values, out.clone())
        close(out, expected, dtype, scale=2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (5, 1), (7, 1), (16, 2), (9, 1)])
@pytest.mark.parametrize(("window", "fixed"), [(None, True), (100, True), (100, False)])
def test_attention_without_splits_has_the_same_bits_for_any_number_of_new_tokens(
    kernels, seed, heads, kv_heads, window, fixed
):
    """Few rows of a KV head are read without a copy of the chunk, and many with one. Steps with proposals that are not
    fixed have the bits of steps without, also behind a window.
    """
    attention = CompiledAttention(kernels.library, kernels.element, window, None, splits=None if fixed else 1)
    for dim, value_dim in ((64, 64), (80, 48)):
        made = paged(
            seed,
            [(40, 230)],
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            value_dim=value_dim,
            block=BLOCK,
            dtype=kernels.dtype,
        )
        rows = []
        for first, new in ((0, 40), (39, 1), (38, 2), (21, 3), (5, 7)):
            batch = batch_over(made.batch.block_tables, [new], [190 + first + new], fixed=fixed)
            query, out = made.query[first : first + new], torch.empty(new, heads * value_dim, dtype=kernels.dtype)
            rows.append((attention.bind(batch, BLOCK, 0.1)(query, made.keys, made.values, out), first, new))
        whole = rows[0][0]
        assert all(torch.equal(part, whole[first : first + new]) for part, first, new in rows)


def test_larger_values_in_the_same_batch_get_larger_scratch(kernels, dtype, seed):
    element = ELEMENTS[dtype]
    attend_once = CompiledAttention(kernels.library, element, None, None, splits=8)
    for value_dim in (16, 512):
        batch, query, keys, values = case(seed, [(1, 600)], 4, 1, 32, value_dim, dtype)
        if value_dim == 16:
            attend_once.bind(batch, BLOCK, 0.2)
        out = torch.empty(1, 4 * value_dim, dtype=dtype)
        attend_once(query, keys, values, out)
        assert attend_once._partials.numel() >= 8 * 4 * (value_dim + 2)
        close(out, PagedAttention(batch, BLOCK, None, 0.2)(query, keys, values, out.clone()), dtype, scale=2)


@pytest.mark.parametrize("tall", [False, True])
def test_the_profile_says_which_kernel_is_taken(dtype, tall: bool):
    layer = CpuKernels(dtype, Profile({(8, 8): Choice(2, tall=tall)})).linear(torch.eye(8, dtype=dtype))
    with patch.object(TorchLinear, "__call__", autospec=True, side_effect=TorchLinear.__call__) as by_torch:
        for rows in (1, 2, 3):
            x = torch.rand(rows, 8).to(dtype)
            assert torch.equal(layer(x, torch.empty_like(x)), x)
    assert [len(call.args[1]) for call in by_torch.call_args_list] == ([] if tall else [3])


def test_what_is_not_a_number_is_never_hidden(kernels: CpuKernels, dtype, seed):
    """A NaN in a key, score or gate must reach the logits, where the engine looks for it."""
    batch, query, keys, values = case(seed, [(1, 40), (6, 90)], 4, 2, 64, 64, dtype)
    broken = query.clone()
    broken[0, 1, 5] = torch.nan
    out = attend(kernels, (batch, broken, keys, values), None)
    assert out[0, 64:128].isnan().all()
    assert out[0, :64].isfinite().all()
    assert out[1:].isfinite().all()
    gate_up = torch.ones(2, 40, dtype=dtype)
    gate_up[1, 3] = torch.nan
    gated = kernels.gate(gate_up, "silu", torch.empty(2, 20, dtype=dtype))
    assert gated.isnan().nonzero().tolist() == [[1, 3]]


@pytest.mark.sample(4)
@pytest.mark.parametrize("rows", [32, 64, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (128, 256))])
@pytest.mark.parametrize("choice", [FLAT, TALL, Choice(0, tall=False)], ids=["flat", "tall", "torch"])
def test_rows_of_fixed_forwards_do_not_depend_on_their_slot(dtype, normal, choice: Choice, rows: int):
    """Torch's product has this property for the numbers of rows of fixed forwards."""
    kernels = CpuKernels(dtype, Profile(static=choice))
    for width, k in ((96, 64), (77, 300), (40, 4096)):
        layer, row, x, results = kernels.linear(normal(width, k)), normal(k), normal(rows, k), []
        for slot in range(0, rows, 5):
            company = x.roll(slot, 0)
            company[slot] = row
            results.append(layer(company, torch.empty(rows, width, dtype=dtype))[slot])
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("by", ["load", "load_bf16"])
@pytest.mark.parametrize("window", [None, 100])
def test_splits_by_load_change_nothing_but_the_last_bits(kernels, dtype, seed, by, window):
    for lengths in ([(1, 700)], SPLIT, [(1, 50 + i) for i in range(40)]):
        data = case(seed, lengths, 6, 2, 64, 64, dtype)
        rounding = torch.bfloat16 if by == "load_bf16" else dtype
        close(attend(kernels, data, window, by=by), reference(data, window), rounding, scale=2)


@pytest.mark.parametrize("rows", [1, 4, 12, 40])
def test_the_fewer_rows_the_more_splits_by_load(dtype, seed, rows, threads):
    element = ELEMENTS[dtype]
    for context, most in ((1000, 16), (200, 4), (64, 1)):
        batch, query, keys, values = case(seed, [(1, context)] * rows, 4, 1, 32, 32, dtype)
        attention = CompiledAttention(load_library(element), element, None, None, by="load")
        attention.bind(batch, BLOCK, 1.0)(query, keys, values, torch.empty(rows, 4 * 32, dtype=dtype))
        wanted = min(most, -(-32 // rows))
        tasks = attention._tasks[: attention._shared.count].tolist()
        assert len(tasks) == rows * wanted
        ends = [task[6] for task in tasks if task[0] == 0]
        assert max(ends) == context


def test_a_given_number_of_splits_takes_precedence_over_load(dtype, seed):
    batch, query, keys, values = case(seed, [(1, 1000)] * 3, 4, 1, 32, 32, dtype)
    attention = CompiledAttention(load_library(ELEMENTS[dtype]), ELEMENTS[dtype], None, None, 2, by="load")
    attention.bind(batch, BLOCK, 1.0)(query, keys, values, torch.empty(3, 4 * 32, dtype=dtype))
    assert attention._shared.count == 3 * 2


@pytest.mark.parametrize(
    ("by", "fixed", "splits"), [("auto", False, 256), ("auto", True, 1), ("load", True, 1), ("load_bf16", True, 1)]
)
def test_there_are_at_most_so_many_splits_as_can_be_joined(by, fixed, splits):
    """The limit holds for any number of threads and any context. Only the plan is computed, not the attention."""
    attention = CompiledAttention(compiled_or_skip(lambda: load_library("f32")), "f32", None, None, by=by)
    batch = batch_over(torch.zeros(1, 7500, dtype=torch.int32), [1], [120_000], fixed=fixed)
    attention.bind(batch, 16, 1.0).plan(Sizes(16, 1, 64, threads=192))
    assert attention._shared.count == splits


def test_partials_in_bfloat16_are_rounded_and_hide_nothing(seed, threads):
    """The difference is visible in a float32 kernel."""
    data = case(seed, [(1, 700)], 2, 1, 32, 32, torch.float32)
    batch, query, keys, values = data
    results, library = [], compiled_or_skip(lambda: load_library("f32"))
    for by in ("load", "load_bf16"):
        attention = CompiledAttention(library, "f32", None, None, by=by)
        results.append(attention.bind(batch, BLOCK, 0.2)(query, keys, values, torch.empty(1, 64)))
    error = (results[0] - results[1]).abs().max()
    assert 1e-6 < error < 1e-2
    values.view(torch.int32)[batch.block_tables[0, 3].item()] = 2**31 - 1  # a NaN that rounding would turn into -0
    assert attention.bind(batch, BLOCK, 0.2)(query, keys, values, torch.empty(1, 64)).isnan().all()
