"""When pools grow, shrink and exchange workers, and when nothing changes. The tests set reports and time."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from baton.cluster.autoscaler import Autoscaler
from baton.config import ClusterConfig
from baton.control_plane import Plan, pool_size
from baton.core import Role
from baton.ledger.control_state import RouterReport, WorkerDemand
from tests.support.plans import first_plan
from tests.unit.cluster.scaling import Cluster

UP_S, DOWN_S, SETTLE_S = 5.0, 60.0, 10.0
TIMES = {"up_after_s": UP_S, "down_after_s": DOWN_S, "settle_s": SETTLE_S}


def here(sizes):
    return [SimpleNamespace(role=role) for role in Role for _ in range(sizes[role])]


def config(prefill=(1, 8), decode=(1, 8), **scaling):
    pools = {
        role: {"replicas": bounds[0], "autoscale": {"min": bounds[0], "max": bounds[1]}} if bounds else {}
        for role, bounds in (("prefill", prefill), ("decode", decode))
    }
    slo = {"ttft_ms": 1000, "itl_ms": 100}
    return ClusterConfig.model_validate({**pools, "scaling": TIMES | scaling, "slo": slo})


class Run:
    """An autoscaler that looks once a second. Its plans take effect immediately if `obeys`."""

    def __init__(self, prefill=2, decode=2, cluster=None, obeys=True):
        self.autoscaler = Autoscaler(cluster or config())
        self.plan = first_plan(prefill, decode)
        self.here = {Role.PREFILL: prefill, Role.DECODE: decode}
        self.now, self.outlook, self.obeys = 100.0, "", obeys
        self._busy_s = 0.0

    def report(self, busy=0.0, used=0.0, reserved=0.0, rows=0, **fields):
        """Return one router's report. `busy` and `used` are shares of each worker, `rows` of all decode workers."""
        workers = {
            f"{role}-{n}": WorkerDemand(role=role, busy_s=self._busy_s)
            if role is Role.PREFILL
            else WorkerDemand(role=role, used=used, reserved=reserved, running=rows if n == 0 else 0)
            for role in Role
            for n in range(self.here[role])
        }
        self._busy_s += busy
        return RouterReport(router_id="router-a", workers=workers, **fields)

    def look(self, *others, says=True, **fields):
        """Return the new plan or None. `others`: reports of other routers; `says`: include this router's report."""
        self.now += 1.0
        reports = [*[self.report(**fields)] * says, *others]
        new, self.outlook = self.autoscaler.look(self.plan, reports, here(self.here), self.now)
        if new is not None and self.obeys:
            self.plan = new
            self.here = {role: pool_size(new, role) for role in Role}
        return new

    def until(self, within_s, *others, **fields):
        looks = (self.look(*others, **fields) for _ in range(round(within_s)))
        return next((new for new in looks if new is not None), None)

    def settled(self, **fields):
        """Run through the time after a change in which nothing is decided."""
        assert self.until(SETTLE_S, **fields) is None
        return self


BUSY = {"busy": 0.75}  # share of prefill workers' time: none can be spared
SLOW = {"itl_s": 0.13, "itl_alone_s": 0.01}
LATE = {"ttft_s": 1.3, "ttft_alone_s": 0.1}


def sizes(plan):
    return plan and (plan.prefill, plan.decode)


def test_pools_without_bounds_are_left_alone_and_what_is_not_known_presses_nothing():
    run = Run(cluster=config(prefill=None, decode=None))
    assert (run.until(200, **SLOW), run.outlook) == (None, "")
    run = Run(cluster=config(prefill=None), prefill=3, decode=2)
    assert sizes(run.until(200, **SLOW)) == (3, 3)
    assert sizes(run.until(200)) == (3, 2)
    run = Run()
    assert run.until(DOWN_S, queue_s=0.0) is None
    assert not any(name in run.outlook for name in ("TTFT", "ITL"))


def test_nothing_is_decided_while_no_router_says_anything():
    run = Run().settled(**SLOW)
    assert run.until(200, says=False) is None
    assert run.until(UP_S - 1, **SLOW) is None  # earlier time counts no more
    assert run.until(2, **SLOW) is not None


