"""What a step of a simulated worker takes: the form that the router fits online, or pieces of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from router.placement.cost_model import UNKNOWN, Cost


class StepCost(Protocol):
    """Seconds of a step of a worker, all ranks of it together.

    For equal `decode_rows` it must be affine in `decode_context`: steps in which nothing changes are added up by that.
    """

    def seconds(self, prompt_tokens: int, prompt_context: int, decode_rows: int, decode_context: int) -> float:
        """A step that computes so many tokens of prompts, which attend to so many positions in all, themselves among
        them, and one token of each of so many rows, which attend to so many positions in all.
        """


@dataclass(frozen=True, slots=True)
class Linear:
    """A line for prompts and one for decoding, each `step_s + token_s tokens + context_s context`.

    A step with both in it has the longer of both `step_s` once, or `joint_step_s` if it is known.
    """

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
    """A cost for each range of decode rows: `pieces` are (fewer rows than this, cost), by rows; `beyond` is of more."""

    pieces: tuple[tuple[int, StepCost], ...] = ()
    beyond: StepCost = field(default_factory=Linear)

    def seconds(self, prompt_tokens: int, prompt_context: int, decode_rows: int, decode_context: int) -> float:
        """See `StepCost`."""
        cost = next((cost for rows, cost in self.pieces if decode_rows < rows), self.beyond)
        return cost.seconds(prompt_tokens, prompt_context, decode_rows, decode_context)


def line(step_s: float = 0.0, token_s: float = 0.0, context_s: float = 0.0) -> Cost:
    """A cost of three numbers, in seconds; nothing of it is about what waits."""
    return Cost(step_s, token_s, context_s, token_s)
