"""From measurements to a profile: what was put in comes out."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.load import Pace
from simulator.profile import Line, Piece
from simulator.profile_fit import Gaps, Slower, Steps, fit_decode, fit_joint, fit_line, fit_spread, seconds_of

TRUE = Line(step_s=0.002, token_s=2e-5, context_s=1e-8)


def _steps(length: int, line: Line = TRUE, factor: float = 1.0) -> Steps:
    context = length * (length + 1) / 2
    return Steps(length, context, factor * seconds_of(line, Steps(length, context, 0.0)))


def test_a_line_is_found_again():
    found = fit_line([_steps(length) for length in (16, 64, 256, 1024, 4096)])
    assert (found.step_s, found.token_s, found.context_s) == pytest.approx((0.002, 2e-5, 1e-8), rel=1e-6)
    assert seconds_of(fit_line([_steps(256)]), _steps(256)) == pytest.approx(_steps(256).seconds), "of one length"
    # Chunks of 16: a last one of 4 tokens takes about as long.
    chunks = [Steps(16, context, 0.012 + 1e-7 * context) for context in (136, 520, 2056)]
    found = fit_line(chunks)
    assert (found.step_s, found.token_s, found.context_s) == pytest.approx((0.012, 0.0, 1e-7), rel=1e-6)
    assert fit_line([*chunks, Steps(4, 10, 0.006)]).token_s > 0, "where some had fewer, it is seen"


def test_noise_makes_no_number_negative_and_predictions_stay_near(seed):
    draw = random.Random(seed)
    steps = [_steps(length, factor=draw.uniform(0.9, 1.1)) for length in (16, 64, 256, 1024) for _ in range(5)]
    found = fit_line(steps)
    assert min(found.step_s, found.token_s, found.context_s) >= 0
    for length in (16, 100, 1024):
        assert seconds_of(found, _steps(length)) == pytest.approx(_steps(length).seconds, rel=0.15)


def test_decode_steps_go_through_what_was_measured_and_straight_between():
    took = {1: 0.001, 2: 0.0011, 4: 0.003, 8: 0.0031}
    points = [Gaps(rows, rows * 20, (seconds + 1e-7 * rows * 20,)) for rows, seconds in took.items()]
    points += [Gaps(rows, rows * 500, (took[rows] + 1e-7 * rows * 500,)) for rows in (1, 8)]
    pieces = fit_decode(points)
    for rows in (1, 2, 4, 8):
        piece = next(one for one in pieces if one.rows_below is None or rows < one.rows_below)
        seconds = seconds_of(piece, Steps(rows, rows * 20, 0.0))
        assert seconds == pytest.approx(took[rows] + 1e-7 * rows * 20, rel=0.25)
    between = next(one for one in pieces if one.rows_below is None or one.rows_below > 3)
    assert took[2] < seconds_of(between, Steps(3, 60, 0.0)) < took[4] + 1e-5


def test_what_more_rows_cost_does_not_hide_what_context_costs():
    took = {1: 0.009, 4: 0.009, 16: 0.015, 32: 0.026}  # flat, then steep
    points = [Gaps(rows, rows * 40, (seconds + 1e-6 * rows * 40,)) for rows, seconds in took.items()]
    points += [Gaps(rows, rows * 608, (took[rows] + 1e-6 * rows * 608,)) for rows in (1, 4)]
    assert [one.context_s for one in fit_decode(points)] == pytest.approx([1e-6] * 3, rel=0.01)
    cheaper = [Gaps(4, 160, (0.009,)), Gaps(4, 2432, (0.0089,))]  # by noise
    assert fit_decode(cheaper)[0].context_s == 0.0
    assert fit_decode([Gaps(4, 80, (0.002, 0.004))])[0].rows_below is None, "one number of rows is a constant"


def test_the_spread_keeps_the_percentiles_and_has_a_mean_of_1(seed):
    draw = np.random.default_rng(seed)
    gaps = [Gaps(rows, 0.0, tuple(rows * draw.lognormal(0, 0.5, 5000))) for rows in (1.0, 4.0)]
    factors = np.array(fit_spread(gaps))
    assert factors.mean() == pytest.approx(1.0, abs=1e-3)
    seen = np.array(gaps[0].seconds) / gaps[0].mean
    for share in (0.5, 0.9, 0.99):
        assert np.quantile(factors, share) == pytest.approx(np.quantile(seen, share), rel=0.1)


def test_each_point_has_the_same_part_in_the_spread():
    """Two rows give twice as many gaps as one, of no more interest."""
    factors = fit_spread([Gaps(1, 0.0, (1.0,) * 10), Gaps(32, 0.0, (0.5, 1.5) * 500)])
    assert {factor: factors.count(factor) for factor in (0.5, 1.0, 1.5)} == {0.5: 50, 1.0: 100, 1.5: 50}


def test_steps_of_both_kinds_tell_what_they_take_more():
    decode = Piece(step_s=0.01, token_s=1e-3, context_s=0.0)
    more = 0.004
    seconds = 10 * (0.01 + 4 * 1e-3 + 100 * TRUE.token_s + more)
    joint, beside = Pace(10, 1000, 0, seconds), Pace(10, 40, 0, 0.0)
    assert fit_joint(TRUE, decode, joint, beside, Slower()) == pytest.approx(more)
    assert fit_joint(TRUE, decode, Pace(), Pace(), Slower()) is None
    busy = joint.since(Pace(0, 0, 0, -10 * (0.1 * 0.014 + 0.5 * (100 * TRUE.token_s + more))))
    assert fit_joint(TRUE, decode, busy, beside, Slower(prompts=1.5, decode=1.1)) == pytest.approx(more)
