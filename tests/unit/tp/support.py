"""Caches of ranks in main memory, with known bytes at each place, and ranks that are threads."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock

import torch

from baton.core import KVLayout
from baton.engine.kernels.cpu.ops import CompiledBlockCopy
from baton.engine.kv_cache import KVCache
from baton.engine.tp.backend import ShardedBackend
from baton.engine.tp.group import Ranks, TpLayout
from baton.engine.tp.kv_memory import CopiedCache, GpuMemory, HostMemory, ShardedCache, kv_memory, rank_layout
from baton.engine.tp.rank_model import RankModel
from baton.engine.tp.rank_process import follow, load_rank
from baton.engine.tp.sharding import Heads
from tests.support.time_factor import scaled
from tests.support.transports import Log, MainMemory

POISON = float("nan")
GQA = KVLayout(layers=5, kv_heads=8, head_dim=3, block_size=4, dtype="float32")
LATENT = KVLayout(layers=5, kv_heads=1, head_dim=6, block_size=4, dtype="float32", tensors=("latent",))
LAYOUTS = (GQA, replace(GQA, kv_heads=2), replace(GQA, kv_heads=1), replace(GQA, dtype="bfloat16"), LATENT)


def poisoned(layout: KVLayout, size: int, total_blocks: int) -> ShardedCache:
    """Return a cache full of NaN."""
    ranks = [KVCache(rank_layout(layout, size), total_blocks) for _ in range(size)]
    for tensor in (tensor for cache in ranks for tensor in cache.tensors):
        tensor.fill_(POISON)
    return ShardedCache(layout, ranks)


def whole(layout: KVLayout, tokens: int, seed: int) -> torch.Tensor:
    """Return KV of a sequence, all heads: [layers, tensors, tokens, kv_heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.layers, len(layout.tensors), tokens, layout.kv_heads, layout.head_width)
    return torch.randn(shape, generator=generator).to(getattr(torch, layout.dtype))


def copies(cache: KVCache) -> tuple[KVCache, ...]:
    """Return the caches in which a write to `cache` arrives."""
    return cache.copies if isinstance(cache, CopiedCache) else (cache,)


def put(cache: ShardedCache, blocks: list[int], kv: torch.Tensor) -> None:
    """Write a sequence like the ranks' models: position by position, each rank its own heads."""
    size, heads = cache.layout.block_size, Heads(cache.layout.kv_heads, len(cache.ranks))
    for rank, own in enumerate(cache.ranks):
        held = heads.held(rank)
        for n, tensor in enumerate(own.tensors):
            for position in range(kv.shape[2]):
                here = kv[:, n, position, held.start : held.stop]
                tensor[:, blocks[position // size], position % size] = here


def wire_of(kv: torch.Tensor, layers: range, begin: int, end: int) -> torch.Tensor:
    """Return the wire's bytes of a part of a sequence, as they are defined."""
    return kv[layers.start : layers.stop, :, begin:end].contiguous().view(torch.uint8).flatten()


def same(a: ShardedCache, b: ShardedCache) -> bool:
    """Return whether all ranks have the same bits everywhere, NaNs included."""
    left, right = ([t.view(torch.uint8) for rank in cache.ranks for t in rank.tensors] for cache in (a, b))
    return len(left) == len(right) and all(map(torch.equal, left, right))


def gpus(size: int) -> tuple[list[Any], Log]:
    """Return one GPU for each rank, made of main memory, and the log of its events."""
    log: Log = []
    return [MainMemory(rank, log) for rank in range(size)], log


def started(work: Callable, *arguments: Any) -> Future:
    """Run `work` in a thread that ends with the process, because a rank waits for rank 0 without a limit."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work(*arguments))
        except Exception as error:  # noqa: BLE001  # the boundary of this thread
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def memory_of(plan: TpLayout, ranks: Ranks, layout: KVLayout, on_gpus: list[Any]) -> GpuMemory:
    memory = kv_memory(plan, ranks, layout, on_gpus.__getitem__)
    assert isinstance(memory, GpuMemory)
    return memory


def plan(store: Path, size: int, folder: str = "") -> TpLayout:
    """Return start parameters of ranks that meet in the folder `store`."""
    model: dict[str, Any] = {"dtype": "auto", "device": "cpu", "block_size": 8, "max_model_len": None}
    ranks: dict[str, Any] = {"threads": 1, "store": str(store / "store"), "parent": os.getpid()}
    limits: dict[str, Any] = {"capacity": 1 << 16, "timeout_s": scaled(20.0)}
    return TpLayout(folder=folder, key="tensor_parallel", size=size, **model, **ranks, **limits)


def on_a_cpu(
    plan: TpLayout, layout: KVLayout, total_blocks: int, copy: CompiledBlockCopy | None = None, *, exposed: bool = False
) -> tuple[KVCache, list[KVCache]]:
    """Return the engine's cache and those of the ranks, which are threads, in memory that they share."""

    def make(rank: int) -> tuple[KVCache, KVCache]:
        memory = HostMemory(plan, Ranks(plan, rank, lambda: None), layout, copy)
        memory.prepare(exposed=exposed)
        return memory.make(total_blocks)

    made = [end.result(scaled(20)) for end in [started(make, rank) for rank in range(plan.size)]]
    return made[0][0], [own for _, own in made]


def on_threads(plan: TpLayout, on_gpus: list[Any], connect: Callable[..., Ranks] = Ranks) -> ShardedBackend:
    """Return a model on ranks with a cache each, as on GPUs, or without GPUs in shared memory. Sums go over gloo."""
    gpu_of = on_gpus.__getitem__ if on_gpus else None
    ends = [started(follow, plan, rank, gpu_of) for rank in range(1, plan.size)]
    ranks = connect(plan, 0, lambda: None)
    local = load_rank(plan, ranks)
    memory = kv_memory(plan, ranks, local.layout, gpu_of)
    followers = Mock(close=lambda patience_s: [end.result(scaled(20)) for end in ends])
    followers.explain.side_effect = lambda error: error
    return ShardedBackend(plan, RankModel(local, ranks, memory), ranks, followers, memory)
