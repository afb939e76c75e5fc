"""What steps took, as a worker reports it: see `baton.worker.engine_loop.Paces`."""

from __future__ import annotations

from dataclasses import replace

from baton.core import Pace


class Paces:
    """All steps so far, by kind. They change: `told` is what a report has."""

    def __init__(self) -> None:
        self.prefill, self.decode = Pace(), Pace()
        self.joint, self.beside = Pace(), Pace()

    def decoded(self, steps: int, tokens: int, context: int, seconds: float) -> None:
        """Steps that only decoded."""
        _add(self.decode, steps, tokens, context, seconds)

    def planned(self, prompts: int, context: int, decodes: int, beside: int, seconds: float) -> None:
        """A step: of prompts so many tokens and positions, of rows as well."""
        if not prompts:
            _add(self.decode, 1, decodes, beside, seconds)
        elif not decodes:
            _add(self.prefill, 1, prompts, context, seconds)
        else:
            _add(self.joint, 1, prompts, context, seconds)
            _add(self.beside, 1, decodes, beside, 0.0)

    def told(self) -> Paces:
        """As they are now."""
        now = Paces()
        now.prefill, now.decode = replace(self.prefill), replace(self.decode)
        now.joint, now.beside = replace(self.joint), replace(self.beside)
        return now


def _add(pace: Pace, steps: int, tokens: int, context: int, seconds: float) -> None:
    pace.steps += steps
    pace.tokens += tokens
    pace.context += context
    pace.seconds += seconds