@pytest.mark.parametrize(
    ("fields", "role", "says"),
    [
        ({"itl_s": 0.13, "itl_alone_s": 0.01}, Role.DECODE, "ITL 130 ms of 100 ms for 5 s"),
        ({"used": 0.95}, Role.DECODE, "KV 95% of 90% for 5 s"),
        ({"rows": 140}, Role.DECODE, "140 of 128 rows for 5 s"),
        ({"used": 0.8, "queue_s": 1.5, "ttft_s": 1.6, "ttft_alone_s": 0.1}, Role.DECODE, "queue 1.50 s of 1.00 s"),
        ({"ttft_s": 1.3, "ttft_alone_s": 0.1}, Role.PREFILL, "TTFT 1.30 s of 1.00 s for 5 s"),
    ],
)
def test_a_pool_with_too_much_to_do_grows(fields, role, says):
    fields = {"busy": 0.75, "used": 0.7} | fields
    run = Run().settled(**fields)
    assert run.until(UP_S - 1, **fields) is None
    assert f"{role} is overloaded for 4 s of 5 s" in run.outlook
    new = run.look(**fields)
    assert sizes(new) == ((3, 2) if role is Role.PREFILL else (2, 3))
    assert (new.by, new.number) == ("autoscaler", 1)
    assert new.reason.startswith(f"{role} 2 to 3: {says}")
    assert new.reason in run.outlook


def test_a_moment_without_takes_time_off_and_does_not_begin_anew():
    run = Run().settled(**BUSY)
    for _ in range(2):
        assert run.until(2, **SLOW, **BUSY) is None
        assert run.look(**BUSY) is None
    assert run.until(2, **SLOW, **BUSY) is None
    assert run.look(**SLOW, **BUSY) is not None
    run = Run().settled(**BUSY)
    for _ in range(100):  # the load is high only every other second
        assert run.look(**SLOW, **BUSY) is None
        assert run.look(**BUSY) is None


