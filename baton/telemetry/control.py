"""What the controller says of a cluster, as metrics of the routers that read it: it has no listener of its own."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.metrics_core import Metric

from baton.telemetry.families import counter, gauge
from baton.telemetry.labels import DECISIONS, SLOT_STATES


class Controlled:
    """What it said last; nothing of it while there is none. Each router says the same: take the greatest."""

    def __init__(self) -> None:
        self._planned: Mapping[str, int] = {}
        self._slots: Sequence[tuple[str, str, int]] = ()
        self._decided: Counts[str] = Counts(dict.fromkeys(DECISIONS, 0))
        self._seen: float | None = None  # the time of the last decision

    def nobody(self) -> None:
        """No controller is there."""
        self._planned, self._slots = {}, ()

    def said(
        self,
        planned: Mapping[str, int],
        slots: Sequence[tuple[str, str, int]],
        decisions: Sequence[tuple[float, str]],
    ) -> None:
        """Workers by role, slots by role, state and restarts, and its latest decisions by time and kind. What was
        decided before the first of these calls is not counted.
        """
        self._planned, self._slots = planned, slots
        for at, kind in decisions:
            if self._seen is not None and at > self._seen:
                self._decided[kind] += 1
        self._seen = max((at for at, _ in decisions), default=self._seen or 0.0)

    def collect(self) -> Iterable[Metric]:
        planned = [((role,), float(count)) for role, count in self._planned.items()]
        yield gauge("baton_planned_workers", "Workers that the controller is to keep", ("role",), planned)
        slots = {(role, state): 0.0 for role in self._planned for state in SLOT_STATES}
        restarts = dict.fromkeys(((role,) for role in self._planned), 0.0)
        for role, state, count in self._slots:
            slots[role, state] = slots.get((role, state), 0.0) + 1
            restarts[(role,)] = restarts.get((role,), 0.0) + count
        yield gauge("baton_slots", "Workers' places, as the controller sees them", ("role", "state"), slots.items())
        text = "Workers that were started again in the places that there are"
        yield gauge("baton_slot_restarts", text, ("role",), restarts.items())
        rows = [((kind,), float(count)) for kind, count in self._decided.items()]
        yield counter("baton_decisions", "Of the controller, since this router began", ("kind",), rows)
