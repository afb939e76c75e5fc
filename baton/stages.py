"""Where the time of one request goes."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from baton.clock import Clock

_NS = 1_000_000_000


class Stage(enum.StrEnum):
    """Where a request can be, in the order in which it passes. A preempted request passes some of them again."""

    QUEUE = "queue"
    ROUTE = "route"
    RESERVE = "reserve"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    COMMIT = "commit"
    DECODE = "decode"
    VERIFY = "verify"  # a part of decoding, of which only the duration is known


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one request by stage, as in `baton.v1.Timings`. `ttft_s` is 0 when no token came."""

    queue_s: float
    route_s: float
    reserve_s: float
    prefill_s: float
    transfer_s: float
    commit_s: float
    decode_s: float
    ttft_s: float
    verify_s: float = 0.0

    @property
    def e2e_s(self) -> float:
        """End to end: the sum of the stages, in their order."""
        waited = self.queue_s + self.route_s + self.reserve_s
        return waited + self.prefill_s + self.transfer_s + self.commit_s + self.decode_s + self.verify_s


@dataclass(slots=True)
class Passage:
    """Once through a stage, on the way of one request: whole nanoseconds since its arrival. `attempt` 0: none yet."""

    stage: Stage
    start: int
    duration: int
    attempt: int
    notes: dict[str, str] = field(default_factory=dict)


class StageClock:
    """Cuts the time of one request into stages: boundaries on one clock, so nothing is lost or counted twice.

    It starts in `queue`, at the request's arrival. Kept in whole nanoseconds, so that sums do not drift. `passages` are
    the same time in order: they follow each other without gap, and a stage may be passed several times. `attempt` is
    the one that the stages from now on belong to. `arrived_s` is the arrival in Unix time.
    """

    def __init__(self, clock: Clock, arrived: tuple[float, float] | None = None) -> None:
        """`arrived`: by the monotonic and by the wall clock; None: now."""
        self._clock = clock
        monotonic, self.arrived_s = arrived or (clock.monotonic(), clock.wall())
        self._start = self._since = round(monotonic * _NS)
        self.passages: list[Passage] = []
        self.attempt = 0
        self._notes: dict[str, str] = {}  # about the stage that it is in
        self._stage = Stage.QUEUE
        self._ttft: int | None = None
        self._over = False

    @property
    def stage(self) -> Stage:
        return self._stage

    @property
    def age_s(self) -> float:
        """Seconds since it started."""
        return (self._now() - self._start) / _NS

    def note(self, **facts: object) -> None:
        """About the stage that it is in."""
        self._notes |= {name: str(fact) for name, fact in facts.items()}

    def enter(self, stage: Stage) -> None:
        """End the current stage now and begin `stage`."""
        if not self._over:
            self._pass(self._now() - self._since)
            self._stage = stage

    def end(self) -> None:
        """The request is over: later moments belong to no stage."""
        self.enter(self._stage)
        self._over = True

    def so_far(self) -> list[Passage]:
        """All of them until now, with the one that is not over."""
        if self._over:
            return self.passages
        since, now = self._since, self._now()
        return [*self.passages, Passage(self._stage, since - self._start, now - since, self._of(), dict(self._notes))]

    def first_token(self) -> None:
        """The first token of an attempt is at the router: prefill ends, the handoff is what is waited for."""
        self.enter(Stage.TRANSFER)
        if self._ttft is None:
            self._ttft = self._since - self._start

    def handed_over(self, commit_s: float) -> None:
        """The decode worker's first message is at the router, and says that its commit took the last `commit_s`.

        What lies between the first token and this moment is transfer but for its end. No worker's clock is compared
        with ours: only a duration is taken over, and no more of it than there is.
        """
        if self._stage is not Stage.TRANSFER:
            self.first_token()  # the decode worker's message overtook the prefill worker's, or there is none
            self._stage = Stage.DECODE
            return
        self._ends_with(Stage.COMMIT, commit_s)
        self._stage = Stage.DECODE

    def verified(self, verify_s: float) -> None:
        """The decode worker has ended its part, and says that verify passes took so much of it; no more than it was."""
        if self._stage is Stage.DECODE and verify_s:
            self._ends_with(Stage.VERIFY, verify_s)
            self._stage = Stage.DECODE

    def ended_at_first_token(self) -> None:
        """There was no handoff: what passed since the first token belongs to prefill."""
        self._stage = Stage.PREFILL

    def timings(self) -> Timings:
        """Where the time went until now."""
        self.enter(self._stage)
        spent = dict.fromkeys(Stage, 0)
        for passage in self.passages:
            spent[passage.stage] += passage.duration
        seconds = {f"{stage.value}_s": duration / _NS for stage, duration in spent.items()}
        return Timings(**seconds, ttft_s=(self._ttft or 0) / _NS)

    def _ends_with(self, stage: Stage, seconds: float) -> None:
        """The current stage ends now, and its last `seconds`, as far as there are so many, were in `stage`."""
        passed = self._now() - self._since
        said = seconds * _NS  # too much of it is inf
        part = min(max(round(said), 0), passed) if math.isfinite(said) else 0
        self._pass(passed - part)
        self._stage = stage
        self._pass(part)

    def _pass(self, duration: int) -> None:
        """So much more of the current stage."""
        notes, self._notes = self._notes, {}
        attempt = self._of()
        last = self.passages[-1] if self.passages else None
        if last is not None and (last.stage, last.attempt) == (self._stage, attempt):
            last.duration += duration
            last.notes |= notes
        elif duration or notes or not self.passages:
            self.passages.append(Passage(self._stage, self._since - self._start, duration, attempt, notes))
        self._since += duration

    def _of(self) -> int:
        return 0 if self._stage is Stage.QUEUE else self.attempt

    def _now(self) -> int:
        return round(self._clock.monotonic() * _NS)