CALM = RouterReport(router_id="router-b", ttft_s=0.1, ttft_alone_s=0.1, itl_s=0.02)
WIDE = config(decode=(1, 20))
MUCH = {"used": 3.0, **BUSY}
KEPT = ("1 prefill to decode (2 to 3): ITL 130 ms of 100 ms for 5 s; prefill with 2 is then at ",)
DECISIONS: dict[str, tuple[Any, ...]] = {
    "in proportion": (Run(2, 4, WIDE), {"used": 0.99, **BUSY}, (2, 5)),
    "half as many more": (Run(2, 4, WIDE), {"used": 1.17, **BUSY}, (2, 6)),
    "twice as many": (Run(2, 4, WIDE), {"used": 1.71, **BUSY}, (2, 8)),
    "never more than twice as many": (Run(2, 4, WIDE), {"used": 8.1, **BUSY}, (2, 8)),
    "no more than the most": (Run(cluster=config(decode=(1, 3))), MUCH, (2, 3)),
    "one is turned that the other pool can spare": (Run(prefill=3), {"busy": 0.2, **SLOW}, (2, 3), *KEPT),
    "and the other way": (Run(decode=3), {"used": 0.3, **LATE}, (3, 2)),
    "several are turned": (Run(6, 3, config(decode=(1, 9))), {"used": 1.8}, (3, 6)),
    "a new one: turning is off": (Run(cluster=config(turn=False)), SLOW, (2, 3)),
    "a new one: the other has its least": (Run(cluster=config(prefill=(2, 8))), SLOW, (2, 3)),
    "a new one: the other is left alone": (Run(cluster=config(prefill=None)), SLOW, (2, 3)),
    "a new one: the other could not do with fewer": (Run(), {"busy": 0.5, **SLOW}, (2, 3)),
    "both grow": (Run(), SLOW | LATE, (3, 3), "prefill 2 to 3: TTFT", "decode 2 to 3: ITL"),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_a_pool_grows_by_new_workers_or_by_those_that_the_other_can_spare(case):
    run, fields, after, *reasons = DECISIONS[case]
    calm = {"busy": fields.get("busy", 0.0)}
    new = run.settled(**calm).until(9, CALM, **fields)
    assert sizes(new) == after
    assert all(reason in new.reason for reason in reasons), new.reason


def test_it_keeps_to_the_most_and_says_so():
    run = Run(decode=3, cluster=config(decode=(1, 3))).settled(**BUSY)
    assert run.until(100, **MUCH) is None
    assert run.outlook.endswith("decode is overloaded (KV 300% of 90%) at its maximum of 3 workers")


def test_a_pool_shrinks_when_fewer_would_have_been_enough_for_long():
    run = Run(prefill=1, decode=3).settled(used=0.3)
    assert run.until(DOWN_S - 1, used=0.3) is None
    assert "decode has spare workers for 59 s of 60 s" in run.outlook
    new = run.look(used=0.3)
    assert sizes(new) == (1, 2)
    assert new.reason == "decode 3 to 2: with 2 at 50% of its limits, spare workers for 60 s"
    run = Run(prefill=1, decode=3).settled()
    for _ in range(5):  # one busy moment prevents shrinking
        assert run.until(DOWN_S - 1, used=0.3) is None
        assert run.look(used=0.5) is None


def test_it_shrinks_to_no_more_than_half_at_once_and_to_the_least_in_the_end():
    run = Run(prefill=3, decode=8, cluster=config(decode=(3, 8)))
    found = [sizes(plan) for plan in (run.look() for _ in range(400)) if plan]
    assert found == [(2, 4), (1, 3)]
    assert run.outlook.endswith("steady")


def test_kv_that_waits_for_prefill_workers_is_not_what_decode_workers_have_to_do():
    full = {"used": 0.98, "reserved": 0.9, "queue_s": 3.0, "ttft_s": 13.1, "ttft_alone_s": 0.1, "busy": 1.0}
    run = Run().settled(**full)
    new = run.until(9, **full)
    assert new.prefill > 2
    assert new.decode <= 2
    assert "KV 9% of 90%" in run.outlook
    decodes = full | {"reserved": 0.02, "ttft_s": 3.4, "busy": 0.7}
    run = Run().settled(**decodes)
    assert sizes(run.until(9, **decodes)) == (2, 4)


def test_workers_are_not_added_for_what_takes_long_alone():
    """The prompt or the step exceeds the SLO even without other load."""
    run = Run(cluster=config(prefill=(2, 8), decode=(2, 8)))
    assert run.until(200, ttft_s=3.5, ttft_alone_s=3.0, itl_s=0.35, itl_alone_s=0.3) is None
    assert "TTFT 3.50 s of 6.00 s" in run.outlook
    assert "ITL 350 ms of 600 ms" in run.outlook


def test_nothing_is_decided_while_workers_come_and_for_a_while_after():
    run = Run(obeys=False).settled(**SLOW, **BUSY)
    new = run.until(9, **SLOW, **BUSY)
    assert run.look(**SLOW, **BUSY) == new  # the plan was not applied: it is returned again
    run.plan = new
    assert run.until(100, **SLOW, **BUSY) is None
    assert run.outlook.endswith("changing: decode 2 to 3")
    run.here[Role.DECODE] = 3
    assert run.until(SETTLE_S + UP_S - 2, **SLOW, **BUSY) is None
    assert sizes(run.until(3, **SLOW, **BUSY)) == (2, 4)


def test_workers_that_never_come_do_not_hold_up_everything():
    run = Run(prefill=2, decode=3, obeys=False)
    run.here[Role.DECODE] = 2
    assert run.until(299) is None
    assert sizes(run.until(SETTLE_S + DOWN_S + 5)) == (1, 2)


def test_an_operators_plan_is_left_alone_for_a_while():
    run = Run().settled(**BUSY)
    assert run.until(UP_S - 1, **SLOW, **BUSY) is None
    run.plan = first_plan(2, 5, number=7, by="operator", generation=3)
    run.here[Role.DECODE] = 5
    assert run.until(SETTLE_S + UP_S - 2, **SLOW, **BUSY) is None
    new = run.until(3, **SLOW, **BUSY)
    assert (new.number, new.generation, new.decode) == (8, 3, 7)


def test_workers_that_do_both_grow_by_late_first_tokens_and_what_is_reserved_counts():
    pool = {"autoscale": {"min": 1, "max": 4}}
    run = Run(0, 2, ClusterConfig.model_validate({"mode": "colocated", "decode": pool, "scaling": TIMES}).by_mode())
    late = {"used": 0.5, "reserved": 0.5, "ttft_s": 3.0, "ttft_alone_s": 0.2}
    new = run.settled().until(UP_S, **late)
    assert (sizes(new), "TTFT 3.00 s of 1.00 s" in new.reason) == ((0, 4), True)
    assert "KV 50% of 90%" in run.outlook
    shrunk = [sizes(plan) for plan in (run.look(used=0.01) for _ in range(400)) if plan]
    assert shrunk[-1] == (0, 2), "one is what decode has, one more what prefill had"
    assert "prefill" not in run.outlook


def test_sizes_beyond_the_bounds_are_brought_within():
    """The file has changed since the stored plan."""
    run = Run(prefill=9, decode=1, cluster=config(decode=(2, 4)))
    new = run.look()
    assert sizes(new) == (8, 2)
    assert new.reason == "autoscale allows prefill 1 to 8, decode 2 to 4"


def test_a_worker_that_begins_anew_is_not_busy_for_less_than_nothing():
    run = Run(cluster=config(decode=None)).settled(busy=0.5)
    run._busy_s = 0.0
    assert run.until(5, busy=0.5) is None
    busy = float(run.outlook.split("busy ")[1].split("%")[0])
    assert 25 < busy < 55


ROW = TypeAdapter(Plan)
numbers = st.floats(0, 1e6, allow_subnormal=False) | st.sampled_from([0.0, 0.9, 1.0])
counts, shares, roles = st.integers(0, 1000), st.floats(0, 1), st.sampled_from(Role)
demands = st.builds(
    WorkerDemand, role=roles, running=counts, waiting=counts, used=shares, reserved=shares, busy_s=numbers
)
reports = st.builds(
    RouterReport,
    router_id=st.sampled_from(["router-a", "router-b"]),
    workers=st.dictionaries(st.sampled_from([f"worker-{n}" for n in range(6)]), demands, max_size=6),
    **dict.fromkeys(("queue_s", "ttft_s", "ttft_alone_s", "itl_s", "itl_alone_s"), numbers),
)
looks = st.lists(st.tuples(st.lists(reports, max_size=2), st.floats(0, 400), st.booleans()), max_size=30)
bounds = st.none() | st.tuples(st.integers(1, 4), st.integers(0, 5)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@pytest.mark.slow
@given(bounds, bounds, st.integers(1, 12), st.integers(1, 12), st.booleans(), looks)
def test_whatever_is_reported_sizes_stay_within_bounds_and_every_plan_has_a_reason(
    prefill, decode, prefills, decodes, turn, looked
):
    cluster = config(prefill, decode, turn=turn, up_after_s=1.0, down_after_s=2.0, settle_s=1.0)
    autoscaler, plan, now, changed = Autoscaler(cluster), first_plan(prefills, decodes), 0.0, -1e9
    for seen, passed, comes in looked:
        now += passed
        there = {role: pool_size(plan, role) if comes else 1 for role in Role}
        new, outlook = autoscaler.look(plan, seen, here(there), now)
        assert bool(outlook) == bool(prefill or decode)
        if new is None:
            continue
        assert ROW.validate_python(asdict(new)) == new
        assert (new.number, new.by, bool(new.reason)) == (plan.number + 1, "autoscaler", True)
        assert (new.prefill, new.decode) != (plan.prefill, plan.decode)
        for role, allowed in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            size = pool_size(new, role)
            assert allowed[0] <= size <= allowed[1] if allowed else size == pool_size(plan, role)
        assert new.reason.startswith("autoscale allows") or now - changed >= 1.0  # settle_s
        plan, changed = new, now


PROMPTS = {"rate": 7, "tokens": 1500, "output": 20}
ANSWERS = {"rate": 5, "tokens": 200, "output": 400}
IDLE = {"rate": 0.2, "tokens": 200, "output": 50}
TTFT_S, ITL_S = 1.0, 0.05
SOON_S = 60.0  # time after which a load meets the SLO


def cluster(seed):
    times = {"up_after_s": 3, "settle_s": 5, "down_after_s": 30}
    pool = {"replicas": 2, "autoscale": {"min": 1, "max": 4}}
    slo = {"ttft_ms": TTFT_S * 1000, "itl_ms": ITL_S * 1000}
    file = {"prefill": pool, "decode": pool, "scaling": times, "slo": slo}
    return Cluster(ClusterConfig.model_validate(file), seed)


def kept(done):
    good = [one.first - one.came <= TTFT_S and one.itl_s <= ITL_S for one in done]
    return sum(good) / len(good)


@pytest.mark.parametrize("case", range(2))
def test_the_slo_is_kept_soon_after_the_load_has_changed(case, seed):
    run = cluster(seed + case)
    sizes = []
    for load in (PROMPTS, ANSWERS, IDLE):
        began, before = run.now, len(run.done)
        run.run(180, **load)
        sizes.append((run.plan.prefill, run.plan.decode))
        assert kept([one for one in run.done[before:] if one.came > began + SOON_S]) > 0.85, run.outlook
    assert sizes[0][0] > sizes[0][1], sizes  # prompts
    assert sizes[1][0] < sizes[1][1], sizes  # answers
    assert sizes[2] == (1, 1)
    assert len(run.plans) <= 9, run.plans
    assert run.most <= 8
    assert all(1 <= size <= 4 for _, plan in run.plans for size in (plan.prefill, plan.decode))


@pytest.mark.parametrize("period_s", [4, 60])
def test_a_load_that_swings_does_not_make_it_flap(period_s, seed):
    run = cluster(seed)
    for turn in range(600 // period_s):
        run.run(period_s / 2, **PROMPTS)
        run.run(period_s / 2, **ANSWERS)
        assert run.now < 2000, turn
    assert len(run.plans) <= 30, run.plans  # one in 20 s; they may be 8 s apart
