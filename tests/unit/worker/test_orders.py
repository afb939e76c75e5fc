"""What a worker is told by the board, beside its lease: obeyed once it concerns it, and never in the lease's way."""

import asyncio
from unittest.mock import AsyncMock, Mock

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


@pytest.fixture
def parts():
    """A lease, a loop, a service, a board, a role and settings in one, of which each call is remembered."""
    it = Mock(heartbeat_s=0.001, lease_s=0.06, failure=None, iterations=0)
    it.renew, it.order = AsyncMock(), AsyncMock(return_value=None)

    def beat():
        it.iterations += 1

    it.beat.side_effect = beat
    return it


@pytest.fixture
def beats(parts):
    return Beats(INFO, parts, parts, parts, parts, parts, FakeClock())


def calls(parts):
    return [name for name, _, _ in parts.mock_calls]


@pytest.mark.parametrize("order", [DRAIN, TURN], ids=["drain", "turn"])
async def test_an_order_is_returned_after_the_lease_was_renewed(parts, beats, order):
    parts.order.side_effect = [None, STAY, order]
    assert await beats.run(asyncio.Event()) is order
    assert calls(parts) == ["check", "beat", "renew", "order"] * 3
    parts.order.assert_awaited_with(D)


@pytest.mark.parametrize("seconds", [0, 60], ids=["away", "silent"])
async def test_a_board_that_cannot_be_read_endangers_no_lease(parts, beats, seconds):
    async def away(ref):
        parts.order.side_effect = [DRAIN]
        await asyncio.sleep(seconds)
        raise LedgerError("away")

    parts.order.side_effect = away
    assert await beats.run(asyncio.Event()) is DRAIN
    assert calls(parts).count("renew") == 2


async def test_told_to_stop_it_has_no_order(parts, beats):
    stop = asyncio.Event()
    parts.check.side_effect = lambda: stop.set() if calls(parts).count("check") == 3 else None
    assert await beats.run(stop) is None
    assert calls(parts).count("check") == 3


async def test_while_it_drains_it_keeps_its_lease_until_nothing_is_left(parts, beats):
    parts.look.side_effect = [False, False, True]
    await beats.drain(asyncio.Event(), 60.0, parts, parts.look)
    parts.submit.assert_called_once_with(parts.drain)
    assert calls(parts)[1:] == ["look", "check", "beat", "renew"] * 3, "routers hear that it drains before it goes"


@pytest.mark.parametrize("how", ["stop", "grace"])
async def test_it_does_not_wait_for_ever(parts, beats, how):
    stop = asyncio.Event()

    def never():
        if how == "stop":
            stop.set()
        else:
            beats._clock.advance(31.0)
        return False

    await beats.drain(stop, 30.0, parts, never)
    assert calls(parts).count("renew") == 1


@pytest.mark.parametrize("drains", [False, True])
async def test_a_broken_engine_ends_it(parts, beats, drains):
    parts.failure = RuntimeError("broken")
    with pytest.raises(EngineFault, match="RuntimeError"):
        await (beats.drain(asyncio.Event(), 60.0, parts, bool) if drains else beats.run(asyncio.Event()))
    assert "renew" not in calls(parts)
