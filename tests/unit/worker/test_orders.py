"""What a worker is told by the board, beside its lease: obeyed once it concerns it, and never in the lease's way."""

import asyncio
from typing import Any, cast

import pytest

from baton.clock import FakeClock
from baton.core import Role
from baton.errors import EngineFault, LedgerError
from baton.ledger.board import Order
from baton.worker.life import Beats
from tests.support.sessions import D
from tests.support.workers import engine_of, info_of

INFO = info_of(D, Role.DECODE, engine_of(Role.DECODE, 10))


def order_of(role=Role.DECODE, **facts):
    return Order(incarnation=str(D.incarnation), role=role, **facts)


DRAIN, TURN, STAY = order_of(drain=True), order_of(Role.PREFILL), order_of()


class Parts:
    """A lease, a loop, a service, a board and settings, of which each call is remembered."""

    heartbeat_s, lease_s = 0.001, 0.06
    failure = None

    def __init__(self):
        self.iterations, self.calls, self.jobs = 0, [], []
        self.orders = []  # to come; an error is raised, "hangs" never answers, none left: None
        self.at_beat = {}  # a function to call, by number

    def check(self):
        self.calls.append("check")

    async def renew(self, progress):
        self.calls.append("renew")

    def beat(self):
        self.iterations += 1
        self.calls.append("beat")
        self.at_beat.get(self.iterations, lambda: None)()

    def submit(self, job):
        self.jobs.append(job)

    async def order(self, ref):
        assert ref == D
        self.calls.append("order")
        found = self.orders.pop(0) if self.orders else None
        if isinstance(found, Exception):
            raise found
        return await asyncio.sleep(60) if found == "hangs" else found

    def drain(self):
        self.calls.append("drain")


@pytest.fixture
def parts():
    return Parts()


@pytest.fixture
def beats(parts):
    it = cast("Any", parts)
    return Beats(INFO, it, it, it, it, it, FakeClock())


@pytest.mark.parametrize("order", [DRAIN, TURN], ids=["drain", "turn"])
async def test_an_order_is_returned_after_the_lease_was_renewed(parts, beats, order):
    parts.orders = [None, STAY, order]
    assert await beats.run(asyncio.Event()) is order
    assert parts.calls == ["check", "beat", "renew", "order"] * 3


@pytest.mark.parametrize("trouble", [LedgerError("away"), "hangs"])
async def test_a_board_that_cannot_be_read_endangers_no_lease(parts, beats, trouble):
    parts.orders = [trouble, DRAIN]
    assert await beats.run(asyncio.Event()) is DRAIN
    assert parts.calls.count("renew") == 2


async def test_told_to_stop_it_has_no_order(parts, beats):
    stop = asyncio.Event()
    parts.at_beat = {3: stop.set}
    assert await beats.run(stop) is None
    assert parts.calls.count("renew") == 3


async def test_while_it_drains_it_keeps_its_lease_until_nothing_is_left(parts, beats):
    looks = iter([False, False, True])

    def drained():
        parts.calls.append("look")
        return next(looks)

    await beats.drain(asyncio.Event(), 60.0, cast("Any", parts), drained)
    assert parts.jobs == [parts.drain]
    assert parts.calls.count("renew") == 3
    assert parts.calls[-4:] == ["look", "check", "beat", "renew"], "routers hear that it drains before it goes"


@pytest.mark.parametrize("how", ["stop", "grace"])
async def test_it_does_not_wait_for_ever(parts, beats, how):
    stop = asyncio.Event()

    def never():
        if how == "stop":
            stop.set()
        else:
            beats._clock.advance(31.0)
        return False

    await beats.drain(stop, 30.0, cast("Any", parts), never)
    assert parts.calls.count("renew") == 1


@pytest.mark.parametrize("drains", [False, True])
async def test_a_broken_engine_ends_it(parts, beats, drains):
    parts.failure = RuntimeError("broken")
    with pytest.raises(EngineFault, match="RuntimeError"):
        await (beats.drain(asyncio.Event(), 60.0, cast("Any", parts), bool) if drains else beats.run(asyncio.Event()))
    assert "renew" not in parts.calls
