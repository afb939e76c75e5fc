"""What the pools have to do, from what routers report: measures, each as a share of what may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.config import ClusterConfig
from baton.core import Role
from baton.ledger.control_state import RouterReport, WorkerDemand

_FULL = 0.9  # of the KV blocks of decode workers: what is decoded grows
_SATURATED = 0.9  # of the time of prefill workers: beyond it, prompts wait long
_AT_LEAST = 2.0  # times what one takes with nothing else there: no number of workers makes that shorter
_REMEMBERED_S = 5.0  # how busy prefill workers were


@dataclass(frozen=True, slots=True)
class Measure:
    """One of a pool's, as a share of what may be: `fixed` stays, `shared` is divided by however many workers there are.
    `text` is for a reader; empty: nothing is known. One that does not press only says how many workers are enough.
    """

    text: str
    shared: float
    fixed: float = 0.0
    presses: bool = True

    @property
    def now(self) -> float:
        return self.fixed + self.shared if self.presses else 0.0


NOTHING = Measure("", 0.0)


@dataclass(frozen=True, slots=True)
class Pressure:
    """What a pool has to do, which `there` workers do."""

    there: int
    measures: tuple[Measure, ...]

    @property
    def worst(self) -> Measure:
        return _worst(self.measures)

    @property
    def now(self) -> float:
        """More than 1: it is too much for them."""
        return self.worst.now

    def with_only(self, workers: int) -> float:
        """What it would be."""
        each = max(self.there, 1) / workers if workers else math.inf
        return max(one.fixed + (one.shared and one.shared * each) for one in self.measures)

    def __str__(self) -> str:
        return ", ".join(one.text for one in self.measures if one.text)


class Pressures:
    """Of both pools, look by look."""

    def __init__(self, config: ClusterConfig) -> None:
        self._ttft_s, self._itl_s = config.slo.ttft_ms / 1000, config.slo.itl_ms / 1000
        self._rows = config.decode.max_running
        self._colocated = config.mode == "colocated"
        self._busy = _Busy()

    def look(self, routers: Sequence[RouterReport], there: Mapping[Role, int], now: float) -> dict[Role, Pressure]:
        """At `now` (monotonic). `routers`: at least one; `there`: workers of each role that take requests.

        Room on decode workers is reserved before a prompt is computed. While prefill workers have too much to do, what
        is reserved for prompts that wait for them, and that part of the wait for room, is theirs: more decode workers
        would be filled with it just so. Colocated workers, which have the role decode, answer for all of it.
        """
        workers = {worker_id: one for report in routers for worker_id, one in report.workers.items()}
        decodes = [one for one in workers.values() if one.role is Role.DECODE]
        busy = self._busy.look({name: one for name, one in workers.items() if one.role is Role.PREFILL}, now)
        share = busy / max(there[Role.PREFILL], 1)
        first, used = _worst(self._first_token(report) for report in routers), _mean([one.used for one in decodes])
        theirs = not self._colocated and first.now and max(first.now, share / _SATURATED) > 1
        late = first.shared / first.now if theirs else 0.0
        blocked = late * _mean([one.reserved for one in decodes])
        blame = min(blocked / used, 1.0) if used else 0.0
        rows, most = sum(one.running + one.waiting for one in decodes), self._rows * max(len(decodes), 1)
        wait_s = (1.0 - blame) * max(report.queue_s for report in routers)
        prompts = (
            _worst(self._first_token(report, blame) for report in routers),
            Measure(f"busy {share:.0%}", share / _SATURATED, presses=False),
        )
        return {
            Role.PREFILL: Pressure(there[Role.PREFILL], (NOTHING,) if self._colocated else prompts),
            Role.DECODE: Pressure(
                there[Role.DECODE],
                (
                    prompts[0] if self._colocated else NOTHING,
                    _worst(self._next_token(report) for report in routers),
                    Measure(f"KV {used - blocked:.0%} of {_FULL:.0%}", (used - blocked) / _FULL),
                    Measure(f"{rows} of {most} rows", rows / most),
                    Measure(f"queue {wait_s:.2f} s of {self._ttft_s:.2f} s" if wait_s else "", wait_s / self._ttft_s),
                ),
            ),
        }

    def _first_token(self, report: RouterReport, blame: float = 0.0) -> Measure:
        """`blame`: the part of the wait in the queue that prefill workers are the reason for."""
        wait_s = report.ttft_s - report.queue_s - report.ttft_alone_s + blame * report.queue_s
        may_s = max(self._ttft_s, _AT_LEAST * report.ttft_alone_s)
        took_s = report.ttft_alone_s + max(wait_s, 0.0)
        text = f"TTFT {took_s:.2f} s of {may_s:.2f} s" if took_s else ""
        return Measure(text, max(wait_s, 0.0) / may_s, report.ttft_alone_s / may_s)

    def _next_token(self, report: RouterReport) -> Measure:
        more_s, may_s = max(report.itl_s - report.itl_alone_s, 0.0), max(self._itl_s, _AT_LEAST * report.itl_alone_s)
        text = f"ITL {report.itl_s * 1e3:.3g} ms of {may_s * 1e3:.3g} ms" if report.itl_s else ""
        return Measure(text, more_s / may_s, report.itl_alone_s / may_s)


class _Busy:
    """How busy prefill workers are, a mean of the last seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float, float]] = {}  # when, seconds in steps by then, the mean

    def look(self, workers: Mapping[str, WorkerDemand], now: float) -> float:
        """The sum of their shares: 2.0 when two always are."""
        self._seen = {worker_id: self._mean(worker_id, one.busy_s, now) for worker_id, one in workers.items()}
        return sum(mean for _, _, mean in self._seen.values())

    def _mean(self, worker_id: str, busy_s: float, now: float) -> tuple[float, float, float]:
        since, before, mean = self._seen.get(worker_id, (now, busy_s, 0.0))
        if busy_s < before:  # another process
            return now, busy_s, mean
        if now > since:
            new = 1.0 - math.exp((since - now) / _REMEMBERED_S)
            mean += new * (min((busy_s - before) / (now - since), 1.0) - mean)
        return now, busy_s, mean


def _worst(measures: Iterable[Measure]) -> Measure:
    return max(measures, key=lambda one: one.now)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
