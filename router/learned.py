"""What is learned of one worker from its reports: what steps of its own kind cost, and prompts beside them."""

from __future__ import annotations

from baton.core import Load, Pace, Role
from router.cost import Cost, StepFit

_STEPS = 8  # that become one observation: a fit costs more than a report
_SELDOM = 0.999  # what is known of prompts at a decode worker counts after a report without: they are tried again


class Likes:
    """What is known of all workers of one model, by role, and of prompts at its decode workers: until there were any,
    what they cost at its prefill workers, in steps of their own.
    """

    def __init__(self) -> None:
        self.steps = {role: StepFit() for role in Role}
        self.prompts = StepFit(self.steps[Role.PREFILL])


class Learned:
    """One worker. `like`: what others like it have told, which it goes by until it has told enough itself."""

    def __init__(self, role: Role, like: Likes) -> None:
        self._role = role
        self._like = like.steps[role]
        self._prompts_like = like.prompts
        self._last = Load()
        self._seen = self._last  # that was learned from
        self.fit = StepFit()
        self.prompts_fit = StepFit()

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
