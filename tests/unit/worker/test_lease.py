"""A worker's life: a lapsed lease is never renewed, and an unreachable Redis does not end it.

Commands are obeyed. On a thread of its host process, it starts, fails, stops, and ends by itself.
"""

import asyncio
import threading
from functools import partial
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import pytest

from baton.core import Role
from baton.errors import Cancelled, ConfigError, EngineFault, LedgerError
from baton.ledger.control_state import WorkerCommand
from baton.testing import FakeClock
from baton.worker import process
from baton.worker.lifecycle import Beats, Lease
from baton.worker.process import HostedWorker, run_worker_process
from tests.simulation.clock import LoopClock, VirtualLoop
from tests.support.sessions import D
from tests.support.time_factor import scaled
from tests.support.waiting import eventually
from tests.support.workers import engine_of, info_of

LEASE_S = 10.0
INFO = info_of(D, Role.DECODE, engine_of(Role.DECODE, 10))


@pytest.fixture
def ledger():
    return Mock(renew=AsyncMock(return_value=True), register=AsyncMock(return_value=True))


def calls(mock):
    return [name for name, _, _ in mock.mock_calls]


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def lease(ledger, clock):
    return Lease(ledger, INFO, LEASE_S, clock)


async def test_a_lease_that_is_renewed_in_time_is_kept(lease, ledger, clock):
    await lease.take()
    for progress in range(5):
        clock.advance(9.0)
        lease.check()
        await lease.renew(progress)
    assert ledger.mock_calls == [call.register(INFO), *(call.renew(D, progress) for progress in range(5))]


@pytest.mark.parametrize("redis", ["there", "away"])
@pytest.mark.parametrize("how", ["check", "renew"])
async def test_a_lease_that_lapsed_is_over_whatever_the_ledger_would_say(lease, ledger, clock, how, redis):
    """Another worker may have taken the id while the engine thread or the process was stuck."""
    await lease.take()
    if redis == "away":
        ledger.renew.side_effect = LedgerError("away")
        await lease.renew(1)
    before = calls(ledger)
    clock.advance(LEASE_S + 0.1)
    with pytest.raises(LedgerError, match="has lapsed"):
        await lease.renew(1) if how == "renew" else lease.check()
    assert calls(ledger) == before


async def test_a_redis_that_forgot_is_told_again_unless_another_incarnation_has_the_place(lease, ledger, clock):
    await lease.take()
    clock.advance(1.0)
    ledger.renew.return_value = False
    await lease.renew(1)
    assert calls(ledger) == ["register", "renew", "register"]
    clock.advance(9.9)
    lease.check()
    ledger.register.return_value = False
    with pytest.raises(EngineFault, match="fenced"):
        await lease.renew(1)
    with pytest.raises(EngineFault, match="taken by another incarnation"):
        await lease.take()


async def test_a_redis_that_is_away_for_long_does_not_end_the_worker(lease, ledger, clock):
    await lease.take()
    ledger.renew.side_effect = [*[LedgerError("away")] * 20, False]
    for progress in range(20):
        clock.advance(5.0)
        lease.check()
        await lease.renew(progress)
    await lease.renew(21)
    assert calls(ledger)[-1] == "register"


def test_a_call_without_an_answer_is_given_up_before_the_lease_lapses(ledger):
    async def never(ref, progress):
        await asyncio.sleep(60)

    async def unanswered():
        ledger.renew.side_effect = never
        lease = Lease(ledger, INFO, LEASE_S, LoopClock())
        await lease.take()
        for _ in range(4):
            async with asyncio.timeout(LEASE_S):
                await lease.renew(1)
            lease.check()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(unanswered())


def order_of(role=Role.DECODE, **facts):
    return WorkerCommand(incarnation=str(D.incarnation), role=role, **facts)


DRAIN, TURN, STAY = order_of(drain=True), order_of(Role.PREFILL), order_of()


@pytest.fixture
def parts():
    """A mock of the lease, loop, service, control state, role and settings that records all calls."""
    it = Mock(heartbeat_s=0.001, lease_s=0.06, failure=None, iterations=0)
    it.renew, it.order = AsyncMock(), AsyncMock(return_value=None)

    def beat():
        it.iterations += 1

    it.beat.side_effect = beat
    return it


@pytest.fixture
def beats(parts):
    return Beats(INFO, parts, parts, parts, parts, parts, FakeClock())


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


NO_SETTINGS: Any = ({}, {}, None)  # unused settings, factories and role


@pytest.fixture
def exits():
    """Records the exit codes with which workers would end the process."""
    return Mock()


@pytest.fixture
def hosted(exits, monkeypatch):
    def start(serve):
        monkeypatch.setattr(process, "serve", lambda settings, factories, role, stop, ready: serve(stop, ready))
        return HostedWorker(partial(run_worker_process, *NO_SETTINGS), exit_process=exits)

    return start


def test_what_kept_it_from_starting_is_raised_by_ready(exits):
    def waits(stop, ready):
        stop.wait(scaled(10))

    worker = HostedWorker(Mock(side_effect=ConfigError("model.path: missing")), exit_process=exits)
    with pytest.raises(ConfigError, match=r"model\.path"):
        worker.ready()
    worker.stop()
    stopped = HostedWorker(waits, exit_process=exits)
    stopped.stop()
    with pytest.raises(Cancelled):
        stopped.ready()
    exits.assert_not_called()


@pytest.mark.parametrize("error", [EngineFault("the engine thread failed"), RuntimeError("a bug"), None])
def test_a_worker_that_ends_by_itself_ends_the_process(exits, hosted, error):
    """`run_worker_process` must not make its own end look like a requested stop."""
    go_on = threading.Event()

    async def serve(stop, ready):
        ready(D)
        await asyncio.to_thread(go_on.wait, scaled(10))
        if error is not None:
            raise error

    worker = hosted(serve)
    worker.ready()
    go_on.set()
    eventually(lambda: exits.called)
    exits.assert_called_once_with(0 if error is None else 1)  # 0: it has drained
    worker.stop()


def test_ready_tells_which_it_is_and_a_stop_ends_it_without_ending_the_process(exits, hosted):
    async def serve(stop, ready):
        ready(D)
        await stop.wait()

    worker = hosted(serve)
    assert worker.ready() == D
    worker.stop()
    assert not worker._thread.is_alive()
    exits.assert_not_called()
