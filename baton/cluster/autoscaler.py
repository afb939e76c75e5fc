"""How many workers each pool should have, by what routers predict: a plan and the reason for it, or what it waits for.

A pool grows when it has had too much to do for `scaling.up_after_s`: by workers that the other one can spare, which are
turned, else by new ones. It shrinks when fewer would have been enough for `scaling.down_after_s`. Between the two lies
room (`_ENOUGH` to 1), so that what has just grown does not shrink again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.cluster.pressure import Pressure, Pressures
from baton.config import ClusterConfig
from baton.core import Role
from baton.ledger.control_state import Plan, RouterReport

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
        self._pressures = Pressures(config)
        self._pools = {role: _Pool() for role in Role}
        self._last: float | None = None  # look
        self._number: int | None = None  # of the plan
        self._quiet_until = 0.0
        self._missing_since: float | None = None

    def look(
        self, plan: Plan, routers: Sequence[RouterReport], workers: Collection[Worker], now: float
    ) -> tuple[Plan | None, str]:
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

    def _bounded(self, plan: Plan) -> Plan | None:
        """The plan within the bounds; None: it is."""
        sizes = {role: min(max(plan.of(role), least), most) for role, (least, most) in self._bounds.items()}
        if all(plan.of(role) == size for role, size in sizes.items()):
            return None
        bounds = ", ".join(f"{role} {least} to {most}" for role, (least, most) in self._bounds.items())
        return _following(plan, sizes, f"autoscale allows {bounds}")

    def _changing(self, plan: Plan, there: Mapping[Role, int], last: float, now: float) -> str:
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

    def _count(self, pool: _Pool, pressure: Pressure, fewer: int, least: int, passed: float) -> None:
        sign = 1 if pressure.now > 1 else -1
        pool.over_s = min(max(pool.over_s + sign * passed, 0.0), self._scaling.up_after_s)
        small = pressure.with_only(fewer) if fewer >= least else math.inf
        pool.spare_s = pool.spare_s + passed if small < _SPARE else 0.0
        pool.enough_s = pool.enough_s + passed if small < _ENOUGH else 0.0

    def _grown(self, plan: Plan, pressures: Mapping[Role, Pressure]) -> Plan | None:
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

    def _shrunk(self, plan: Plan, pressures: Mapping[Role, Pressure]) -> Plan | None:
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

    def _spared(self, role: Role, plan: Plan, pressure: Pressure, most: int) -> int:
        """How many of this pool, at most so many, the other one can have."""
        if not self._scaling.turn or role not in self._bounds or self._pools[role].spare_s < self._scaling.up_after_s:
            return 0
        count, least = plan.of(role), self._bounds[role][0]
        able = (n for n in range(min(most, count - least), 0, -1) if pressure.with_only(count - n) < _SPARE)
        return next(able, 0)

    def _outlook(self, plan: Plan, pressures: Mapping[Role, Pressure]) -> str:
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


def _following(plan: Plan, sizes: Mapping[Role, int], reason: str) -> Plan:
    changed = {role.value: size for role, size in sizes.items()}
    return plan.model_copy(update=changed | {"number": plan.number + 1, "by": "autoscaler", "reason": reason})
