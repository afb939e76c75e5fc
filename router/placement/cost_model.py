"""What steps of a worker cost, fitted online to what it reports: seconds = a + b tokens + c context, none below 0.

`context` is how many positions the tokens of a step attend to, summed: with it, one model is right for prompts (whose
cost grows with the square) and for decoding (which reads all KV).

What is learned of one worker from its reports: what steps of its own kind cost, and prompts beside them.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.core import Load, Pace, Role

_FORGET = 0.97  # what an observation still counts after the next one,
_HASTE = 10.0  # and less when predictions are off: this power more for each time that they are by themselves
_LEAST_S = 1e-7  # of a step
_IDLE = 0.98  # and after a report without steps
_MOST_STEPS = 32.0  # an observation of more counts as much as one of so many
_SETTLED = 8  # observations from which on an outlier is known as one
_OUTLIER = 4.0  # times what predictions are usually off by
_NOISE = 0.05  # a share by which every prediction is off
_COLD = 4.0  # what took so many times longer at first was warming up
_MOST_USUAL = 0.9  # of a step: what else is in it took something
_PRIOR = 8.0  # steps of its like that count for a worker beside its own
_FEW = 2.0  # steps up to which something else stands in
_FORGOTTEN = 1e-100  # of a step: what is left of the sums has too few digits, or none
# Where data do not tell the causes apart it is the tokens, then the step, then the context.
_RIDGE = np.array([1e-5, 1e-6, 1e-4])
_RIDGES = np.diag(_RIDGE)
_SUBSETS = np.array(list(product((0.0, 1.0), repeat=3)))
_KEPT = _SUBSETS[:, :, None] * _SUBSETS[:, None, :]
_LEFT_OUT = np.eye(3) * (1.0 - _SUBSETS + _RIDGE)[:, None, :]

Matrix = NDArray[np.float64]


class Cost(NamedTuple):
    """Seconds: of a step, of each token, of each position attended to, and of a token that waits with others."""

    step_s: float
    token_s: float
    context_s: float
    queued_s: float

    @property
    def known(self) -> bool:
        return self.step_s + self.token_s + self.context_s > 0

    def of(self, tokens: float, context: float) -> float:
        """Seconds of a step."""
        return self.step_s + self.token_s * tokens + self.context_s * context


UNKNOWN = Cost(0.0, 0.0, 0.0, 0.0)


class StepCostFit:
    """Least squares of relative errors with exponential forgetting, in memory that does not grow.

    `prior`, which is of something else, stands in until this one has seen enough.
    """

    def __init__(self, prior: StepCostFit | None = None) -> None:
        self._prior = prior
        self._sums: Matrix = np.zeros((3, 5))  # x x', x y, and (weight, tokens, context)
        self._off = 0.0  # how far off predictions usually are, as a share of them
        self.seen = 0  # observations
        self._cost = UNKNOWN
        self._due = 0.0  # observations until it is worth solving again

    def observe(self, pace: Pace, usual_s: float = 0.0) -> None:
        """These steps came since the last report. What cannot be is passed over.

        `usual_s` of their seconds is what they would have taken anyway, which is fitted elsewhere.
        """
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
        """A report without steps: what is known ages, and with it what made this worker look slow."""
        self._sums *= share
        self._due -= (1.0 - share) / (1.0 - _IDLE)

    def cost(self, prior: StepCostFit | None = None) -> Cost:
        """The fit; `prior`, of its like, fills in where this one has seen little."""
        if self._due <= 0:
            self._cost = _solve(self._with(prior or self._prior))
            self._due = min(8, 1 + self.seen // 2)
        return self._cost

    def _with(self, prior: StepCostFit | None) -> Matrix:
        """The sums with some steps of `prior`, weighed as errors of this one's size."""
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
        """What to take for the seconds of a step, both in terms of what was expected. Many outliers are none."""
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
    """The best coefficients of which none is below 0: of the eight ways to leave some out, the best that is allowed."""
    scale = np.sqrt(np.diag(sums))
    if not scale.all() or sums[0, 4] < _FORGOTTEN:
        return UNKNOWN
    unit, right = sums[:, :3] / np.outer(scale, scale), sums[:, 3] / scale
    found = np.linalg.solve(unit * _KEPT + _LEFT_OUT, (_SUBSETS * right)[:, :, None])[:, :, 0]
    loss = np.einsum("si,ij,sj->s", found, unit + _RIDGES, found) - 2.0 * found @ right
    loss[(found < 0.0).any(axis=1)] = np.inf
    step_s, token_s, context_s = (float(value) for value in found[loss.argmin()] / scale)
    return Cost(step_s, token_s, context_s, token_s + context_s * float(sums[2, 4] / sums[1, 4]))


_STEPS = 8  # that become one observation: a fit costs more than a report
_SELDOM = 0.999  # what is known of prompts at a decode worker counts after a report without: they are tried again


class CostModels:
    """What is known of all workers of one model, by role, and of prompts at its decode workers: until there were any,
    what they cost at its prefill workers, in steps of their own.
    """

    def __init__(self) -> None:
        self.steps = {role: StepCostFit() for role in Role}
        self.prompts = StepCostFit(self.steps[Role.PREFILL])


class WorkerCostModel:
    """One worker. `like`: what others like it have told, which it goes by until it has told enough itself."""

    def __init__(self, role: Role, like: CostModels) -> None:
        self._role = role
        self._like = like.steps[role]
        self._prompts_like = like.prompts
        self._last = Load()
        self._seen = self._last  # that was learned from
        self.fit = StepCostFit()
        self.prompts_fit = StepCostFit()

    @property
    def cost(self) -> Cost:
        """Of steps of its own kind."""
        return self.fit.cost(self._like)

    @property
    def prompts(self) -> Cost:
        """Of prompts at a decode worker, beside what it decodes anyway."""
        return self.prompts_fit.cost(self._prompts_like)

    def told(self, load: Load) -> bool:
        """It has reported. Returns whether something was learned from it."""
        if load is self._last:
            return False
        last, self._last = self._last, load
        enough = self._seen.step + min(_STEPS, 1 + self.fit.seen)
        if load.step < enough and load.step != last.step:  # a beat without a step: nothing more is to come
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
            self._like.observe(news)
            self._like.cost()
        else:
            self.fit.idle()
        self.fit.cost(self._like)  # now, and not when a request waits for it

    def _learn_prompts(self, load: Load, before: Load) -> None:
        """A decode worker's steps with prompts in them took longer than without."""
        joint, only = load.joint_pace.since(before.joint_pace), load.prefill_pace.since(before.prefill_pace)
        beside, cost = load.beside_pace.since(before.beside_pace), self.cost
        steps, seconds = joint.steps + only.steps, joint.seconds + only.seconds
        fits = (self.prompts_fit, self._prompts_like)
        if steps > 0 and cost.known:
            usual = steps * cost.step_s + beside.tokens * cost.token_s + beside.context * cost.context_s
            for fit in fits:
                fit.observe(Pace(steps, joint.tokens + only.tokens, joint.context + only.context, seconds), usual)
        else:
            for fit in fits:
                fit.idle(_SELDOM)
        self._prompts_like.cost()
        self.prompts_fit.cost(self._prompts_like)
