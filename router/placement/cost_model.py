"""The cost of a worker's steps, fitted online to its reports: seconds = a + b tokens + c context, with a, b, c >= 0.

`context` is the number of positions that the tokens of a step attend to. It makes one model fit both prompts, with a
cost that grows with the square of their length, and decode steps, which read all KV.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.core import Load, Pace, Role

_FORGET = 0.97  # weight that an observation keeps after the next one
_HASTE = 10.0  # added to the exponent of forgetting per relative error of predictions
_LEAST_S = 1e-7  # minimum of a step
_IDLE = 0.98  # weight that observations keep after a report without steps
_MOST_STEPS = 32.0  # maximum weight of one observation
_SETTLED = 8  # observations before outliers are recognized
_OUTLIER = 4.0  # times the typical error
_NOISE = 0.05  # minimum relative error of a prediction
_COLD = 4.0  # first steps that took this many times longer than the next were warming up
_MOST_USUAL = 0.9  # maximum share of a step that `usual_s` explains
_PRIOR = 8.0  # weight in steps of similar workers' observations
_FEW = 2.0  # up to this many steps, the prior is used instead
_FORGOTTEN = 1e-100  # in steps: below this, the sums have lost their precision
# Ridge of step, tokens and context. Where data cannot separate them, tokens explain the cost first, then the step.
_RIDGE = np.array([1e-5, 1e-6, 1e-4])
_RIDGES = np.diag(_RIDGE)
_SUBSETS = np.array(list(product((0.0, 1.0), repeat=3)))
_KEPT = _SUBSETS[:, :, None] * _SUBSETS[:, None, :]
_LEFT_OUT = np.eye(3) * (1.0 - _SUBSETS + _RIDGE)[:, None, :]

Matrix = NDArray[np.float64]


class Cost(NamedTuple):
    """Seconds per step, per token, per position attended to, and per token of a waiting prompt."""

    step_s: float
    token_s: float
    context_s: float
    queued_s: float

    @property
    def known(self) -> bool:
        return self.step_s + self.token_s + self.context_s > 0

    def of(self, tokens: float, context: float) -> float:
        return self.step_s + self.token_s * tokens + self.context_s * context


UNKNOWN = Cost(0.0, 0.0, 0.0, 0.0)


class StepCostFit:
    """Least squares of relative errors with exponential forgetting, in constant memory. `prior` is another kind of
    steps. It is used until this fit has enough observations.
    """

    def __init__(self, prior: StepCostFit | None = None) -> None:
        self._prior = prior
        self._sums: Matrix = np.zeros((3, 5))  # x x', x y, and (weight, tokens, context)
        self._off = 0.0  # typical relative error of a prediction
        self.seen = 0
        self._cost = UNKNOWN
        self._due = 0.0  # observations until the next solve

    def observe(self, pace: Pace, usual_s: float = 0.0) -> None:
        """Add the steps of a report, unless invalid. `usual_s` of their seconds is explained by another fit."""
        if min(pace.steps, pace.tokens, pace.context) <= 0 or pace.seconds < pace.steps * _LEAST_S:
            return
        step = np.array((1.0, pace.tokens / pace.steps, pace.context / pace.steps))
        expected = seconds = pace.seconds / pace.steps
        usual = min(usual_s / pace.steps, seconds * _MOST_USUAL)
        if self._cost.known:
            expected = max(usual + self._cost.of(step[1], step[2]), _LEAST_S)
            seconds = expected * self._credible(seconds / expected)
        weight, x = min(pace.steps, _MOST_STEPS), step / expected
        self._sums *= _FORGET ** (1.0 + _HASTE * self._off)
        self._sums += (weight * x)[:, None] * np.array((*x, (seconds - usual) / expected, 0.0))
        self._sums[:, 4] += weight * step
        self.seen += 1
        self._due -= 1

    def idle(self, share: float = _IDLE) -> None:
        """Age the fit after a report without steps, so that a worker that looked slow recovers."""
        self._sums *= share
        self._due -= (1.0 - share) / (1.0 - _IDLE)

    def cost(self, prior: StepCostFit | None = None) -> Cost:
        """Return the fitted cost. `prior`, the fit of similar workers, supplements a fit with few observations."""
        if self._due <= 0:
            self._cost = _solve(self._with(prior or self._prior))
            self._due = min(8, 1 + self.seen // 2)
        return self._cost

    def _with(self, prior: StepCostFit | None) -> Matrix:
        """Return the sums with some steps of `prior`, scaled to this fit's errors."""
        if prior is None:
            return self._sums
        ours, theirs = self._sums, prior._with(prior._prior)
        if prior is self._prior:
            return ours if ours[0, 4] > _FEW else theirs
        if ours[0, 4] < 1e-3 or not theirs[0, 4]:
            return ours if ours[0, 4] > theirs[0, 4] else theirs
        size = (ours[0, 0] / ours[0, 4]) / (theirs[0, 0] / theirs[0, 4])
        joined: Matrix = ours + theirs * (size * _PRIOR / max(theirs[0, 4], _PRIOR))
        return joined

    def _credible(self, ratio: float) -> float:
        """Cut an outlier. Takes and returns a ratio to the expected seconds. A series of outliers is accepted."""
        if self.seen < _SETTLED:
            if ratio * _COLD < 1.0:
                self._sums, self._due = np.zeros((3, 5)), 0
            self._off += (min(abs(ratio - 1.0), 1.0) - self._off) / (self.seen + 1)
            return ratio
        most = _OUTLIER * max(self._off, _NOISE)
        off = min(max(ratio - 1.0, -most), most)
        self._off += 0.1 * (min(abs(off), 1.0) - self._off)
        return 1.0 + off


