"""What a router finds out for Prometheus, when it is asked: what the controller said, and which processes there are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from baton.core import Role
from baton.errors import LedgerError
from baton.ledger.control_state import Board
from baton.metrics.http import Target, target

if TYPE_CHECKING:
    from router.floor import Floor

_WITHIN_S = 1.0  # a scraper waits no longer for what is only told here


async def look(floor: Floor, board: Board | None) -> None:
    """Before a scrape: what the controller said last. Without the ledger, what was known before holds."""
    if board is None:
        return
    with suppress(LedgerError, TimeoutError):
        async with asyncio.timeout(_WITHIN_S):
            report = await board.control()
        if report is None:
            floor.metrics.control.nobody()
            return
        floor.metrics.control.said(
            {role.value: report.plan.of(role) for role in Role},
            [(slot.role.value, slot.state, slot.restarts) for slot in report.slots],
            [(decision.at, decision.kind) for decision in report.decisions],
        )


async def targets(floor: Floor, board: Board | None) -> Sequence[Target]:
    """All routers and workers that are known here. Without the ledger: this router, and its workers."""
    routers = {floor.router_id: floor.metrics_at}
    if board is not None:
        with suppress(LedgerError, TimeoutError):
            async with asyncio.timeout(_WITHIN_S):
                routers |= {report.router_id: report.metrics for report in await board.routers() if report.metrics}
    name = floor.settings.name
    found = [target(address, name, "router", router_id) for router_id, address in sorted(routers.items())]
    return found + [target(address, name, "worker", worker_id) for worker_id, address in floor.pool.told_metrics()]
