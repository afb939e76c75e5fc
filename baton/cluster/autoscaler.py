"""The autoscaler: turns the predictions of routers into a plan for both pools, with a reason.

`PoolLoads` computes each pool's load as shares of limits. A pool grows after `scaling.up_after_s` of overload: by role
change of workers that the other pool can spare, or else by new ones. It shrinks when fewer workers would have been
enough for `scaling.down_after_s`. The gap between both thresholds (`_ENOUGH` to 1) prevents oscillation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.config import ClusterConfig
from baton.control_plane import Plan, next_plan, pool_size
from baton.core import Role, WorkerInfo
from baton.ledger.control_state import RouterReport

_FULL = 0.9  # usable share of decode workers' KV blocks, because running sequences grow
_SATURATED = 0.9  # usable share of prefill workers' time; beyond it, prompts wait long
_AT_LEAST = 2.0  # lowest latency limit, times the unloaded latency, which more workers cannot reduce
_REMEMBERED_S = 5.0  # time constant of the mean load of prefill workers


@dataclass(frozen=True, slots=True)
class LoadMeasure:
    """One load of a pool, as a share of its limit: `fixed` is constant, `shared` is divided among the workers. `text`
    is for operators, or empty if nothing is known. A measure without `presses` limits shrinking, but causes no growth.
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
    """The load measures of a pool that has `there` workers."""

    there: int
    measures: tuple[LoadMeasure, ...]

    @property
    def worst(self) -> LoadMeasure:
        return _worst(self.measures)

    def with_only(self, workers: int) -> float:
        each = max(self.there, 1) / workers if workers else math.inf
        return max(one.fixed + (one.shared and one.shared * each) for one in self.measures)

    def __str__(self) -> str:
        return ", ".join(one.text for one in self.measures if one.text)


class PoolLoads:
    """Computes the loads of both pools from the routers' reports."""

    def __init__(self, config: ClusterConfig) -> None:
        self._ttft_s, self._itl_s = config.slo.ttft_ms / 1000, config.slo.itl_ms / 1000
        self._rows = config.decode.max_running
        self._colocated = config.mode == "colocated"
        self._busy: dict[str, tuple[float, float, float]] = {}  # by prefill worker: time, busy seconds until then, mean

    def look(self, routers: Sequence[RouterReport], there: Mapping[Role, int], now: float) -> dict[Role, PoolLoad]:
        """Return both loads at `now` (monotonic), from at least one router and the number of workers by role. Decode KV
        is reserved before a prompt is computed. While prefill is overloaded, reservations and queue wait of its waiting
        prompts count against prefill, because more decode workers would only fill up too. Colocated workers (role
        decode) take it all.
        """
        workers = {worker_id: one for report in routers for worker_id, one in report.workers.items()}
        decodes = [one for one in workers.values() if one.role is Role.DECODE]
        prefills = [(name, one.busy_s) for name, one in workers.items() if one.role is Role.PREFILL]
        self._busy = {name: self._busy_mean(name, busy_s, now) for name, busy_s in prefills}
        share = sum(mean for _, _, mean in self._busy.values()) / max(there[Role.PREFILL], 1)
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
        queue = f"queue {wait_s:.2f} s of {self._ttft_s:.2f} s" if wait_s else ""
        decoding = (
            prompts[0] if self._colocated else NOTHING,
            _worst(self._next_token(report) for report in routers),
            LoadMeasure(f"KV {used - blocked:.0%} of {_FULL:.0%}", (used - blocked) / _FULL),
            LoadMeasure(f"{rows} of {most} rows", rows / most),
            LoadMeasure(queue, wait_s / self._ttft_s),
        )
        return {
            Role.PREFILL: PoolLoad(there[Role.PREFILL], (NOTHING,) if self._colocated else prompts),
            Role.DECODE: PoolLoad(there[Role.DECODE], decoding),
        }

    def _first_token(self, report: RouterReport, blame: float = 0.0) -> LoadMeasure:
        """Measure the TTFT. `blame` is the share of the queue wait that prefill workers cause."""
        wait_s = report.ttft_s - report.queue_s - report.ttft_alone_s + blame * report.queue_s
        may_s = max(self._ttft_s, _AT_LEAST * report.ttft_alone_s)
        took_s = report.ttft_alone_s + max(wait_s, 0.0)
        text = f"TTFT {took_s:.2f} s of {may_s:.2f} s" if took_s else ""
        return LoadMeasure(text, max(wait_s, 0.0) / may_s, report.ttft_alone_s / may_s)

    def _next_token(self, report: RouterReport) -> LoadMeasure:
        more_s, may_s = max(report.itl_s - report.itl_alone_s, 0.0), max(self._itl_s, _AT_LEAST * report.itl_alone_s)
        text = f"ITL {report.itl_s * 1e3:.3g} ms of {may_s * 1e3:.3g} ms" if report.itl_s else ""
        return LoadMeasure(text, more_s / may_s, report.itl_alone_s / may_s)

    def _busy_mean(self, worker_id: str, busy_s: float, now: float) -> tuple[float, float, float]:
        """Return the next entry of `_busy`. Its mean is 1.0 if the worker is always busy."""
        since, before, mean = self._busy.get(worker_id, (now, busy_s, 0.0))
        if busy_s < before:  # the worker's process is a new one
            return now, busy_s, mean
        if now > since:
            new = 1.0 - math.exp((since - now) / _REMEMBERED_S)
            mean += new * (min((busy_s - before) / (now - since), 1.0) - mean)
        return now, busy_s, mean


