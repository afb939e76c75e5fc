"""Where the time of one request goes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

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

    @property
    def e2e_s(self) -> float:
        """End to end: the sum of the stages, in their order."""
        waited = self.queue_s + self.route_s + self.reserve_s
        return waited + self.prefill_s + self.transfer_s + self.commit_s + self.decode_s


class StageClock:
    """Cuts the time of one request into stages: boundaries on one clock, so nothing is lost or counted twice.

    It starts in `queue`, at the request's arrival. Kept in whole nanoseconds, so that sums do not drift.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start = self._since = self._now()
        self._stage = Stage.QUEUE
        self._spent = dict.fromkeys(Stage, 0)
        self._ttft: int | None = None

    @property
    def stage(self) -> Stage:
        return self._stage

    @property
    def age_s(self) -> float:
        """Seconds since it started."""
        return (self._now() - self._start) / _NS

    def enter(self, stage: Stage) -> None:
        """End the current stage now and begin `stage`."""
        now = self._now()
        self._spent[self._stage] += now - self._since
        self._stage, self._since = stage, now

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
        since = self._since
        self.enter(Stage.DECODE)
        commit = min(max(round(commit_s * _NS), 0), self._since - since)
        self._spent[Stage.TRANSFER] -= commit
        self._spent[Stage.COMMIT] += commit

    def ended_at_first_token(self) -> None:
        """There was no handoff: what passed since the first token belongs to prefill."""
        self._stage = Stage.PREFILL

    def timings(self) -> Timings:
        """Where the time went until now."""
        self.enter(self._stage)
        seconds = [*(self._spent[stage] / _NS for stage in Stage), (self._ttft or 0) / _NS]
        return Timings(*seconds)

    def _now(self) -> int:
        return round(self._clock.monotonic() * _NS)
