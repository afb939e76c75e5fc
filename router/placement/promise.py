"""The flight of a choice: its progress as far as forecasts need it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core import WorkerRef
from router.parsing.ranges import NO_PROMISE, Promise
from router.placement.snapshot import Facts


@dataclass(slots=True, eq=False)
class Flight:
    """One choice from its arrival to its end. Times are on the router's clock, in seconds. The observer of the choice
    counts its tokens with `seen`; admission fills in the forecasts.
    """

    prompt: int  # tokens
    answer: int  # tokens at most
    arrived: float = 0.0
    promise: Promise = NO_PROMISE
    tenant: str = ""
    priority: int = 0  # a prefill worker computes higher ones first
    overdue: bool = False  # it has waited too long: only other promises limit where it goes
    done: int = 0  # tokens that the client has
    first_at: float | None = None
    last_at: float = 0.0
    count: Callable[[], int] | None = field(default=None, repr=False)  # newer than `done`, in a simulation
    made_at: float = 0.0  # time of the forecast `ttft_s`
    ttft_s: float = 0.0  # largest forecast from `made_at` on, over all later admissions; 0 means none
    itl_s: float = 0.0  # largest forecast of its mean gap, over all later admissions
    move_s: float = 0.0  # forecast of the handoff
    work: tuple[float, float] = (0.0, 0.0)  # prompt tokens to compute, and the positions that they attend to
    cached: Mapping[WorkerRef, float] = field(default_factory=dict)  # prompt tokens, by prefill worker
    attempts: int = 0

    @property
    def deadline(self) -> float:
        return self.arrived + self.promise.ttft_s

    @property
    def left(self) -> int:
        """Tokens to come, at most."""
        return max(self.answer - (self.done if self.count is None else self.count()), 0)

    @property
    def gaps_key(self) -> int:
        """The class of its number of gaps: a mean of more gaps varies less."""
        return self.answer.bit_length()

    def seen(self, tokens: int, now: float) -> None:
        """Record `tokens` tokens for the client, which came from a worker at `now`."""
        self.done, self.last_at = tokens, now
        if self.first_at is None:
            self.first_at = now

    def mean_gap_s(self, step_s: float, now: float) -> float:
        """Return the mean gap of the whole answer if all later steps take `step_s`. Spent time below the limit is
        credit, spent time above it is debt. An answer that ends earlier has a mean between the present one and this.
        """
        gaps = self.answer - 1
        if gaps < 1:
            return 0.0
        if self.first_at is None:
            return step_s + self.move_s / gaps
        return (now - self.first_at + self.left * step_s) / gaps

    def longest_s(self, left: int, now: float) -> float:
        """Return the seconds of each of `left` later steps with which the mean gap of the answer is as promised."""
        gaps = self.answer - 1
        if gaps < 1:
            return math.inf
        if self.first_at is None:
            return self.promise.itl_s - self.move_s / gaps
        credit_s = self.promise.itl_s * gaps - (now - self.first_at)
        return credit_s / left if left else math.copysign(math.inf, credit_s)

    @property
    def measured_gap_s(self) -> float:
        """The mean gap so far, or 0 without one."""
        return (self.last_at - self.first_at) / (self.done - 1) if self.first_at is not None and self.done > 1 else 0.0

    @property
    def kept(self) -> tuple[bool, bool]:
        """Whether the tokens so far are within the promised TTFT, and within the promised mean gap."""
        ttft = self.first_at is None or self.first_at <= self.deadline
        return ttft, self.measured_gap_s <= self.promise.itl_s


class Seat(NamedTuple):
    """One usable worker for a request: its facts, the cached tokens of the prompt there, the tokens of a block, the
    seconds to move the KV of a token, and the most requests of a step.
    """

    ref: WorkerRef
    facts: Facts[float]
    cached: float
    block_size: int
    move_s: float = 0.0
    rows: float = math.inf

    @property
    def known(self) -> bool:
        """Whether the worker's steps were measured."""
        return self.facts.step_s + self.facts.token_s > 0.0
