"""Recent activity of a router: metrics of the last minute, and a feed of the latest events.

`LastMinute` keeps a bucket per second; a gap between tokens costs one list entry until its second is settled.
`EventFeed` keeps joins, losses, rejections, failures and recoveries. `ActivityRecorder` fills both.
Nothing here waits, or keeps a reference to a request.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from baton import errors
from baton.clock import Clock
from baton.core import Incarnation, Role
from baton.errors import BatonError
from baton.rpc.v1 import admin_pb2

KEPT = 200
REPEAT_S = 10.0  # between events of rejections with one reason, whose number an event has
OTHERS = ("refused", "other rejections", "")


class EventFeed:
    """The latest events, numbered from 1: `KEPT` of them, and `KEPT // 2` rejections, which never push out others.
    Equal events between two `settle` calls are merged into one, and equal rejections within `REPEAT_S`. Rejections
    beyond `KEPT // 2` reasons at a time are merged, too.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: deque[tuple[int, admin_pb2.Happening]] = deque(maxlen=KEPT)
        self._kept_rejections: deque[tuple[int, admin_pb2.Happening]] = deque(maxlen=KEPT // 2)
        self._pending: dict[tuple[str, str, str], admin_pb2.Happening] = {}
        self._repeats: Counter[tuple[str, str, str]] = Counter()  # of each pending event
        self._rejected: dict[tuple[str, str, str], float] = {}  # times of the latest events of rejections
        self.last = 0  # number of the latest event

    def add(
        self,
        kind: str,
        text: str,
        request_id: str = "",
        worker_id: str = "",
        *,
        at: float | None = None,
        group: str = "",
    ) -> None:
        """Add an event. `kind` is that of `Happening`; `text` contains nothing of a prompt or an answer. `at` is Unix
        time, now by default. Events with equal `group` are merged; the default is the text.
        """
        key = kind, group or text, worker_id
        if kind == "refused" and key not in self._pending and len(self._pending) >= KEPT // 2:
            key, text, request_id = OTHERS, OTHERS[1], ""
        if key in self._pending:
            self._repeats[key] += 1
        elif len(self._pending) < KEPT or key == OTHERS:
            at = self._clock.wall() if at is None else at
            event = admin_pb2.Happening(time_s=at, kind=kind, text=text, request_id=request_id, worker_id=worker_id)
            self._pending[key] = event

    def settle(self) -> int:
        """Number the pending events and return the last number. Call it every second, with or without watchers."""
        now = self._clock.monotonic()
        self._rejected = {key: at for key, at in self._rejected.items() if now - at < REPEAT_S}
        for key in [key for key in self._pending if key not in self._rejected]:
            event, repeats = self._pending.pop(key), self._repeats.pop(key, 0)
            if repeats:
                event.text, event.request_id = f"{event.text} ({repeats + 1} times)", ""
            self.last += 1
            if event.kind == "refused":
                self._rejected[key] = now
                self._kept_rejections.append((self.last, event))
            else:
                self._kept.append((self.last, event))
        return self.last

    def since(self, number: int) -> list[admin_pb2.Happening]:
        """Return the events after this number, in their order."""
        kept = heapq.merge(self._kept, self._kept_rejections, key=itemgetter(0))
        return [event for place, event in kept if place > number]


KEPT_S = 60
_LOWEST_S = 1e-4
_GROWTH = math.log(1.05)  # log of the factor between bucket bounds; a quantile is off by at most 2.5 %


@dataclass(slots=True)
class _Second:
    """Metrics of one second. Durations are counted by bucket number."""

    at: int
    tokens: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    itl: Counter[int] = field(default_factory=Counter)
    e2e: Counter[int] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)  # not counted in `itl` yet
    counts: Counter[str] = field(default_factory=Counter)  # events that happen once per request

    def settle(self) -> None:
        if self.gaps:
            numbers = (np.log(np.maximum(self.gaps, _LOWEST_S) / _LOWEST_S) / _GROWTH).astype(int)
            self.itl.update(numbers.tolist())
            self.gaps.clear()


