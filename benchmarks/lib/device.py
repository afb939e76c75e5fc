"""Speed of one GPU, timed by its own events: memory, matrix products, attention, and whole forwards of a model."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch

from baton.engine.batch import Batch
from baton.engine.kernels.gpu.cuda_graphs import CudaCapture, DecodeGraphs
from baton.engine.kernels.torch_attention import PagedAttention
from baton.engine.model_runner import Inputs
from benchmarks.lib.random_weights import random_model, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from baton.engine.kernels.base import Kernels
    from baton.engine.kv_cache import KVCache
    from baton.engine.models.loading import TransformerBackend
    from benchmarks.lib.shapes import Shape

ROUNDS, PROBE_BYTES, GEMM_SIZE = 20, 4 << 30, 8192


class Case(NamedTuple):
    """Lengths, cache and heads of one attention."""

    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    window: int | None = None


CASES = (
    Case((1,), (1,), 8, 2, 64, 16),
    Case((1,) * 5, (1, 255, 256, 257, 4097), 32, 8, 128, 16),
    Case((1,) * 3, (15, 16, 3000), 7, 1, 64, 16, 1000),
    Case((1, 300, 1, 65), (900, 300, 5, 1089), 32, 4, 64, 16),
    Case((511, 1, 130), (1500, 77, 130), 32, 8, 128, 256),
    Case((200, 1), (900, 40), 12, 12, 128, 256, 128),
)


def seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median time of `work` on the GPU, after three warm-up runs; without a GPU that of the host's clock."""
    for _ in range(3):
        work()
    if not torch.cuda.is_available():
        return median(_clocked(work) for _ in range(rounds))
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]  # type: ignore[no-untyped-call]
    for start, end in marks:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return float(median(start.elapsed_time(end) for start, end in marks)) / 1000


