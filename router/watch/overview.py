"""What this router is, and what it knows of its workers and of the controller, now."""

from __future__ import annotations

import structlog

from baton.errors import LedgerError
from baton.ledger.control_state import Board, ControlReport, Plan
from baton.rpc import convert
from baton.rpc.v1 import admin_pb2
from router.floor import Floor
from router.link import WorkerLink

log = structlog.get_logger(__name__)


class Overview:
    """`control`: what the controller said last; None: it is not there, or Redis is not."""

    def __init__(self, floor: Floor, board: Board | None) -> None:
        self.control: ControlReport | None = None
        self._floor = floor
        self._board = board
        self._started = floor.clock.monotonic()

    async def status(self) -> admin_pb2.StatusReply:
        """Taken now, and `control` with it."""
        await self.look()
        return self.known()

    def known(self) -> admin_pb2.StatusReply:
        """Taken now, but for `control`."""
        floor, settings = self._floor, self._floor.settings
        ended = {outcome: floor.outcomes[outcome] for outcome in ("finished", "cancelled", "failed", "refused")}
        return admin_pb2.StatusReply(
            name=settings.name,
            router_id=floor.router_id,
            version=settings.version,
            model=settings.model,
            uptime_s=floor.clock.monotonic() - self._started,
            running=len(floor.running),
            queued=floor.admission.waiting,
            queued_tokens=floor.admission.waiting_tokens,
            drain_requests_per_s=floor.admission.drain.requests_per_s,
            drain_tokens_per_s=floor.admission.drain.tokens_per_s,
            accepted=floor.outcomes["accepted"] + sum(call.accepted for call in floor.running),
            workers=[
                _worker(link, floor.pool.note(link))
                for link in sorted(floor.pool.links, key=lambda link: link.info.ref.worker_id)
            ],
            control=None if self.control is None else _report(self.control, floor.clock.wall()),
            **ended,
        )

    async def look(self) -> None:
        """What the controller says: a round trip to Redis, or as long as that may take when it is silent."""
        try:
            self.control = await self._board.control() if self._board else None
        except LedgerError as error:
            log.warning("board_unreadable", error=str(error))
            self.control = None


def plan_to_pb(plan: Plan) -> admin_pb2.Plan:
    """As it is said to operators."""
    return admin_pb2.Plan(**plan.model_dump())


def _report(report: ControlReport, wall: float) -> admin_pb2.Control:
    return admin_pb2.Control(
        plan=plan_to_pb(report.plan),
        age_s=max(0.0, wall - report.at),
        slots=[admin_pb2.Slot(**slot.model_dump(mode="json")) for slot in report.slots],
        decisions=[
            admin_pb2.Decision(age_s=max(0.0, wall - one.at), kind=one.kind, text=one.text) for one in report.decisions
        ],
        host=report.host,
        outlook=report.outlook,
    )


def _worker(link: WorkerLink, note: str) -> admin_pb2.WorkerStatus:
    return admin_pb2.WorkerStatus(
        info=convert.info_to_pb(link.info),
        load=convert.load_to_pb(link.view.load),
        state=link.state,
        dispatched=link.view.dispatched,
        note=note,
    )
