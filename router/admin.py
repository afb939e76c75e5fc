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
from router.context import RouterContext
from router.request.delivery import Context
from router.status import RouterStatus, plan_to_pb

log = structlog.get_logger(__name__)

_TRIES = 5  # each may conflict with another writer of the plan


class Admin(AdminServicer):
    """Servicer of `baton.v1.Admin`: this router's status and its view of the workers, and changes of the plan."""

    def __init__(self, context: RouterContext, control_state: ControlState | None) -> None:
        self._context, self._control_state = context, control_state
        self.live = RouterStatus(context, control_state)

    async def Status(self, request: admin_pb2.StatusRequest, context: Context) -> admin_pb2.StatusReply:
        return await self.live.status()

    async def Requests(self, request: admin_pb2.RequestsRequest, context: Context) -> admin_pb2.RequestsReply:
        choices = [choice for call in self._context.running for choice in call.observer.choices]
        ids = [name for each in choices for name in (each.request_id, each.taken_over) if name]
        return admin_pb2.RequestsReply(router_id=self._context.sinks.router_id, request_ids=ids)

    async def Scale(self, request: admin_pb2.ScaleRequest, context: Context) -> admin_pb2.ScaleReply:
        async with _typed_errors(context):
            return admin_pb2.ScaleReply(plan=plan_to_pb(await self._replan(request)))

    async def Restart(self, request: admin_pb2.RestartRequest, context: Context) -> admin_pb2.RestartReply:
        async with _typed_errors(context):
            return admin_pb2.RestartReply(plan=plan_to_pb(await self._replan(None)))

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainReply:
        async with _typed_errors(context):
            state, control = await self._controlled()
            refs = {link.info.ref.worker_id: link.info for link in self._context.pool.links if not link.retired}
            info = refs.get(request.worker_id)
            slots = {slot.worker_id for slot in control.slots}
            if info is None or request.worker_id not in slots:
                names = ", ".join(sorted(refs.keys() & slots)) or "none"
                text = f"the controller runs no worker {request.worker_id!r}; its workers: {names}"
                raise InvalidRequest.of("worker_id", text)
            incarnation, grace_s = str(info.ref.incarnation), self._context.settings.drain_s
            command = WorkerCommand(incarnation=incarnation, role=info.role, drain=True, grace_s=grace_s, wish=True)
            await state.put_order(request.worker_id, command)
            log.info("drain_wished", worker=info.ref)
            return admin_pb2.DrainReply()

    async def Watch(self, request: admin_pb2.WatchRequest, context: Context) -> AsyncIterator[admin_pb2.Live]:
        tokens, grant = self._context.tokens, current_grant()
        confirm = partial(tokens.confirm, grant) if tokens is not None and grant is not None else None
        async with _typed_errors(context), aclosing(self.live.watch(request.interval_s, confirm)) as views:
            async for view, happenings in views:
                shown = admin_pb2.Live(happenings=happenings)
                shown.MergeFrom(view)
                yield shown

    async def Trace(self, request: admin_pb2.TraceRequest, context: Context) -> admin_pb2.TraceReply:
        found = self.trace_of(request.request_id)
        if found is None:
            which = f"request {request.request_id[:128]!r}" if request.request_id else "a request"
            text = f"{which} is neither running nor among the last that ended on this router"
            await context.abort(StatusCode.NOT_FOUND, text)
        return found

    def trace_of(self, request_id: str) -> admin_pb2.TraceReply | None:
        """Return the trace of a running or recent request or choice, or None. "" finds the one that ended last."""
        name = request_id.partition(".")[0]
        running = (call.observer.trace for call in self._context.running if call.name == name)
        found = next(running, None) or self._context.sinks.traces.find(name)
        return None if found is None else found.reply()

    async def _replan(self, wanted: admin_pb2.ScaleRequest | None) -> Plan:
        """Write the next plan: other sizes, or if None another generation. Raises InvalidRequest, NoWorker."""
        for _ in range(_TRIES):
            state, control = await self._controlled()
            plan = max(control.plan, await state.plan() or control.plan, key=lambda one: one.number)
            if wanted is None:
                plan = replace(plan, generation=plan.generation + 1)
                following = next_plan(plan, {}, plan.by, "all workers are to be replaced")
            else:
                sizes = _sizes(wanted, self._context.settings.scale)
                following = next_plan(plan, sizes, "operator", "requested by an operator")
            if await state.put_plan(following):
                log.info("plan_said", prefill=following.prefill, decode=following.decode, number=following.number)
                return following
        raise NoWorker(f"{_TRIES} changes conflicted with other changes of the plan; try again")

    async def _controlled(self) -> tuple[ControlState, ControlReport]:
        """Return the control state and the controller's report. Raises NoWorker if no controller is running."""
        control = await self._control_state.control() if self._control_state else None
        if self._control_state is None or control is None:
            raise NoWorker("no controller is running; `baton up` or `baton controller` runs one")
        return self._control_state, control


@asynccontextmanager
async def _typed_errors(context: Context) -> AsyncIterator[None]:
    """Turn typed errors into the status of the call."""
    try:
        yield
    except BatonError as error:
        await abort(context, error)


def _sizes(wanted: admin_pb2.ScaleRequest, limits: Mapping[Role, tuple[int, int]]) -> dict[Role, int]:
    """Return the wanted pool sizes. Raises InvalidRequest if the cluster file does not allow a size or pool."""
    sizes: dict[Role, int] = {}
    wrong = []
    for role, size in ((Role.PREFILL, wanted.prefill), (Role.DECODE, wanted.decode)):
        if not wanted.HasField(role.value):
            continue
        sizes[role] = size
        least, most = limits.get(role, (0, 0))
        if role not in limits:
            text = f"mode: colocated has no {role.value} workers; set the number of decode workers"
            wrong.append(Violation(role.value, text))
        elif not least <= size <= most:
            wrong.append(Violation(role.value, f"must be from {least} to {most}, got {size}"))
    if not sizes:
        wrong.append(Violation("prefill", "set the number of prefill workers, of decode workers, or both"))
    if wrong:
        raise InvalidRequest(*wrong)
    return sizes
