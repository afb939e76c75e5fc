"""What steps took, as a worker reports it: see `baton.worker.loop.Paces`."""

from __future__ import annotations

from baton.load import Pace


class Paces:
    """All steps so far, by kind."""

    def __init__(self) -> None:
        self.prefill, self.decode = Pace(), Pace()
        self.joint, self.beside = Pace(), Pace()

    def decoded(self, steps: int, tokens: int, context: int, seconds: float) -> None:
        """Steps that only decoded."""
        before = self.decode
        self.decode = Pace(
            before.steps + steps, before.tokens + tokens, before.context + context, before.seconds + seconds
        )

    def planned(self, prompts: int, context: int, decodes: int, beside: int, seconds: float) -> None:
        """A step: of prompts so many tokens and positions, of rows as well."""
        if not prompts:
            self.decode = self.decode.plus(decodes, beside, seconds)
        elif not decodes:
            self.prefill = self.prefill.plus(prompts, context, seconds)
        else:
            self.joint = self.joint.plus(prompts, context, seconds)
            self.beside = self.beside.plus(decodes, beside, 0.0)
