"""The figures of benchmarks/disaggregation.py and benchmarks/simulator.py, from what clients saw."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from baton.cluster.state import ClusterState, ProcessId
from baton.workload import Arrival, read_trace
from benchmarks import disaggregation, simulator
from benchmarks.lib.disagg_figures import Slo, attainment, goodput, keep, kept, phase_of, quantile
from benchmarks.lib.disagg_goals import GOALS, aimed, goals, ratios, sides_of, tightest
from benchmarks.lib.disagg_plot import plot
from benchmarks.lib.disagg_run import SPLIT, Side, bind, colocated
from benchmarks.lib.mixed_load import DOCUMENT, KINDS, STREAM, arrivals, kinds_of, write_trace
from simulator import simulate
from simulator.profile import Beside, Layout, Line, Link, Piece, Profile
from simulator.report import Report
from simulator.scenario import Scenario
from tests.unit.benchmarks.disagg_support import SLO, phase, seen

USUAL_S = 0.0041  # of `a_profile`: its gap of a request alone


def test_a_request_is_good_if_so_many_of_its_gaps_are():
    slow = [0.01] * 90 + [1.0] * 10
    most = replace(SLO, percentile=90)
    assert seen(0.5, *slow).good(most)
    assert not seen(0.5, *slow, 1.0).good(most)
    assert not seen(0.5, *slow).good(replace(SLO, percentile=99))
    assert not seen(1.1, 0.01).good(most)
    assert seen(1.0).good(most)


def test_or_if_their_mean_is():
    assert seen(0.5, 0.01, 0.09).good(SLO)
    assert not seen(0.5, 0.01, 0.091).good(SLO)
    assert not seen(1.1, 0.01).good(SLO)
    assert seen(1.0).good(SLO)


def test_quantiles_are_values_that_were_seen():
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]
    assert math.isnan(quantile([], 0.5))


def test_goodput_is_the_highest_rate_that_nine_of_ten_requests_keep_to():
    good, bad = seen(0.1, 0.01), seen(0.1, 0.1)
    phases = [
        phase(SPLIT, 1.0, 1, (good,) * 10),
        phase(SPLIT, 2.0, 1, (good,) * 20),
        phase(SPLIT, 2.0, 2, (good,) * 18 + (bad,) * 2),  # 95 % of both rounds
        phase(SPLIT, 4.0, 1, (bad,) * 10 + (good,) * 30),  # 75 %
        phase(SPLIT, 8.0, 1, (good,) * 40),  # by chance, behind a rate that is too high
    ]
    assert goodput(phases, SLO) == pytest.approx(2.5)
    assert goodput(phases[:3], SLO) == 2.0
    assert goodput(phases[3:4], SLO) == 0.0
    assert attainment(phases[1:3], SLO) == pytest.approx(0.95)


def test_what_was_seen_is_kept(tmp_path):
    phases = [phase(SPLIT, 1.0, 1, (seen(0.1, 0.01, 0.02), seen(0.1))), phase("colocated-64", 2.0, 2)]
    keep(tmp_path / "seen.json", SLO, phases)
    assert kept(tmp_path / "seen.json") == (SLO, phases)


def test_what_failed_counts_against_attainment_and_nowhere_else():
    sample = {"error": "", "prompt_tokens": 64, "ttft_s": 0.2, "gaps_s": [0.01, 0.02]}
    report = {
        "samples": [sample, {**sample, "error": "Overloaded", "ttft_s": None}],
        "generator": {"cpu_share": 0.2, "late_p99_s": 0.003},
    }
    found = phase_of(report, SPLIT, 2.0, 1, 10.0)
    assert (found.sent, found.seen, attainment([found], SLO)) == (2, (seen(0.2, 0.01, 0.02),), 0.5)
    assert (found.generator_cpu, found.late_s) == (0.2, 0.003)


def test_ratios_are_above_one_where_splitting_is_better():
    better, worse = (seen(0.1, 0.01),) * 20, (seen(0.2, 0.08),) * 10 + (seen(0.2, 0.01),) * 10
    phases = [
        one
        for number in (1, 2)
        for one in (phase(SPLIT, 2.0, number, better), phase("colocated-64", 2.0, number, worse))
    ]
    found = ratios(phases, "colocated-64", 2.0)
    assert found == pytest.approx({"itl_p99_ratio": 8.0, "ttft_p50_ratio": 2.0})
    found_goals = goals(phases, Slo(0.1, 0.01), 90)
    assert [goal.split for goal in found_goals] == [2.0] * len(GOALS)
    assert [goal.colocated["colocated-64"] for goal in found_goals] == [0.0] * (len(GOALS) - 2) + [2.0] * 2
    tight = tightest(found_goals)
    assert (tight.times, tight.best, tight.ratio) == (10.0, "colocated-64", 1.0)
    text, figures = disaggregation.report(phases, Slo(0.1, 0.01), 90)
    assert figures == pytest.approx({"itl_p99_ratio": 8.0, "ttft_p50_ratio": 2.0, "goodput_ratio": 1.0})
    assert text.count("| over 1.00") == 6 * (len(GOALS) - 2)  # with three TTFT goals, the mean and two more percentiles


def test_who_keeps_a_goal_at_no_rate_counts_as_if_at_the_lowest():
    good, bad = (seen(0.1, 0.01),) * 10, (seen(0.1, 0.024),) * 10
    phases = [phase(SPLIT, rate, answers=good) for rate in (1.0, 2.0, 3.0)]
    phases += [phase("colocated-64", rate, answers=bad) for rate in (1.0, 2.0, 3.0)]
    found = goals(phases, Slo(0.1, 0.01), 90)
    assert (aimed(found).ratio, aimed(found).told) == (3.0, "over 3.00")
    assert (tightest(found).times, tightest(found).told) == (2.5, "1.00")
    text, figures = disaggregation.report(phases, Slo(0.1, 0.01), 90)
    assert figures["goodput_ratio"] == 3.0
    assert "splitting gives over 3.00 times the goodput" in text


def test_at_each_goal_the_best_chunk_counts():
    slow_start, slow_gap = (seen(0.4, 0.01),) * 10, (seen(0.1, 0.02),) * 10
    phases = [
        phase(SPLIT, answers=(seen(0.1, 0.011),) * 10),
        phase("colocated-64", answers=slow_start),
        phase("colocated-256", answers=slow_gap),
    ]
    found = {goal.times: goal.best for goal in goals(phases, Slo(0.08, 0.01), 90)}
    assert (found[1.25], found[3.0]) == ("colocated-64", "colocated-64")
    strict = {goal.times: goal for goal in goals(phases, Slo(0.07, 0.01), 90)}
    assert (strict[3.0].best, strict[3.0].ratio) == ("colocated-256", 1.0)
    assert strict[1.25].told == "over 1.00"


def test_another_engine_is_shown_and_never_the_control():
    quick = (seen(0.1, 0.01),) * 10
    phases = [phase(side, answers=quick) for side in ("vllm-128", "colocated-256", SPLIT, "colocated-64")]
    assert sides_of(phases) == [SPLIT, "colocated-64", "colocated-256", "vllm-128"]
    goal = goals(phases, Slo(0.1, 0.01), 90)[0]
    assert (goal.best, goal.peers) == ("colocated-64", {"vllm-128": 2.0})
    assert "vllm-128, requests/s" in disaggregation.regions([goal], Slo(0.1, 0.01))


def test_all_sides_get_the_same_load(tmp_path):
    first = list(arrivals(4.0, 30.0, seed=1))
    assert first == list(arrivals(4.0, 30.0, seed=1)) != list(arrivals(4.0, 30.0, seed=2))
    assert len(first) / 30 == pytest.approx(4.0, rel=0.4)
    assert {kind for _, kind in first} == {STREAM, DOCUMENT}
    write_trace(tmp_path / "trace.jsonl", 4.0, 30.0, seed=1)
    read = read_trace(tmp_path / "trace.jsonl").arrivals
    assert [one.prompt_tokens for one in read] == [kind.prompt_tokens for _, kind in first]
    assert read[-1].at_s == pytest.approx(first[-1][0] - first[0][0], abs=1e-5)


def test_other_lengths_come_at_the_same_moments(tmp_path):
    kinds = kinds_of("32,256,512,64")
    assert [(kind.name, kind.prompt_tokens, kind.max_tokens) for kind in kinds] == [
        ("stream", 32, 256),
        ("document", 512, 64),
    ]
    usual, others = (list(arrivals(4.0, 30.0, 1, each)) for each in (KINDS, kinds))
    assert [(at, kind.name) for at, kind in usual] == [(at, kind.name) for at, kind in others]
    write_trace(tmp_path / "trace.jsonl", 4.0, 30.0, 1, kinds)
    assert {one.prompt_tokens for one in read_trace(tmp_path / "trace.jsonl").arrivals} == {32, 512}


@pytest.mark.parametrize("lengths", ["", "32,128,256", "32,128,256,32,1", "32,128,256,1", "32,128,-256,32", "a,b,c,d"])
def test_lengths_that_are_none(lengths, capsys):
    with pytest.raises(SystemExit):
        disaggregation.main(["--lengths", lengths])
    assert f"argument --lengths: four numbers of tokens from 2 on, with commas, are allowed, not {lengths}" in (
        capsys.readouterr().err
    )


def test_a_picture(tmp_path):
    phases = [phase(side, rate, 1, (seen(0.1, 0.01),) * 4) for side in (SPLIT, "colocated-64") for rate in (1.0, 2.0)]
    assert plot(phases, SLO, tmp_path / "found.svg")
    assert "<svg" in (tmp_path / "found.svg").read_text()


def a_profile() -> Profile:
    decode = (Piece(step_s=0.004, token_s=1e-4, context_s=0.0),)
    prompt = Line(step_s=0.004, token_s=1e-4, context_s=0.0)
    layout = Layout(tensor_parallel=1, kv_tokens=100_000, prompt=prompt, decode=decode)
    link = Link(bytes_per_s=1e9)
    return Profile(
        name="toy", model="", hardware="", source="a test", token_bytes=1e4, layers=4, link=link, layouts=(layout,)
    )


def profiles(*rounds: int) -> simulator.Profiles:
    return {(side, number): a_profile() for side in (SPLIT, "colocated-128") for number in rounds}


@pytest.mark.parametrize("side", [Side(SPLIT), colocated(128)], ids=str)
def test_the_simulator_gets_the_very_load_of_a_phase(side):
    was = phase(side.name, 4.0, 3)
    report = simulator.predict(a_profile(), was, SLO, USUAL_S, 0)
    load = [kind for _, kind in arrivals(4.0, 10.0, 3)]
    assert report.completed == report.arrivals == len(load)
    assert report.output_tokens == sum(kind.max_tokens for kind in load)
    found = simulator.simulated(profiles(3), [was], SLO, USUAL_S)
    assert found["share"] == report.good / report.arrivals
    assert found["ttft_p50"] == report.ttft.p50 > 0.004
    compared = simulator.Compared(side.name, 4.0, {**found, "goodput": found["goodput"] * 2}, found)
    assert [compared.error(figure) for figure in simulator.FIGURES] == pytest.approx([0, 0, 0, 0, 0.5])


def test_a_load_is_simulated_with_several_seeds():
    layout = a_profile().layouts[0].model_copy(update={"spread": tuple(0.5 + n / 200 for n in range(200))})
    wide, was = a_profile().model_copy(update={"layouts": (layout,)}), phase(SPLIT, 4.0, 3)
    drawn = [simulator.predict(wide, was, SLO, USUAL_S, seed).ttft.p99 for seed in simulator.SEEDS]
    assert len(set(drawn)) > 1
    assert simulator.simulated({(SPLIT, 3): wide}, [was], SLO, USUAL_S)["ttft_p99"] == median(drawn)


def test_goodput_is_compared_at_each_goal():
    """As fast as could be: all that was seen kept to the goals, as simulated; where nothing did, nothing is said."""
    was = [phase(SPLIT, 4.0, 3, (seen(0.01, 0.001),) * 40), phase("colocated-128", 4.0, 3, (seen(9.0, 9.0),) * 40)]
    (split, mixed) = simulator.compared(profiles(3), was, SLO, USUAL_S)
    assert (split.side, split.measured["goodput"], mixed.measured["goodput"]) == (SPLIT, 4.0, 0.0)
    shown = simulator.by_goal(profiles(3), was, SLO, 95).splitlines()
    assert [row.split("|")[1].split(" x")[0].strip() for row in shown[2:]] == [f"{times:g}" for times in GOALS]
    assert {row.split("|")[3].strip() for row in shown[2:]} == {"1"}
    error = abs(split.simulated["goodput"] - 4.0) / 4.0
    assert shown[-1].split("|")[2].strip() == f"{error:.1%}"
    assert {row.split("|")[4].strip() for row in shown[2:]} == {"over 1.00"}
    assert shown[-1].split("|")[5].strip() == "1.00", "simulated, the colocated side carries as much"


def test_each_load_is_simulated_with_the_profile_of_its_round_and_side(tmp_path):
    slow = a_profile().model_copy(update={"overheads": Beside(admit_s=0.5)})
    loads = [phase(side, 4.0, number) for side in (SPLIT, "colocated-64", "colocated-32") for number in (1, 2)]
    late = [True, False, False, True, True, True]
    for one, is_late in zip(loads, late, strict=True):
        own = slow if is_late else a_profile()
        disaggregation.profile_file(tmp_path / "p.json", one.round, one.side).write_text(own.model_dump_json())
    found = simulator.known(tmp_path / "p.json", [*loads, phase("vllm-64", 4.0, 1)])
    assert [simulator.simulated(found, [one], SLO, USUAL_S)["ttft_p50"] > 0.5 for one in loads] == late


def test_the_router_of_a_simulation_is_told_what_the_real_one_is_whatever_is_judged(monkeypatch):
    told = []

    def told_first(scenario: Scenario, load: list[Arrival]) -> Report:
        told.append((scenario.router.slo_itl_s, scenario.slo.itl_s))
        return simulate(scenario, load)

    monkeypatch.setattr("benchmarks.simulator.simulate", told_first)
    answers = (seen(0.01, 0.001),) * 40
    was = [replace(phase(side, 4.0, 3, answers), told_s=0.123) for side in (SPLIT, "colocated-128")]
    simulator.by_goal(profiles(3), was, SLO, 95)
    of_loads = [one for one in told if one != (math.inf, 1.0)]  # of requests that are alone nobody judges
    assert {router_s for router_s, _ in of_loads} == {0.123}
    assert {round(judged_s / SLO.itl_s, 2) for _, judged_s in of_loads} == set(GOALS)


def test_a_report_says_how_many_loads_were_given_again():
    better = (seen(0.1, 0.01),) * 10
    loads = [phase(side, answers=better) for side in (SPLIT, "colocated-64")]
    loads += [replace(loads[0], rate=3.0, tries=2), replace(loads[1], rate=3.0, tries=3, wander=1.2)]
    text, _ = disaggregation.report(loads, Slo(0.1, 0.01), None)
    assert "Of 4 loads 2 were given again" in text
    assert "more than 10% before and after; in 1 it did each time" in text


def test_profiles_alone_are_of_all_sides_and_no_load(monkeypatch, capsys, tmp_path):
    asked: list[tuple[list[int], list[float], Path]] = []

    def measured(args: Any, chunks: list[int], rates: list[float]) -> None:
        asked.append((chunks, rates, args.profile))

    monkeypatch.setattr(disaggregation, "measured", measured)
    disaggregation.main(["--profiles-only", "--profile", str(tmp_path / "p.json"), "--chunks", "16,64"])
    assert asked == [([16, 64], [], tmp_path / "p.json")]
    with pytest.raises(SystemExit):
        disaggregation.main(["--profiles-only"])
    assert "--profiles-only: needs --profile" in capsys.readouterr().err
    assert len(asked) == 1


def test_what_is_good_goes_by_how_fast_the_machine_was():
    slow = phase(SPLIT, answers=(seen(1.1, 0.055),))
    assert slow.good(SLO) == attainment([slow], SLO) == goodput([slow], SLO) == 0
    there = replace(slow, speed=1.1)
    assert (there.good(SLO), attainment([there], SLO), goodput([there], SLO)) == (1, 1.0, 2.0)
    assert replace(slow, speed=1.09).good(SLO) == 0


def test_the_simulator_is_as_fast_as_the_machine_was():
    was = phase(SPLIT, 1.0, 3)
    usual = simulator.predict(a_profile(), was, SLO, USUAL_S, 0)
    slow = simulator.predict(a_profile(), replace(was, speed=2.0), SLO, USUAL_S, 0)
    assert usual.itl.p50 == pytest.approx(USUAL_S, rel=0.02)
    assert slow.itl.p50 == pytest.approx(2 * usual.itl.p50, rel=0.02)
    assert simulator.predict(a_profile(), was, SLO, 2 * USUAL_S, 0).itl.p50 == pytest.approx(slow.itl.p50, rel=0.02)
    strict = Slo(1.0, 1.5 * USUAL_S)
    none = simulator.predict(a_profile(), was, strict, 2 * USUAL_S, 0)
    all_of = simulator.predict(a_profile(), replace(was, speed=2.0), strict, USUAL_S, 0)
    assert (none.good, all_of.good) == (0, all_of.arrivals)


def test_workers_have_a_core_each_and_all_else_has_all():
    cores = os.sched_getaffinity(0)
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE)).pid
            for name in ("router", "prefill-0", "decode-0", "redis")
        }
        processes = {name: ProcessId(pid, 0.0) for name, pid in started.items()}
        bind(ClusterState("x", ProcessId(1, 0.0), "", "", "", "", "", processes))
        found = {name: os.sched_getaffinity(pid) for name, pid in started.items()}
    assert found["router"] == found["redis"] == cores
    assert [len(found[name]) for name in ("prefill-0", "decode-0")] == [1, 1]
    assert len(found["prefill-0"] | found["decode-0"]) == min(2, len(cores))
