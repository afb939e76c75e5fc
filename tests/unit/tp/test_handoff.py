"""Handoffs over gloo between workers each of whose ranks has a cache: through a Sender and a PeerService."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from baton.engine.tp.cache import ShardedCache
from kvtransfer.transports.gloo import GlooTransport
from tests.unit.kvtransfer.conftest import Pairs
from tests.unit.kvtransfer.support import SETTINGS, make_end
from tests.unit.tp.support import GQA, LATENT, poisoned, put, same, whole

TOKENS, SKIP, TOTAL = 37, 5, 24
LAYOUTS = {"gqa8": GQA, "gqa2": replace(GQA, kv_heads=2), "gqa1": replace(GQA, kv_heads=1), "latent": LATENT}
GLOO = {side: lambda memory: [GlooTransport("127.0.0.1")] for side in ("send", "recv")}


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    torch.set_num_threads(1)
    pairs = Pairs()
    yield pairs
    pairs.close()


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("sender_size", "receiver_size"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_every_rank_gets_its_heads(pairs: Pairs, sender_size: int, receiver_size: int, kind: str, seed: int) -> None:
    """Layer by layer as it is computed, in two chunks, into blocks of another size; what is skipped stays untouched.

    Frames hold about two layers of 7 positions: layers and positions are both cut.
    """
    rng, layout = random.Random(seed), LAYOUTS[kind]
    kv = whole(layout, TOKENS, seed)
    source = poisoned(replace(layout, block_size=3), sender_size, TOTAL)
    target = poisoned(replace(layout, block_size=5), receiver_size, TOTAL)
    there, here = (rng.sample(range(TOTAL), cache.layout.blocks_for(TOKENS)) for cache in (source, target))
    settings = replace(SETTINGS, frame_size=14 * layout.layer_token_bytes, verify_kv=True)
    pair = pairs(settings, source=source, target=target, layout=target.layout, **GLOO)
    job = pair.reserve("r", TOKENS, here, skip=SKIP)
    pair.sender.begin(job)
    for computed in (20, TOKENS):
        for layers in range(1, layout.layers + 1):
            wanted = torch.full_like(kv, float("nan"))
            wanted[:layers, :, :computed] = kv[:layers, :, :computed]
            if computed == TOKENS:
                wanted[:, :, :20] = kv[:, :, :20]
            put(source, there, wanted)  # what is not computed yet is NaN: nobody may have read it
            pair.sender.computed(job.handoff, there, layers, computed)
    pair.sender.finish(job.handoff, make_end(TOKENS))
    result = pair.reports.done(job.handoff)
    assert result.transport == "gloo"
    assert result.nbytes == (TOKENS - SKIP) * layout.layers * layout.layer_token_bytes
    assert result.frames > layout.layers
    assert same(target, holding(target, here, kv))
    assert len(pair.table.commits) == 1


def holding(like: ShardedCache, blocks: list[int], kv: torch.Tensor) -> ShardedCache:
    """A cache in which this sequence, but for what is skipped, is all that anybody has written."""
    made, kv = poisoned(like.layout, len(like.ranks), like.total_blocks), kv.clone()
    kv[:, :, :SKIP] = float("nan")
    put(made, blocks, kv)
    return made
