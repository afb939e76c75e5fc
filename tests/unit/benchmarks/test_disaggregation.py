"""The figures of benchmarks/disaggregation.py and benchmarks/simulator.py."""

from dataclasses import replace
from typing import Any

import pytest

from baton.bench.traces import read_trace
from baton.planner.profile import Layout, Line, Link, Piece, Profile
from benchmarks import disaggregation, simulator
from benchmarks.lib.disagg_figures import Phase, Seen, Slo, attainment, goodput, keep, kept, phase_of
from benchmarks.lib.disagg_goals import GOALS, aimed, goals, sides_of, tightest
from benchmarks.lib.disagg_run import SPLIT, Side, colocated
from benchmarks.lib.mixed_load import DOCUMENT, KINDS, STREAM, arrivals, kinds_of, write_trace

SLO = Slo(1.0, 0.05)
USUAL_S = 0.0041  # the gap of a lone request, by `a_profile`
MIXED = "colocated-64"


def seen(ttft_s: float, *gaps_s: float) -> Seen:
    return Seen(64, ttft_s, gaps_s)


def phase(side: str, rate: float = 2.0, number: int = 1, answers: tuple[Seen, ...] = ()) -> Phase:
    return Phase(side, rate, number, 10.0, len(answers), answers, 0.1, 0.001)


@pytest.mark.parametrize(
    ("request_", "slo", "good"),
    [
        (seen(0.5, 0.01, 0.09), SLO, True),
        (seen(0.5, 0.01, 0.091), SLO, False),
        (seen(1.1, 0.01), SLO, False),
        (seen(1.0), SLO, True),
        (seen(0.5, *[0.01] * 90, *[1.0] * 10), replace(SLO, percentile=90), True),
        (seen(0.5, *[0.01] * 90, *[1.0] * 11), replace(SLO, percentile=90), False),
        (seen(0.5, *[0.01] * 90, *[1.0] * 10), replace(SLO, percentile=99), False),
        (seen(1.1, 0.01), replace(SLO, percentile=90), False),
    ],
)
def test_a_request_is_good_by_its_first_token_and_the_mean_or_a_percentile_of_its_gaps(request_, slo, good):
    assert request_.good(slo) == good


def test_goodput_is_the_highest_rate_that_nine_of_ten_requests_keep_to():
    good, bad = seen(0.1, 0.01), seen(0.1, 0.1)
    phases = [
        phase(SPLIT, 1.0, 1, (good,) * 10),
        phase(SPLIT, 2.0, 1, (good,) * 20),
        phase(SPLIT, 2.0, 2, (good,) * 18 + (bad,) * 2),  # 95 % of both rounds
        phase(SPLIT, 4.0, 1, (bad,) * 10 + (good,) * 30),  # 75 %
        phase(SPLIT, 8.0, 1, (good,) * 40),  # by chance, after a rate that is too high
    ]
    assert goodput(phases, SLO) == pytest.approx(2.5)
    assert goodput(phases[:3], SLO) == 2.0
    assert goodput(phases[3:4], SLO) == 0.0
    assert attainment(phases[1:3], SLO) == pytest.approx(0.95)


def test_goals_are_stretched_by_how_slow_the_machine_was():
    slow = phase(SPLIT, answers=(seen(1.1, 0.055),))
    assert slow.good(SLO) == attainment([slow], SLO) == goodput([slow], SLO) == replace(slow, speed=1.09).good(SLO) == 0
    there = replace(slow, speed=1.1)
    assert (there.good(SLO), attainment([there], SLO), goodput([there], SLO)) == (1, 1.0, 2.0)


def test_requests_that_failed_count_against_attainment_and_all_is_kept(tmp_path):
    sample = {"error": "", "prompt_tokens": 64, "ttft_s": 0.2, "gaps_s": [0.01, 0.02]}
    report = {
        "samples": [sample, {**sample, "error": "Overloaded", "ttft_s": None}],
        "generator": {"cpu_share": 0.2, "late_p99_s": 0.003},
    }
    found = phase_of(report, SPLIT, 2.0, 1, 10.0)
    assert (found.sent, found.seen, attainment([found], SLO)) == (2, (seen(0.2, 0.01, 0.02),), 0.5)
    assert (found.generator_cpu, found.late_s) == (0.2, 0.003)
    phases = [found, phase(MIXED, 2.0, 2)]
    keep(tmp_path / "seen.json", SLO, phases)
    assert kept(tmp_path / "seen.json") == (SLO, phases)


def test_ratios_are_above_one_where_splitting_is_better():
    better, worse = (seen(0.1, 0.01),) * 20, (seen(0.2, 0.08),) * 10 + (seen(0.2, 0.01),) * 10
    phases = [phase(side, 2.0, n, own) for n in (1, 2) for side, own in ((SPLIT, better), (MIXED, worse))]
    found = goals(phases, Slo(0.1, 0.01), 90)
    assert [goal.split for goal in found] == [2.0] * len(GOALS)
    assert [goal.colocated[MIXED] for goal in found] == [0.0] * (len(GOALS) - 2) + [2.0] * 2
    assert (tightest(found).times, tightest(found).best, tightest(found).ratio) == (10.0, MIXED, 1.0)
    _, figures = disaggregation.report(phases, Slo(0.1, 0.01), 90)
    assert figures == pytest.approx({"itl_p99_ratio": 8.0, "ttft_p50_ratio": 2.0, "goodput_ratio": 1.0})