class LastMinute:
    """Metrics of the last minute. All durations are in seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.monotonic()
        self._seconds: deque[_Second] = deque(maxlen=KEPT_S + 1)
        self._seconds.append(_Second(int(self._since)))

    def tokens(self, count: int, gap_s: float) -> None:
        """Count tokens that came `gap_s` after the previous ones, as `count` gaps of equal length."""
        second = self._seconds[-1]
        second.tokens += count
        second.gaps += (gap_s,) if count == 1 else (gap_s / count,) * count

    def first_tokens(self, count: int, ttft_s: float, prompt_tokens: int) -> None:
        """Count the first tokens of an answer, `ttft_s` after its request."""
        second = self.second()
        second.tokens += count
        second.ttft[_bucket(ttft_s)] += 1
        second.counts["prompt_tokens"] += prompt_tokens

    def finished(self, e2e_s: float) -> None:
        self.second().e2e[_bucket(e2e_s)] += 1

    def count(self, what: str) -> None:
        """Count a request: ended | failed | refused | recovered | judged (against the SLO) | kept (the SLO)."""
        self.second().counts[what] += 1

    def second(self) -> _Second:
        """Return the current second. Call it every second, because `tokens` does not check the time."""
        at, last = int(self._clock.monotonic()), self._seconds[-1]
        if last.at == at:
            return last
        last.settle()
        self._seconds.append(_Second(at))
        return self._seconds[-1]

    def window(self, seconds: int = KEPT_S) -> admin_pb2.Window:
        """Return the metrics of the last `seconds`, including the current one."""
        now = self._clock.monotonic()
        self._seconds[-1].settle()
        found = [second for second in self._seconds if second.at > int(now) - seconds]
        spans = min(seconds - 1 + now % 1, max(now - self._since, 1.0))
        counts: Counter[str] = Counter()
        for second in found:
            counts.update(second.counts)
        return admin_pb2.Window(
            seconds=spans,
            ttft=_quantiles(second.ttft for second in found),
            itl=_quantiles(second.itl for second in found),
            e2e=_quantiles(second.e2e for second in found),
            requests_per_s=counts["ended"] / spans,
            tokens_per_s=sum(second.tokens for second in found) / spans,
            prompt_tokens_per_s=counts["prompt_tokens"] / spans,
            failed=counts["failed"],
            refused=counts["refused"],
            recoveries=counts["recovered"],
            slo_share=counts["kept"] / counts["judged"] if counts["judged"] else -1.0,
        )


def _bucket(seconds: float) -> int:
    return int(math.log(max(seconds, _LOWEST_S) / _LOWEST_S) / _GROWTH)


def _quantiles(parts: Iterable[Counter[int]]) -> admin_pb2.Quantiles:
    """Return the quantiles of all durations, each as the midpoint of its bucket."""
    merged: Counter[int] = Counter()
    for part in parts:
        merged.update(part)
    if not (total := merged.total()):
        return admin_pb2.Quantiles()
    buckets = sorted(merged)
    below = np.cumsum([merged[bucket] for bucket in buckets])
    found = (buckets[place] for place in np.searchsorted(below, np.array((0.5, 0.9, 0.99)) * total))
    p50, p90, p99 = (_LOWEST_S * math.exp(_GROWTH * (bucket + 0.5)) for bucket in found)
    return admin_pb2.Quantiles(count=total, p50=p50, p90=p90, p99=p99)


Worker = tuple[str, Incarnation]
_FIELD = re.compile(r"[a-z][a-z_0-9.\[\]]{0,63}")
_OURS = (errors.Overloaded, errors.NoWorker, errors.WorkerLost, errors.DeadlineExceeded)  # no client text in them


class ActivityRecorder:
    """Recorder of a router's activity; one per router."""

    def __init__(self, clock: Clock) -> None:
        self.recent = LastMinute(clock)
        self.happenings = EventFeed(clock)
        self._connected: dict[Worker, Role] = {}

    def recovered(self, name: str, workers: tuple[str, str], reason: str, *, fenced: bool) -> None:
        """Record that another attempt follows the one on `workers`, the ids of a prefill and a decode worker."""
        prefill, decode = workers
        self.recent.count("recovered")
        if fenced:
            self.happenings.add("fenced", "the decode worker rejects the KV of the lost attempt", name, decode)
        worker = prefill if reason.startswith(Role.PREFILL) else decode
        self.happenings.add("recovered", f"continues with another attempt: {reason}", name, worker)

    def ended(
        self, name: str, outcome: str, error: BatonError | None, age_s: float = 0.0, *, met_slo: bool | None = None
    ) -> None:
        """Record the end of a request after `age_s`; see `Metrics.ended`. `met_slo` is None if that is not judged."""
        self.recent.count("ended")
        if outcome in {"failed", "refused"}:
            self.recent.count(outcome)
            differs = outcome == "refused" and isinstance(error, _OURS)  # the texts differ by their wait time
            self.happenings.add(outcome, _shown(error), name, group=type(error).__name__ if differs else "")
        elif outcome == "finished":
            self.recent.finished(age_s)
        if met_slo is not None:
            self.recent.count("judged")
            if met_slo:
                self.recent.count("kept")

    def rejected(self, reason: str) -> None:
        """Record a request that the HTTP gateway rejects. `reason` contains nothing of the request."""
        self.recent.count("ended")
        self.recent.count("refused")
        self.happenings.add("refused", reason)

    def record_workers(self, connected: Mapping[Worker, Role]) -> None:
        """Record workers that joined or left. Call it every second with the connected ones."""
        self.recent.second()
        for worker, role in self._connected.items():
            if worker not in connected:
                self.happenings.add("left", f"a {role} worker left", worker_id=worker[0])
        for worker, role in connected.items():
            if worker not in self._connected:
                self.happenings.add("joined", f"a {role} worker joined", worker_id=worker[0])
        self._connected = dict(connected)


def _shown(error: BatonError | None) -> str:
    """Return the error's name, with its text if that cannot contain parts of a request, or the names of its fields."""
    name = type(error).__name__
    if isinstance(error, errors.InvalidRequest):
        fields = sorted({each.field for each in error.violations if _FIELD.fullmatch(each.field)})
        return f"{name}: {', '.join(fields)}" if fields else name
    return f"{name}: {error}" if isinstance(error, _OURS) else name
