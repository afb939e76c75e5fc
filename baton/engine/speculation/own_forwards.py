"""Interface of forwards that settle several tokens of a sequence in one step: verify passes and speculation."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import Protocol, TypeVar

from baton.engine.determinism.verifier import VerifiedTokens
from baton.engine.kv_cache import KVCache
from baton.engine.request import Request
from baton.engine.sequence import LayerListener, Sequence
from baton.engine.step_result import Counters, StepResult


class OwnWork(Protocol):
    """Work of one sequence in such a forward."""

    @property
    def sequence(self) -> Sequence: ...


_Work = TypeVar("_Work")
_Draws = TypeVar("_Draws")


class OwnForwards(Protocol[_Work, _Draws]):
    """One kind of these forwards."""

    def compute(
        self, work: list[_Work], requests: ListOf[Request], kv: KVCache, on_layer: LayerListener | None, /
    ) -> list[_Draws]:
        """Run the model and return the draws of each item, or none if the work is to run again."""

    def count(self, work: ListOf[_Work], result: StepResult, counters: Counters, /) -> None:
        """Count the cost of a forward, before `take`."""

    def take(self, item: _Work, request: Request, draws: _Draws, counters: Counters, /) -> VerifiedTokens | None:
        """Push the right draws to the request and advance its sequence. Return None if none can be drawn."""