def test_a_side_that_keeps_a_goal_at_no_rate_counts_as_if_at_the_lowest():
    good, bad = (seen(0.1, 0.01),) * 10, (seen(0.1, 0.024),) * 10
    phases = [phase(side, rate, 1, own) for side, own in ((SPLIT, good), (MIXED, bad)) for rate in (1.0, 2.0, 3.0)]
    found = goals(phases, Slo(0.1, 0.01), 90)
    assert (aimed(found).ratio, aimed(found).told) == (3.0, "over 3.00")
    assert (tightest(found).times, tightest(found).told) == (2.5, "1.00")
    assert disaggregation.report(phases, Slo(0.1, 0.01), 90)[1]["goodput_ratio"] == 3.0


def test_at_each_goal_the_best_chunk_counts_and_another_engine_never():
    phases = [
        phase(SPLIT, answers=(seen(0.1, 0.011),) * 10),
        phase(MIXED, answers=(seen(0.4, 0.01),) * 10),
        phase("colocated-256", answers=(seen(0.1, 0.02),) * 10),
        phase("vllm-128", answers=(seen(0.1, 0.01),) * 10),
    ]
    assert sides_of(phases) == [SPLIT, MIXED, "colocated-256", "vllm-128"]
    found = {goal.times: goal for goal in goals(phases, Slo(0.08, 0.01), 90)}
    assert (found[1.25].best, found[3.0].best, found[3.0].peers) == (MIXED, MIXED, {"vllm-128": 2.0})
    strict = {goal.times: goal for goal in goals(phases, Slo(0.07, 0.01), 90)}
    assert (strict[3.0].best, strict[3.0].ratio, strict[1.25].told) == ("colocated-256", 1.0, "over 1.00")


def test_all_sides_get_the_same_load_and_other_lengths_come_at_the_same_moments(tmp_path):
    first = list(arrivals(4.0, 30.0, seed=1))
    assert first == list(arrivals(4.0, 30.0, seed=1)) != list(arrivals(4.0, 30.0, seed=2))
    assert len(first) / 30 == pytest.approx(4.0, rel=0.4)
    assert {kind for _, kind in first} == {STREAM, DOCUMENT} == set(KINDS)
    kinds = kinds_of("32,256,512,64")
    assert [(kind.prompt_tokens, kind.max_tokens) for kind in kinds] == [(32, 256), (512, 64)]
    others = list(arrivals(4.0, 30.0, 1, kinds))
    assert [(at, kind.name) for at, kind in others] == [(at, kind.name) for at, kind in first]
    write_trace(tmp_path / "trace.jsonl", 4.0, 30.0, 1, kinds)
    read = read_trace(tmp_path / "trace.jsonl").arrivals
    assert [one.prompt_tokens for one in read] == [kind.prompt_tokens for _, kind in others]
    assert read[-1].at_s == pytest.approx(first[-1][0] - first[0][0], abs=1e-5)


def a_profile(**changes: Any) -> Profile:
    """Return a toy profile. `changes` apply to its only layout."""
    decode = (Piece(step_s=0.004, token_s=1e-4, context_s=0.0),)
    prompt = Line(step_s=0.004, token_s=1e-4, context_s=0.0)
    layout = Layout(tensor_parallel=1, kv_tokens=100_000, prompt=prompt, decode=decode, **changes)
    facts = {"name": "toy", "model": "", "hardware": "", "source": "a test", "token_bytes": 1e4, "layers": 4}
    return Profile(**facts, link=Link(bytes_per_s=1e9), layouts=(layout,))  # type: ignore[arg-type]


PROFILES: simulator.Profiles = {(side, 3): a_profile() for side in (SPLIT, "colocated-128")}


@pytest.mark.parametrize("side", [Side(SPLIT), colocated(128)], ids=str)
def test_the_simulator_gets_the_very_load_of_a_phase(side):
    was = phase(side.name, 4.0, 3)
    report = simulator.predict(a_profile(), was, SLO, USUAL_S, 0)
    load = [kind for _, kind in arrivals(4.0, 10.0, 3)]
    assert report.completed == report.arrivals == len(load)
    assert report.output_tokens == sum(kind.max_tokens for kind in load)
    found = simulator.simulated(PROFILES, [was], SLO, USUAL_S)
    assert (found["share"], found["ttft_p50"]) == (report.good / report.arrivals, report.ttft.p50)
    compared = simulator.Compared(side.name, 4.0, {**found, "goodput": found["goodput"] * 2}, found)
    assert [compared.error(figure) for figure in simulator.FIGURES] == pytest.approx([0, 0, 0, 0, 0.5])
