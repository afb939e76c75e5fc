"""A simulated cluster apart from serving: faults, reports, gaps, options, and the cost of many workers. Costs of a
request are counted in events and function calls, never in seconds, so they are the same on any machine.
tests/simulation/test_simulator_recovers_alike.py tests the states of an attempt and its recovery.
"""

import json
import sys
from cProfile import Profile
from dataclasses import replace
from pstats import Stats
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.bench.traces import Arrival
from baton.cli.sizing.planning import _pool, _router
from baton.config import load_config
from baton.core import HandoffId
from baton.planner.sim import __main__ as program
from baton.planner.sim.__main__ import _RATE, main, scale_load, scale_scenario
from baton.planner.sim.cluster import Cluster, simulate
from baton.planner.sim.scenario import Death, Network, Pool, Router, Slo, Slow, SlowLink
from baton.planner.sim.stats import Report, Tally
from baton.planner.sim.worker import PrefillWorker
from prefill_workers.worker import job_to_drop
from router.context import RouterSettings
from tests.unit.simulator.scenes import PATIENT, colocated, poisson, scene

PERCENTILE = Slo(itl_percentile=99.0)
DEATHS = (Death(3.0, "decode-0", back_after_s=1.0),)


def test_faults_that_overlap_multiply_and_each_ends_for_itself():
    slow = (Slow(0.0, 2.0, "decode-0", 2.0), Slow(1.0, 3.0, "decode-0", 3.0), Slow(3.0, 4.0, "decode-0", 5.0))
    links = (SlowLink(0.0, 2.0, "", 0.5), SlowLink(1.0, 3.0, "decode-0", 0.5), SlowLink(1.0, 2.0, "", 0.1))
    cluster = Cluster(scene(1, 1, faults=slow + links))
    whole, seen = cluster.link_rate("prefill-0"), []

    def look() -> None:
        factors = cluster.slow["decode-0"], cluster._workers["decode-0"].engine.timing.factor
        seen.append((*factors, cluster.link_rate("decode-0") / whole))

    for second in range(5):
        cluster.kernel.at(second + 0.5, look)
    cluster.run([])
    assert [one[:2] for one in seen] == [(factor, factor) for factor in (2.0, 6.0, 3.0, 5.0, 1.0)]
    assert [one[2] for one in seen] == pytest.approx([0.5, 0.025, 0.5, 1.0, 1.0])


def test_workers_report_while_somebody_is_served_and_once_more(monkeypatch):
    beats, beat = [], Cluster._beat

    def seen(cluster: Cluster) -> None:
        beats.append(cluster.kernel.now)
        beat(cluster)

    monkeypatch.setattr(Cluster, "_beat", seen)
    report = simulate(scene(), [Arrival(0.0, 100, 5), Arrival(100_000.0, 100, 150)])
    assert beats == pytest.approx([1.0, 2.0, 100_001.0, 100_002.0], abs=0.01)
    assert report.completed == 2
    assert report.events < 200


@pytest.mark.sample(4)
@pytest.mark.parametrize("noticed_s", [0.0, 3e-4])
@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("local", [False, True], ids=["pairs", "local prefill"])
def test_nothing_is_left_whenever_a_worker_dies(worker, noticed_s, local):
    router = replace(PATIENT, local_prefill=local)
    for at_s in (1.0 + 1e-4 * step for step in range(120)):
        faults = (Death(at_s, worker, back_after_s=1.0, noticed_s=noticed_s),)
        report = simulate(scene(1, 1, router=router, faults=faults), [Arrival(1.0, 100, 3)])
        assert report.completed == 1


MANY = {"kv_blocks": 80, "max_running": 8}
MOVED = {
    "preempted": scene(2, 1, pool={"kv_blocks": 80}),
    "colocated, preempted": colocated(1, pool=MANY),
    "dead": scene(2, 2, faults=DEATHS),
    "colocated, dead": colocated(2, faults=DEATHS, pool={"spread": (0.5, 1.5)}),
}


