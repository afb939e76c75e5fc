"""What a controller knows of each worker, and what to change so that they become as planned: pure, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from baton.cluster.interfaces import Seen
from baton.core import Role, WorkerInfo
from baton.ledger.control_state import PoolSizes, WorkerCommand, WorkerSlot

MAX_IN_A_ROW = 10  # deaths, without STABLE_S of life between them
ROOM_S = 60.0  # a successor that has no process after so long finds no room beside what it is to replace

State = Literal["starting", "ready", "turning", "draining", "failed"]


@dataclass(slots=True)
class WorkerState:
    """A worker's place. `role` is what it should be; times are monotonic seconds."""

    worker_id: str
    role: Role
    generation: int
    restarts: int = 0
    note: str = ""
    unwanted: bool = False  # an operator wants another in its place
    leaving: bool = False  # it drains, or is ended, and is not started again
    told_at: float | None = None  # since when it is under an order, not yet done
    born: float = 0.0
    in_a_row: int = 0
    retry_at: float | None = None  # it has ended, and is started again then
    missing_since: float | None = None
    killed: bool = False
    seen: Seen | None = None
    info: WorkerInfo | None = None  # what its live incarnation says of itself

    @property
    def state(self) -> State:
        if self.leaving:
            return "draining"
        if self.retry_at is not None:
            return "failed" if self.in_a_row > MAX_IN_A_ROW else "starting"
        if self.told_at is not None:
            return "turning"
        return "ready" if self.info is not None else "starting"

    @property
    def slot(self) -> WorkerSlot:
        """For the report."""
        return WorkerSlot(
            worker_id=self.worker_id,
            role=self.role,
            state=self.state,
            generation=self.generation,
            restarts=self.restarts,
            note=self.note,
        )

    def look(self, seen: Seen | None, info: WorkerInfo | None, now: float) -> None:
        """What is known of it now. A lease without a process that is ready is that of the process before."""
        waits = seen.error if seen is not None and seen.state == "starting" else None
        waited = self.seen is not None and self.seen.state == "starting" and self.seen.error is not None
        if (waits or waited) and not self.killed:
            self.note = str(waits or "")
        self.seen = seen
        self.info = info if seen is not None and seen.state == "ready" else None
        if self.info is None:
            return
        if not self.leaving:
            turned = self.info.role is self.role
            self.told_at = None if turned else now if self.told_at is None else self.told_at
            self.note = ""
        self.missing_since = None

    def old(self, plan: PoolSizes) -> bool:
        """Whether another is to take its place."""
        return self.unwanted or self.generation < plan.generation

    def obey(self, order: WorkerCommand | None, now: float) -> None:
        """What is said of its live incarnation by an operator (a wish), or by the controller before this one."""
        if order is None or self.info is None or self.leaving:
            return
        if order.wish:
            self.unwanted, self.note = True, "is to be replaced"
        elif order.drain:
            self.leave(now)
        elif order.role is not self.role and order.role is not self.info.role:
            self.change_role(order.role, now)

    def leave(self, now: float) -> None:
        self.leaving, self.told_at, self.note = True, now, ""

    def change_role(self, role: Role, now: float) -> None:
        self.role, self.told_at = role, now

    def order(self, grace_s: float) -> WorkerCommand | None:
        """What its live incarnation has to be told; None: nothing."""
        if self.info is None or not (self.leaving or self.info.role is not self.role):
            return None
        return WorkerCommand(
            incarnation=str(self.info.ref.incarnation), role=self.role, drain=self.leaving, grace_s=grace_s
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One change: start a worker of `role`, or turn `unit` into one, or have it leave."""

    kind: Literal["start", "turn", "leave"]
    reason: str
    role: Role
    unit: WorkerState | None = None


def reconcile_step(units: Sequence[WorkerState], plan: PoolSizes, now: float, *, turns: bool) -> Step | None:
    """The next change towards the plan that may be made now; None: there is none, or one must be waited for.

    No ready worker is taken away that leaves fewer ready ones than planned; but where its successor finds no room
    beside it, all but the last one may go first. `turns`: whether a worker may change its role.
    """
    kept = {role: [unit for unit in units if unit.role is role and not unit.leaving] for role in Role}
    over = {role: len(kept[role]) - plan.of(role) for role in Role}
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if over[role] >= 0:
            continue
        if turns and over[other] > 0:
            spare = _spare(kept[other], plan, other, now)
            if spare is not None and spare.state == "ready":
                return Step("turn", f"{other.value} has one too many, {role.value} one too few", role, spare)
            if spare is None and any(unit.state in {"starting", "turning"} for unit in kept[other]):
                continue  # until one may be turned
        return Step("start", f"{plan.of(role)} {role.value} workers are planned", role)
    for role in Role:
        if over[role] > 0 and (spare := _spare(kept[role], plan, role, now)) is not None:
            reason = f"generation {plan.generation} takes its place"
            if not spare.old(plan):
                reason = f"{plan.of(role)} are planned"
            return Step("leave", "an operator wants it drained" if spare.unwanted else reason, role, spare)
    return _successor(units, kept, plan)


def _successor(units: Sequence[WorkerState], kept: dict[Role, list[WorkerState]], plan: PoolSizes) -> Step | None:
    """One more than planned, for a worker that is to be replaced; one at a time, when nothing else is under way."""
    if any(unit.state not in {"ready", "failed"} for unit in units):
        return None
    for role in Role:
        old = next((unit for unit in kept[role] if unit.old(plan)), None)
        if old is not None and len(kept[role]) == plan.of(role):
            why = "an operator wants drained" if old.unwanted else f"is of generation {old.generation}"
            return Step("start", f"to replace {old.worker_id}, which {why}", role)
    return None


def _spare(kept: Sequence[WorkerState], plan: PoolSizes, role: Role, now: float) -> WorkerState | None:
    """Which of too many goes next: one that is to be replaced, not ready, newest; None: none may go now."""
    ranked = sorted(kept, key=lambda unit: _index(unit.worker_id), reverse=True)
    old = [unit for unit in ranked if unit.old(plan)]
    ready = [unit for unit in ranked if unit.state == "ready"]
    for unit in old or ranked:
        if unit.state in {"starting", "failed"}:
            return unit
    if any(unit not in old for unit in ready):  # the new generation can be ready
        for unit in ranked:
            if unit.state == "failed":
                return unit
    least = min(1, plan.of(role)) if any(_without_room(unit, now) for unit in kept) else plan.of(role)
    return next((unit for unit in ready if not old or unit in old), None) if len(ready) > least else None


def _without_room(unit: WorkerState, now: float) -> bool:
    placed = unit.seen is not None and (unit.seen.state != "starting" or unit.seen.pid is not None)
    return unit.state == "starting" and unit.in_a_row == 0 and not placed and now - unit.born > ROOM_S


def _index(worker_id: str) -> tuple[int, str]:
    number = worker_id.rpartition("-")[2]
    return (int(number) if number.isdecimal() else 0, worker_id)


def free_id(role: Role, taken: Iterable[str]) -> str:
    """`decode-0`, or the lowest number that is not taken."""
    known = set(taken)
    return next(name for n in range(len(known) + 1) if (name := f"{role.value}-{n}") not in known)
