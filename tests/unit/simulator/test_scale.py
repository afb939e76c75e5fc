"""A thousand workers: all that comes has its outcome, a run repeats itself, and a request costs no more than with few.

What a request costs is counted in events and in calls of functions, never in seconds: both are the same on any machine.
"""

from __future__ import annotations

import json
import sys
from cProfile import Profile
from pstats import Stats
from typing import cast

import pytest

from simulator import __main__ as program
from simulator import simulate
from simulator.__main__ import _RATE, scale_load, scale_scenario
from simulator.report import Report

WORKERS, REQUESTS = 1000, 3000
EACH = REQUESTS // WORKERS


def run(workers: int, requests: int, *, colocated: bool = False, seed: int = 0) -> Report:
    scenario = scale_scenario(workers, colocated=colocated, seed=seed)
    return simulate(scenario, scale_load(requests, _RATE * workers, seed))


@pytest.mark.slow
def test_a_thousand_workers_serve_all_that_comes_twice_alike(monkeypatch, capsys, seed):
    options = {"requests": REQUESTS, "workers": WORKERS, "seed": seed}
    monkeypatch.setattr(sys, "argv", ["simulator", *(f"--{name}={value}" for name, value in options.items())])
    monkeypatch.setattr(program, "configure_logging", lambda *_: None)  # it is the process's, and others log here too
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
    """Events and calls for each request, at the same load for each worker; starting the workers is among them."""
    profile, requests = Profile(), EACH * workers
    report = profile.runcall(run, workers, requests, colocated=colocated)
    assert report.completed == requests
    assert colocated or report.events < report.decode.steps / 2, "most steps have no event of their own"
    calls = cast("int", Stats(profile).total_calls)  # type: ignore[attr-defined]
    return report.events / requests, calls / requests


@pytest.mark.slow
@pytest.mark.parametrize("colocated", [False, True], ids=["pairs", "colocated"])
def test_a_request_costs_as_much_among_many_workers_as_among_few(colocated):
    """What each worker costs is shared by the requests that it has: ten times as many are no dearer for each."""
    few, many = cost(50, colocated=colocated), cost(500, colocated=colocated)
    assert many == pytest.approx(few, rel=0.15), "events and calls a request"
    assert many[0] < 1.1 * few[0]
    assert many[0] < 30, "events a request: steps in which nothing changes are one"
