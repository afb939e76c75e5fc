"""Who listens to a simulated engine: a worker of one of the roles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from simulator.rows import Row


class Listener(Protocol):
    """Who is told what steps bring, between two of them."""

    def chunk(self, row: Row, count: int, seconds: float) -> None:
        """A step begins that computes so many tokens of a prompt, and takes so long."""

    def first(self, row: Row) -> None:
        """A prompt is computed, and its first new token is there."""

    def finished(self, row: Row) -> None:
        """Its last token is there, and it has let its blocks go."""

    def preempted(self, row: Row) -> None:
        """It had to let its blocks go, and is not here any more."""

    def turned(self) -> None:
        """Jobs have run, and something may have changed."""
