"""Stages of a request, and a clock that measures the time in each."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.clock import Clock

_NS = 1_000_000_000


class Stage(enum.StrEnum):
    """Stages of a request in order. A preempted request passes some of them again."""

    QUEUE = "queue"
    ROUTE = "route"
    RESERVE = "reserve"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    COMMIT = "commit"
    DECODE = "decode"
    VERIFY = "verify"  # part of decoding; only its duration is known


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one request by stage, without gaps; they sum to `e2e_s`. `ttft_s` is 0 if no token came."""

    queue_s: float
    route_s: float
    reserve_s: float
    prefill_s: float
    transfer_s: float
    commit_s: float
    decode_s: float
    ttft_s: float
    e2e_s: float
    verify_s: float = 0.0  # stage of a deterministic request's verify passes; not part of `decode_s`


def timings_of(seconds: Mapping[Stage, float], ttft_s: float) -> Timings:
    """Return the timings for the seconds of each stage; a missing stage took none."""
    stages = {f"{stage.value}_s": seconds.get(stage, 0.0) for stage in Stage}
    return Timings(**stages, ttft_s=ttft_s, e2e_s=sum(stages.values()))


@dataclass(slots=True)
class Passage:
    """One pass through a stage, in whole nanoseconds since the arrival. `attempt` is 0 before the first attempt."""

    stage: Stage
    start: int
    duration: int
    attempt: int
    notes: dict[str, str] = field(default_factory=dict)


class StageClock:
    """Divides the time of one request into stages, in whole nanoseconds, so that sums do not drift. `passages` follow
    each other without a gap; a stage may occur several times. `attempt` applies to the stages from now on.
    """

    def __init__(self, clock: Clock, arrived: tuple[float, float] | None = None) -> None:
        """`arrived` is the arrival by the monotonic and by the wall clock (Unix time); None means now."""
        self._clock = clock
        monotonic, self.arrived_s = arrived or (clock.monotonic(), clock.wall())
        self._start = self._since = round(monotonic * _NS)
        self.passages: list[Passage] = []
        self.attempt = 0
        self._notes: dict[str, str] = {}  # of the current stage
        self.stage = Stage.QUEUE
        self._ttft: int | None = None
        self._over = False

    @property
    def age_s(self) -> float:
        return (self._now() - self._start) / _NS

    def note(self, **facts: object) -> None:
        self._notes |= {name: str(fact) for name, fact in facts.items()}

    def enter(self, stage: Stage) -> None:
        """End the current stage now and begin `stage`."""
        if not self._over:
            self._pass(self._now() - self._since)
            self.stage = stage

    def end(self) -> None:
        """End the request; later time belongs to no stage."""
        self.enter(self.stage)
        self._over = True

    def so_far(self) -> list[Passage]:
        if self._over:
            return self.passages
        since, now = self._since, self._now()
        return [*self.passages, Passage(self.stage, since - self._start, now - since, self._of(), dict(self._notes))]

    def first_token(self) -> None:
        """Record the arrival of an attempt's first token: prefill ends, transfer begins."""
        self.enter(Stage.TRANSFER)
        if self._ttft is None:
            self._ttft = self._since - self._start

    def handed_over(self, commit_s: float) -> None:
        """Record the decode worker's first message. Time since the first token is transfer, except for the last
        `commit_s`, at most that time. A reported duration is used because clocks of hosts are not comparable.
        """
        if self.stage is not Stage.TRANSFER:
            self.first_token()  # it arrived before the prefill worker's message, or there is none
            self.stage = Stage.DECODE
            return
        self._end_with(Stage.COMMIT, commit_s)
        self.stage = Stage.DECODE

    def verified(self, verify_s: float) -> None:
        """Record the end of decoding. Its verify passes took `verify_s`, at most the time that passed."""
        if self.stage is Stage.DECODE and verify_s:
            self._end_with(Stage.VERIFY, verify_s)
            self.stage = Stage.DECODE

    def ended_at_first_token(self) -> None:
        """Record an end without a handoff: the time since the first token belongs to prefill."""
        self.stage = Stage.PREFILL

    def timings(self) -> Timings:
        self.enter(self.stage)
        spent = dict.fromkeys(Stage, 0)
        for passage in self.passages:
            spent[passage.stage] += passage.duration
        return timings_of({stage: duration / _NS for stage, duration in spent.items()}, (self._ttft or 0) / _NS)

    def _end_with(self, stage: Stage, seconds: float) -> None:
        """End the current stage now and count its last `seconds`, at most all of it, as `stage`."""
        passed = self._now() - self._since
        wanted = seconds * _NS  # a huge value becomes inf
        part = min(max(round(wanted), 0), passed) if math.isfinite(wanted) else 0
        self._pass(passed - part)
        self.stage = stage
        self._pass(part)

    def _pass(self, duration: int) -> None:
        notes, self._notes = self._notes, {}
        attempt = self._of()
        last = self.passages[-1] if self.passages else None
        if last is not None and (last.stage, last.attempt) == (self.stage, attempt):
            last.duration += duration
            last.notes |= notes
        elif duration or notes or not self.passages:
            self.passages.append(Passage(self.stage, self._since - self._start, duration, attempt, notes))
        self._since += duration

    def _of(self) -> int:
        return 0 if self.stage is Stage.QUEUE else self.attempt

    def _now(self) -> int:
        return round(self._clock.monotonic() * _NS)