def _worst(measures: Iterable[LoadMeasure]) -> LoadMeasure:
    return max(measures, key=lambda one: one.now)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


_ENOUGH = 0.6  # a smaller pool is enough if its load stays below this
_SPARE = 0.8  # load limit of the remaining workers when others change role
_LAPSE_S = 3.0  # longest time between two looks that counts
_MISSING_TIMEOUT_S = 300.0  # missing workers are then ignored (models load for minutes)


@dataclass(slots=True)
class _Pool:
    """How many seconds each condition of a pool has held."""

    over_s: float = 0.0  # overloaded; time without overload is subtracted
    spare_s: float = 0.0  # one worker could be spared for the other pool
    enough_s: float = 0.0  # one worker fewer would be enough


class Autoscaler:
    """Moves pools that have `autoscale` within their limits. It is called about once a second; `now` is monotonic."""

    def __init__(self, config: ClusterConfig) -> None:
        pools = {Role.PREFILL: config.prefill, Role.DECODE: config.decode}
        self._bounds = {role: pool.bounds for role, pool in pools.items() if pool.autoscale}
        self._scaling = config.scaling
        self._loads = PoolLoads(config)
        self._pools = {role: _Pool() for role in Role}
        self._last: float | None = None  # time of the last look
        self._number: int | None = None  # number of the last plan
        self._quiet_until = 0.0
        self._missing_since: float | None = None

    def look(
        self, plan: Plan, routers: Sequence[RouterReport], workers: Collection[WorkerInfo], now: float
    ) -> tuple[Plan | None, str]:
        """Return the next plan or None, and a text for `baton status`, which is empty if autoscaling is off. `workers`
        are those in the ledger. A plan that was not adopted is proposed again by the next look.
        """
        last, self._last = now if self._last is None else self._last, now
        if not self._bounds:
            return None, ""
        if (wrong := self._bounded(plan)) is not None:
            return wrong, wrong.reason
        there = Counter(worker.role for worker in workers)
        if not routers:
            self._pools = {role: _Pool() for role in Role}
            return None, "no router reports its load, so no decision is made"
        loads = self._loads.look(routers, there, now)
        shown = [role for role in Role if pool_size(plan, role) or there[role]]
        seen = "; ".join(f"{role} {there[role]}: {loads[role]}" for role in shown)
        if why := self._changing(plan, there, last, now):
            self._pools = {role: _Pool() for role in Role}
            return None, f"{seen}; {why}"
        for role, (least, _) in self._bounds.items():
            self._count(self._pools[role], loads[role], pool_size(plan, role) - 1, least, min(now - last, _LAPSE_S))
        new = self._grown(plan, loads) or self._shrunk(plan, loads)
        return new, f"{seen}; {new.reason if new else self._outlook(plan, loads)}"

    def _bounded(self, plan: Plan) -> Plan | None:
        """Return the plan moved within the limits, or None if it is within them."""
        sizes = {role: min(max(pool_size(plan, role), least), most) for role, (least, most) in self._bounds.items()}
        if all(pool_size(plan, role) == size for role, size in sizes.items()):
            return None
        bounds = ", ".join(f"{role} {least} to {most}" for role, (least, most) in self._bounds.items())
        return next_plan(plan, sizes, "autoscaler", f"autoscale allows {bounds}")

    def _changing(self, plan: Plan, there: Mapping[Role, int], last: float, now: float) -> str:
        """Return why decisions must wait, if so. Time without calls, while a plan is carried out, counts too."""
        if plan.number != self._number:
            self._pools = {role: _Pool() for role in Role}
            self._number, self._quiet_until = plan.number, last + self._scaling.settle_s
        sizes = ((role, pool_size(plan, role)) for role in Role)
        missing = [f"{role} {there[role]} to {size}" for role, size in sizes if there[role] != size]
        self._missing_since = None if not missing else now if self._missing_since is None else self._missing_since
        if self._missing_since is not None and now - self._missing_since < _MISSING_TIMEOUT_S:
            self._quiet_until = now + self._scaling.settle_s
            return f"changing: {', '.join(missing)}"
        left_s = self._quiet_until - now
        return f"settles for {left_s:.0f} s" if left_s > 0 else ""

    def _count(self, pool: _Pool, load: PoolLoad, fewer: int, least: int, passed: float) -> None:
        sign = 1 if load.worst.now > 1 else -1
        pool.over_s = min(max(pool.over_s + sign * passed, 0.0), self._scaling.up_after_s)
        small = load.with_only(fewer) if fewer >= least else math.inf
        pool.spare_s = pool.spare_s + passed if small < _SPARE else 0.0
        pool.enough_s = pool.enough_s + passed if small < _ENOUGH else 0.0

    def _grown(self, plan: Plan, loads: Mapping[Role, PoolLoad]) -> Plan | None:
        sizes: dict[Role, int] = {}
        why = []
        for role in self._bounds:
            if self._pools[role].over_s < self._scaling.up_after_s:
                continue
            count, worst = pool_size(plan, role), loads[role].worst
            goal = max(count + 1, min(math.ceil(count * worst.now), 2 * count))  # enough for the load, at most twice
            goal = min(goal, self._bounds[role][1])
            if goal == count:
                continue
            text = f"{worst.text} for {self._scaling.up_after_s:g} s"
            other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
            if turned := self._spared(other, plan, loads[other], goal - count):
                sizes |= {role: count + turned, other: pool_size(plan, other) - turned}
                left = f"{other} with {sizes[other]} is then at {loads[other].with_only(sizes[other]):.0%}"
                why.append(f"{turned} {other} to {role} ({count} to {sizes[role]}): {text}; {left} of its limits")
            else:
                sizes[role] = goal
                why.append(f"{role} {count} to {goal}: {text}")
        return next_plan(plan, sizes, "autoscaler", "; ".join(why)) if sizes else None

    def _shrunk(self, plan: Plan, loads: Mapping[Role, PoolLoad]) -> Plan | None:
        sizes, why = {}, []
        for role, (least, _) in self._bounds.items():
            count, after_s = pool_size(plan, role), self._scaling.down_after_s
            if self._pools[role].enough_s < after_s:
                continue
            fewest = max(least, (count + 1) // 2)
            sizes[role] = next(n for n in range(fewest, count) if loads[role].with_only(n) < _ENOUGH)
            left = f"with {sizes[role]} at {loads[role].with_only(sizes[role]):.0%} of its limits"
            why.append(f"{role} {count} to {sizes[role]}: {left}, spare workers for {after_s:g} s")
        return next_plan(plan, sizes, "autoscaler", "; ".join(why)) if sizes else None

    def _spared(self, role: Role, plan: Plan, load: PoolLoad, most: int) -> int:
        """Return how many workers, at most `most`, this pool can give to the other one."""
        if not self._scaling.turn or role not in self._bounds or self._pools[role].spare_s < self._scaling.up_after_s:
            return 0
        count, least = pool_size(plan, role), self._bounds[role][0]
        able = (n for n in range(min(most, count - least), 0, -1) if load.with_only(count - n) < _SPARE)
        return next(able, 0)

    def _outlook(self, plan: Plan, loads: Mapping[Role, PoolLoad]) -> str:
        parts = []
        for role, (_, most) in self._bounds.items():
            pool, after, text = self._pools[role], self._scaling, loads[role].worst.text
            if pool.over_s and pool_size(plan, role) >= most:
                parts.append(f"{role} is overloaded ({text}) at its maximum of {most} workers")
            elif pool.over_s:
                parts.append(f"{role} is overloaded for {pool.over_s:.0f} s of {after.up_after_s:g} s ({text})")
            elif pool.enough_s:
                parts.append(f"{role} has spare workers for {pool.enough_s:.0f} s of {after.down_after_s:g} s")
        return "; ".join(parts) or "steady"
