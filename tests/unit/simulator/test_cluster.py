"""What a simulated cluster does beside serving: faults come and go, workers report, gaps are kept."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from baton.workload import Arrival
from simulator import simulate
from simulator.__main__ import main
from simulator.cluster import Cluster
from simulator.scenario import Death, Slo, Slow, SlowLink
from simulator.tally import Tally
from tests.unit.simulator.scenes import PATIENT, colocated, poisson, scene

PERCENTILE = Slo(itl_percentile=99.0)
DEATHS = (Death(3.0, "decode-0", back_after_s=1.0),)


def test_faults_that_overlap_multiply_and_each_ends_for_itself():
    slow = (Slow(0.0, 2.0, "decode-0", 2.0), Slow(1.0, 3.0, "decode-0", 3.0), Slow(3.0, 4.0, "decode-0", 5.0))
    links = (SlowLink(0.0, 2.0, "", 0.5), SlowLink(1.0, 3.0, "decode-0", 0.5), SlowLink(1.0, 2.0, "", 0.1))
    cluster = Cluster(scene(1, 1, faults=slow + links))
    whole, seen = cluster.way_s("prefill-0"), []

    def look() -> None:
        factors = cluster.slow["decode-0"], cluster._workers["decode-0"].engine.timing.factor
        seen.append((*factors, cluster.way_s("decode-0") / whole))

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
    """One fewer than tokens; steps in which a row had to wait count twice."""
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
        (("--rate", "nan"), "above 0, got nan"),
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
