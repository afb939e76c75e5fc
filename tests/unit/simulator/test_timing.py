"""Interference of workers on one host: a step's time depends on the others' work when it begins."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from baton.bench.traces import Arrival
from baton.planner.sim.cluster import hosts_of, simulate
from baton.planner.sim.scenario import Contention, Linear, Pool, Slo, Slowed, line
from baton.planner.sim.timing import Timing
from tests.unit.simulator.scenes import AT_ONCE, NO_OVERHEADS, colocated, scene

COST = Linear(line(0.1), line(0.010))
BESIDE = Contention(2, prompts=1.5, beside_prompts=Slowed(factor=1.2), beside_decode=Slowed(factor=2.0))
POOL = Pool(1, COST, contention=BESIDE)
KEPT = Slo(itl_percentile=50.0)


def timings(*pools: Pool, on: list[Timing] | None = None) -> list[Timing]:
    host = on if on is not None else []
    return [Timing(pool, Random(1), host) for pool in pools]


def prompt(timing: Timing) -> float:
    return timing.step(10, 55, 0, 0)


def decode(timing: Timing) -> float:
    return timing.steps(1, 20, 1)[0]


def test_a_step_is_as_long_as_what_the_others_do_makes_it():
    host: list[Timing] = []
    one, other = timings(POOL, POOL, on=host)
    assert (prompt(one), decode(one)) == (0.1, 0.010)
    decode(other)
    assert (prompt(one), decode(one)) == pytest.approx((0.15, 0.020))
    prompt(other)
    assert (prompt(one), decode(one)) == pytest.approx((0.15, 0.012))
    other.rest()
    assert (prompt(one), decode(one)) == (0.1, 0.010)
    decode(other)
    other.leave()
    assert decode(one) == 0.010
    (successor,) = timings(POOL, on=host)
    decode(successor)
    assert decode(one) == pytest.approx(0.020)


def test_who_does_both_at_a_time_is_in_between():
    one, other = timings(POOL, POOL)
    both_s = other.step(10, 55, 1, 20)
    share = 0.010 / both_s
    assert both_s == pytest.approx(0.1)
    assert decode(one) == pytest.approx(0.010 * (1 + share * 1.0 + (1 - share) * 0.2))
    decode(other)
    assert one.step(10, 55, 1, 20) == pytest.approx(both_s * (1 + share * 1.0 + (1 - share) * 0.5))


def test_of_several_others_each_counts_as_one_of_them():
    four = replace(POOL, contention=replace(BESIDE, workers=4))
    one, *others = timings(four, four, four)
    decode(others[0])
    assert decode(one) == pytest.approx(0.010 * (1 + 1 / 3))
    prompt(others[1])
    assert decode(one) == pytest.approx(0.010 * (1 + 1 / 3 + 0.2 / 3)), "of three, one of which is not here"


def test_steps_differ_as_those_beside_such_others_did(seed):
    beside = Contention(2, beside_prompts=Slowed(spread=(0.5, 1.5)), beside_decode=Slowed(spread=(0.25, 1.75)))
    one, other = timings(Pool(1, COST, spread=(0.9, 1.1), contention=beside), POOL)

    def seen() -> set[float]:
        return {round(one.steps(1, 20, 1)[2][0] / 0.010, 6) for _ in range(50)}

    assert seen() == {0.9, 1.1}
    decode(other)
    assert seen() == {0.25, 1.75}
    prompt(other)
    assert seen() == {0.5, 1.5}


def test_the_others_hear_of_what_changes_and_of_nothing_else():
    heard = []
    one, other = timings(POOL, POOL)
    one.on_change, other.on_change = (lambda: heard.append("one")), (lambda: heard.append("other"))
    for change in (decode, decode, prompt, prompt):
        change(one)
    one.rest()
    one.rest()
    assert heard == ["other"] * 3


FACTS: dict[str, Any] = {"network": AT_ONCE, "overheads": NO_OVERHEADS, "slo": KEPT}
FACTS["pool"] = {"cost": COST, "contention": BESIDE}


def test_what_decodes_is_slower_while_a_prompt_is_computed_and_no_longer():
    """101 tokens. The second prompt begins when it gets blocks, and takes 0.15 s: 12 or 13 steps of 12 ms."""
    alone = simulate(scene(1, 1, **FACTS), [Arrival(0.0, 10, 101)])
    assert (alone.itl.p50, alone.itl.max) == pytest.approx((0.010, 0.010), rel=0.01)
    both = simulate(scene(1, 1, **FACTS), [Arrival(0.0, 10, 101), Arrival(0.455, 10, 1)])
    assert both.e2e.max == pytest.approx(0.1 + 100 * 0.010 + 12.5 * 0.002, abs=0.003)
    assert (both.itl.p50, both.itl.max) == pytest.approx((0.010, 0.012), rel=0.01)
    assert both.ttft.max == pytest.approx(0.005 + 0.150)


def test_colocated_workers_slow_each_other_as_far_as_they_decode_at_the_same_time():
    scenario = colocated(2, **FACTS)
    apart = simulate(scenario, [Arrival(0.0, 10, 51), Arrival(5.0, 10, 51)])
    assert (apart.itl.p50, apart.itl.max) == pytest.approx((0.010, 0.010), rel=0.01)
    together = simulate(scenario, [Arrival(0.0, 10, 51), Arrival(0.001, 10, 51)])
    assert together.itl.p50 == pytest.approx(0.020, rel=0.01)


def test_a_host_has_as_many_workers_as_were_measured_together():
    placed = hosts_of(scene(3, 2, **FACTS))
    assert list(placed) == ["prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1"]
    hosts = {tuple(name for name, one in placed.items() if one is host) for host in placed.values()}
    assert hosts == {("prefill-0", "decode-0"), ("prefill-1", "decode-1"), ("prefill-2",)}
    assert hosts_of(scene(3, 2)) == {}
