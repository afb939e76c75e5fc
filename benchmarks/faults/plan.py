"""The seeded plan of a soak: kinds of faults, dealt like cards, so that all pieces together have equal numbers of each.

A fault waits for answers, not for time: it strikes after so many answers since the last one, at the next token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = (
    "kill-router",
    "kill-prefill",
    "kill-decode",
    "kill-redis",
    "kill-supervisor",
    "freeze-router",
    "freeze-prefill",
    "freeze-decode",
    "freeze-prefill-long",
    "freeze-decode-long",
    "freeze-redis",
    "freeze-supervisor",
    "term-worker",
    "empty-redis",
    "pause-redis",
    "readonly-redis",
    "descriptors",
    "memory",
    "disk-full",
    "network-cut",
    "network-slow",
    "drain",
    "restart",
    "scale",
    "turn",
    "cancels",
    "clock-forward",
    "clock-back",
)
ANSWERS = (4, 12)


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault. `draw` chooses among the processes that exist then."""

    number: int
    kind: str
    answers: int
    draw: int


def plan(seed: int, piece: int, faults: int, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """Return the faults of a piece. Consecutive pieces continue one sequence of shuffled decks of all kinds."""
    return [_fault(seed, number, kinds) for number in range(piece * faults, (piece + 1) * faults)]


def _fault(seed: int, number: int, kinds: Sequence[str]) -> Fault:
    deck, place = divmod(number, len(kinds))
    order = random.Random(f"{seed} {deck}").sample(kinds, len(kinds))
    rng = random.Random(f"{seed} fault {number}")
    return Fault(number, order[place], rng.randint(*ANSWERS), rng.randrange(1 << 30))
