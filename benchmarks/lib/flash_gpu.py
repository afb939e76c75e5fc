"""The ideas of FlashDecoding++ on a GPU: Triton's decode attention, and products of few rows padded or not."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from baton.engine.kernels.cpu.kernel_choice import UNIFIED
from baton.engine.kernels.gpu.shapes import decode_tiles, split_count, split_programs
from benchmarks.lib.device import batch_of, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from benchmarks.lib.shapes import Shape

Record = dict[str, Any]
BLOCK, SHARE, LOG2E = 16, 0.5, 1.4426950408889634
COLD_BYTES = 256 << 20
PADDED = {"padded to 8": 8, "padded to 64": 64}


def missing() -> str:
    """Return why a GPU is not measured, or ""."""
    if not torch.cuda.is_available():
        return "torch has no CUDA device here"
    return "" if find_spec("triton") else "triton is not installed"


def attention(
    device: torch.device, heads: tuple[int, int, int], contexts: Sequence[int], rows: Sequence[int], rounds: int
) -> Iterator[Record]:
    """Yield decode attention of one layer in bfloat16 with a running and with a unified maximum, and its fall-backs."""
    query_heads, kv_heads, dim = heads
    for context, count in product(contexts, rows):
        needed, at = 4 * count * context * kv_heads * dim, {"context": context, "rows": count}
        if device.type == "cuda" and needed > SHARE * torch.cuda.mem_get_info(device)[0]:
            yield {"part": "skipped", **at, "why": f"KV of {needed / 2**30:.1f} GiB"}
            continue
        batch = batch_of([1] * count, [context] * count, BLOCK, device)
        shape = int(batch.block_tables.max()) + 1, BLOCK, kv_heads, dim
        keys, values = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        query = torch.randn(count, query_heads, dim, dtype=torch.bfloat16, device=device)
        run, bases = decode(batch, query, keys, values)
        kinds = {"running": partial(run, None), "unified": partial(run, UNIFIED)}
        yield {"part": "attention", **at, "seconds": _rounds(kinds, rounds), "count": left(run, bases)}


def decode(batch: Any, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Callable[[float | None], object], Tensor]:
    """Return one layer's decode attention by its unified maximum, with the splits of the engine, and their bases."""
    from baton.engine.kernels.gpu import triton_attention  # triton is not installed for CPUs

    (rows, heads, dim), kv_heads, device = query.shape, keys.shape[2], query.device
    splits = split_count(max(batch.context_lens))
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    pieces = triton_attention.Pieces.empty(rows, heads, splits, dim, device)
    tiles, programs = decode_tiles(heads // kv_heads, dim, dim, 2), split_programs(rows * kv_heads, splits, processors)
    out = torch.empty(rows, heads * dim, dtype=query.dtype, device=device)
    where = query, keys, values, batch.block_tables, batch.query_starts, batch.kv_lens, out, pieces, tiles

    def run(unified: float | None) -> None:
        triton_attention.decode_attention(*where, programs=programs, scale=dim**-0.5, window=None, unified=unified)

    return run, pieces.bases


def left(run: Callable[[float | None], object], bases: Tensor) -> int:
    """Return how many rows of splits left the unified maximum: their base is another one."""
    run(UNIFIED)
    return int((bases != torch.tensor(UNIFIED * LOG2E, device=bases.device)).sum())


def products(device: torch.device, name: str, shape: Shape, rows: Sequence[int], rounds: int) -> Iterator[Record]:
    """Yield torch's products of a layer for few rows, as they are and padded. Baton has no own product on GPUs."""
    for (k, width), count in product(shape.linears, rows):
        copies = max(2, COLD_BYTES // (2 * width * k))
        weights = list(torch.randn(copies, width, k, dtype=torch.bfloat16, device=device))
        sizes = {"as it is": count} | {label: size for label, size in PADDED.items() if size > count}
        calls = {label: partial(_each, weights, size) for label, size in sizes.items()}
        times = {label: [s / copies for s in found] for label, found in _rounds(calls, rounds).items()}
        yield {"part": "product", "model": name, "width": width, "k": k, "rows": count, "seconds": times}


def _each(weights: Sequence[Tensor], rows: int) -> None:
    x = torch.empty(rows, weights[0].shape[1], dtype=torch.bfloat16, device=weights[0].device).fill_(0.5)
    for weight in weights:
        torch.mm(x, weight.t())


def _rounds(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    turns = [{name: seconds(call) for name, call in calls.items()} for _ in range(rounds)]
    return {name: [turn[name] for turn in turns] for name in calls}
