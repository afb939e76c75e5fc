"""The control state in Redis: the plan of the cluster, orders to workers, and reports of routers and the controller.

    PREFIX:plan              the planned pool sizes (JSON); the highest number wins
    PREFIX:order:ID          the order to the worker of that id (JSON); only the incarnation in it obeys
    PREFIX:routers           set of router ids that may be alive
    PREFIX:router:ID         a router's report (JSON); expires with its lease
    PREFIX:control           the controller's report (JSON); expires with its lease

Everything is declarative and small, is written at most once a second, and is not needed to serve. A store that lost its
data has a plan again as soon as the controller or an operator writes one. Unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from baton.control_plane import Count, DecisionKind, Id, Number, Plan, Slot, Text
from baton.core import Role, WorkerRef
from baton.ledger.redis_client import Connection, Script

log = structlog.get_logger(__name__)

KEPT_S = 7 * 86400  # plans and orders
DECISIONS = 20  # in a controller's report


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", revalidate_instances="always")


class WorkerCommand(_Record):
    """An order to one incarnation: take this role, or drain and end. `grace_s`: seconds for its running work."""

    incarnation: Id
    role: Role
    drain: bool = False
    grace_s: Number = 60.0
    wish: bool = False  # a request of an operator to the controller; the worker ignores it


class WorkerDemand(_Record):
    """One worker in a router's report."""

    role: Role
    running: Count = 0
    waiting: Count = 0
    queued_tokens: Count = 0
    used: Number = 0.0  # share of its KV blocks that is owned or reserved, 0 to 1
    reserved: Number = 0.0  # part of `used`, for prompts that other workers compute
    step_s: Number = 0.0  # decode: duration of a step at the current load, which is its ITL; 0 means unknown
    busy_s: Number = 0.0  # prefill: time in steps since its process began


class RouterReport(_Record):
    """One router's report. Times in seconds; 0 means unknown."""

    router_id: Id
    queued: Count = 0
    queued_tokens: Count = 0
    oldest_s: Number = 0.0  # wait of the head of the queue so far
    running: Count = 0
    arrived: Count = 0  # requests since it began
    refused: Count = 0  # before acceptance, since it began
    queue_s: Number = 0.0  # predicted wait of a new request for capacity on a decode worker
    prompt_tokens: Number = 0.0  # mean of recent prompts, the typical prompt
    ttft_s: Number = 0.0  # predicted for a typical prompt now, including `queue_s`
    ttft_alone_s: Number = 0.0  # the same on an idle cluster
    itl_s: Number = 0.0  # predicted for one more request now, on the best decode worker
    itl_alone_s: Number = 0.0  # the same on an idle cluster
    workers: dict[str, WorkerDemand] = Field(default_factory=dict)
    metrics: Text = ""  # host:port


class Decision(_Record):
    """A decision of the controller. `at`: wall clock."""

    at: Number
    kind: DecisionKind
    text: Text


class ControlReport(_Record):
    """The controller's view and latest decisions. `at`: wall clock."""

    plan: Plan
    at: Number
    slots: tuple[Slot, ...] = ()
    decisions: tuple[Decision, ...] = ()
    host: Text = ""
    outlook: Text = ""  # the autoscaler's view as text; empty if it is off


Row = TypeVar("Row")
_PLAN = TypeAdapter(Plan)

# KEYS: plan. ARGV: the new plan, its number, TTL ms. Returns 1, or 0 if a plan of that number or a later one exists.
_PUT_PLAN = Script(
    """
    local before = redis.call('GET', KEYS[1])
    if before then
        local known, plan = pcall(cjson.decode, before)
        if known and type(plan) == 'table' and tonumber(plan.number) and tonumber(plan.number) >= tonumber(ARGV[2]) then
            return 0
        end
    end
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
    return 1
    """
)


class ControlState:
    """One process's client of the control state. Every method raises LedgerError if Redis cannot be used."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def plan(self) -> Plan | None:
        """Return the plan. None if there is none yet, or the store lost it."""
        return await self._get(_PLAN.validate_json, "plan")

    async def put_plan(self, plan: Plan) -> bool:
        """Write a plan. Returns False if that number or a later one exists: read it, and retry with a higher one."""
        key = self._connection.key("plan")
        args = (_PLAN.dump_json(plan), plan.number, KEPT_S * 1000)
        return bool(await self._connection.run(_PUT_PLAN, [key], args))

    async def order(self, ref: WorkerRef) -> WorkerCommand | None:
        found = await self._get(WorkerCommand.model_validate_json, "order", ref.worker_id)
        return found if found is not None and found.incarnation == str(ref.incarnation) else None

    async def put_order(self, worker_id: str, order: WorkerCommand) -> None:
        await self._put(order, KEPT_S * 1000, "order", worker_id)

    async def drop_order(self, worker_id: str) -> None:
        await self._connection.call("DEL", self._connection.key("order", worker_id))

    async def put_router(self, report: RouterReport, lease_s: float) -> None:
        await self._connection.call("SADD", self._connection.key("routers"), report.router_id)
        await self._put(report, round(lease_s * 1000), "router", report.router_id)

    async def drop_router(self, router_id: str) -> None:
        await self._connection.call("DEL", self._connection.key("router", router_id))
        await self._connection.call("SREM", self._connection.key("routers"), router_id)

    async def routers(self) -> list[RouterReport]:
        """Return the reports that routers sent within their lease, by id."""
        answer = await self._connection.call("SMEMBERS", self._connection.key("routers"))
        found = []
        names = [name.decode() for name in answer if isinstance(name, bytes)] if isinstance(answer, (list, set)) else []
        for router_id in sorted(names):
            report = await self._get(RouterReport.model_validate_json, "router", router_id)
            if report is None:
                await self._connection.call("SREM", self._connection.key("routers"), router_id)
            else:
                found.append(report)
        return found

    async def control(self) -> ControlReport | None:
        """Return the controller's report. None if no controller is alive."""
        return await self._get(ControlReport.model_validate_json, "control")

    async def last_control(self) -> ControlReport | None:
        """Return the last report of a controller, which may have died long ago. None after an orderly end."""
        return await self._get(ControlReport.model_validate_json, "control-last")

    async def put_control(self, report: ControlReport, lease_s: float) -> None:
        await self._put(report, KEPT_S * 1000, "control-last")
        await self._put(report, round(lease_s * 1000), "control")

    async def drop_control(self) -> None:
        await self._connection.call("DEL", *(self._connection.key(name) for name in ("control", "control-last")))

    async def _put(self, row: _Record, kept_ms: int, *key: str) -> None:
        await self._connection.call("SET", self._connection.key(*key), row.model_dump_json(), "PX", kept_ms)

    async def _get(self, read: Callable[[bytes], Row], *key: str) -> Row | None:
        """Read a row. A damaged or foreign row is logged and counts as missing."""
        answer = await self._connection.call("GET", self._connection.key(*key))
        if not isinstance(answer, bytes):
            return None
        try:
            return read(answer)
        except ValidationError as error:
            wrong = "; ".join(".".join(map(str, item["loc"])) for item in error.errors(include_input=False))
            log.warning("board_row_refused", key=":".join(key), wrong=wrong)
            return None
