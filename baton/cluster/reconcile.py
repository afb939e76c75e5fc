"""The controller's state of each worker, and the next change towards the plan. Pure functions without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from baton.cluster.interfaces import Seen
from baton.control_plane import MAX_TEXT, Plan, Slot, SlotState, pool_size
from baton.core import Role, WorkerInfo
from baton.ledger.control_state import WorkerCommand

MAX_IN_A_ROW = 10  # consecutive deaths, each before it was ready for STABLE_S
ROOM_S = 60.0  # a successor without a process after this time does not fit next to its predecessor


@dataclass(slots=True)
class WorkerState:
    """A planned worker and its process. `role` is the role it should have; times are monotonic seconds."""

    worker_id: str
    role: Role
    generation: int
    restarts: int = 0
    note: str = ""
    unwanted: bool = False  # an operator wants it replaced
    leaving: bool = False  # it drains or is being ended, and will not be restarted
    ordered_at: float | None = None  # when its pending command was given
    grace_s: float | None = None  # for its running work, if the order to drain had another one than the cluster file
    born: float = 0.0
    ready_at: float | None = None
    in_a_row: int = 0
    retry_at: float | None = None  # it has ended, and is restarted at that time
    missing_since: float | None = None
    killed: bool = False
    taken_over: bool = False  # its process was started by an earlier controller
    seen: Seen | None = None
    info: WorkerInfo | None = None  # the registration of its live incarnation

    @property
    def state(self) -> SlotState:
        if self.leaving:
            return "draining"
        if self.retry_at is not None:
            return "failed" if self.in_a_row > MAX_IN_A_ROW else "starting"
        if self.ordered_at is not None:
            return "turning"
        return "ready" if self.info is not None else "starting"

    @property
    def slot(self) -> Slot:
        note = self.note[:MAX_TEXT]
        return Slot(self.worker_id, self.role, self.state, self.generation, self.restarts, note)

    def look(self, seen: Seen | None, info: WorkerInfo | None, now: float) -> None:
        """Update the observed state. A lease without a ready process belongs to the previous process and is ignored."""
        waits = seen.error if seen is not None and seen.state == "starting" else None
        waited = self.seen is not None and self.seen.state == "starting" and self.seen.error is not None
        if (waits or waited) and not self.killed:
            self.note = str(waits or "")
        self.seen = seen
        self.info = info if seen is not None and seen.state == "ready" else None
        if self.info is None:
            return
        self.ready_at = now if self.ready_at is None else self.ready_at
        if not self.leaving:
            turned = self.info.role is self.role
            self.ordered_at = None if turned else now if self.ordered_at is None else self.ordered_at
            self.note = ""
        self.missing_since = None

    @property
    def may_serve(self) -> bool:
        """Whether its process serves, or may serve although the process has not answered this controller yet."""
        return self.seen is not None and (
            self.seen.state == "ready" or (self.taken_over and self.seen.state == "starting")
        )

    def old(self, plan: Plan) -> bool:
        """Return whether another worker is to replace it."""
        return self.unwanted or self.generation < plan.generation

    def adopt_command(self, order: WorkerCommand | None, now: float) -> None:
        """Adopt a command for its live incarnation, written by an operator (`wish`) or by an earlier controller."""
        if order is None or self.info is None:
            return
        if order.drain and not order.wish:
            self.grace_s = order.grace_s
        if self.leaving:
            return
        if order.wish:
            self.unwanted, self.note = True, "will be replaced"
        elif order.drain:
            self.leave(now)
        elif order.role is not self.role and order.role is not self.info.role:
            self.change_role(order.role, now)

    def leave(self, now: float) -> None:
        self.leaving, self.ordered_at, self.note = True, now, ""

    def change_role(self, role: Role, now: float) -> None:
        self.role, self.ordered_at = role, now

    def order(self, grace_s: float) -> WorkerCommand | None:
        """Return the command that its live incarnation needs, or None."""
        if self.info is None or not (self.leaving or self.info.role is not self.role):
            return None
        return WorkerCommand(
            incarnation=str(self.info.ref.incarnation),
            role=self.role,
            drain=self.leaving,
            grace_s=grace_s if self.grace_s is None else self.grace_s,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One change: start a worker of `role`, change the role of `unit` to it, or have `unit` leave."""

    kind: Literal["start", "turn", "leave"]
    reason: str
    role: Role
    unit: WorkerState | None = None


