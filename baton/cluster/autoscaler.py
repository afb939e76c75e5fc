"""How many workers each pool should have, by what routers predict: a plan and the reason for it, or what it waits for.

A pool grows when it has had too much to do for `scaling.up_after_s`: by workers that the other one can spare, which are
turned, else by new ones. It shrinks when fewer would have been enough for `scaling.down_after_s`. Between the two lies
room (`_ENOUGH` to 1), so that what has just grown does not shrink again.

What the pools have to do, from what routers report: measures, each as a share of what may be.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.config import ClusterConfig
from baton.core import Role
from baton.ledger.control_state import PoolSizes, RouterReport, WorkerDemand

_FULL = 0.9  # of the KV blocks of decode workers: what is decoded grows
_SATURATED = 0.9  # of the time of prefill workers: beyond it, prompts wait long
_AT_LEAST = 2.0  # times what one takes with nothing else there: no number of workers makes that shorter
_REMEMBERED_S = 5.0  # how busy prefill workers were


@dataclass(frozen=True, slots=True)
class LoadMeasure:
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


NOTHING = LoadMeasure("", 0.0)


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What a pool has to do, which `there` workers do."""

    there: int
    measures: tuple[LoadMeasure, ...]

    @property
    def worst(self) -> LoadMeasure:
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


class PoolLoads:
    """Of both pools, look by look."""

    def __init__(self, config: ClusterConfig) -> None:
        self._ttft_s, self._itl_s = config.slo.ttft_ms / 1000, config.slo.itl_ms / 1000
        self._rows = config.decode.max_running
        self._colocated = config.mode == "colocated"
        self._busy = _Busy()

    def look(self, routers: Sequence[RouterReport], there: Mapping[Role, int], now: float) -> dict[Role, PoolLoad]:
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
            LoadMeasure(f"busy {share:.0%}", share / _SATURATED, presses=False),
        )
        return {
            Role.PREFILL: PoolLoad(there[Role.PREFILL], (NOTHING,) if self._colocated else prompts),
            Role.DECODE: PoolLoad(
                there[Role.DECODE],
                (
                    prompts[0] if self._colocated else NOTHING,
                    _worst(self._next_token(report) for report in routers),
                    LoadMeasure(f"KV {used - blocked:.0%} of {_FULL:.0%}", (used - blocked) / _FULL),
                    LoadMeasure(f"{rows} of {most} rows", rows / most),
                    LoadMeasure(
                        f"queue {wait_s:.2f} s of {self._ttft_s:.2f} s" if wait_s else "", wait_s / self._ttft_s
                    ),
                ),
            ),
        }

    def _first_token(self, report: RouterReport, blame: float = 0.0) -> LoadMeasure:
        """`blame`: the part of the wait in the queue that prefill workers are the reason for."""
        wait_s = report.ttft_s - report.queue_s - report.ttft_alone_s + blame * report.queue_s
        may_s = max(self._ttft_s, _AT_LEAST * report.ttft_alone_s)
        took_s = report.ttft_alone_s + max(wait_s, 0.0)
        text = f"TTFT {took_s:.2f} s of {may_s:.2f} s" if took_s else ""
        return LoadMeasure(text, max(wait_s, 0.0) / may_s, report.ttft_alone_s / may_s)

    def _next_token(self, report: RouterReport) -> LoadMeasure:
        more_s, may_s = max(report.itl_s - report.itl_alone_s, 0.0), max(self._itl_s, _AT_LEAST * report.itl_alone_s)
        text = f"ITL {report.itl_s * 1e3:.3g} ms of {may_s * 1e3:.3g} ms" if report.itl_s else ""
        return LoadMeasure(text, more_s / may_s, report.itl_alone_s / may_s)


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


def _worst(measures: Iterable[LoadMeasure]) -> LoadMeasure:
    return max(measures, key=lambda one: one.now)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


_ENOUGH = 0.6  # of what a pool can do: fewer workers that would have no more than that are enough
_SPARE = 0.8  # and that much may be left to those who stay when others are turned
_LAPSE_S = 3.0  # between two looks that count
_PATIENCE_S = 300.0  # workers that do not come (models load for minutes) are then decided without


