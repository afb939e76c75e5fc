"""The gRPC service for operators: the router's status, and commands for the controller."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

import structlog
from grpc import StatusCode

from baton.control_plane import Plan, next_plan
from baton.core import Role
from baton.errors import BatonError, InvalidRequest, NoWorker, Violation
from baton.ledger.control_state import ControlReport, ControlState, WorkerCommand
from baton.rpc.status import abort
from baton.rpc.v1 import admin_pb2
from baton.rpc.v1.admin_pb2_grpc import AdminServicer
from router.auth.interceptor import current_grant
from router.auth.tokens import TokenFile
from router.context import RouterSettings
from router.request.client_request import RunningRequests
from router.request.delivery import Context
from router.request.lifecycle import Dispatch
from router.request.observer import Sinks
from router.status import Overview, StatusBroadcaster, plan_to_pb

log = structlog.get_logger(__name__)

_TRIES = 5  # each may conflict with another writer of the plan


class Admin(AdminServicer):
    """Servicer of `baton.v1.Admin`: this router's status and its view of the workers, and changes of the plan."""

    def __init__(
        self,
        settings: RouterSettings,
        sinks: Sinks,
        dispatch: Dispatch,
        running: RunningRequests,
        tokens: TokenFile | None,
        board: ControlState | None,
    ) -> None:
        self._settings, self._sinks, self._pool = settings, sinks, dispatch.pool
        self._running, self._tokens, self._board = running, tokens, board
        self._overview = Overview(settings, sinks, dispatch, running, board)
        self.live = StatusBroadcaster(self._overview, sinks, dispatch.pool, running)

    async def Status(self, request: admin_pb2.StatusRequest, context: Context) -> admin_pb2.StatusReply:
        return await self._overview.status()

    async def Requests(self, request: admin_pb2.RequestsRequest, context: Context) -> admin_pb2.RequestsReply:
        ids = [choice.request_id for call in self._running for choice in call.observer.choices]
        return admin_pb2.RequestsReply(router_id=self._sinks.router_id, request_ids=ids)

    async def Scale(self, request: admin_pb2.ScaleRequest, context: Context) -> admin_pb2.ScaleReply:
        async with _told(context):
            return admin_pb2.ScaleReply(plan=plan_to_pb(await self._replan(request)))

    async def Restart(self, request: admin_pb2.RestartRequest, context: Context) -> admin_pb2.RestartReply:
        async with _told(context):
            return admin_pb2.RestartReply(plan=plan_to_pb(await self._replan(None)))

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainReply:
        async with _told(context):
            board, control = await self._controlled()
            refs = {link.info.ref.worker_id: link.info for link in self._pool.links if not link.retired}
            info = refs.get(request.worker_id)
            if info is None or request.worker_id not in {slot.worker_id for slot in control.slots}:
                known = ", ".join(sorted(refs)) or "none"
                raise InvalidRequest.of(
                    "worker_id", f"no such worker is here: {request.worker_id!r}; known are {known}"
                )
            grace_s = self._settings.drain_s
            order = WorkerCommand(
                incarnation=str(info.ref.incarnation), role=info.role, drain=True, grace_s=grace_s, wish=True
            )
            await board.put_order(request.worker_id, order)
            log.info("drain_wished", worker=info.ref)
            return admin_pb2.DrainReply()

    async def Watch(self, request: admin_pb2.WatchRequest, context: Context) -> AsyncIterator[admin_pb2.Live]:
        tokens, grant = self._tokens, current_grant()
        confirm = partial(tokens.confirm, grant) if tokens is not None and grant is not None else None
        async with _told(context), aclosing(self.live.watch(request.interval_s, confirm)) as views:
            async for view, happenings in views:
                shown = admin_pb2.Live(happenings=happenings)
                shown.MergeFrom(view)
                yield shown

    async def Trace(self, request: admin_pb2.TraceRequest, context: Context) -> admin_pb2.TraceReply:
        found = self.trace_of(request.request_id)
        if found is None:
            which = f"request {request.request_id[:128]!r}" if request.request_id else "a request"
            await context.abort(StatusCode.NOT_FOUND, f"{which} is not among the last that ended here, nor running")
        return found

    def trace_of(self, request_id: str) -> admin_pb2.TraceReply | None:
        """Return the trace of a running or recent request or choice, or None. "" finds the one that ended last."""
        name = request_id.partition(".")[0]
        running = (call.observer.trace for call in self._running if call.name == name)
        found = next(running, None) or self._sinks.traces.find(name)
        return None if found is None else found.reply()

    async def _replan(self, wanted: admin_pb2.ScaleRequest | None) -> Plan:
        """Write the next plan: other sizes, or if None another generation. Raises InvalidRequest, NoWorker."""
        for _ in range(_TRIES):
            board, control = await self._controlled()
            plan = max(control.plan, await board.plan() or control.plan, key=lambda one: one.number)
            if wanted is None:
                plan = replace(plan, generation=plan.generation + 1)
                following = next_plan(plan, {}, "operator", "all workers are to be replaced")
            else:
                sizes = _sizes(wanted, self._settings.scale)
                following = next_plan(plan, sizes, "operator", "an operator said so")
            if await board.put_plan(following):
                log.info("plan_said", prefill=following.prefill, decode=following.decode, number=following.number)
                return following
        raise NoWorker("others change the plan all the time; try again")

    async def _controlled(self) -> tuple[ControlState, ControlReport]:
        """Return the control state and the controller's report. Raises NoWorker if no controller is running."""
        control = await self._board.control() if self._board else None
        if self._board is None or control is None:
            raise NoWorker("no controller is there: `baton up`, or `baton controller`, runs one")
        return self._board, control


@asynccontextmanager
async def _told(context: Context) -> AsyncIterator[None]:
    """Turn typed errors into the status of the call."""
    try:
        yield
    except BatonError as error:
        await abort(context, error)


def _sizes(wanted: admin_pb2.ScaleRequest, bounds: Mapping[Role, tuple[int, int]]) -> dict[Role, int]:
    """Return the wanted pool sizes. Raises InvalidRequest if the cluster file does not allow a size or pool."""
    sizes: dict[Role, int] = {}
    wrong = []
    for role in Role:
        if not wanted.HasField(role.value):
            continue
        if role not in bounds:
            text = f"with mode: colocated there are no {role.value} workers; its workers are those of decode"
            wrong.append(Violation(role.value, text))
            continue
        size, (least, most) = getattr(wanted, role.value), bounds[role]
        sizes[role] = size
        if not least <= size <= most:
            wrong.append(Violation(role.value, f"must be from {least} to {most}, got {size}"))
    if not (sizes or wrong):
        wrong.append(Violation("prefill", "say how many workers a pool should have: prefill, decode, or both"))
    if wrong:
        raise InvalidRequest(*wrong)
    return sizes
