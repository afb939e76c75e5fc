"""The comparison of a receipt with its answer, computed again: equal, or the first position that differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from baton.receipts.form import ChoiceDigest, OpenedChoice, Receipt, logprob_of

Scored = tuple[int, int]  # a token id, and the bits of its log-probability


@dataclass(frozen=True, slots=True)
class Found:
    """One side of a difference. `bits` are 8 hex digits. All are None behind the end of a choice."""

    token: int | None = None
    logprob: float | None = None
    bits: str | None = None

    @classmethod
    def of(cls, scored: Scored) -> Found:
        return cls(scored[0], logprob_of(scored[1]), f"{scored[1]:08x}")

    def __str__(self) -> str:
        if self.token is None:
            return "no token" if self.bits is None else f"the end, log-probability {self.logprob!r} ({self.bits})"
        return f"token {self.token}, log-probability {self.logprob!r} ({self.bits})"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a choice. `position` counts the tokens of the answer from 0. It is None for a receipt
    without an opening, whose digest proves a difference but not its place. `what` is tokens, end or digest.
    """

    choice: int
    what: str
    position: int | None
    recorded: Found
    replayed: Found

    def __str__(self) -> str:
        if self.position is None:
            return f"choice {self.choice} differs; the receipt has no opening, so the position is unknown"
        return f"choice {self.choice}, position {self.position}: {self.recorded} then; {self.replayed} now"


@dataclass(frozen=True, slots=True)
class Replayed:
    """One choice, computed again, with its end."""

    opened: OpenedChoice
    finish_reason: str
    matched_stop: str


def first_difference(receipt: Receipt, again: Sequence[Replayed]) -> Difference | None:
    """Return the first difference, choice by choice, or None if all bits are equal."""
    opening = receipt.opening.choices if receipt.opening else None
    for place, digest in enumerate(receipt.choices):
        recorded = opening[place] if opening is not None else None
        if (found := _of_choice(place, digest, recorded, again[place])) is not None:
            return found
    return None


def _of_choice(place: int, digest: ChoiceDigest, recorded: OpenedChoice | None, again: Replayed) -> Difference | None:
    ends = digest.finish_reason.value, digest.matched_stop
    if again.opened.sha256() == digest.sha256 and ends == (again.finish_reason, again.matched_stop):
        return None
    if recorded is None:
        return Difference(place, "digest", None, Found(), Found())
    pairs = zip_longest(_scored(recorded), _scored(again.opened))
    for position, (then, now) in enumerate(pairs):
        if then != now:
            sides = Found.of(then) if then else _end(recorded), Found.of(now) if now else _end(again.opened)
            return Difference(place, "tokens", position, *sides)
    return Difference(place, "end", len(recorded.ids), _end(recorded), _end(again.opened))


def _scored(opened: OpenedChoice) -> list[Scored]:
    return list(zip(opened.ids, opened.bits, strict=True))


def _end(opened: OpenedChoice) -> Found:
    return Found(None, logprob_of(int(opened.end, 16)), opened.end) if opened.end else Found()
