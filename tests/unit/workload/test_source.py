"""A load as a whole: when, how long, and what is shared."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

from baton.errors import ConfigError
from baton.workload import Arrival, Lengths, Prompts, Times, Trace, arrivals, summary

LENGTHS = Lengths.parse("uniform:1-9", "4")
NO_TIMES = ("", "gamma", "gamma:0", "gamma:x", "gamma:1e-200", "gamma:1001", "gamma:inf", "poisson:2", "uniform")
TRACE = Trace(Path("t"), (Arrival(0.0, 8, 2, (0, 1), 4), Arrival(1.0, 6, 0, (0, 2), 4), Arrival(1.0, 0, 3)), timed=True)


@pytest.mark.parametrize(("text", "cv"), [("poisson", 1), ("constant", 0), ("gamma:0.5", 0.5), ("gamma:3", 3)])
def test_times_have_the_rate_and_the_burstiness(text: str, cv: float):
    times = list(islice(Times.parse(text, 5).seconds(seed=1), 40000))
    gaps = [later - earlier for earlier, later in pairwise([0.0, *times])]
    assert mean(gaps) == pytest.approx(0.2, rel=0.04)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.04, abs=1e-6)


@pytest.mark.parametrize("text", NO_TIMES)
def test_times_that_are_none(text: str):
    with pytest.raises(ConfigError, match="arrivals: must be poisson, constant, or gamma:CV"):
        Times.parse(text, 1)
    with pytest.raises(ConfigError, match="rate: must be requests per second, a number above 0, got 0"):
        Times.parse("poisson", 0)


def test_the_same_seed_gives_the_same_load():
    times = Times(10)
    first, again, other = (list(islice(arrivals(LENGTHS, seed, times=times), 50)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(one.at_s != two.at_s for one, two in zip(first, other, strict=True))
    assert all(1 <= one.prompt_tokens <= 9 and one.max_tokens == 4 for one in first)


def test_a_trace_goes_on_with_new_beginnings():
    found = list(islice(arrivals(LENGTHS, 0, trace=TRACE), 6))
    assert [one.at_s for one in found] == [0.0, 1.0, 1.0, 1.5, 2.5, 2.5]
    assert [one.blocks for one in found] == [(0, 1), (0, 2), (), (3, 4), (3, 5), ()]
    assert [one.max_tokens for one in found] == [2, 4, 3] * 2
    assert found[2].prompt_tokens >= 1
    assert [one.at_s for one in islice(arrivals(LENGTHS, 0, trace=TRACE, times=Times(2, 0)), 3)] == [0.5, 1.0, 1.5]


def test_a_summary():
    found = summary(TRACE.arrivals)
    assert (found.requests, found.span_s, found.rate) == (3, 1.0, 2.0)
    assert (found.prompt_tokens, found.max_tokens, found.longest) == (14, 5, 10)
    assert found.shared == pytest.approx(4 / 14)
    again = summary([TRACE.arrivals[1], TRACE.arrivals[1]])
    assert again.shared == pytest.approx(0.5)  # its second block is cut short, and found as far as it goes


def test_equal_blocks_are_equal_tokens_and_nothing_else_is():
    prompts = Prompts(vocab_size=1000, seed=3)
    first, second = (prompts.tokens(one, number) for number, one in enumerate(TRACE.arrivals[:2]))
    assert (len(first), len(second)) == (8, 6)
    assert first[:4] == second[:4]
    assert first[4:6] != second[4:]
    assert prompts.tokens(Arrival(0.0, 8, 2, (0, 2), 4), 5)[:6] == second
    assert prompts.tokens(TRACE.arrivals[0], 9) == first
    own = Arrival(0.0, 20, 1)
    assert prompts.tokens(own, 0) == prompts.tokens(own, 0) != prompts.tokens(own, 1)
    assert prompts.tokens(own, 0) != Prompts(1000, 4).tokens(own, 0)
    behind = Arrival(0.0, 10, 1, (0, 1), 4)
    assert prompts.tokens(behind, 0)[:8] == first
    assert prompts.tokens(behind, 0)[8:] != prompts.tokens(behind, 1)[8:]
    assert all(0 <= token < 1000 for token in first)


@pytest.mark.parametrize(("most", "lengths"), [(20, (10, 4)), (14, (10, 4)), (9, (5, 4)), (4, (1, 3)), (2, (1, 1))])
def test_within(most: int, lengths: tuple[int, int]):
    one = Arrival(0.0, 10, 4)
    cut = one.within(most)
    assert (cut.prompt_tokens, cut.max_tokens) == lengths
    assert (cut is one) == (lengths == (10, 4))
    written = Arrival(0.0, 10, 4, prompt=(1,) * 10)
    assert written.within(2) is written
