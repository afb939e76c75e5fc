"""Fits of step costs: they are accurate, never negative, forget old reports and ignore outliers."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import Pace
from router.placement.cost_model import UNKNOWN, StepCostFit

TRUE = (0.004, 0.0003, 2e-8)


def seconds(tokens, context, true=TRUE):
    return true[0] + true[1] * tokens + true[2] * context


def prompts(rng, true=TRUE, spikes=0.0):
    """Yield steps of a prefill worker without end: 1 to 2,048 new tokens after some computed ones."""
    while True:
        tokens, before, steps = rng.randint(1, 2048), rng.choice((0, 0, 500, 4000)), rng.choice((1, 1, 3, 20))
        context = tokens * before + tokens * (tokens + 1) // 2
        factor = rng.uniform(20, 200) if rng.random() < spikes else rng.uniform(0.95, 1.05)
        yield Pace(steps, steps * tokens, steps * context, steps * seconds(tokens, context, true) * factor)


def fitted(paces, count, fit=None):
    fit = fit or StepCostFit()
    for _ in range(count):
        fit.observe(next(paces))
        fit.cost()
    return fit


def off(cost, true=TRUE):
    """Return the largest relative error of the predictions for ordinary steps."""
    points = [(tokens, tokens * before + tokens * tokens / 2) for tokens in (100, 500, 2000) for before in (0, 3000)]
    return max(abs(cost.of(*point) / seconds(*point, true) - 1) for point in points)


@pytest.mark.parametrize("seed", range(3))
def test_costs_are_found_in_noisy_reports_without_outliers_and_a_change_is_no_outlier(seed):
    rng = random.Random(seed)
    fit, slower = fitted(prompts(rng), 200), tuple(3 * value for value in TRUE)
    assert off(fit.cost()) < 0.05
    assert fit.cost().token_s == pytest.approx(TRUE[1], rel=0.25)
    assert off(fitted(prompts(rng, slower), 100, fit).cost(), slower) < 0.15
    assert off(fitted(prompts(random.Random(seed), spikes=0.05), 400).cost()) < 0.35


def test_warming_up_is_forgotten_at_once():
    rng, fit = random.Random(1), StepCostFit()
    fit.observe(Pace(1, 10, 55, 20.0))  # includes the compilation of kernels
    fit.cost()
    fit.observe(Pace(1, 10, 55, 0.01))
    assert fit.cost().of(10, 55) < 0.1
    fitted(prompts(rng), 6, fit)
    assert off(fit.cost()) < 0.5


reports = st.builds(Pace, *[st.integers(-5, 10**6)] * 3, st.floats(-1.0, 1e4))


@given(st.lists(st.one_of(reports, st.none()), max_size=60))
def test_no_cost_is_negative_or_endless_whatever_is_reported(sequence):
    fit = StepCostFit()
    for report in sequence:
        if report is None:
            fit.idle()
        else:
            fit.observe(report)
        cost = fit.cost()
        assert min(cost) >= 0
        assert all(map(np.isfinite, cost))


@pytest.mark.parametrize("digits", [90, *range(110, 340, 3)])
def test_what_was_forgotten_long_ago_is_not_known(digits):
    """Days of idle heartbeats: some sums underflow before others."""
    fit = StepCostFit()
    for number in range(12):
        fit.observe(Pace(10, 100 + number, 4000 + number * number, 0.05 + 0.001 * number))
    for _ in range(2):
        fit.idle(10 ** (-digits / 2))
    cost = fit.cost()
    assert cost == UNKNOWN if digits > 90 else cost.known
    assert np.isfinite(cost).all()


def test_who_has_seen_little_goes_by_its_like():
    like, own = fitted(prompts(random.Random(3)), 100), StepCostFit()
    assert StepCostFit().cost() == StepCostFit().cost(StepCostFit()) == UNKNOWN
    assert not UNKNOWN.known
    assert off(own.cost(like)) < 0.1
    slower = tuple(5 * value for value in TRUE)
    paces = prompts(random.Random(4), slower)
    for _ in range(40):
        own.observe(next(paces))
        own.cost(like)
    assert off(own.cost(like), slower) < 0.15, "its own reports count more"
    for _ in range(1000):
        own.idle()
        own.cost(like)
    assert off(own.cost(like)) < 0.15, "and are forgotten when it is idle: it is tried again"


def test_equal_steps_are_put_down_to_their_tokens():
    fit = StepCostFit()
    for _ in range(20):
        fit.observe(Pace(1, 100, 5050, 0.1))
    assert fit.cost().of(200, 20100) == pytest.approx(0.2, rel=0.2)
    assert fit.cost().of(100, 5050) == pytest.approx(0.1, rel=0.01)