def _solve(sums: Matrix) -> Cost:
    """Return the best coefficients without a negative one, among the eight subsets of causes."""
    scale = np.sqrt(np.diag(sums))
    if not scale.all() or sums[0, 4] < _FORGOTTEN:
        return UNKNOWN
    unit, right = sums[:, :3] / np.outer(scale, scale), sums[:, 3] / scale
    found = np.linalg.solve(unit * _KEPT + _LEFT_OUT, (_SUBSETS * right)[:, :, None])[:, :, 0]
    loss = np.einsum("si,ij,sj->s", found, unit + _RIDGES, found) - 2.0 * found @ right
    loss[(found < 0.0).any(axis=1)] = np.inf
    step_s, token_s, context_s = (float(value) for value in found[loss.argmin()] / scale)
    return Cost(step_s, token_s, context_s, token_s + context_s * float(sums[2, 4] / sums[1, 4]))


_STEPS = 8  # per observation, because a fit costs more than a report
_SELDOM = 0.999  # weight kept after a report without prompts: local prefill is tried again some time


class CostModels:
    """The costs for one model: `steps` by role, and `prompts` on decode workers, with prefill steps as their prior."""

    def __init__(self) -> None:
        self.steps = {role: StepCostFit() for role in Role}
        self.prompts = StepCostFit(self.steps[Role.PREFILL])


class WorkerCostModel:
    """The cost model of one worker. Until it has enough reports, `similar`, the model of similar workers, is used."""

    def __init__(self, role: Role, similar: CostModels) -> None:
        self._role = role
        self._similar, self._similar_prompts = similar.steps[role], similar.prompts
        self._last = Load()
        self._seen = self._last  # the last report learned from
        self.fit = StepCostFit()
        self.prompts_fit = StepCostFit()

    @property
    def cost(self) -> Cost:
        return self.fit.cost(self._similar)

    @property
    def prompts(self) -> Cost:
        return self.prompts_fit.cost(self._similar_prompts)

    def update(self, load: Load) -> bool:
        """Process a report. Return whether the model learned from it."""
        if load is self._last:
            return False
        last, self._last = self._last, load
        enough = self._seen.step + min(_STEPS, 1 + self.fit.seen)
        if load.step < enough and load.step != last.step:  # a report without a new step ends the wait for more
            return False
        before, self._seen = self._seen, load
        if self._role is Role.PREFILL:
            self._learn(load.prefill_pace.since(before.prefill_pace))
        else:
            self._learn(load.decode_pace.since(before.decode_pace))
            self._learn_prompts(load, before)
        return True

    def _learn(self, news: Pace) -> None:
        if news.steps > 0:
            self.fit.observe(news)
            self._similar.observe(news)
            self._similar.cost()
        else:
            self.fit.idle()
        self.fit.cost(self._similar)  # solved now, so that no request waits for it

    def _learn_prompts(self, load: Load, before: Load) -> None:
        """Learn from how much longer decode steps take with prompts in them."""
        joint, only = load.joint_pace.since(before.joint_pace), load.prefill_pace.since(before.prefill_pace)
        beside, cost = load.beside_pace.since(before.beside_pace), self.cost
        steps, seconds = joint.steps + only.steps, joint.seconds + only.seconds
        fits = (self.prompts_fit, self._similar_prompts)
        if steps > 0 and cost.known:
            usual = steps * cost.step_s + beside.tokens * cost.token_s + beside.context * cost.context_s
            for fit in fits:
                fit.observe(Pace(steps, joint.tokens + only.tokens, joint.context + only.context, seconds), usual)
        else:
            for fit in fits:
                fit.idle(_SELDOM)
        self._similar_prompts.cost()
        self.prompts_fit.cost(self._similar_prompts)
