"""The kernels of the level neon under an emulator, by tests of the other levels with few sizes, because it is slow."""

from unittest.mock import patch

import pytest
import torch

from baton.engine.kernels.cpu import compiler, ops
from baton.engine.kernels.cpu.kernel_choice import Choice, Profile
from baton.engine.kernels.cpu.ops import ELEMENTS, CpuKernels
from baton.engine.kernels.cpu.sampling import CompiledDraw
from baton.engine.kernels.quantized import SCHEMES, Scheme, quantize
from baton.engine.kernels.torch_attention import PagedAttention
from baton.engine.kernels.torch_reference import TorchKernels
from baton.engine.sampling.sampler import Sampler
from tests.support.compiled_kernels import compiled_or_skip
from tests.support.emulated import emulated_kernels
from tests.support.paged_attention import paged
from tests.unit.kernels import test_cpu_kernels, test_cpu_sampling, test_kv_levels, test_quantized

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.sample(4, of="kernels under an emulator")]


@pytest.fixture(scope="module", params=list(ELEMENTS), ids=str)
def kernels(request, tmp_path_factory):
    with emulated_kernels(tmp_path_factory.mktemp("neon")):
        yield CpuKernels(request.param, Profile(static=test_cpu_kernels.FLAT))


@pytest.fixture
def normal(kernels, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).to(kernels.dtype)


@pytest.mark.parametrize("tall", [False, True], ids=["flat", "tall"])
def test_linear_and_gated_products_equal_torch(kernels, normal, tall: bool):
    choice, plain = Choice(0 if tall else 1 << 20, tall=True), TorchKernels()
    own = CpuKernels(kernels.dtype, Profile(static=choice))
    for inner, k, rows in ((1, 1, 1), (3, 33, 2), (15, 300, 7), (38, 129, 70)):
        weight, bias, x = normal(2 * inner, k) * k**-0.5, normal(2 * inner), normal(rows, k)
        results = []
        for one in (own, plain):
            layer, wide = one.linear(weight, bias), torch.full((rows, 2 * inner), torch.nan, dtype=kernels.dtype)
            results.append((layer(x, wide), one.gated(layer, x, "gelu_tanh", wide.clone(), wide[:, :inner].clone())))
        for found, expected in zip(*results, strict=True):
            test_cpu_kernels.close(found, expected, kernels.dtype, scale=4)


def test_rows_do_not_depend_on_their_company(kernels, normal):
    for layer in (
        kernels.linear(normal(30, 700)),
        kernels.quantized(quantize(normal(30, 700), SCHEMES["int4"]), None, torch.clone),
    ):
        x = normal(9, 700)
        whole = layer(x, torch.empty(9, 30, dtype=kernels.dtype))
        for first, rows in ((0, 1), (1, 2), (2, 5)):
            part = layer(x[first : first + rows], torch.empty(rows, 30, dtype=kernels.dtype))
            assert torch.equal(part, whole[first : first + rows])


def test_elementwise_kernels_equal_torch(kernels, normal, seed: int):
    dtype = kernels.dtype
    test_cpu_kernels.test_norms_equal_torch(kernels, dtype, normal, 70)
    for activation in ("silu", "gelu", "gelu_tanh"):
        test_cpu_kernels.test_gates_equal_torch(kernels, dtype, normal, 33, activation)
    test_cpu_kernels.test_rotation_and_cache_equal_torch(kernels, dtype, normal, 6, 2, 20, True)
    test_kv_levels.TestCompiled().test_heads_are_written_as_by_torch(kernels, seed, 20)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("levels", [False, True], ids=["plain", "int8"])
def test_attention_equals_the_reference(kernels, seed: int, window: int | None, levels: bool):
    made = paged(
        seed, ((70, 150), (1, 300), (1, 1)), heads=6, kv_heads=2, dim=20, value_dim=16, block=16, dtype=kernels.dtype
    )
    expected = made.expected(window)
    if levels:
        test_kv_levels.quantised(made)
        out = torch.empty(len(made.query), 6 * 16)
        expected = PagedAttention(made.batch, 16, window, 20**-0.5)(made.query.float(), made.keys, made.values, out)
    found = kernels.attention(made.batch, 16, window, 20**-0.5)(
        made.query, made.keys, made.values, torch.full((len(made.query), 6 * 16), torch.nan, dtype=kernels.dtype)
    )
    test_cpu_kernels.close(found, expected, kernels.dtype)


@pytest.mark.parametrize("scheme", [Scheme(8, 0), Scheme(8, 32), Scheme(4, 32)], ids=str)
def test_quantised_products_are_exact_and_have_the_bits_of_other_levels(kernels, seed: int, scheme: Scheme):
    rng = torch.Generator().manual_seed(seed)
    for zeros in (False, True):
        test_quantized.test_the_product_equals_exact_integers(kernels, rng, scheme, zeros)
    weight, x = (
        quantize(torch.randn(70, 300, generator=rng), scheme),
        torch.randn(9, 300, generator=rng).to(kernels.dtype),
    )
    found = kernels.quantized(weight, None, torch.clone)(x, torch.empty(9, 70))
    with patch.object(ops, "load_library", compiler.load_library):
        native = compiled_or_skip(lambda: CpuKernels(kernels.dtype, Profile()))
    assert torch.equal(found, native.quantized(weight, None, torch.clone)(x, torch.empty(9, 70)))


def test_draws_are_those_of_torch(kernels):
    own = Sampler(CompiledDraw(kernels.library, kernels.element))
    for vocab, shape in ((7, "smooth"), (1025, "ties"), (1025, "sparse")):
        test_cpu_sampling.test_all_kinds_of_rows_draw_torchs_tokens(own, vocab, shape)
    test_cpu_sampling.test_logits_that_are_no_numbers_draw_nothing_and_change_no_other_row(own, "all")