@pytest.mark.parametrize("of", MOVED.values(), ids=MOVED)
def test_gaps_of_rows_that_went_on_elsewhere_count(of, monkeypatch):
    """One gap fewer than tokens. Steps in which a row had to wait count twice."""
    missing, completed = [], Tally.completed

    def seen(tally: Tally, ttft_s: float, e2e_s: float, tokens: int, gaps: list[tuple[float, int]]) -> None:
        missing.append(tokens - 1 - sum(count for _, count in gaps))
        completed(tally, ttft_s, e2e_s, tokens, gaps)

    monkeypatch.setattr(Tally, "completed", seen)
    report = simulate(replace(of, slo=PERCENTILE), poisson(150, 20.0, prompt=100, answer=150))
    assert report.recoveries["decode_lost" if of.faults else "preempted"] > 0
    assert (len(missing), max(missing)) == (150, 0)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--requests", "0"), "--requests: must be at least 1, got 0"),
        (("--rate", "0"), "--rate: must be requests per second and worker, a number above 0, got 0"),
        (("--workers", "1"), "--workers: must be at least 2, got 1"),
        (("--workers", "0", "--colocated"), "--workers: must be at least 1, got 0"),
    ],
)
def test_options_that_cannot_be_are_usage_errors(args, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulator", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_what_is_not_said_is_what_a_cluster_has_of_which_it_is_not_said(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: oracle}\n")
    config = load_config(path, (), {})
    assert _router(config) == Router()
    assert Router().attempts == RouterSettings(name="", model="").attempts
    assert _pool(config.decode) == Pool(0)
    assert (config.slo.ttft_ms / 1e3, config.slo.itl_ms / 1e3) == (Slo().ttft_s, Slo().itl_s)
    assert config.transfer.coalesce_below == Network().coalesce_below


def test_the_same_kv_is_given_up_where_prompts_find_no_room(seed):
    draw = Random(seed)
    for _ in range(200):
        likely = draw.choice((0.5, 0.9))
        works = {
            HandoffId(str(n), 1): (draw.random() < likely, draw.random() < likely) for n in range(draw.randrange(6))
        }
        theirs: Any = {
            name: SimpleNamespace(first=computed or None, waits=waits) for name, (computed, waits) in works.items()
        }
        pushes = {name: SimpleNamespace(computed=computed, waits=waits) for name, (computed, waits) in works.items()}
        spared: Any = PrefillWorker._spare(cast("Any", SimpleNamespace(pushes=pushes)))
        assert spared == job_to_drop(theirs), works


WORKERS, REQUESTS = 1000, 3000
EACH = REQUESTS // WORKERS


def run(workers: int, requests: int, *, colocated: bool = False, seed: int = 0) -> Report:
    scenario = scale_scenario(workers, colocated=colocated, seed=seed)
    return simulate(scenario, scale_load(requests, _RATE * workers, seed))


@pytest.mark.slow
def test_a_thousand_workers_serve_all_that_comes_twice_alike(monkeypatch, capsys, seed):
    options = {"requests": REQUESTS, "workers": WORKERS, "seed": seed}
    monkeypatch.setattr(sys, "argv", ["simulator", *(f"--{name}={value}" for name, value in options.items())])
    monkeypatch.setattr(program, "configure_logging", lambda *_: None)  # would change other tests' logs
    program.main()
    said, report = capsys.readouterr().out, run(WORKERS, REQUESTS, seed=seed)
    figures = json.loads(said.splitlines()[-1])
    assert (figures["requests"], figures["workers"], figures["events"]) == (REQUESTS, WORKERS, report.events)
    assert said.startswith(report.table() + "\n"), "the very same"
    lengths = list(scale_load(REQUESTS, _RATE * WORKERS, seed))
    assert report.completed == report.arrivals == REQUESTS, "it is a load that the cluster takes"
    assert report.output_tokens == sum(one.max_tokens for one in lengths)
    assert report.prefill.prompt_tokens + report.decode.prompt_tokens == sum(one.prompt_tokens for one in lengths)
    assert report.prefill.steps > WORKERS / 5, "all of them work"


def cost(workers: int, *, colocated: bool) -> tuple[float, float]:
    """Return events and calls per request, at the same load per worker, including the start of the workers."""
    profile, requests = Profile(), EACH * workers
    report = profile.runcall(run, workers, requests, colocated=colocated)
    assert report.completed == requests
    assert colocated or report.events < report.decode.steps / 2, "most steps have no event of their own"
    calls = cast("int", Stats(profile).total_calls)  # type: ignore[attr-defined]
    return report.events / requests, calls / requests


@pytest.mark.slow
@pytest.mark.parametrize("colocated", [False, True], ids=["pairs", "colocated"])
def test_a_request_costs_as_much_among_many_workers_as_among_few(colocated):
    """A worker's own cost is shared by its requests, so ten times as many workers cost the same per request."""
    few, many = cost(50, colocated=colocated), cost(500, colocated=colocated)
    assert many == pytest.approx(few, rel=0.15), "events and calls a request"
    assert many[0] < 1.1 * few[0]
    assert many[0] < 30, "events a request: steps in which nothing changes are one"
