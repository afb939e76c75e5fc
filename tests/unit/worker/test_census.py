"""A census counts who holds blocks, and finds those that nobody holds."""

import threading
from functools import partial

import pytest

from baton.core import HandoffId
from baton.errors import DeadlineExceeded
from baton.load import BlockCounts
from baton.worker.census import Holding, count, take
from baton.worker.loop import EngineLoop
from tests.support.sessions import D
from tests.support.workers import DecodeSide
from tests.unit.history.good import taken

A, B = HandoffId("a", 1), HandoffId("b", 2)


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


async def test_it_is_taken_on_the_engine_thread(side):
    allocation, threads = taken(side.engine.pool, 3), []

    def holdings():
        threads.append(threading.current_thread().name)
        return [Holding(A, "decoding", allocation.blocks)]

    side.loop.start(side.role)
    found = await take(side.loop, D, holdings)
    assert (threads, found.blocks.owned, found.unaccounted) == (["engine"], 3, 0)


async def test_a_failure_is_the_askers_and_not_the_engines(side):
    def holdings():
        raise ZeroDivisionError

    side.loop.start(side.role)
    with pytest.raises(ZeroDivisionError):
        await take(side.loop, D, holdings)
    assert (await take(side.loop, D, list)).unaccounted == 0
    assert side.loop.failure is None


async def test_an_engine_that_does_not_come_to_it_is_not_waited_for(side):
    looked: list[Holding] = []

    def holdings():
        looked.append(Holding(A, "decoding", []))
        return looked

    with pytest.raises(DeadlineExceeded, match=r"decode-0@7\.2: no census within 0\.01 s"):
        await take(side.loop, D, holdings, within_s=0.01)
    side.loop.start(side.role)
    assert (await take(side.loop, D, list)).unaccounted == 0
    assert looked == []  # nobody waited for it any more