def reconcile_step(units: Sequence[WorkerState], plan: Plan, now: float, *, turns: bool) -> Step | None:
    """Return the next change towards the plan that is allowed now, or None. `turns` allows role changes. A ready worker
    leaves only if as many ready ones remain as planned. If its successor does not fit next to it, one must remain.
    """
    kept = {role: [unit for unit in units if unit.role is role and not unit.leaving] for role in Role}
    over = {role: len(kept[role]) - pool_size(plan, role) for role in Role}
    for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        if over[role] >= 0:
            continue
        if turns and over[other] > 0:
            spare = _spare(kept[other], plan, other, now)
            if spare is not None and spare.state == "ready":
                return Step("turn", f"{other.value} has a surplus worker, {role.value} lacks one", role, spare)
            if spare is None and any(unit.state in {"starting", "turning"} for unit in kept[other]):
                continue  # until one may change its role
        return Step("start", f"planned {role.value} workers: {pool_size(plan, role)}", role)
    for role in Role:
        if over[role] > 0 and (spare := _spare(kept[role], plan, role, now)) is not None:
            reason = f"replaced by generation {plan.generation}"
            if not spare.old(plan):
                reason = f"planned workers: {pool_size(plan, role)}"
            return Step("leave", "drained by an operator" if spare.unwanted else reason, role, spare)
    return _successor(units, kept, plan)


def _successor(units: Sequence[WorkerState], kept: dict[Role, list[WorkerState]], plan: Plan) -> Step | None:
    """Return a start above plan to replace a worker: one at a time, and only when no change is in progress."""
    if any(unit.state not in {"ready", "failed"} for unit in units):
        return None
    for role in Role:
        old = next((unit for unit in kept[role] if unit.old(plan)), None)
        if old is not None and len(kept[role]) == pool_size(plan, role):
            why = "an operator drains" if old.unwanted else f"is of generation {old.generation}"
            return Step("start", f"to replace {old.worker_id}, which {why}", role)
    return None


def _spare(kept: Sequence[WorkerState], plan: Plan, role: Role, now: float) -> WorkerState | None:
    """Return the surplus worker to leave next, or None: outdated ones first, then unready ones, then the newest."""
    ranked = sorted(kept, key=lambda unit: _index(unit.worker_id), reverse=True)
    old = [unit for unit in ranked if unit.old(plan)]
    ready = [unit for unit in ranked if unit.state == "ready"]
    for unit in old or ranked:
        if unit.state in {"starting", "failed"}:
            return unit
    if any(unit not in old for unit in ready):  # the new generation is able to become ready
        for unit in ranked:
            if unit.state == "failed":
                return unit
    least, narrow = pool_size(plan, role), any(unit.in_a_row == 0 and lacks_room(unit, now) for unit in kept)
    least = min(1, least) if narrow else least
    return next((unit for unit in ready if not old or unit in old), None) if len(ready) > least else None


def lacks_room(unit: WorkerState, now: float) -> bool:
    """Return whether it has been without a process for so long that it does not fit anywhere."""
    placed = unit.seen is not None and (unit.seen.state != "starting" or unit.seen.pid is not None)
    return unit.state == "starting" and not placed and now - unit.born > ROOM_S


def _index(worker_id: str) -> tuple[int, str]:
    number = worker_id.rpartition("-")[2]
    return (int(number) if number.isdecimal() else 0, worker_id)


def free_id(role: Role, taken: Iterable[str]) -> str:
    """Return `ROLE-N` with the lowest number that is not taken, such as `decode-0`."""
    known = set(taken)
    return next(name for n in range(len(known) + 1) if (name := f"{role.value}-{n}") not in known)
