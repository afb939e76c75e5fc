"""Handoffs over gloo between workers each of whose ranks has a cache: through a Sender and a PeerService."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch

from baton.core import KVLayout
from baton.engine.kv import KVCache
from baton.engine.tp.cache import ShardedCache
from kvtransfer.receiver import PeerService
from kvtransfer.sender import Sender
from kvtransfer.transports.gloo import GlooTransport
from tests.unit.kvtransfer.support import (
    FINGERPRINT,
    SETTINGS,
    D,
    LoopbackPeer,
    P,
    RecordingTable,
    Reports,
    make_end,
    make_job,
)
from tests.unit.tp.support import GQA, LATENT, poisoned, put, same, whole

TOKENS, SKIP, TOTAL = 37, 5, 24
LAYOUTS = {"gqa8": GQA, "gqa2": replace(GQA, kv_heads=2), "gqa1": replace(GQA, kv_heads=1), "latent": LATENT}


@pytest.fixture
def leaving() -> Iterator[ExitStack]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        yield stack


def connected(
    leaving: ExitStack, source: KVCache, target: KVCache, layout: KVLayout
) -> tuple[Sender, RecordingTable, Reports]:
    """Frames hold about two layers of 7 positions: layers and positions are both cut."""
    settings = replace(SETTINGS, transport="gloo", frame_size=14 * layout.layer_token_bytes, verify_kv=True)
    table, reports = RecordingTable(target.layout), Reports()
    made: Callable[[], GlooTransport] = partial(GlooTransport, "127.0.0.1")
    peer = LoopbackPeer(lambda: PeerService(target, D, FINGERPRINT, settings, table, [made()]))
    leaving.callback(peer.close)
    sender = Sender(source, P, FINGERPRINT, settings, [made()], reports, connect=peer.connect)
    leaving.callback(sender.close)
    return sender, table, reports


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("sender_size", "receiver_size"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_every_rank_gets_its_heads(leaving, sender_size: int, receiver_size: int, kind: str, seed: int) -> None:
    """Layer by layer as it is computed, in two chunks, into blocks of another size; what is skipped stays untouched."""
    rng, layout = random.Random(seed), LAYOUTS[kind]
    kv = whole(layout, TOKENS, seed)
    source = poisoned(replace(layout, block_size=3), sender_size, TOTAL)
    target = poisoned(replace(layout, block_size=5), receiver_size, TOTAL)
    there, here = (rng.sample(range(TOTAL), cache.layout.blocks_for(TOKENS)) for cache in (source, target))
    sender, table, reports = connected(leaving, source, target, layout)
    job = make_job("r", TOKENS, skip=SKIP)
    table.reserve(job.handoff, here)
    sender.begin(job)
    for computed in (20, TOKENS):
        for layers in range(1, layout.layers + 1):
            wanted = torch.full_like(kv, float("nan"))
            wanted[:layers, :, :computed] = kv[:layers, :, :computed]
            if computed == TOKENS:
                wanted[:, :, :20] = kv[:, :, :20]
            put(source, there, wanted)  # what is not computed yet is NaN: nobody may have read it
            sender.computed(job.handoff, there, layers, computed)
    sender.finish(job.handoff, make_end(TOKENS))
    result = reports.done(job.handoff)
    assert result.transport == "gloo"
    assert result.nbytes == (TOKENS - SKIP) * layout.layers * layout.layer_token_bytes
    assert result.frames > layout.layers
    assert same(target, holding(target, here, kv))
    assert len(table.commits) == 1


def holding(like: ShardedCache, blocks: list[int], kv: torch.Tensor) -> ShardedCache:
    """A cache in which this sequence, but for what is skipped, is all that anybody has written."""
    made, kv = poisoned(like.layout, len(like.ranks), like.total_blocks), kv.clone()
    kv[:, :, :SKIP] = float("nan")
    put(made, blocks, kv)
    return made
