"""Handoffs between workers with ranks on CPUs: each head arrives at every rank that holds it. Ranks are threads here.

`tests/integration/test_rank_handoffs.py` has ranks in processes.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.core import KVLayout
from baton.engine.kernels.select import block_copy, choose_kernels
from baton.engine.kv_cache import DTYPES, KVCache
from baton.engine.tp.kv_memory import ShardedCache, rank_layout
from kvtransfer.transports.base import Transport
from kvtransfer.transports.nixl import NixlTransport
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.torch_dist import GlooTransport
from tests.support.nixl import Agents, Library
from tests.unit.kvtransfer.support import SETTINGS, Pairs
from tests.unit.tp.support import GQA, on_a_cpu, plan, put, same, whole


def over(transport: str) -> Callable[[KVCache], Transport]:
    """Return a function that makes the transport of a cache. NIXL is a stand-in (`tests.support.nixl`)."""
    agents = Agents()
    makers: dict[str, Callable[[KVCache], Transport]] = {
        "shm": ShmTransport,
        "gloo": lambda kv: GlooTransport("127.0.0.1"),
        "nixl": lambda kv: NixlTransport(SETTINGS, Library(agents), agents.serve),
    }
    return makers[transport]


SIZES = [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1), (4, 4)]
TOTAL, TOKENS = 20, 37
CPU = torch.device("cpu")


def worker(folder: Path, size: int, layout: KVLayout, *, exposed: bool = False) -> tuple[KVCache, ShardedCache]:
    """Return the cache that a worker hands over from or to, full of zeros, and the caches of its ranks."""
    copy = block_copy(choose_kernels(CPU, DTYPES["float32" if layout.dtype == "int8" else layout.dtype]))
    cache, ranks = on_a_cpu(plan(folder, size), layout, TOTAL, copy, exposed=exposed)
    return cache, ShardedCache(layout, ranks)


def zeros(layout: KVLayout, size: int) -> ShardedCache:
    return ShardedCache(layout, [KVCache(rank_layout(layout, size), TOTAL) for _ in range(size)])


@pytest.mark.sample(12)
@pytest.mark.parametrize("transport", ["shm", "gloo", "nixl"])
@pytest.mark.parametrize(
    "layout",
    [GQA, replace(GQA, kv_heads=2, dtype="bfloat16", head_dim=32), replace(GQA, kv_heads=2, dtype="int8")],
    ids=["8", "2 heads", "int8"],
)
@pytest.mark.parametrize(("sender", "receiver"), SIZES)
def test_each_rank_gets_its_heads(
    pairs: Pairs, tmp_path: Path, transport: str, layout: KVLayout, sender: int, receiver: int
) -> None:
    """Layers and chunks are reported one by one, and blocks differ in size. Two KV heads have copies on four ranks."""
    (tmp_path / "d").mkdir()
    source, theirs = worker(tmp_path, sender, layout, exposed=transport == "shm")
    target, ours = worker(tmp_path / "d", receiver, replace(layout, block_size=5))
    kv, blocks, made = whole(layout, TOKENS, 1), list(range(TOTAL))[::-1], over(transport)
    frames = replace(SETTINGS, frame_size=14 * layout.layer_token_bytes)
    pair = pairs(frames, source=source, target=target, send=lambda _: [made(source)], recv=lambda _: [made(target)])
    job, present = pair.begin("r", TOKENS, blocks, skip=5), torch.zeros_like(kv)
    for computed, layer in itertools.product((20, TOKENS), range(layout.layers)):
        present[layer, :, :computed] = kv[layer, :, :computed]
        put(theirs, blocks, present)
        pair.sender.computed(job.handoff, blocks, layer + 1, computed)
    assert pair.complete(job, blocks).transport == transport
    kv[:, :, :5] = 0.0  # nothing is written there
    expected = zeros(target.layout, receiver)
    put(expected, blocks, kv)
    assert same(ours, expected)