class Worker(Protocol):
    """One that takes requests."""

    @property
    def role(self) -> Role: ...


@dataclass(slots=True)
class _Pool:
    """For how long, in seconds, it has been so."""

    over_s: float = 0.0  # too much to do; time with less is taken off again
    spare_s: float = 0.0  # one fewer could be done with, if need be
    enough_s: float = 0.0  # one fewer would be enough


class Autoscaler:
    """Moves the pools that have `autoscale` between their bounds. It looks about once a second; `now` is monotonic."""

    def __init__(self, config: ClusterConfig) -> None:
        pools = {Role.PREFILL: config.prefill, Role.DECODE: config.decode}
        self._bounds = {role: pool.bounds for role, pool in pools.items() if pool.autoscale}
        self._scaling = config.scaling
        self._pressures = PoolLoads(config)
        self._pools = {role: _Pool() for role in Role}
        self._last: float | None = None  # look
        self._number: int | None = None  # of the plan
        self._quiet_until = 0.0
        self._missing_since: float | None = None

    def look(
        self, plan: PoolSizes, routers: Sequence[RouterReport], workers: Collection[Worker], now: float
    ) -> tuple[PoolSizes | None, str]:
        """The next plan, or None, and what a reader of `baton status` may want to know; empty: it is off.

        `workers`: those in the ledger. A plan that did not come to be is proposed again at the next look.
        """
        last, self._last = now if self._last is None else self._last, now
        if not self._bounds:
            return None, ""
        if (wrong := self._bounded(plan)) is not None:
            return wrong, wrong.reason
        there = Counter(worker.role for worker in workers)
        if not routers:
            self._pools = {role: _Pool() for role in Role}
            return None, "no router says what it sees: nothing is decided"
        pressures = self._pressures.look(routers, there, now)
        seen = "; ".join(f"{role} {there[role]}: {pressures[role]}" for role in Role if plan.of(role) or there[role])
        if why := self._changing(plan, there, last, now):
            self._pools = {role: _Pool() for role in Role}
            return None, f"{seen}; {why}"
        for role, (least, _) in self._bounds.items():
            self._count(self._pools[role], pressures[role], plan.of(role) - 1, least, min(now - last, _LAPSE_S))
        new = self._grown(plan, pressures) or self._shrunk(plan, pressures)
        return new, f"{seen}; {new.reason if new else self._outlook(plan, pressures)}"

    def _bounded(self, plan: PoolSizes) -> PoolSizes | None:
        """The plan within the bounds; None: it is."""
        sizes = {role: min(max(plan.of(role), least), most) for role, (least, most) in self._bounds.items()}
        if all(plan.of(role) == size for role, size in sizes.items()):
            return None
        bounds = ", ".join(f"{role} {least} to {most}" for role, (least, most) in self._bounds.items())
        return _following(plan, sizes, f"autoscale allows {bounds}")

    def _changing(self, plan: PoolSizes, there: Mapping[Role, int], last: float, now: float) -> str:
        """What is waited for before anything is decided; empty: nothing. The controller does not ask while a plan is
        carried out: that time counts.
        """
        if plan.number != self._number:
            self._pools = {role: _Pool() for role in Role}
            self._number, self._quiet_until = plan.number, last + self._scaling.settle_s
        missing = [f"{role} {there[role]} to {plan.of(role)}" for role in Role if there[role] != plan.of(role)]
        self._missing_since = None if not missing else now if self._missing_since is None else self._missing_since
        if self._missing_since is not None and now - self._missing_since < _PATIENCE_S:
            self._quiet_until = now + self._scaling.settle_s
            return f"changing: {', '.join(missing)}"
        left_s = self._quiet_until - now
        return f"settles for {left_s:.0f} s" if left_s > 0 else ""

    def _count(self, pool: _Pool, pressure: PoolLoad, fewer: int, least: int, passed: float) -> None:
        sign = 1 if pressure.now > 1 else -1
        pool.over_s = min(max(pool.over_s + sign * passed, 0.0), self._scaling.up_after_s)
        small = pressure.with_only(fewer) if fewer >= least else math.inf
        pool.spare_s = pool.spare_s + passed if small < _SPARE else 0.0
        pool.enough_s = pool.enough_s + passed if small < _ENOUGH else 0.0

    def _grown(self, plan: PoolSizes, pressures: Mapping[Role, PoolLoad]) -> PoolSizes | None:
        sizes: dict[Role, int] = {}
        why = []
        for role in self._pressed():
            count, worst = plan.of(role), pressures[role].worst
            goal = self._goal(role, count, worst.now)
            if goal == count:
                continue
            text = f"{worst.text} for {self._scaling.up_after_s:g} s"
            other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
            if turned := self._spared(other, plan, pressures[other], goal - count):
                sizes |= {role: count + turned, other: plan.of(other) - turned}
                left = f"{other} with {sizes[other]} is then at {pressures[other].with_only(sizes[other]):.0%}"
                why.append(f"{turned} {other} to be {role} ({count} to {sizes[role]}): {text}; {left} of its limits")
            else:
                sizes[role] = goal
                why.append(f"{role} {count} to {goal}: {text}")
        return _following(plan, sizes, "; ".join(why)) if sizes else None

    def _shrunk(self, plan: PoolSizes, pressures: Mapping[Role, PoolLoad]) -> PoolSizes | None:
        sizes, why = {}, []
        for role, (least, _) in self._bounds.items():
            count, after_s = plan.of(role), self._scaling.down_after_s
            if self._pools[role].enough_s < after_s:
                continue
            fewest = max(least, (count + 1) // 2)
            sizes[role] = next(n for n in range(fewest, count) if pressures[role].with_only(n) < _ENOUGH)
            left = f"with {sizes[role]} at {pressures[role].with_only(sizes[role]):.0%} of its limits"
            why.append(f"{role} {count} to {sizes[role]}: {left}, fewer would have been enough for {after_s:g} s")
        return _following(plan, sizes, "; ".join(why)) if sizes else None

    def _pressed(self) -> list[Role]:
        return [role for role in self._bounds if self._pools[role].over_s >= self._scaling.up_after_s]

    def _goal(self, role: Role, count: int, pressure: float) -> int:
        """As many as share it out, at most twice as many; `count` when there may be no more."""
        return min(max(count + 1, min(math.ceil(count * pressure), 2 * count)), self._bounds[role][1])

    def _spared(self, role: Role, plan: PoolSizes, pressure: PoolLoad, most: int) -> int:
        """How many of this pool, at most so many, the other one can have."""
        if not self._scaling.turn or role not in self._bounds or self._pools[role].spare_s < self._scaling.up_after_s:
            return 0
        count, least = plan.of(role), self._bounds[role][0]
        able = (n for n in range(min(most, count - least), 0, -1) if pressure.with_only(count - n) < _SPARE)
        return next(able, 0)

    def _outlook(self, plan: PoolSizes, pressures: Mapping[Role, PoolLoad]) -> str:
        said = []
        for role, (_, most) in self._bounds.items():
            pool, after, text = self._pools[role], self._scaling, pressures[role].worst.text
            if pool.over_s and plan.of(role) >= most:
                said.append(f"{role} has too much to do ({text}) and its most workers, {most}")
            elif pool.over_s:
                said.append(f"{role} has too much to do for {pool.over_s:.0f} s of {after.up_after_s:g} s ({text})")
            elif pool.enough_s:
                said.append(f"fewer {role} workers are enough for {pool.enough_s:.0f} s of {after.down_after_s:g} s")
        return "; ".join(said) or "steady"


def _following(plan: PoolSizes, sizes: Mapping[Role, int], reason: str) -> PoolSizes:
    changed = {role.value: size for role, size in sizes.items()}
    return plan.model_copy(update=changed | {"number": plan.number + 1, "by": "autoscaler", "reason": reason})
