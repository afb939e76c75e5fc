"""The attempts of requests whose workers die in certain phases. Production, in virtual time, and the simulator in
`baton/planner/sim/` write these stories in the same form for comparison.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from baton.core import Role


class Phase(StrEnum):
    """A phase of an attempt."""

    RESERVING = "reserving"  # the Reserve is in transit
    RESERVED = "reserved"  # blocks are reserved, but the router has not received that
    COMPUTING = "computing"  # the prompt is computed, or its KV waits for another worker
    PUSHING = "pushing"  # the first token is sent, and KV is transferred
    COMMITTED = "committed"  # the decode worker has all KV, but the router has not received that
    DECODING = "decoding"  # the router has received tokens


ALONE = Phase.RESERVING, Phase.RESERVED, Phase.COMPUTING, Phase.DECODING  # a decode worker computes prompts as well
PROMPT, TOKENS, BLOCK = 30, 16, 4
BLOCKS = 64  # of a worker
BACK_S = 1.0  # from a worker's death to its next incarnation
_SOME = 2


@dataclass(frozen=True)
class Strike:
    """Kills the attempt's worker of this role in a phase. Without a role, its prefill worker drops the last KV."""

    attempt: int
    phase: Phase
    role: Role | None

    def __str__(self) -> str:
        return f"{self.role or 'KV'} {self.phase}/{self.attempt}"


@dataclass(frozen=True)
class Case:
    """Workers, strikes at the first request, and a number of requests every 10 ms. `prefill` may be 0."""

    prefill: int = 3
    decode: int = 3
    strikes: tuple[Strike, ...] = ()
    requests: int = 1
    blocks: int = BLOCKS  # of a decode worker


@dataclass
class Leg:
    """One attempt. `failed` and `died` count against the request's limits of failures and deaths. `held`: the prefill
    worker has the KV for the next attempt.
    """

    commands: list[str] = field(default_factory=list)  # to workers, without Release: cleanup is checked separately
    known: str = ""  # the client's tokens at the start; the exact number depends on step times, so it ends at "some"
    ended: str = ""  # the reason for another attempt
    failed: bool = False
    died: bool = False
    held: bool = False

    def knows(self, tokens: int) -> None:
        self.known = str(tokens) if tokens < _SOME else "some"


@dataclass
class Story:
    """All attempts, by request and attempt number, and how many requests completed or failed."""

    legs: dict[tuple[int, int], Leg] = field(default_factory=dict)
    recoveries: Counter[str] = field(default_factory=Counter)  # as the metrics count them
    outcomes: Counter[str] = field(default_factory=Counter)

    def leg(self, request: int, attempt: int) -> Leg:
        return self.legs.setdefault((request, attempt), Leg())

    def __str__(self) -> str:
        lines = [f"  {number}: {leg}" for number, leg in sorted(self.legs.items())]
        return "\n".join([f"{dict(self.outcomes)}, {dict(sorted(self.recoveries.items()))}", *lines])


class Striker:
    """Carries out each planned strike when its phase is reached. `strike(what)` does so in its own world."""

    def __init__(self, strikes: tuple[Strike, ...], strike: Callable[[Strike], None]) -> None:
        self.pending = list(strikes)
        self._strike = strike

    def reached(self, attempt: int, phase: Phase) -> None:
        for one in [one for one in self.pending if (one.attempt, one.phase) == (attempt, phase)]:
            self.pending.remove(one)
            self._strike(one)
