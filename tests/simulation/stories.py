"""What becomes of requests when workers die in certain phases of their attempts: told by production, as it runs in
virtual time, and by the simulator in `baton/planner/sim/`, in the same words, so that the two can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from baton.core import Role


class Phase(StrEnum):
    """Of an attempt."""

    RESERVING = "reserving"  # the Reserve is on its way
    RESERVED = "reserved"  # there is room, the router does not know yet
    COMPUTING = "computing"  # the prompt is; or, if it was, its KV is to go to another worker
    PUSHING = "pushing"  # the first token is said, KV moves
    COMMITTED = "committed"  # the decode worker has all, the router does not know yet
    DECODING = "decoding"  # the router has tokens of it


ALONE = Phase.RESERVING, Phase.RESERVED, Phase.COMPUTING, Phase.DECODING  # a decode worker computes the prompt as well
PROMPT, TOKENS, BLOCK = 30, 16, 4
BLOCKS = 64  # of a worker
BACK_S = 1.0  # from a worker's death to its next incarnation
_SOME = 2


@dataclass(frozen=True)
class Strike:
    """When an attempt is in a phase, the worker that it has of a role dies. None: its prefill worker lives, and drops
    what it holds of the attempt before.
    """

    attempt: int
    phase: Phase
    role: Role | None

    def __str__(self) -> str:
        return f"{self.role or 'KV'} {self.phase}/{self.attempt}"


@dataclass(frozen=True)
class Case:
    """Workers, strikes at the first request, and how many come, 10 ms apart. Without prefill workers, others do all."""

    prefill: int = 3
    decode: int = 3
    strikes: tuple[Strike, ...] = ()
    requests: int = 1
    blocks: int = BLOCKS  # of a decode worker


@dataclass
class Leg:
    """One attempt. `failed`, `died`: it counts against the request's budget of failures, of deaths. `held`: the prefill
    worker has what the next one needs.
    """

    commands: list[str] = field(default_factory=list)  # to workers, but Release: that nothing is left is looked at
    known: str = ""  # tokens that the client had: after some it hangs on how long steps take how many
    ended: str = ""  # why another one is needed
    failed: bool = False
    died: bool = False
    held: bool = False

    def knows(self, tokens: int) -> None:
        self.known = str(tokens) if tokens < _SOME else "some"


@dataclass
class Story:
    """All attempts, by number of the request and of the attempt, and how requests ended: completed, or failed."""

    legs: dict[tuple[int, int], Leg] = field(default_factory=dict)
    recoveries: Counter[str] = field(default_factory=Counter)  # as they are counted for people
    outcomes: Counter[str] = field(default_factory=Counter)

    def leg(self, request: int, attempt: int) -> Leg:
        return self.legs.setdefault((request, attempt), Leg())

    def __str__(self) -> str:
        lines = [f"  {number}: {leg}" for number, leg in sorted(self.legs.items())]
        return "\n".join([f"{dict(self.outcomes)}, {dict(sorted(self.recoveries.items()))}", *lines])


class Striker:
    """Does what was planned once a phase is reached. `strike(what)` does it in its own world."""

    def __init__(self, strikes: tuple[Strike, ...], strike: Callable[[Strike], None]) -> None:
        self.pending = list(strikes)
        self._strike = strike

    def reached(self, attempt: int, phase: Phase) -> None:
        for one in [one for one in self.pending if (one.attempt, one.phase) == (attempt, phase)]:
            self.pending.remove(one)
            self._strike(one)
