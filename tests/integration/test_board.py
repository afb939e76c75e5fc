"""The control state in a real redis-server, and the operators' requests that a router writes there."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from baton.cli.cluster.operator import Operator
from baton.cli.target import Admins
from baton.client.types import ClusterStatus
from baton.clock import SystemClock
from baton.cluster.controller_ray import found_cluster
from baton.cluster.follower_lease import LEASE_S, FollowerLease
from baton.control_plane import Slot
from baton.core import Incarnation, Role, WorkerInfo, WorkerRef
from baton.errors import BatonError, ConfigError, DeadlineExceeded, InvalidRequest, LedgerError, NoWorker
from baton.ledger.control_state import ControlReport, ControlState, Decision, RouterReport, WorkerCommand, WorkerDemand
from baton.ledger.redis_client import COMMANDS, Connection
from baton.ledger.registry import Ledger
from baton.tokenizer import OracleTokenizer
from router.context import RouterSettings
from router.server import Router, serve
from tests.support.in_process_router import FakeWorker
from tests.support.ledger import raw, registered
from tests.support.plans import first_plan
from tests.support.waiting import until

HERE = WorkerRef("prefill-0", Incarnation(3, 4), "127.0.0.1:1")
ANY = "127.0.0.1:0"
call = asyncio.to_thread


@pytest.fixture
def board(ledger: Ledger) -> ControlState:
    return ControlState(ledger.connection)


async def test_a_cluster_serves_with_a_controller_and_a_decode_worker(board, ledger, server):
    name = ledger.connection.key("x").split(":")[1]
    assert await found_cluster(server.url, name) == (False, False, 0)
    await registered(ledger, "decode-0")
    assert await found_cluster(server.url, name) == (True, False, 1), "without a controller"
    await controlled(board, READY, number=1)
    assert await found_cluster(server.url, name) == (True, True, 1)
    await ledger.deregister((await ledger.workers())[0].ref)
    assert await found_cluster(server.url, name) == (True, False, 0)


async def test_one_host_at_a_time_runs_a_cluster(ledger, server):
    """`stopping` ends each wait for a lease."""
    name, stopping = ledger.connection.key("x").split(":")[1], Mock(return_value=True)
    first, second = (FollowerLease(server.url, name, f"host-{n} /home", stopping) for n in "12")
    await call(first.__enter__)
    await call(first.take)
    for refused in (second.take, first.check, second.__enter__):
        with pytest.raises(ConfigError, match="name: `baton up` on host-1 runs cluster"):
            await call(refused)
    assert 0 < raw(server).pttl(ledger.connection.key("up")) <= 1000 * LEASE_S
    await call(second.leave)
    await call(first.__exit__, NoWorker, NoWorker("its child is restarted"), None)
    with pytest.raises(ConfigError, match="host-1"):
        await call(second.check)
    await call(first.__exit__, None, None, None)
    await call(second.check)
    await call(second.__enter__)
    stopping.side_effect = lambda seconds: second.leave()  # as if it had expired
    await call(first.__enter__)
    with pytest.raises(ConfigError, match="host-1"):
        await call(second.take)


async def test_one_plan_of_the_highest_number_stays(board):
    assert await board.plan() is None
    assert await board.put_plan(first_plan(1, 2, number=4))
    for number in (3, 4):
        assert not await board.put_plan(first_plan(9, 9, number=number)), "it is not newer"
    assert await board.put_plan(first_plan(2, 2, number=5, by="operator"))
    assert await board.plan() == first_plan(2, 2, number=5, by="operator")
    said = await asyncio.gather(*(board.put_plan(first_plan(i, 1, number=7)) for i in range(1, 20)))
    assert sum(said) == 1, "of those who plan at once, one wins the number"


@pytest.mark.parametrize("garbage", [b"", b"no json", b"[]", b'{"prefill": "many"}', b'{"number": "x"}', b"\xff"])
async def test_a_damaged_plan_is_none_and_gives_way(board, ledger, server, garbage):
    raw(server).set(ledger.connection.key("plan"), garbage)
    assert await board.plan() is None
    assert await board.put_plan(first_plan(1, 1, number=0)), "the plan that was there is unreadable"


async def test_an_order_is_for_one_incarnation_alone(board):
    order = WorkerCommand(incarnation=str(HERE.incarnation), role=Role.DECODE)
    await board.put_order("prefill-0", order)
    assert await board.order(HERE) == order
    assert await board.order(WorkerRef("prefill-0", Incarnation(3, 5), "")) is None
    assert await board.order(WorkerRef("prefill-1", Incarnation(3, 4), "")) is None
    await board.drop_order("prefill-0")
    assert await board.order(HERE) is None


async def test_routers_that_say_nothing_more_are_forgotten(board, ledger, server):
    key = ledger.connection.key
    report = RouterReport(router_id="r1", queued=3, workers={"decode-0": WorkerDemand(role=Role.DECODE, used=0.5)})
    await board.put_router(report, 60.0)
    await board.put_router(RouterReport(router_id="r2"), 0.001)
    await until(lambda: not raw(server).exists(key("router", "r2")), "its lease is over")
    assert await board.routers() == [report]
    assert raw(server).smembers(key("routers")) == {b"r1"}
    await board.drop_router("r1")
    assert await board.routers() == []


async def test_what_a_newer_controller_says_more_is_passed_over(board, ledger, server):
    report = ControlReport(plan=first_plan(1, 1), at=1.0, decisions=(Decision(at=1.0, kind="plan", text="x"),))
    raw(server).set(ledger.connection.key("control"), report.model_dump_json()[:-1] + ', "mood": "good"}')
    assert await board.control() == report
    await board.drop_control()
    assert await board.control() is None


async def test_the_last_report_outlives_its_controller(board, server, ledger):
    report = ControlReport(plan=first_plan(1, 1), at=1.0)
    await board.put_control(report, 0.001)
    await until(lambda: not raw(server).exists(ledger.connection.key("control")), "its lease is over")
    assert (await board.control(), await board.last_control()) == (None, report)
    await board.drop_control()
    assert await board.last_control() is None


async def test_it_keeps_to_the_commands_that_the_documented_user_may(board, server):
    client = raw(server)
    client.config_resetstat()
    await board.put_plan(first_plan(1, 1))
    await board.put_order("prefill-0", WorkerCommand(incarnation="1.1", role=Role.PREFILL))
    await board.put_router(RouterReport(router_id="r"), 1.0)
    await board.put_control(ControlReport(plan=first_plan(1, 1), at=0.0), 1.0)
    for asked in (board.plan(), board.order(HERE), board.routers(), board.control()):
        await asked
    for dropped in (board.drop_order("prefill-0"), board.drop_router("r"), board.drop_control()):
        await dropped
    used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    assert used <= {*COMMANDS, "ping", "config|resetstat", "config", "info"}


@pytest.fixture
async def workers() -> AsyncIterator[list[FakeWorker]]:
    """One worker, and those that a test adds."""
    made = [await FakeWorker(Role.PREFILL, "prefill-0", 1).start()]
    yield made
    for one in made:
        await one.kill()


@pytest.fixture
async def router(board: ControlState, workers: list[FakeWorker]) -> AsyncIterator[Router]:
    async def source() -> list[WorkerInfo]:
        return [one.info for one in workers]

    bounds = {Role.PREFILL: (1, 4096), Role.DECODE: (2, 4)}
    settings = RouterSettings("test", "oracle", grpc=ANY, metrics=ANY, scale=bounds, drain_s=7.0)
    made = await serve(settings, source, OracleTokenizer(), control_state=board)
    await until(lambda: any(link.usable for link in made.context.pool.links), "connected")
    yield made
    await made.stop(0.0)


@pytest.fixture
def operator(router: Router) -> Operator:
    return Operator(Admins([router.admin]))


async def controlled(board: ControlState, *slots: Slot, **plan: Any) -> None:
    """Report a controller with this plan and these workers."""
    planned, now = first_plan(1, 2, **plan), SystemClock().wall()
    await board.put_control(ControlReport(plan=planned, at=now, slots=slots, host="h", outlook="calm"), 60.0)


READY = Slot("prefill-0", Role.PREFILL, "ready", 0, 0, "")


async def test_without_a_controller_nobody_is_told_that_something_happens(operator, board):
    for ask in (lambda: operator.scale({"decode": 2}), operator.restart, lambda: operator.drain("prefill-0")):
        with pytest.raises(NoWorker, match="no controller is running"):
            await call(ask)
    assert await board.plan() is None


async def test_an_operator_scales_within_the_bounds_of_the_file(operator, board):
    await controlled(board, number=8)
    said = await call(operator.scale, {"decode": 3})
    assert (said.prefill, said.decode, said.number, said.by) == (1, 3, 9, "operator")
    await call(operator.scale, {"prefill": 2})
    plan = await board.plan()
    assert (plan.prefill, plan.decode, plan.number) == (2, 3, 10), "what the first said stays"
    with pytest.raises(InvalidRequest, match="decode: must be from 2 to 4, got 5") as refused:
        await call(operator.scale, {"prefill": 0, "decode": 5})
    assert "prefill: must be from 1" in str(refused.value)
    with pytest.raises(InvalidRequest, match="set the number of prefill workers"):
        await call(operator.scale, {})
    assert (await board.plan()).number == 10


async def test_a_restart_is_the_next_generation_by_any_router_that_answers(router, board):
    await controlled(board, generation=3)
    said = await call(Operator(Admins(["127.0.0.1:1", router.admin])).restart)
    assert (said.prefill, said.decode, said.generation, said.number) == (1, 2, 4, 1)
    plan = await board.plan()
    assert (plan.generation, plan.by) == (4, "file"), "the sizes are still those of the file"
    with pytest.raises(NoWorker):
        await call(Operator(Admins(["127.0.0.1:1"])).restart)


async def test_a_drain_is_an_order_to_the_process_that_is_there(operator, board, workers):
    await controlled(board, READY)
    process = await call(operator.drain, "prefill-0")
    assert process == str(workers[0].info.ref)
    order = await board.order(workers[0].info.ref)
    assert (order.drain, order.role, order.grace_s) == (True, Role.PREFILL, 7.0)
    assert order.wish, "the controller sees to it that another one is there first"
    for name in ("prefill-1", ""):
        with pytest.raises(InvalidRequest, match="its workers: prefill-0"):
            await call(operator.drain, name)


async def test_who_waits_is_told_when_it_is_done_or_what_is_missing(operator, board, workers):
    slots = [READY, *(replace(READY, worker_id=f"decode-{i}", role=Role.DECODE) for i in range(2))]
    late = replace(slots[1], state="starting", note="no room")
    newer = replace(READY, generation=1)
    for unsettled in ([READY, late, slots[2]], slots[:2], [newer, *slots[1:]]):
        await controlled(board, *unsettled, number=5)
        with pytest.raises(DeadlineExceeded, match="not done in 0 s"):
            await call(operator.wait_settled, 5, 0.0)
    await controlled(board, *slots, number=5)
    with pytest.raises(DeadlineExceeded, match="prefill-0 is ready, decode-0 is ready but not connected"):
        await call(operator.wait_settled, 5, 0.0)
    for slot in slots[1:]:
        workers.append(await FakeWorker(Role.DECODE, slot.worker_id, 1).start())
    await call(operator.wait_settled, 5, 20.0)
    with pytest.raises(DeadlineExceeded):
        await call(operator.wait_settled, 6, 0.0)
    status = await call(operator.status)
    assert (status.control.outlook, status.control.host, status.control.plan.number) == ("calm", "h", 5)
    assert 0.0 <= status.control.age_s < 30.0


async def test_a_router_that_restarts_does_not_end_a_wait(operator, board, workers, monkeypatch):
    slots = [READY, *(replace(READY, worker_id=f"decode-{i}", role=Role.DECODE) for i in range(2))]
    await controlled(board, *slots, number=5)
    for slot in slots[1:]:
        workers.append(await FakeWorker(Role.DECODE, slot.worker_id, 1).start())
    answered, away = Admins.status, iter([NoWorker("it restarts"), DeadlineExceeded("it is slow")])

    def status(self: Admins, address: str) -> ClusterStatus:
        for error in away:
            raise error
        return answered(self, address)

    monkeypatch.setattr(Admins, "status", status)
    await call(operator.wait_settled, 5, 20.0)
    away = iter([NoWorker("it restarts")])
    with pytest.raises(NoWorker):
        await call(operator.wait_settled, 5, 0.0)


async def test_a_redis_that_is_away_costs_the_status_nothing_but_that(router, operator, monkeypatch):
    monkeypatch.setattr(Connection, "call", AsyncMock(side_effect=LedgerError("down")))
    assert (await call(operator.status)).control is None
    with pytest.raises(BatonError):
        await call(operator.restart)


async def test_the_age_of_a_decision_counts_until_the_report(board, operator):
    now = SystemClock().wall()
    decision = Decision(at=now - 120, kind="plan", text="x")
    await board.put_control(ControlReport(plan=first_plan(1, 1), at=now - 100, decisions=(decision,)), 60.0)
    (shown,) = (await call(operator.status)).control.decisions
    assert shown.age_s == pytest.approx(20)


async def test_a_frozen_router_is_passed_over_for_the_status_only(router, board, monkeypatch):
    admins, started = Admins(["127.0.0.1:1", router.admin]), Admins.status

    def status(self: Admins, address: str) -> ClusterStatus:
        if address != router.admin:
            raise DeadlineExceeded("no answer")
        return started(self, address)

    monkeypatch.setattr(Admins, "status", status)
    monkeypatch.setattr(Admins, "call", Mock(side_effect=DeadlineExceeded("no answer")))
    assert (await call(Operator(admins).status)).workers
    with pytest.raises(DeadlineExceeded):  # the router may have done it
        await call(Operator(admins).restart)


async def test_a_router_is_on_the_board_until_it_goes(router, board):
    async def shown() -> bool:
        return [report.router_id for report in await board.routers()] == [router.context.sinks.router_id]

    await until(shown)
    await router.stop(0.0)
    assert await board.routers() == []


async def test_a_redis_that_never_answers_holds_no_router_up(router, monkeypatch):
    async def never(*_: object) -> object:
        return await asyncio.Event().wait()

    monkeypatch.setattr(Connection, "call", never)
    await router.stop(0.0)
