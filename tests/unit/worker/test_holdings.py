"""Each role tells who holds which of its blocks, in every state."""

import pytest

from baton.core import HandoffId
from baton.worker.census import count
from kvtransfer.handoff import Offer, PushJob
from tests.support.fake_pusher import CUT
from tests.support.sessions import BACKEND, BLOCK, D, P, fence, names_of, prefill, prompt_of, repush, reserve, spec_of
from tests.support.workers import DecodeSide, PrefillSide

A, B = HandoffId("a", 1), HandoffId("b", 1)


@pytest.fixture
def p():
    return PrefillSide()


@pytest.fixture
def d():
    return DecodeSide()


def states(side, router_id="router-a"):
    """As the census has them, which always adds up; all are of this router."""
    census = count(D, side.counts, side.role.holdings())
    assert census.unaccounted == 0
    assert {held.router_id for held in census.held} <= {router_id}
    return [(held.handoff, held.state, held.blocks) for held in census.held]


def test_a_prefill_worker(p, router):
    p.take(router, prefill(A), prefill(B, spec_of(B, 5)))
    assert states(p) == [(A, "queued", 0), (B, "queued", 0)]
    p.step()
    assert states(p) == [(A, "pushing", 3), (B, "pushing", 2)]
    p.push_ends(A, CUT)
    assert states(p) == [(A, "waiting", 3), (B, "pushing", 2)]
    again = HandoffId("a", 2)
    p.take(router, repush(A, again))
    assert states(p) == [(B, "pushing", 2), (again, "pushing", 3)]
    p.role.gone(router)
    assert states(p) == []
    chunked = PrefillSide(max_batched_tokens=4)
    chunked.take(router, prefill(A))
    chunked.step()
    assert states(chunked) == [(A, "prefilling", 3)]


def test_a_fetch_holds_blocks_beside_the_prompt(p, router):
    p.role.fetches._cost.computed(1, 10.0)  # computing is dear
    p.take(router, prefill(A, skip=8))
    assert states(p) == [(A, "fetching", 2)]
    p.role.fetch_ended(A)
    p.loop.drain()
    assert states(p) == [(A, "queued", 0)]


def test_a_decode_worker(d, router):
    d.take(router, reserve(A, 9), reserve(B, 5))
    assert states(d) == [(A, "reserved", 3), (B, "reserved", 2)]
    for handoff, known in ((A, 9), (B, 5)):
        d.role.reservations.offer(handoff, P, Offer(BACKEND.fingerprint, known, 0))
    assert states(d) == [(A, "receiving", 3), (B, "receiving", 2)]
    d.role.reservations.lost(P)
    assert states(d) == [(A, "fenced", 3), (B, "fenced", 2)]
    d.take(router, fence(A), fence(B))
    assert states(d) == []


def test_from_the_commit_on(d, router):
    d.receive(router, A)
    d.commit(A)
    assert states(d) == [(A, "committed", 3)]
    d.loop.drain()
    assert states(d) == [(A, "decoding", 3)]
    d.run()
    assert states(d) == []


def test_what_is_fetched_from_a_decode_worker_is_pinned(d, router):
    d.attach_pusher()
    d.receive(router, A)
    d.commit(A)
    d.loop.drain()
    d.role._drop(A)
    names = names_of(prompt_of(A))
    assert len(d.engine.pool.find(names)) == 9 // BLOCK
    d.take(router, reserve(B, 9, prefix=names))
    d.role.pins.fetch(PushJob(B, P, 8))
    d.loop.drain()
    assert sorted(states(d)) == [(B, "fetched", 2), (B, "reserved", 3)]
    d.push_ends(B, CUT)
    assert states(d) == [(B, "reserved", 3)]


def test_blocks_that_the_role_forgot_are_unaccounted(d, router):
    d.take(router, reserve(A, 9))
    d.role.reservations.take(A)
    assert count(D, d.counts, d.role.holdings()).unaccounted == 3
