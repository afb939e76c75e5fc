"""Recent activity of a router: metrics of the last minute, and a feed of the latest events.

`LastMinute` keeps a bucket per second; a gap between tokens costs one list entry until its second is settled.
`EventFeed` keeps joins, losses, rejections, failures and recoveries. `ActivityRecorder` fills both.
Nothing here waits, or keeps a reference to a request.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from baton import errors
from baton.clock import Clock
from baton.core import Incarnation, Role
from baton.errors import BatonError
from baton.rpc.v1 import admin_pb2

KEPT = 200


@dataclass(slots=True)
class _Pending:
    at: float
    text: str
    request_id: str
    times: int = 1


class EventFeed:
    """The latest `KEPT` events, numbered from 1. Equal events between two `settle` calls are merged into one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: deque[admin_pb2.Happening] = deque(maxlen=KEPT)
        self._pending: dict[tuple[str, str, str], _Pending] = {}
        self.last = 0  # number of the latest event

    def add(
        self,
        kind: str,
        text: str,
        request_id: str = "",
        worker_id: str = "",
        *,
        at: float | None = None,
        alike: str = "",
    ) -> None:
        """Add an event. `kind` is that of `Happening`; `text` contains nothing of a prompt or an answer. `at` is Unix
        time, now by default. Events with equal `alike` are merged; the default is the text.
        """
        key = kind, alike or text, worker_id
        found = self._pending.get(key)
        if found is not None:
            found.times += 1
        elif len(self._pending) < KEPT:
            at = self._clock.wall() if at is None else at
            self._pending[key] = _Pending(at, text, request_id)

    def settle(self) -> int:
        """Number the pending events and return the last number. Call it every second, with or without watchers."""
        for (kind, _, worker_id), one in self._pending.items():
            once = one.times == 1
            text, request_id = (one.text, one.request_id) if once else (f"{one.text} ({one.times} times)", "")
            told = admin_pb2.Happening(time_s=one.at, kind=kind, text=text, request_id=request_id, worker_id=worker_id)
            self._kept.append(told)
            self.last += 1
        self._pending.clear()
        return self.last

    def since(self, number: int) -> list[admin_pb2.Happening]:
        """Return the kept events after `number`, oldest first."""
        return list(islice(self._kept, max(0, len(self._kept) - (self.last - number)), None))


KEPT_S = 60
_LOWEST_S = 1e-4
_GROWTH = math.log(1.05)  # log of the factor between bucket bounds; a quantile is off by at most 2.5 %


class _Second:
    """Metrics of one second. Durations are counted by bucket number."""

    __slots__ = ("at", "counts", "e2e", "gaps", "itl", "tokens", "ttft")

    def __init__(self, at: int) -> None:
        self.at = at
        self.tokens = 0
        self.ttft: dict[int, int] = {}
        self.gaps: list[float] = []  # not counted yet
        self.itl: dict[int, int] = {}
        self.e2e: dict[int, int] = {}
        self.counts: Counter[str] = Counter()  # counts of things that happen once per request

    def settle(self) -> None:
        """Count the pending gaps."""
        if self.gaps:
            numbers = (np.log(np.maximum(self.gaps, _LOWEST_S) / _LOWEST_S) / _GROWTH).astype(int)
            for at, count in zip(*np.unique(numbers, return_counts=True), strict=True):
                self.itl[int(at)] = self.itl.get(int(at), 0) + int(count)
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
        second, at = self.second(), _number(ttft_s)
        second.tokens += count
        second.ttft[at] = second.ttft.get(at, 0) + 1
        second.counts["prompt_tokens"] += prompt_tokens

    def finished(self, e2e_s: float) -> None:
        """Count a completely answered request."""
        second, at = self.second(), _number(e2e_s)
        second.e2e[at] = second.e2e.get(at, 0) + 1

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


def _number(seconds: float) -> int:
    return int(math.log(max(seconds, _LOWEST_S) / _LOWEST_S) / _GROWTH)


def _quantiles(parts: Iterable[dict[int, int]]) -> admin_pb2.Quantiles:
    merged: Counter[int] = Counter()
    for part in parts:
        merged.update(part)
    ordered, total = sorted(merged.items()), merged.total()
    if not total:
        return admin_pb2.Quantiles()
    p50, p90, p99 = (_quantile(ordered, share * total) for share in (0.5, 0.9, 0.99))
    return admin_pb2.Quantiles(count=total, p50=p50, p90=p90, p99=p99)


def _quantile(ordered: Iterable[tuple[int, int]], rank: float) -> float:
    """Return the midpoint of the bucket that contains this rank."""
    passed = at = 0
    for at, count in ordered:  # noqa: B007
        passed += count
        if passed >= rank:
            break
    return _LOWEST_S * math.exp(_GROWTH * (at + 0.5))


Worker = tuple[str, Incarnation]
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
            alike = type(error).__name__ if outcome == "refused" else ""  # the texts differ by their wait time
            self.happenings.add(outcome, _shown(error), name, alike=alike)
        elif outcome == "finished":
            self.recent.finished(age_s)
        if met_slo is not None:
            self.recent.count("judged")
            if met_slo:
                self.recent.count("kept")

    def look(self, connected: Mapping[Worker, Role]) -> None:
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
    """Return the error's name, with its text if that cannot contain parts of a request."""
    return f"{type(error).__name__}: {error}" if isinstance(error, _OURS) else type(error).__name__
