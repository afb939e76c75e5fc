"""Step costs of a simulated worker: the linear form that the router fits online, or pieces of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from router.placement.cost_model import UNKNOWN, Cost


class StepCost(Protocol):
    """Seconds per step of a worker, all its ranks together. The cost must be affine in `decode_context` for equal
    `decode_rows`, because a stretch of steps is summed that way.
    """

    def seconds(self, prompt_tokens: int, prompt_context: int, decode_rows: int, decode_context: int) -> float:
        """Return a step's seconds. Contexts are positions attended to, which for prompts include their own tokens."""


@dataclass(frozen=True, slots=True)
class Linear:
    """One line for prompts, one for decoding. Mixed steps count the longer `step_s` once, or `joint_step_s`."""

    prompt: Cost = UNKNOWN
    decode: Cost = UNKNOWN
    joint_step_s: float | None = None

    def seconds(self, prompt_tokens: int, prompt_context: int, decode_rows: int, decode_context: int) -> float:
        """See `StepCost`."""
        p, d = self.prompt, self.decode
        if not prompt_tokens:
            return d.step_s + d.token_s * decode_rows + d.context_s * decode_context
        prompts = p.token_s * prompt_tokens + p.context_s * prompt_context
        if not decode_rows:
            return p.step_s + prompts
        step_s = max(p.step_s, d.step_s) if self.joint_step_s is None else self.joint_step_s
        return step_s + prompts + d.token_s * decode_rows + d.context_s * decode_context


@dataclass(frozen=True, slots=True)
class Piecewise:
    """A cost per range of batch sizes. `pieces`: (fewer sequences than this, cost), ascending; `beyond`: the rest."""

    pieces: tuple[tuple[int, StepCost], ...] = ()
    beyond: StepCost = field(default_factory=Linear)

    def seconds(self, prompt_tokens: int, prompt_context: int, decode_rows: int, decode_context: int) -> float:
        """See `StepCost`."""
        cost = next((cost for rows, cost in self.pieces if decode_rows < rows), self.beyond)
        return cost.seconds(prompt_tokens, prompt_context, decode_rows, decode_context)


def line(step_s: float = 0.0, token_s: float = 0.0, context_s: float = 0.0) -> Cost:
    """Return a cost of three numbers, in seconds. A queued token costs `token_s`."""
    return Cost(step_s, token_s, context_s, token_s)
