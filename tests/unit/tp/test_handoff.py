"""Handoffs over gloo between workers each of whose ranks has a cache: through a Sender and a PeerService."""

import itertools
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from baton.engine.kv_cache import KVCache
from kvtransfer.receiver import PeerService
from kvtransfer.sender import Sender
from kvtransfer.transports.torch_dist import GlooTransport
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


@contextmanager
def connected(source: KVCache, target: KVCache) -> Iterator[tuple[Sender, RecordingTable, Reports]]:
    """Connect a sender to a receiver. Frames have about two layers of 7 positions, so that both are cut."""
    settings = replace(SETTINGS, transport="gloo", frame_size=14 * source.layout.layer_token_bytes, verify_kv=True)
    table, reports, made = RecordingTable(target.layout), Reports(), partial(GlooTransport, "127.0.0.1")
    peer = LoopbackPeer(lambda: PeerService(target, D, FINGERPRINT, settings, table, [made()]))
    sender = Sender(source, P, FINGERPRINT, settings, [made()], reports, connect=peer.connect)
    with closing(peer), closing(sender):
        yield sender, table, reports


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("sender_size", "receiver_size"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_every_rank_gets_its_heads(sender_size: int, receiver_size: int, kind: str, seed: int) -> None:
    """Layer by layer in two chunks, into blocks of another size. Skipped positions stay untouched."""
    rng, layout = random.Random(seed), LAYOUTS[kind]
    kv = whole(layout, TOKENS, seed)
    source = poisoned(replace(layout, block_size=3), sender_size, TOTAL)
    target = poisoned(replace(layout, block_size=5), receiver_size, TOTAL)
    there, here = (rng.sample(range(TOTAL), cache.layout.blocks_for(TOKENS)) for cache in (source, target))
    job, present = make_job("r", TOKENS, skip=SKIP), torch.full_like(kv, float("nan"))
    with connected(source, target) as (sender, table, reports):
        table.reserve(job.handoff, here)
        sender.begin(job)
        for computed, layer in itertools.product((20, TOKENS), range(layout.layers)):
            present[layer, :, :computed] = kv[layer, :, :computed]
            put(source, there, present)  # uncomputed KV is NaN, so reading it would show
            sender.computed(job.handoff, there, layer + 1, computed)
        sender.finish(job.handoff, make_end(TOKENS))
        result = reports.done(job.handoff)
    assert result.transport == "gloo"
    assert result.nbytes == (TOKENS - SKIP) * layout.layers * layout.layer_token_bytes
    assert result.frames > layout.layers
    expected = poisoned(target.layout, receiver_size, TOTAL)
    kv[:, :, :SKIP] = float("nan")  # nothing is written there
    put(expected, here, kv)
    assert same(target, expected)
    assert len(table.commits) == 1
