"""Whole simulations: agreement with queueing theory, invariants, and visible effects."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from baton.bench.traces import Arrival
from baton.errors import ConfigError
from baton.planner.sim.cluster import simulate
from baton.planner.sim.engine import Engine
from baton.planner.sim.scenario import (
    Death,
    Linear,
    Network,
    Overheads,
    Piecewise,
    Pool,
    Router,
    Scenario,
    Slo,
    Slow,
    line,
)
from tests.unit.simulator.scenes import AT_ONCE, COST, DECODING, NO_OVERHEADS, PATIENT, colocated, poisson, scene

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.8])
def test_prompts_wait_as_in_an_m_d_1_queue(load):
    service_s = 0.01  # a step computes one prompt
    pool = Pool(1, Linear(line(service_s)), max_batched_tokens=100, kv_blocks=100_000)
    scenario = Scenario(Pool(1), pool, network=AT_ONCE, overheads=NO_OVERHEADS, router=PATIENT)
    draw, at_s, arrivals = Random(7), 0.0, []
    for _ in range(6000):
        at_s += draw.expovariate(load / service_s)
        arrivals.append(Arrival(at_s, 100, 1))
    report = simulate(scenario, arrivals)
    wait_s = service_s * load / (2 * (1 - load))
    assert report.ttft.mean == pytest.approx(service_s + wait_s, rel=0.08)
    assert report.prefill.busy == pytest.approx(load, rel=0.03)


def test_a_request_alone_takes_what_its_parts_take():
    network = Network(bytes_per_s=1e9, latency_s=0.003, token_bytes=1e5, layers=10)
    overheads = Overheads(admit_s=0.001, hop_s=0.0005, commit_s=0.002, tell_s=0.004)
    report = simulate(scene(1, 1, network=network, overheads=overheads), [Arrival(1.0, 1000, 11)])
    prompt_s = COST.seconds(1000, 1000 * 1001 // 2, 0, 0)
    ttft_s = 0.001 + 3 * 0.0005 + prompt_s + 0.004
    steps_s = sum(COST.seconds(0, 0, 1, 1000 + n) for n in range(1, 11))
    rest_s = 1000 * 1e5 / 1e9 - (prompt_s - prompt_s / 10)  # the hidden part began after the first layer
    assert report.ttft.max == pytest.approx(ttft_s)
    assert report.transfer.max == pytest.approx(rest_s + 0.005)
    assert report.e2e.max == pytest.approx(ttft_s + rest_s + 0.005 + steps_s)
    assert report.output_tokens == 11
    assert report.itl.count == 10


SKIPPED = {
    "pairs": (scene(), 0.02),
    "local prefill": (scene(router=replace(PATIENT, local_prefill=True, policy="predicted")), 0.02),
    "colocated": (colocated(), 0.08),  # a rounding of a cost sends some prompts to the other worker
    "colocated, little room": (colocated(1, pool={"kv_blocks": 60, "max_running": 8}), 0.02),
    "little room": (scene(2, 1, pool={"kv_blocks": 60}), 0.02),
    "few rows": (scene(2, 1, pool={"max_running": 3}), 0.02),
}


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "within"), SKIPPED.values(), ids=SKIPPED)
def test_skipping_steps_changes_nothing(scenario, within, monkeypatch):
    arrivals = list(poisson(300, 25.0))
    quick = simulate(scenario, arrivals)
    monkeypatch.setattr(Engine, "_steady_steps", lambda engine: 0)  # the scheduler plans every step
    slow = simulate(scenario, arrivals)
    for name in ("ttft", "itl", "e2e", "tpot"):
        ours, theirs = getattr(quick, name), getattr(slow, name)
        assert ours.count == theirs.count
        assert (ours.mean, ours.p50, ours.p99) == pytest.approx((theirs.mean, theirs.p50, theirs.p99), rel=within)
    assert quick.decode.steps == pytest.approx(slow.decode.steps, rel=0.01)
    assert quick.output_tokens == slow.output_tokens
    assert quick.decode.preemptions == pytest.approx(slow.decode.preemptions, rel=0.2, abs=3)


def test_all_that_came_has_one_outcome_when_there_is_too_much():
    router = Router(max_requests=20, max_wait_s=0.5)
    report = simulate(scene(1, 1, router=router, pool={"kv_blocks": 200}), poisson(2000, 400.0))
    assert report.refused > 0
    assert report.expired > 0
    assert report.completed + report.refused + report.expired == report.arrivals == 2000
    assert report.queue_peak >= 20


@pytest.mark.slow
def test_the_same_arguments_give_the_same_report_in_another_process():
    script = (
        "from tests.unit.simulator.test_simulate import eventful; from baton.planner.sim.cluster import simulate;"
        "print(simulate(*eventful()).as_json())"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, check=True, text=True).stdout.strip()
    scenario, arrivals = eventful()
    report = simulate(scenario, arrivals)
    assert (report.arrivals, report.as_json()) == (400, told)
    assert simulate(replace(scenario, seed=2), arrivals).as_json() != told


def eventful() -> tuple[Scenario, list[Arrival]]:
    faults = (Death(2.0, "decode-1"), Death(4.0, "prefill-0"), Slow(3.0, 6.0, "decode-0", 3.0))
    pool = {"spread": (0.5, 1.0, 1.5), "kv_blocks": 300}
    return scene(2, 3, pool=pool, faults=faults, seed=1), list(poisson(400, 40.0))


@pytest.mark.parametrize("mode", ["pairs", "colocated"])
def test_workers_that_die_cost_time_and_no_request(mode):
    faults = [Death(1.5, "decode-0", back_after_s=1.0, noticed_s=0.1), Death(6.0, "decode-1", back_after_s=1.0)]
    if mode == "pairs":
        faults += [Death(3.0, "prefill-1", back_after_s=1.0), Death(4.5, "prefill-0", noticed_s=0.05)]
    of = scene(2, 3, faults=tuple(faults)) if mode == "pairs" else colocated(3, faults=tuple(faults))
    arrivals = list(poisson(400, 60.0))
    calm, report = simulate(replace(of, faults=()), arrivals), simulate(of, arrivals)
    assert report.completed == 400 == calm.completed
    assert report.output_tokens == calm.output_tokens
    assert report.recoveries["decode_lost"] > 0
    assert report.recoveries.get("prefill_lost", 0) > 0 or mode == "colocated"
    assert report.e2e.p99 > calm.e2e.p99


@pytest.mark.slow
def test_long_prompts_are_felt_by_those_who_decode_beside_them():
    arrivals = sorted(
        [*poisson(200, 10.0, prompt=64, answer=200), *poisson(300, 20.0, prompt=1500, answer=4, seed=2)],
        key=lambda one: one.at_s,
    )
    apart = simulate(scene(2, 2, network=AT_ONCE), arrivals)
    together, finer = (simulate(colocated(4, chunk=chunk), arrivals) for chunk in (2048, 128))
    assert together.itl.p99 > 2 * apart.itl.p99
    assert finer.itl.p99 < together.itl.p99 / 2
    assert finer.ttft.p99 > together.ttft.p99


def test_who_computes_a_long_prompt_is_known_to_be_busy():
    """Reports during a long prompt show the worker busy, so that other prompts do not queue behind it."""
    pool = {"cost": Linear(line(0.01, 1e-3), DECODING), "max_batched_tokens": 1000}
    arrivals = [Arrival(0.0, 30_000, 2), *(Arrival(0.1 + 0.1 * n, 20, 2) for n in range(200))]
    report = simulate(scene(2, 2, pool=pool), arrivals)
    assert report.ttft.max > 30.0
    assert report.ttft.p95 < 1.0


def test_what_never_fits_is_refused_what_just_fits_is_served_and_rows_without_a_block_are_preempted():
    arrivals = [Arrival(0.0, 1000, 601), Arrival(0.0, 1000, 600), Arrival(0.1, 1000, 600)]
    report = simulate(scene(1, 1, pool={"kv_blocks": 100}), arrivals)
    assert (report.refused, report.completed) == (1, 2)
    report = simulate(scene(2, 1, pool={"kv_blocks": 80}), poisson(200, 20.0, prompt=100, answer=200))
    assert report.recoveries["preempted"] == report.decode.preemptions > 0
    assert (report.completed, report.decode.kv_used_peak <= 1.0) == (200, True)


def test_a_cost_in_pieces_and_noise():
    pieces = Piecewise(((2, Linear(decode=line(0.01))),), Linear(decode=line(0.1)))
    pool = {"cost": pieces, "spread": (0.5, 1.5)}
    one = simulate(scene(1, 1, pool=pool, network=AT_ONCE), [Arrival(0.0, 10, 1000)])
    two = simulate(scene(1, 1, pool=pool, network=AT_ONCE), [Arrival(0.0, 10, 1000), Arrival(0.0, 10, 1000)])
    assert one.itl.mean == pytest.approx(0.01, rel=0.05)
    assert (one.itl.p50, one.itl.p99) == pytest.approx((0.005, 0.015), rel=0.01) or one.itl.p50 > 0.0145
    assert two.itl.mean == pytest.approx(0.1, rel=0.05)


def test_goals_are_judged_one_by_one_and_by_own_percentiles():
    arrivals = list(poisson(300, 30.0))
    mean = simulate(scene(slo=Slo(ttft_s=0.02, itl_s=0.013)), arrivals)
    own = simulate(scene(slo=Slo(ttft_s=0.02, itl_s=0.013, itl_percentile=99.0)), arrivals)
    assert 0 < mean.good <= min(mean.good_ttft, mean.good_itl) < 300
    assert own.good_itl < mean.good_itl
    assert own.good_ttft == mean.good_ttft
    loose = simulate(scene(slo=Slo(ttft_s=9.0, itl_s=9.0, itl_percentile=99.0)), arrivals)
    assert loose.attainment == loose.itl_attainment == 1.0


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"faults": (Death(1.0, "decode-9"),)}, "faults.worker.*decode-9"),
        ({"router": Router(policy="best")}, "router.policy.*best"),
        ({"prefill": 0}, "prefill.workers.*at least 1"),
        ({"pool": {"block_size": 0}}, "block_size.*at least 1"),
    ],
)
def test_what_cannot_be_is_named(facts, named):
    with pytest.raises(ConfigError, match=named):
        scene(**facts)
