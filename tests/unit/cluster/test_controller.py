"""The controller with simulated workers: it reaches the plan after any event, and never stops a role's last worker."""

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.cluster.backend_process import STABLE_S, START_TIMEOUT_S, StartError
from baton.cluster.controller import check_alone
from baton.cluster.reconcile import MAX_IN_A_ROW, ROOM_S
from baton.cluster.worker_supervisor import PAUSE_S, DecisionLog
from baton.core import Role
from baton.errors import BatonError, ConfigError
from baton.ledger.control_state import RouterReport, WorkerCommand
from tests.support.plans import first_plan
from tests.unit.cluster.control_world import LEASE_S, LOAD_S, WORK_S, World, again, begun, run, started


async def test_a_cluster_starts_as_its_file_says_and_says_so():
    world, controller = await started(prefill=2, decode=1)
    assert world.found() == {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode"}
    assert (world.said.prefill, world.said.decode, world.said.by, world.said.number) == (2, 1, "file", 0)
    assert world.states() == dict.fromkeys(world.found(), "ready")
    assert world.kinds() == ["plan", "start", "start"]
    assert world.orders == {}
    await controller.end()
    assert world.report is None


async def test_a_clock_that_was_set_back_delays_no_report(monkeypatch):
    world, controller = await started()
    monkeypatch.setattr(world.clock, "wall", lambda: 1.0)
    await run(world, controller, 2)
    world.report = None  # its lease has lapsed
    await run(world, controller, 2)
    assert world.report is not None


async def test_who_died_is_started_again():
    world, controller = await started()
    world.die("decode-0")
    await run(world, controller, 4)
    assert world.started == ["prefill-0", "decode-0", "decode-0"]
    found = world.slots()["decode-0"]
    assert (found.state, found.restarts, found.note) == ("ready", 1, "")
    assert "its cable was pulled" in world.report.decisions[-1].text


@pytest.mark.parametrize("replanned", [False, True])
async def test_who_dies_too_often_fails_and_is_tried_again_after_a_pause_or_by_another_plan(replanned):
    world, controller = await started(decode=2)
    world.broken = {"decode-1"}
    world.die("decode-1")
    await run(world, controller, 100)
    found = world.slots()["decode-1"]
    assert found.state == "failed"
    assert "no such model" in found.note
    assert world.kinds()[-1] == "give_up"
    assert world.started.count("decode-1") <= MAX_IN_A_ROW + 2
    await run(world, controller, 5 * PAUSE_S)
    assert world.kinds().count("give_up") == 1, "a line for each failed attempt would fill the list"
    world.broken = set()
    if replanned:
        world.tell(generation=1)
    await run(world, controller, LOAD_S + 1 if replanned else PAUSE_S + LOAD_S + 1)
    assert world.states()["decode-1"] == "ready"


async def test_a_worker_that_dies_in_long_loads_fails_as_well(monkeypatch):
    world, controller = await started(decode=2)
    monkeypatch.setattr("tests.unit.cluster.control_world.LOAD_S", 2 * STABLE_S)
    for _ in range(MAX_IN_A_ROW):
        world.die("decode-1")
        await run(world, controller, 1.5 * STABLE_S)
        assert world.states()["decode-1"] == "starting"
    world.die("decode-1")
    await run(world, controller, 1)
    assert world.states()["decode-1"] == "failed"
    monkeypatch.setattr("tests.unit.cluster.control_world.LOAD_S", LOAD_S)
    await run(world, controller, PAUSE_S + LOAD_S + 1 + STABLE_S)
    world.die("decode-1")
    await run(world, controller, 1)
    assert world.states()["decode-1"] == "starting", "it was ready for long enough"


async def test_a_frozen_worker_is_killed_and_replaced():
    world, controller = await started()
    world.freeze("decode-0")
    await run(world, controller, LEASE_S)
    assert world.killed == []
    await run(world, controller, LEASE_S)
    assert world.killed == ["decode-0"]
    assert world.ready(Role.DECODE) == ["decode-0"]
    assert "no lease" in next(one.text for one in world.report.decisions if one.kind == "replace")


async def test_one_that_never_becomes_ready_is_killed():
    world, controller = await started(decode=2)
    world.die("decode-1")
    await run(world, controller, 1)
    world.freeze("decode-1")
    await run(world, controller, START_TIMEOUT_S - 2, every_s=2)
    assert world.killed == []
    await run(world, controller, 10)
    assert world.killed == ["decode-1"]
    assert controller.ready


@pytest.mark.parametrize("forgets", [False, True])
async def test_nobody_is_killed_because_redis_was_away_or_forgot(forgets):
    world, controller = await started()
    world.tell(decode=2)
    await run(world, controller, LEASE_S)
    world.away = True
    await run(world, controller, 10 * LEASE_S)
    world.away = False
    if forgets:
        world.forget_store()
    await run(world, controller, 5 * LEASE_S)
    assert world.killed == []
    assert world.started == ["prefill-0", "decode-0", "decode-1"]
    assert controller.ready
    assert world.said == world.report.plan
    assert (world.said.decode, world.said.number, world.said.by) == (2, 1, "operator"), "the plan is stored again"


async def test_after_a_loss_workers_have_time_to_enter_again_before_anything_is_changed():
    world, controller = await started(decode=2)
    world.tell(decode=1)
    said = world.said
    world.forget_store()
    world.said, world.cut = said, True
    await run(world, controller, LEASE_S)
    assert (world.killed, len(world.found())) == ([], 3)
    world.cut = False
    await run(world, controller, WORK_S + 2)
    assert (world.killed, len(world.found())) == ([], 2)
    assert controller.ready


async def test_a_pool_shrinks_by_draining_its_newest():
    world, controller = await started(decode=3)
    world.tell(decode=1)
    await run(world, controller, 1)
    assert {name: (order.drain, order.grace_s) for name, order in world.orders.items()} == {
        "decode-1": (True, 60.0),
        "decode-2": (True, 60.0),
    }
    await run(world, controller, WORK_S + 1)
    assert world.found() == {"prefill-0": "prefill", "decode-0": "decode"}
    assert (world.orders, world.killed, list(world.processes)) == ({}, [], ["prefill-0", "decode-0"])


async def test_one_too_many_here_and_one_too_few_there_is_turned():
    world, controller = await started(prefill=2)
    world.tell(prefill=1, decode=2)
    await run(world, controller, 1)
    assert world.states()["prefill-1"] == "turning"
    await run(world, controller, WORK_S + 1)
    assert world.found() == {"prefill-0": "prefill", "prefill-1": "decode", "decode-0": "decode"}
    assert controller.ready
    assert world.orders == {}
    assert len(world.started) == 3, "no worker was started again"
    world.tell(prefill=2, decode=1)
    await run(world, controller, WORK_S + 2)
    assert Counter(world.found().values()) == {"prefill": 2, "decode": 1}
    assert len(world.started) == 3


@pytest.mark.parametrize("config", [{"turn": False}, {"parallel": True}])
async def test_where_none_may_be_turned_one_is_started_and_one_drained(config):
    world = World(prefill=2, turn=config.get("turn", True))
    two = {"decode": {"replicas": 1, "device": "cpu", "tensor_parallel": 2}}
    controller = await begun(world, world.controller(**two) if "parallel" in config else None)
    world.tell(prefill=1, decode=2)
    await run(world, controller, 10)
    assert world.found() == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


async def test_one_that_does_not_obey_is_ended():
    world, controller = await started(prefill=2, decode=2)
    world.tell(prefill=1, decode=3)
    await run(world, controller, 1)
    world.freeze("prefill-1")
    await run(world, controller, 200)
    assert world.killed == ["prefill-1"]
    assert world.found()["prefill-1"] == "decode"
    world.tell(decode=2)
    await run(world, controller, 1)
    going = next(name for name, state in world.states().items() if state == "draining")
    world.freeze(going)
    await run(world, controller, 200)
    assert world.killed == ["prefill-1", going]
    assert going not in world.found()
    assert controller.ready


def drain(world: World, worker_id: str, *, wish: bool = True) -> None:
    """Order a drain, as an operator (`wish`) or as a controller does."""
    process = world.processes[worker_id]
    incarnation = str(process.incarnation)
    world.orders[worker_id] = WorkerCommand(incarnation=incarnation, role=process.role, drain=True, wish=wish)


async def test_the_grace_of_an_order_for_a_host_that_goes_away_stays():
    world, controller = await started(decode=2)
    process = world.processes["decode-1"]
    order = WorkerCommand(incarnation=str(process.incarnation), role=process.role, drain=True, grace_s=7.0)
    world.orders["decode-1"] = order
    await run(world, controller, 1)
    assert world.states()["decode-1"] == "draining"
    assert world.orders["decode-1"] == order
    await again(world, 1)
    assert world.orders["decode-1"] == order, "an order outlives its controller"


async def test_a_second_controller_of_a_name_does_not_start():
    class State:
        def __init__(self, *times):
            self.reports = [at and Mock(at=at, host="there") for at in times]

        async def control(self):
            return self.reports.pop(0) if self.reports[1:] else self.reports[0]

    state: Any = State
    await check_alone("n", state(None))
    await check_alone("n", state(5.0), wait_s=0.0)  # of a killed one
    await check_alone("n", state(5.0, None))  # it has ended
    with pytest.raises(ConfigError, match="name: another controller of cluster 'n' runs on there"):
        await check_alone("n", state(5.0, 5.0, 6.0))


async def test_the_last_worker_that_an_operator_wants_drained_stays_until_another_is_there():
    world, controller = await started()
    drain(world, "decode-0")
    for _ in range(40):
        await run(world, controller, 0.5)
        assert world.ready(Role.DECODE)
    assert world.found() == {"prefill-0": "prefill", "decode-1": "decode"}
    assert controller.ready
    assert world.killed == []
    assert world.orders == {}
    assert [d.text for d in world.report.decisions if "operator" in d.text] == [
        "decode-1: to replace decode-0, which an operator drains",
        "decode-0: drained by an operator",
    ]


async def test_a_wish_outlives_the_controller_and_ends_with_its_process():
    world, controller = await started(prefill=2)
    drain(world, "prefill-0")
    drain(world, "prefill-1")
    await run(world, controller, 0.5)
    assert world.orders["prefill-1"].wish
    world.die("prefill-1")
    controller = await again(world, 30)
    assert world.orders == {}
    assert "prefill-0" not in world.found()
    assert controller.ready


async def test_a_generation_is_replaced_one_by_one_with_never_fewer_than_planned():
    world, controller = await started(prefill=2, decode=2)
    before = {process.pid for process in world.processes.values()}
    world.tell(generation=1)
    for _ in range(200):
        await run(world, controller, 0.5)
        assert all(len(world.ready(role)) >= 2 for role in Role)
        assert len(world.found()) <= 6
        leaving = [name for name, state in world.states().items() if state == "draining"]
        assert len(leaving) <= 1
    assert controller.ready
    assert not before & {process.pid for process in world.processes.values()}
    assert world.killed == []
    assert {slot.generation for slot in world.report.slots} == {1}


async def test_where_a_successor_finds_no_room_the_old_one_goes_first_if_another_is_ready():
    world, controller = await started(prefill=1, decode=2, room=3)
    world.tell(generation=1)
    await run(world, controller, ROOM_S - 5)
    assert world.killed == []
    # There is no capacity for a second prefill worker, so the only one stays until there is one more host.
    await run(world, controller, 2 * ROOM_S)
    assert world.ready(Role.PREFILL) == ["prefill-0"]
    world.room = 4
    await run(world, controller, 20)
    world.room = 3
    await run(world, controller, 6 * ROOM_S)
    assert controller.ready
    assert {slot.generation for slot in world.report.slots} == {1}


async def test_a_generation_that_cannot_start_leaves_the_old_one_at_work():
    world, controller = await started(prefill=1, decode=2)
    world.broken = {"*"}
    world.tell(generation=1)
    await run(world, controller, 300)
    assert world.killed == []
    assert set(world.ready(Role.DECODE)) == {"decode-0", "decode-1"}
    assert world.ready(Role.PREFILL) == ["prefill-0"]
    assert world.states()["prefill-1"] == "failed"


@pytest.mark.parametrize("forgets", [False, True], ids=["in the middle", "the store forgot the report"])
async def test_a_controller_that_starts_takes_over_what_runs(forgets):
    world, first = await started(prefill=2)
    world.tell(prefill=1, decode=2)
    await run(world, first, 10 if forgets else 1)
    if forgets:
        world.report = None
    else:
        world.die("decode-0")
    second = await again(world, 20)
    assert Counter(world.found().values()) == {"prefill": 1, "decode": 2}
    assert world.found()["prefill-1"] == "decode"
    assert second.ready
    assert (world.killed, len(world.started)) == ([], 3 if forgets else 4)
    assert "plan" in world.kinds()


@pytest.mark.parametrize(("lease_s", "answers_s"), [(3.0, 10.0), (LEASE_S, 1.0)])
@pytest.mark.parametrize("rolls", [False, True], ids=["a lower size in the file", "in the middle of a roll"])
async def test_a_surplus_worker_that_has_not_answered_a_new_controller_yet_is_drained_and_not_killed(
    rolls, lease_s, answers_s
):
    world, first = await started(decode=1 if rolls else 3, answers_s=answers_s)
    if rolls:
        world.tell(generation=1)
        await run(world, first, 0.5)
        assert len(world.found()) == 3
    else:
        world.decode = 2
    second = world.controller(ledger={"lease_s": lease_s})
    await second.begin()
    for _ in range(80):
        await run(world, second, 0.5)
        assert len(world.ready(Role.DECODE)) >= world.decode
    assert world.killed == []
    assert "drain" in world.kinds()
    assert second.ready


async def test_a_roll_goes_on_although_the_report_of_the_controller_before_has_expired():
    world, first = await started(prefill=2)
    before = {id(process): process for process in world.processes.values()}
    world.tell(generation=1)
    while before.keys() <= set(map(id, world.processes.values())):
        await run(world, first, 0.5)
    world.report = None
    second = await again(world, 60)
    assert second.ready
    assert not before.keys() & set(map(id, world.processes.values()))


@pytest.mark.parametrize(("by", "sizes"), [("operator", (1, 3)), ("autoscaler", (1, 3)), ("file", (1, 1))])
async def test_another_file_counts_unless_somebody_said_otherwise_since(by, sizes):
    world, _ = await started()
    world.said = first_plan(1, 3, number=7, generation=2, by=by)
    second = await again(world, 20)
    assert (second.plan.prefill, second.plan.decode) == sizes
    assert second.plan.generation == 2
    assert world.said == second.plan
    told = f"the cluster file has 1 prefill and 1 decode workers, but {by} set 1 prefill and 3 decode since"
    assert any(told in one.text for one in world.report.decisions) is (by != "file")
    anew = World()
    anew.said = first_plan(1, 3, number=7, by=by)
    first = await begun(anew)
    assert (first.plan.decode, anew.said.number) == (1, 8), "where nothing runs, the file counts"


async def test_colocated_workers_are_of_one_kind_and_their_number_follows_the_plan():
    world = World(0, 2)
    controller = await begun(world, world.controller(mode="colocated"))
    assert world.found() == {"decode-0": "decode", "decode-1": "decode"}
    assert "2 colocated" in world.report.decisions[0].text
    for decode, seconds in ((3, 10), (1, 20)):
        world.tell(decode=decode)
        await run(world, controller, seconds)
        assert world.found() == {f"decode-{number}": "decode" for number in range(decode)}
        assert controller.ready


@pytest.mark.parametrize(("before", "now"), [((1, 1), (0, 2)), ((0, 2), (1, 1))])
async def test_an_operators_plan_for_the_other_mode_is_not_followed(before, now):
    world, modes = World(*before), ("colocated", "disaggregated")
    await begun(world, world.controller(mode=modes[before[0]]))
    world.tell()
    world.prefill, world.decode = now
    controller = world.controller(mode=modes[now[0]])
    await controller.begin()
    assert (controller.plan.prefill, controller.plan.decode, controller.plan.by) == (*now, "file")
    await run(world, controller, 30)
    assert controller.ready
    assert sorted(world.found().values()) == ["decode"] * now[1] + ["prefill"] * now[0]


async def test_a_worker_that_fits_nowhere_does_not_stop_the_autoscaler():
    world, scaler = World(room=2), Mock()
    scaler.look.return_value = (None, "")
    controller = await begun(world, world.controller(scaler))
    world.tell(decode=2)
    scaler.look.return_value = (first_plan(1, 1, number=2, reason="there is no room"), "")
    await run(world, controller, ROOM_S - 5)
    assert (world.said.decode, world.states()["decode-1"]) == (2, "starting")
    await run(world, controller, 10)
    assert (world.said.decode, world.states()) == (1, {"prefill-0": "ready", "decode-0": "ready"})


async def test_the_autoscaler_is_asked_each_second_and_its_plan_followed_when_nothing_is_under_way():
    world, scaler = World(), Mock()
    scaler.look.return_value = (None, "all is well")
    world.routed = [RouterReport(router_id="r")]
    controller = await begun(world, world.controller(scaler))
    await run(world, controller, 10)
    asked = [call.args for call in scaler.look.call_args_list]
    assert len(asked) >= 10
    plan, routers, workers, _ = asked[-1]
    assert (plan.number, len(routers), len(workers)) == (0, 1, 2)
    assert all(later[3] - earlier[3] >= 1 for earlier, later in pairwise(asked))
    assert world.report.outlook == "all is well"
    scaler.look.return_value = (first_plan(1, 2, reason="so much to do"), "")
    await run(world, controller, 2)
    assert (world.said.number, world.said.by, world.said.reason) == (1, "autoscaler", "so much to do")
    scaler.look.return_value = (first_plan(1, 3), "")
    await run(world, controller, 1)
    assert world.said.number == 1, "a worker starts"
    await run(world, controller, 1 + LOAD_S)
    assert world.said.number == 2


@pytest.mark.parametrize(
    ("broken", "seconds", "says"),
    [({"decode-0"}, 0.5, "no such model"), (set(), START_TIMEOUT_S + 1, "was silent for 600 s")],
    ids=["it ends", "it is silent"],
)
async def test_a_worker_that_does_not_start_with_the_cluster_is_an_error(broken, seconds, says):
    world = World(broken=broken)
    controller = world.controller()
    await controller.begin()
    await controller.poll()
    controller.check_start()
    if not broken:
        world.freeze("decode-0")
    world.advance(seconds)
    with pytest.raises(BatonError, match=says):
        controller.check_start()


async def test_a_long_reason_why_a_worker_waits_is_cut_in_the_report():
    world, controller = await started()
    world.tell(decode=2)
    await run(world, controller, 0.5)
    world.freeze("decode-1")
    world.processes["decode-1"].error = StartError("x" * 5000)
    await run(world, controller, 1)
    assert world.slots()["decode-1"].note == "x" * 1024


EVENTS = st.one_of(
    st.tuples(st.just("plan"), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.sampled_from(["roll", "away", "back", "forget", "controller"])),
    st.tuples(st.sampled_from(["die", "freeze", "drain"]), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.integers(1, 40)),
)


class Story:
    """Random events. It is an error if the controller's own commands leave a role without ready workers."""

    def __init__(self, turn):
        self.world = World(prefill=2, decode=2, turn=turn)

    async def tell(self, events):
        self.controller = await begun(self.world)
        for kind, *rest in events:
            await self.happens(kind, *rest)
            await self.go_on(1)
        self.world.away = False
        for _ in range(100):
            await self.go_on(4)
            if self.controller.ready and not self.orders() and self.world.said == self.controller.plan:
                break
        plan, roles = self.controller.plan, Counter(self.world.found().values())
        assert self.controller.ready, self.world.report
        assert roles == {"prefill": plan.prefill, "decode": plan.decode}
        assert {slot.generation for slot in self.world.report.slots} == {plan.generation}
        assert self.orders() == []

    def orders(self):
        alive = {str(process.incarnation) for process in self.world.processes.values()}
        return [order for order in self.world.orders.values() if order.incarnation in alive]

    async def happens(self, kind, *rest):
        world = self.world
        alive = [p.worker_id for p in world.processes.values() if p.state == "ready"]
        if kind == "wait":
            await self.go_on(rest[0])
        elif kind in {"away", "back"}:
            world.away = kind == "away"
        elif kind == "forget":
            world.forget_store()
        elif kind == "controller":
            world.followers.clear()
            world.away = False
            self.controller = world.controller()
            await self.controller.begin()
        elif kind in {"plan", "roll"} and world.said is not None:
            sizes = dict(zip(("prefill", "decode"), rest, strict=False))
            world.tell(**(sizes or {"generation": world.said.generation + 1}))
        elif kind in {"die", "freeze"} and alive:
            (world.die if kind == "die" else world.freeze)(alive[rest[0] % len(alive)])
        elif kind == "drain" and alive and not world.away:
            chosen = alive[rest[0] % len(alive)]
            if chosen not in world.orders:
                drain(world, chosen, wish=False)
                world._live(world.processes[chosen], world.clock.monotonic())

    async def go_on(self, seconds):
        for _ in range(seconds):
            self.world.advance(1)
            before = {role: self.obeying(role) for role in Role}
            await self.controller.poll()
            for role in Role:
                assert self.obeying(role) or not before[role], (role, self.world.report)

    def obeying(self, role):
        """Return workers that are ready by their lease and have no command, even one that they have not seen yet."""
        world, now = self.world, self.world.clock.monotonic()
        leased = {name for name, (info, until) in world.leases.items() if info.role is role and until > now}
        alive = {name for name, p in world.processes.items() if p.state == "ready" and not p.busy_until}
        going = {name for name, unit in self.controller._units.items() if unit.ordered_at is not None}
        return (leased & alive) - going - set(world.orders)


@pytest.mark.slow
@pytest.mark.parametrize("turn", [True, False])
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(events=st.lists(EVENTS, max_size=12))
def test_whatever_happens_it_becomes_as_planned_and_no_order_takes_the_last_one(turn, events):
    asyncio.run(Story(turn).tell(events))


def test_times_of_decisions_rise_although_the_clock_steps_back():
    """Routers count the decisions after the last one that they have counted."""
    journal = DecisionLog(Mock(wall=Mock(side_effect=[100.0, 100.0, 40.0, 41.0, 200.0])))
    for _ in range(5):
        journal.record("plan", "x")
    at = [one.at for one in journal.decisions]
    assert at == sorted(set(at))
    assert (at[0], at[-1]) == (100.0, 200.0)
