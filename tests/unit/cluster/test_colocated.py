"""A cluster without a prefill pool: its controller, and what its autoscaler goes by."""

from types import SimpleNamespace

import pytest

from baton.cluster.autoscaler import Autoscaler
from baton.cluster.pressure import Pressures
from baton.config import ClusterConfig
from baton.core import Role
from baton.ledger.board import Plan, RouterReport, WorkerDemand
from tests.unit.cluster.control_world import World, begun, run

SCALING = {"up_after_s": 2, "settle_s": 1, "down_after_s": 3}
CONFIG = ClusterConfig.model_validate(
    {"mode": "colocated", "decode": {"autoscale": {"min": 1, "max": 4}}, "scaling": SCALING}
).by_mode()
LATE = {"ttft_s": 3.0, "ttft_alone_s": 0.2}


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
    assert sorted(world.roles().values()) == ["decode"] * now[1] + ["prefill"] * now[0]


def report(count=2, used=0.5, **fields):
    demand = WorkerDemand(role=Role.DECODE, used=used, reserved=used, running=1)
    return RouterReport(router_id="r", workers={f"decode-{n}": demand for n in range(count)}, **fields)


def test_late_first_tokens_and_what_is_reserved_are_theirs():
    found = Pressures(CONFIG).look([report(**LATE)], {Role.PREFILL: 0, Role.DECODE: 2}, 0.0)
    assert (found[Role.PREFILL].now, str(found[Role.PREFILL])) == (0.0, "")
    assert found[Role.DECODE].now == pytest.approx(3.0)
    assert "TTFT 3.00 s of 1.00 s" in str(found[Role.DECODE])
    assert "KV 50% of 90%" in str(found[Role.DECODE])


def test_it_grows_by_workers_of_that_kind_and_shrinks_again():
    scaler, plan = Autoscaler(CONFIG), Plan(prefill=0, decode=2)
    plans = []
    for now in range(40):
        fields = LATE if now < 12 else {}
        here = [SimpleNamespace(role=Role.DECODE)] * plan.decode
        new, outlook = scaler.look(plan, [report(plan.decode, used=0.01, **fields)], here, float(now))
        assert "prefill" not in outlook
        if new is not None:
            plan = new
            plans.append((new.prefill, new.decode))
    assert plans[0] == (0, 4)
    assert plans[-1] == (0, 2), "one is what decode has, one more what prefill had"
