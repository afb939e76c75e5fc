"""The figures of benchmarks/disaggregation.py and benchmarks/simulator.py."""

from dataclasses import replace

import pytest

from baton.bench.traces import read_trace
from benchmarks.lib.disagg_figures import Phase, Seen, Slo, attainment, goodput
from benchmarks.lib.disagg_goals import goals, sides_of
from benchmarks.lib.disagg_run import SPLIT
from benchmarks.lib.mixed_load import DOCUMENT, KINDS, STREAM, arrivals, kinds_of, write_trace

SLO = Slo(1.0, 0.05)
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
