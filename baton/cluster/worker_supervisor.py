"""Supervision of worker processes: starts them, restarts ended ones, and kills those that make no progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import structlog

from baton.clock import Clock
from baton.cluster.backend_process import BACKOFF_S, STABLE_S, START_TIMEOUT_S, StartError
from baton.cluster.interfaces import Placement
from baton.cluster.reconcile import MAX_IN_A_ROW, WorkerState
from baton.control_plane import MAX_TEXT, DecisionKind
from baton.ledger.control_state import DECISIONS, Decision

PAUSE_S = 60.0  # until another attempt after too many failures
OVERTIME_S = 60.0  # beyond the drain grace period, until a worker that has not obeyed its command is killed

log = structlog.get_logger(__name__)


class DecisionLog:
    """Decisions with their reasons: logged, and the last ones kept for the report."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS)

    def record(self, kind: DecisionKind, text: str) -> None:
        write = log.warning if kind in {"replace", "give_up"} else log.info
        write("decision", kind=kind, text=text)
        # The times rise although a clock may step back, because routers count the decisions after the last known time.
        at = max(self._clock.wall(), self.decisions[-1].at + 0.001 if self.decisions else 0.0)
        self.decisions.append(Decision(at=at, kind=kind, text=text[:MAX_TEXT]))


class WorkerSupervisor:
    """Supervises all worker processes of one cluster. It changes their roles and number only on request."""

    def __init__(self, placement: Placement, journal: DecisionLog, lease_grace_s: float, drain_s: float) -> None:
        """`lease_grace_s` is the time a worker without a lease has to register again before it counts as frozen."""
        self.units: dict[str, WorkerState] = {}
        self._placement, self._journal = placement, journal
        self._lease_grace_s, self._drain_s = lease_grace_s, drain_s

    def start(self, unit: WorkerState, now: float) -> None:
        """Begin to start the worker's process. It must have none."""
        unit.born, unit.retry_at, unit.ordered_at, unit.missing_since, unit.killed = now, None, None, None, False
        unit.seen, unit.info, unit.unwanted, unit.ready_at, unit.taken_over = None, None, False, None, False
        self.units[unit.worker_id] = unit
        self._placement.start(unit.worker_id, unit.role)

    def leave(self, unit: WorkerState, reason: str, now: float) -> None:
        """Drain a ready worker. One that is not ready holds no requests and is killed immediately."""
        drains = unit.state == "ready"
        unit.leave(now)
        self._journal.record("drain" if drains else "end", f"{unit.worker_id}: {reason}")
        if not drains:
            self._placement.kill(unit.worker_id)

    def supervise(self, generation: int, now: float, *, kill: bool) -> None:
        """Restart ended workers with `generation`, and with `kill` end overdue ones."""
        for unit in list(self.units.values()):
            if unit.seen is None or unit.seen.state == "ended":
                self._ended(unit, generation, now)
            elif kill and not unit.killed and (reason := self._overdue(unit, now)):
                unit.killed, unit.note = True, reason
                self._journal.record("replace", f"{unit.worker_id} {reason}; killing its process")
                self._placement.kill(unit.worker_id)

    def retry(self, units: Iterable[WorkerState], now: float) -> None:
        for unit in units:
            if unit.retry_at is not None:
                unit.in_a_row, unit.retry_at = 0, now

    def _ended(self, unit: WorkerState, generation: int, now: float) -> None:
        if unit.leaving:
            self._placement.forget(unit.worker_id)
            del self.units[unit.worker_id]
            self._journal.record("end", f"{unit.worker_id} has ended")
        elif unit.retry_at is None:
            self._died(unit, now)
        elif now >= unit.retry_at:
            self._placement.forget(unit.worker_id)
            unit.generation, unit.restarts = generation, unit.restarts + 1
            self.start(unit, now)

    def _died(self, unit: WorkerState, now: float) -> None:
        stable = unit.ready_at is not None and now - unit.ready_at > STABLE_S
        unit.in_a_row, unit.info = 1 if stable else unit.in_a_row + 1, None
        error = unit.seen.error if unit.seen else None
        why = unit.note if unit.killed else str(error or StartError("ended"))
        given_up = unit.in_a_row > MAX_IN_A_ROW
        pause = PAUSE_S if given_up else BACKOFF_S[min(unit.in_a_row, len(BACKOFF_S)) - 1]
        unit.retry_at, unit.note = now + pause, why
        if unit.in_a_row == MAX_IN_A_ROW + 1:
            self._journal.record("give_up", f"{unit.worker_id} died {unit.in_a_row} times in a row: {why}")
        elif not given_up and not unit.killed:
            self._journal.record("replace", f"{unit.worker_id}, restart in {pause:g} s: {why}")

    def _overdue(self, unit: WorkerState, now: float) -> str:
        """Return why the worker counts as frozen, or an empty string."""
        assert unit.seen is not None
        if unit.ordered_at is not None:
            what = "drain" if unit.leaving else "change its role"
            limit = self._drain_s + OVERTIME_S
            return f"did not {what} within {limit:g} s" if now - unit.ordered_at > limit else ""
        if unit.seen.state == "starting":
            return f"was silent for {START_TIMEOUT_S:g} s" if now - unit.born > START_TIMEOUT_S else ""
        if unit.info is None:
            unit.missing_since = now if unit.missing_since is None else unit.missing_since
            if now - unit.missing_since > self._lease_grace_s:
                return f"has had no lease for {self._lease_grace_s:g} s"
        return ""