def _clocked(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def bandwidth(device: torch.device, nbytes: int = PROBE_BYTES) -> float:
    """Return bytes per second: the better of reading and copying `nbytes`."""
    source = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    read = source.nbytes / seconds(source.sum)
    return max(read, 2 * source.nbytes / seconds(lambda: target.copy_(source)))


def gemm_rate(device: torch.device, shapes: Sequence[tuple[int, int, int]], size: int = GEMM_SIZE) -> float:
    """Return operations per second of the fastest bfloat16 product: a square one of `size`, and these (M, K, N)."""

    def rate(m: int, k: int, n: int) -> float:
        a, b = (torch.randn(size, dtype=torch.bfloat16, device=device) for size in ((m, k), (n, k)))
        out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
        return 2 * m * k * n / seconds(lambda: torch.mm(a, b.t(), out=out))

    return max(rate(*shape) for shape in [(size,) * 3, *shapes])


def model_of(shape: Shape, device: torch.device, block_size: int, positions: int = 8192) -> TransformerBackend:
    """Return a bfloat16 model of this shape with random weights."""
    return random_model(settings_of(shape, positions), device=device, dtype="bfloat16", block_size=block_size)


def batch_of(queries: Sequence[int], contexts: Sequence[int], block_size: int, device: torch.device) -> Batch:
    """Return a batch of sequences with separate blocks in random order. The first block is unused."""
    counts = [-(-context // block_size) for context in contexts]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, own in zip(tables, torch.split(blocks, counts), strict=True):
        row[: len(own)] = own
    positions = [torch.arange(end - new, end) for new, end in zip(queries, contexts, strict=True)]
    slots = [t[p // block_size] * block_size + p % block_size for t, p in zip(tables.long(), positions, strict=True)]
    starts = torch.tensor(list(accumulate(queries, initial=0)), dtype=torch.int32)
    ids = torch.arange(sum(queries)) % 1000
    kv_lens = torch.tensor(list(contexts), dtype=torch.int32)
    tensors = (ids, torch.cat(positions), torch.cat(slots))
    batch = Batch(*tensors, list(queries), list(contexts), starts, kv_lens, tables, starts[1:].long() - 1)
    return on_device(batch, device)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on the device."""
    return replace(
        batch,
        token_ids=batch.token_ids.to(device),
        positions=batch.positions.to(device),
        slot_mapping=batch.slot_mapping.to(device),
        query_starts=batch.query_starts.to(device),
        kv_lens=batch.kv_lens.to(device),
        block_tables=batch.block_tables.to(device),
        logit_rows=batch.logit_rows.to(device),
    )


def moved(batch: Batch, widest: Batch) -> Batch:
    """Copy a batch of one token per sequence to the memory of graphs (`Inputs.widest`), pad it, and return it there."""
    rows, wanted, width = len(batch.token_ids), len(batch.logit_rows), batch.block_tables.shape[1]
    widest.slot_mapping.fill_(-1)
    widest.kv_lens.zero_()
    widest.logit_rows.zero_()
    widest.query_starts.copy_(torch.arange(len(widest.query_starts)))
    return replace(
        batch,
        token_ids=widest.token_ids[:rows].copy_(batch.token_ids),
        positions=widest.positions[:rows].copy_(batch.positions),
        slot_mapping=widest.slot_mapping[:rows].copy_(batch.slot_mapping),
        query_starts=widest.query_starts[: rows + 1],
        kv_lens=widest.kv_lens[:rows].copy_(batch.kv_lens),
        block_tables=widest.block_tables[:rows, :width].copy_(batch.block_tables),
        logit_rows=widest.logit_rows[:wanted].copy_(batch.logit_rows),
    )


def attention_error(
    case: Case, kernels: Kernels, device: torch.device, dtype: torch.dtype, unwritten: float = 100.0
) -> float:
    """Return the largest difference to the torch reference in float32 on the CPU, for values of about 1.

    Results are NaN before, and slots without a token have the value `unwritten`. FlashAttention needs a finite one.
    """
    batch = batch_of(case.queries, case.contexts, case.block_size, device)
    blocks = int(batch.block_tables.max()) + 1
    generator = torch.Generator().manual_seed(2)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    query = drawn(len(batch.token_ids), case.heads, case.dim)
    keys, values = (drawn(blocks, case.block_size, case.kv_heads, case.dim) for _ in range(2))
    scale, out = case.dim**-0.5, torch.full((len(query), case.heads * case.dim), torch.nan, dtype=dtype, device=device)
    host = torch.device("cpu")  # another library than the GPU's
    wide = PagedAttention(on_device(batch, host), case.block_size, case.window, scale)
    exact = [each.to(host, torch.float32) for each in (query, keys, values)]
    expected = wide(exact[0], exact[1], exact[2], torch.empty(out.shape))
    for cache in (keys, values):
        cache.flatten(0, 1)[unwritten_slots(batch, case.block_size, blocks)] = unwritten
    kernels.attention(batch, case.block_size, case.window, scale)(query, keys, values, out)
    return float((out.to(host, torch.float32) - expected).abs().max())


def unwritten_slots(batch: Batch, block_size: int, blocks: int) -> Tensor:
    """Return bool [blocks * block_size]: the slots of a cache without a token of the batch."""
    free = torch.ones(blocks * block_size, dtype=torch.bool, device=batch.block_tables.device)
    for table, context in zip(batch.block_tables.long(), batch.context_lens, strict=True):
        positions = torch.arange(context, device=table.device)
        free[table[positions // block_size] * block_size + positions % block_size] = False
    return free


def decode_seconds(model: TransformerBackend, rows: int, context: int, *, graphs: bool) -> float:
    """Return the seconds of a decode step of `rows` sequences with `context` positions of KV each."""
    batch = batch_of([1] * rows, [context] * rows, model.layout.block_size, model.device)
    kv = _cache(model, batch)
    if not graphs:
        return seconds(lambda: model.forward(batch, kv))
    inputs = Inputs(model, rows, rows, model.layout.blocks_for(2 * context))
    decode = DecodeGraphs(model, kv, inputs.widest())
    decode.sizes = [rows]
    decode.capture(CudaCapture(model.device))
    there = moved(batch, inputs.widest())
    return seconds(lambda: decode.run(there, rows))


def prefill_seconds(model: TransformerBackend, tokens: int) -> float:
    """Return the seconds of one prompt in one forward."""
    batch = batch_of([tokens], [tokens], model.layout.block_size, model.device)
    kv = _cache(model, batch)
    return seconds(lambda: model.forward(batch, kv), rounds=5)


def _cache(model: TransformerBackend, batch: Batch) -> KVCache:
    kv = model.make_cache(int(batch.block_tables.max()) + 1)
    kv.k.normal_()
    kv.v.normal_()
    return kv
