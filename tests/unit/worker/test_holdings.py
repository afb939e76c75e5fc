"""A census lists the holders of a worker's blocks in every state and finds blocks without a holder."""

import threading
from functools import partial
from unittest.mock import Mock

import pytest

from baton.core import BlockCounts, HandoffId
from baton.errors import DeadlineExceeded
from baton.worker.block_census import Holding, count, take
from baton.worker.engine_loop import EngineLoop
from kvtransfer.handoff import Offer, PushJob
from tests.support.fake_pusher import CUT
from tests.support.sessions import BACKEND, BLOCK, D, P, fence, names_of, prefill, prompt_of, repush, reserve, spec_of
from tests.support.workers import DecodeSide, PrefillSide
from tests.unit.history.good import taken

A, B = HandoffId("a", 1), HandoffId("b", 1)


@pytest.fixture
def d():
    return DecodeSide()


def states(side, router_id="router-a"):
    """Return the holdings in a census, which must add up. All are of this router."""
    census = count(D, side.counts, side.role.holdings())
    assert census.unaccounted == 0
    assert {held.router_id for held in census.held} <= {router_id}
    return [(held.handoff, held.state, held.blocks) for held in census.held]


def test_a_prefill_worker(router):
    p = PrefillSide()
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


def test_a_fetch_holds_blocks_beside_the_prompt(router):
    p = PrefillSide()
    p.role.fetches._cost.computed(1, 10.0)  # makes computing expensive
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


def test_shared_blocks_count_once():
    holdings = [Holding(A, "decoding", [0, 1, 2], "router-a"), Holding(B, "reserved", [0, 1, 3], "router-b")]
    found = count(D, BlockCounts(8, free=4, owned=3, reserved=1), holdings)
    assert [(held.handoff, held.state, held.blocks, held.counted) for held in found.held] == [
        (A, "decoding", 3, 3),
        (B, "reserved", 3, 1),
    ]
    assert (found.worker, found.unaccounted) == (D, 0)


@pytest.mark.parametrize(
    ("counts", "unaccounted"),
    [
        *((BlockCounts(8, free=8 - owned, owned=owned), owned - 2) for owned in (4, 2, 1)),
        (BlockCounts(8, cached=5, quarantined=1, owned=2), 0),  # these need no holder
    ],
)
def test_what_nobody_holds_is_unaccounted(counts, unaccounted):
    assert count(D, counts, [Holding(A, "decoding", [4, 5])]).unaccounted == unaccounted


@pytest.fixture
def side():
    made = DecodeSide(10, loop=partial(EngineLoop, idle_s=0.01))
    yield made
    made.loop.stop()


async def test_it_is_taken_on_the_engine_thread_and_a_failure_is_the_askers_and_not_the_engines(side):
    allocation, threads = taken(side.engine.pool, 3), []

    def holdings():
        threads.append(threading.current_thread().name)
        return [Holding(A, "decoding", allocation.blocks)]

    side.loop.start(side.role)
    found = await take(side.loop, D, holdings)
    assert (threads, found.blocks.owned, found.unaccounted) == (["engine"], 3, 0)
    with pytest.raises(ZeroDivisionError):
        await take(side.loop, D, Mock(side_effect=ZeroDivisionError))
    assert (await take(side.loop, D, holdings)).unaccounted == 0
    assert side.loop.failure is None


async def test_an_engine_that_does_not_come_to_it_is_not_waited_for(side):
    holdings = Mock(return_value=[])
    with pytest.raises(DeadlineExceeded, match=r"decode-0@7\.2: no census within 0\.01 s"):
        await take(side.loop, D, holdings, within_s=0.01)
    side.loop.start(side.role)
    assert (await take(side.loop, D, list)).unaccounted == 0
    holdings.assert_not_called()  # the expired census was skipped
