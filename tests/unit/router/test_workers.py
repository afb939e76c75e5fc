"""Claims on pairs of workers: who is taken, who is kept, and what they count as loaded with."""

from typing import cast

import pytest

from baton.clock import FakeClock
from baton.core import BlockCounts, Incarnation, KVLayout, Load, Role, WorkerInfo, WorkerRef
from router.link import WorkerLink
from router.policy import POLICIES, WorkerView
from router.workers import WorkerPool

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=16, dtype="float32")


class FakeLink:
    """A link that is up, without a stream."""

    def __init__(self, role, name, fingerprint="fp"):
        ref = WorkerRef(name, Incarnation(1, 1), "127.0.0.1:1")
        self.view = WorkerView(WorkerInfo(ref, role, fingerprint, "oracle", 2048, 100, LAYOUT))
        self.view.load = Load(blocks=BlockCounts(total=100, free=100))
        self.state, self.usable = "connected", True

    @property
    def info(self):
        return self.view.info


@pytest.fixture
def pool():
    async def nobody():
        return []

    made = WorkerPool(nobody, POLICIES["least_loaded"], "router-a", 1.0, FakeClock())
    for role in Role:
        for number in range(2):
            link = FakeLink(role, f"{role}-{number}")
            made._links[link.info.ref] = cast("WorkerLink", link)
    return made


def link(pool, name):
    return next(link for link in pool.links if link.info.ref.worker_id == name)


def names(claim):
    return claim.prefill.info.ref.worker_id, claim.decode.info.ref.worker_id


def test_the_worker_that_holds_the_kv_is_taken_while_it_is_there(pool):
    kept = link(pool, "prefill-1")
    kept.view.queued_tokens = 1000
    assert names(pool.claim(10)) == ("prefill-0", "decode-0")
    assert names(pool.claim(10, kept)) == ("prefill-1", "decode-1")
    kept.usable = False
    assert names(pool.claim(10, kept))[0] == "prefill-0"


def test_nobody_else_is_taken_when_it_finds_no_decode_worker(pool):
    for name in ("decode-0", "decode-1"):
        link(pool, name).view.full = True
    assert pool.claim(10, link(pool, "prefill-1")) is None


def test_a_claim_counts_until_it_is_given_back(pool):
    claim = pool.claim(40, link(pool, "prefill-1"))
    prefill, decode = link(pool, "prefill-1").view, link(pool, "decode-0").view
    assert (prefill.dispatched, prefill.queued_tokens) == (1, 40)
    assert (decode.dispatched, decode.pending_blocks) == (1, 3)
    claim.release()
    assert (prefill.dispatched, prefill.queued_tokens, decode.dispatched, decode.pending_blocks) == (0, 0, 0, 0)
