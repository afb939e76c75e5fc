"""The KV cache: its wire order, and its size in blocks."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.core import KVLayout
from baton.engine.kernels.cpu.compiler import load_library
from baton.engine.kernels.cpu.ops import CompiledBlockCopy
from baton.engine.kv_cache import CPU_CAP_BYTES, CPU_SHARE, KVCache, Sizing, auto_kv_bytes, size_kv
from baton.engine.memory.host_memory import available_bytes, total_bytes
from baton.engine.oracle import oracle_layout
from baton.engine.tp.kv_memory import ShardedCache
from baton.errors import ConfigError
from tests.support.compiled_kernels import compiled_or_skip
from tests.unit.tp.support import GQA, poisoned

Copier = Callable[[], CompiledBlockCopy | None]


@cache
def compiled() -> CompiledBlockCopy:
    return compiled_or_skip(lambda: CompiledBlockCopy(load_library("f32"), "f32"))


COPIES = pytest.mark.parametrize("copier", [lambda: None, compiled], ids=["torch", "compiled"])
LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=4, block_size=5, dtype="bfloat16")
TOTAL = 40


def numbered(layout: KVLayout = LAYOUT, total_blocks: int = 7, copy: CompiledBlockCopy | None = None) -> KVCache:
    kv = KVCache(layout, total_blocks, copy=copy)
    for n, tensor in enumerate(kv.tensors):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(n)))
    return kv


def buffer(kv: KVCache, layers: range, tokens: int) -> torch.Tensor:
    return torch.zeros(len(layers) * tokens * kv.layout.layer_token_bytes, dtype=torch.uint8)


def gathered(kv: KVCache, layers: range, blocks: list[int], begin: int, end: int) -> torch.Tensor:
    out = buffer(kv, layers, end - begin)
    kv.gather(layers, blocks, begin, end, out)
    return out


def row_by_row(kv: KVCache, layers: range, blocks: list[int], begin: int, end: int) -> torch.Tensor:
    """Return the bytes in wire order: by layer, then by tensor, then by position."""
    size = kv.layout.block_size
    rows = [
        tensor[layer, blocks[position // size], position % size].flatten()
        for layer in layers
        for tensor in kv.tensors
        for position in range(begin, end)
    ]
    return torch.cat(rows).view(torch.uint8)


@st.composite
def sequences(draw: st.DrawFn):
    layout = KVLayout(
        layers=draw(st.integers(1, 3)),
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 2, 3, 5, 16, 32])),  # with 32, the halves of runs are whole cache lines
        block_size=0,
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16", "int8"])),
        tensors=draw(st.sampled_from([("k", "v"), ("latent",)])),
    )
    first = draw(st.integers(0, layout.layers - 1))
    begin = draw(st.integers(0, TOTAL - 1))
    return layout, range(first, draw(st.integers(first + 1, layout.layers))), begin, draw(st.integers(begin + 1, TOTAL))


def holding(data: st.DataObject, layout: KVLayout, copier: Copier, *, fill: bool) -> tuple[KVCache, list[int]]:
    layout = replace(layout, block_size=data.draw(st.integers(1, TOTAL + 3), "block size"))
    due = layout.blocks_for(TOTAL)
    kv = numbered(layout, due + 2, copier()) if fill else KVCache(layout, due + 2, copy=copier())
    return kv, data.draw(st.permutations(range(due + 2)), "blocks")[:due]


@COPIES
@given(sequence=sequences(), data=st.data())
def test_any_positions_go_from_any_blocks_to_any_others(copier: Copier, sequence, data: st.DataObject):
    layout, layers, begin, end = sequence
    source, there = holding(data, layout, copier, fill=True)
    target, here = holding(data, layout, copier, fill=False)
    pieced, places = holding(data, layout, copier, fill=False)
    direct, ours = holding(data, layout, copier, fill=False)
    wire = gathered(source, layers, there, begin, end)
    assert torch.equal(wire, row_by_row(source, layers, there, begin, end))
    target.scatter(layers, here, begin, end, wire)
    cuts = sorted(data.draw(st.sets(st.integers(begin, end), max_size=4), "cuts") | {begin, end})
    for first, last in data.draw(st.permutations(list(itertools.pairwise(cuts))), "order"):
        for layer in layers:
            only = range(layer, layer + 1)
            pieced.scatter(only, places, first, last, gathered(source, only, there, first, last))
    direct.copy_from(source, layers, there, ours, begin, end)
    for kv, blocks in ((target, here), (pieced, places), (direct, ours)):
        assert torch.equal(row_by_row(kv, layers, blocks, begin, end), wire)
        elements = sum(int(tensor.count_nonzero()) for tensor in kv.tensors)
        assert elements == int(wire.view(kv.k.dtype).count_nonzero())  # nothing else was written


@COPIES
def test_a_view_with_strides_is_gathered_as_its_elements(copier: Copier):
    """A rank of a tensor-parallel worker has such a view: some heads of a larger cache."""
    whole = numbered(replace(LAYOUT, kv_heads=4))
    storage = [tensor[:, :, :, 1:3] for tensor in whole.tensors]
    part, copy = KVCache(LAYOUT, 7, storage=storage, copy=copier()), KVCache(LAYOUT, 7)
    for mine, theirs in zip(copy.tensors, storage, strict=True):
        mine.copy_(theirs)
    wire = gathered(part, range(3), [4, 0, 6], 2, 13)
    assert torch.equal(wire, gathered(copy, range(3), [4, 0, 6], 2, 13))
    others = whole.k[:, :, :, [0, 3]].clone()
    part.scatter(range(3), [1, 2, 3], 2, 13, wire)
    assert torch.equal(gathered(part, range(3), [1, 2, 3], 2, 13), wire)
    assert torch.equal(whole.k[:, :, :, [0, 3]], others)


@pytest.fixture(params=["torch", "compiled", "ranks"])
def any_kind(request: pytest.FixtureRequest) -> KVCache:
    """A cache copied by torch, copied by the compiled kernel, or divided among ranks."""
    if request.param == "ranks":
        return poisoned(GQA, 4, 7)
    return numbered(GQA, copy=compiled() if request.param == "compiled" else None)


def bits(kv: KVCache) -> list[list[int]]:
    caches = kv.ranks if isinstance(kv, ShardedCache) else [kv]
    return [tensor.flatten().view(torch.int32).tolist() for cache in caches for tensor in cache.tensors]


@pytest.mark.parametrize("data", [torch.empty(159, dtype=torch.uint8), torch.empty(160), torch.empty(0)])
def test_wrong_buffer(any_kind: KVCache, data: torch.Tensor):
    for call in (any_kind.gather, any_kind.scatter):
        with pytest.raises(ValueError, match="need uint8"):
            call(range(1), [0], 0, 4, data)


@pytest.mark.parametrize(
    ("layers", "blocks", "begin", "end"),
    [
        (range(4, 6), [0], 0, 4),
        (range(-1, 1), [0], 0, 4),
        (range(1), [7], 0, 4),
        (range(1), [-1, 3], 3, 5),
        (range(1), [3, -1], 3, 5),
        (range(1), [0, 1], 5, 9),
        (range(1), [0, 1], -1, 3),
        (range(1), [], 0, 1),
    ],
)
def test_out_of_range_touches_nothing(any_kind: KVCache, layers: range, blocks: list[int], begin: int, end: int):
    data, before = buffer(any_kind, layers, end - begin), bits(any_kind)
    for call in (any_kind.gather, any_kind.scatter):
        with pytest.raises(IndexError, match="out of range"):
            call(layers, blocks, begin, end, data)
    assert bits(any_kind) == before


def test_no_layers_are_nothing(any_kind):
    before = bits(any_kind)
    assert gathered(any_kind, range(2, 2), [1], 0, 4).numel() == 0
    any_kind.scatter(range(0), [1], 0, 4, torch.empty(0, dtype=torch.uint8))
    assert bits(any_kind) == before


def test_blocks_that_hold_none_of_the_positions_need_not_be_there():
    kv = numbered()
    assert torch.equal(gathered(kv, range(3), [99, 4, 99], 5, 10), row_by_row(kv, range(3), [0, 4, 0], 5, 10))


@COPIES
def test_rows_of_whole_cache_lines(copier: Copier):
    """Rows of whole cache lines are written past the CPU's caches."""
    layout = KVLayout(layers=2, kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16")
    source, target = numbered(layout, 9, copier()), KVCache(layout, 9, copy=copier())
    wire = gathered(source, range(2), [4, 8, 1, 2], 5, 60)
    assert torch.equal(wire, row_by_row(source, range(2), [4, 8, 1, 2], 5, 60))
    target.scatter(range(2), [3, 0, 7, 5], 5, 60, wire)
    assert torch.equal(row_by_row(target, range(2), [3, 0, 7, 5], 5, 60), wire)


ORACLE = oracle_layout(block_size=16)
CPU = torch.device("cpu")


def size(kv_memory, max_model_len, model_max_len=2048):
    return size_kv(ORACLE, kv_memory=kv_memory, max_model_len=max_model_len, model_max_len=model_max_len, device=CPU)


def test_bytes_become_whole_blocks_and_auto_length_is_the_least_of_model_and_pool():
    assert size(10 * ORACLE.block_bytes + 1, 160) == Sizing(10, 160)
    assert size(10 * ORACLE.block_bytes, "auto") == Sizing(10, 160)
    assert size(10 * ORACLE.block_bytes, "auto", 100) == Sizing(10, 100)


@pytest.mark.parametrize(
    ("blocks", "state_size", "slots", "saved"),
    [
        (100, ORACLE.block_bytes // 8, 20, 0),
        (100, ORACLE.block_bytes // 4, 20, 0),
        (100, ORACLE.block_bytes // 4, 20, 10),
        (80, ORACLE.block_bytes // 4, 15, 10),
        (40, ORACLE.block_bytes // 4, 6, 6),
        (6, ORACLE.block_bytes // 4, 1, 1),
        (8, 0, None, 0),
    ],
)
def test_states_of_recurrent_layers_take_at_most_half_of_the_memory(blocks, state_size, slots, saved):
    """Those of deterministic requests have a saved state, up to as many as run together."""
    layout = replace(ORACLE, state_size=state_size)
    found = size_kv(
        layout,
        kv_memory=blocks * layout.block_bytes,
        max_model_len="auto",
        model_max_len=2048,
        device=CPU,
        sequences=10,
        deterministic=saved > 0,
    )
    states = 0 if slots is None else (2 * slots + saved) * layout.state_bytes // layout.block_bytes
    assert (found.state_slots, found.total_blocks) == (slots, blocks - states)
    assert states <= blocks / 2
    with pytest.raises(ConfigError, match=r"kv_memory: 1 bytes are (too few for states|less than one block)"):
        size_kv(layout, kv_memory=1, max_model_len="auto", model_max_len=2048, device=CPU)


def test_auto_memory_is_a_bounded_share():
    found = size("auto", "auto").total_blocks * ORACLE.block_bytes
    assert 0 < found <= min(CPU_CAP_BYTES, psutil.virtual_memory().total * CPU_SHARE)
    assert auto_kv_bytes(CPU) <= CPU_CAP_BYTES


def test_memory_of_ranks_is_that_of_all_their_gpus_and_of_each_copy_of_a_head(monkeypatch):
    """Rank 0 measures its own GPU. Four ranks with a GPU each hold a KV head twice if there are two."""
    gqa, gpu = replace(ORACLE, kv_heads=2), torch.device("cuda", 0)
    free, total = 100 * gqa.block_bytes, 200 * gqa.block_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))

    def blocks(kv_memory, device, ranks):
        return size_kv(
            gqa, kv_memory=kv_memory, max_model_len="auto", model_max_len=2048, device=device, ranks=ranks
        ).total_blocks

    assert [blocks("auto", gpu, ranks) for ranks in (1, 2, 4)] == [90, 180, 180]
    assert [blocks(40 * gqa.block_bytes, CPU, ranks) for ranks in (1, 2, 4)] == [40, 40, 20]
    assert blocks(2 * total, gpu, 2) == 400
    with pytest.raises(ConfigError, match=f"kv_memory: {2 * total + 1} bytes, but cuda:0 has"):
        blocks(2 * total + 1, gpu, 2)


@pytest.mark.parametrize(
    ("memory", "length", "words"),
    [
        (100, "auto", "kv_memory: 100 bytes are less than one block"),
        (10 * ORACLE.block_bytes, 161, f"set at least {11 * ORACLE.block_bytes} bytes"),
        (10 * ORACLE.block_bytes, 4096, "between 2 and the model's 2048, got 4096"),
        (10 * ORACLE.block_bytes, 1, "between 2 and"),
        (2**50, 160, f"kv_memory: {2**50} bytes, but cpu has [0-9]+;"),
    ],
)
def test_what_does_not_fit_is_said_with_numbers(memory, length, words):
    with pytest.raises(ConfigError, match=words):
        size(memory, length)


@pytest.mark.parametrize(
    ("limit", "used", "wanted"), [("5000", "2000", 3000), ("5000", "6000", 0), ("max", "1", None), ("5000", None, None)]
)
def test_a_containers_limit_counts(tmp_path, limit, used, wanted):
    (tmp_path / "memory.max").write_text(limit + "\n")
    if used is not None:
        (tmp_path / "memory.current").write_text(used + "\n")
    found = available_bytes(tmp_path)
    assert found == wanted if wanted is not None else found > 5000
    assert (total_bytes(tmp_path) == 5000) is (limit == "5000")


def test_the_cache_of_files_in_a_container_gives_way(tmp_path):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\nfile 4000\ninactive_file 2500\nactive_file 1000\nshmem 500\n")
    assert available_bytes(tmp_path) == 3500
