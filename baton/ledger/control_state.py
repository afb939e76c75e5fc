"""The control plane's board: what the cluster should be, what workers are told, what routers and the controller see.

    PREFIX:plan              what the cluster should be (JSON); the highest number wins
    PREFIX:order:ID          what the worker of that id is told (JSON); only the incarnation that it names obeys
    PREFIX:routers           set of router ids that may be alive
    PREFIX:router:ID         what a router sees (JSON); expires with its lease
    PREFIX:control           what the controller sees and has decided (JSON); expires with its lease

All of it is declarative and small, written at most once a second, and none of it is needed to serve: a store that came
back empty has a plan again as soon as the controller, or an operator, says one. Unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.core import Role, WorkerRef
from baton.ledger.redis_client import Connection, Script

log = structlog.get_logger(__name__)

KEPT_S = 7 * 86400  # plans and orders that nobody looks at
DECISIONS = 20  # that a controller tells of

Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=1024)]
Id = Annotated[str, Field(min_length=1, max_length=256)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class PoolSizes(_Record):
    """What the cluster should be. Workers of an older generation are replaced, one after the other."""

    prefill: Count
    decode: Count
    generation: Count = 0
    number: Count = 0
    by: Literal["file", "operator", "autoscaler"] = "file"
    reason: Text = ""

    def of(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode


class WorkerCommand(_Record):
    """What one incarnation is told: to be of this role, or to drain and end. `grace_s`: for what it still has."""

    incarnation: Id
    role: Role
    drain: bool = False
    grace_s: Number = 60.0
    wish: bool = False  # an operator's, for the controller; the worker does nothing yet


class WorkerDemand(_Record):
    """One worker's part in what a router sees."""

    role: Role
    running: Count = 0
    waiting: Count = 0
    queued_tokens: Count = 0
    used: Number = 0.0  # part of its KV blocks that is owned or reserved, 0 to 1
    reserved: Number = 0.0  # of that, for prompts that are still computed elsewhere
    step_s: Number = 0.0  # decode: what a step takes at its load now, which is the ITL there; 0: not known yet
    backlog_s: Number = 0.0  # prefill: until a newcomer's turn; 0: none, or not known yet
    busy_s: Number = 0.0  # prefill: in steps, since its process began


class RouterReport(_Record):
    """What one router sees. Times in seconds; 0 where nothing is known."""

    router_id: Id
    queued: Count = 0
    queued_tokens: Count = 0
    oldest_s: Number = 0.0  # how long the first in the queue has waited
    running: Count = 0
    arrived: Count = 0  # requests since it began
    refused: Count = 0  # for lack of room, since it began
    queue_s: Number = 0.0  # predicted wait in the queue, for room on a decode worker, of one that comes now
    prompt_tokens: Number = 0.0  # of a typical prompt: a mean of those that came lately
    ttft_s: Number = 0.0  # predicted for a typical prompt that comes now, `queue_s` included
    ttft_alone_s: Number = 0.0  # and if nothing else were there
    itl_s: Number = 0.0  # predicted for one more request now, on the best decode worker
    itl_alone_s: Number = 0.0  # and if nothing else were there
    workers: dict[str, WorkerDemand] = Field(default_factory=dict)
    metrics: Text = ""  # host:port


class WorkerSlot(_Record):
    """A worker's place, as the controller sees it. `role` is what it should be."""

    worker_id: Id
    role: Role
    state: Literal["starting", "ready", "turning", "draining", "failed"]
    generation: Count = 0
    restarts: Count = 0
    note: Text = ""


class Decision(_Record):
    """Something that the controller decided: at what time (wall clock), what, and why."""

    at: Number
    kind: Literal["plan", "start", "turn", "drain", "end", "replace", "give_up"]
    text: Text


class ControlReport(_Record):
    """What the controller sees and has decided. `at`: wall clock."""

    plan: PoolSizes
    at: Number
    slots: tuple[WorkerSlot, ...] = ()
    decisions: tuple[Decision, ...] = ()
    host: Text = ""
    outlook: Text = ""  # what the autoscaler sees, for a reader; empty: it is off


Row = TypeVar("Row", bound=_Record)

# KEYS: plan. ARGV: the new plan, its number, kept for (ms). Answers 1, or 0 if a plan of that number or later is there.
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
    """One process's view of it. Every method raises LedgerError when Redis cannot be used."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def plan(self) -> PoolSizes | None:
        """None: nobody has said one, or the store forgot."""
        return await self._get(PoolSizes, "plan")

    async def put_plan(self, plan: PoolSizes) -> bool:
        """False: one of that number, or a later one, is there; read it, and say yours again with a higher number."""
        key = self._connection.key("plan")
        args = (plan.model_dump_json(), plan.number, KEPT_S * 1000)
        return bool(await self._connection.run(_PUT_PLAN, [key], args))

    async def order(self, ref: WorkerRef) -> WorkerCommand | None:
        """What this very incarnation is told; None: nothing."""
        found = await self._get(WorkerCommand, "order", ref.worker_id)
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
        """Those that said something within their lease, by id."""
        answer = await self._connection.call("SMEMBERS", self._connection.key("routers"))
        found = []
        for router_id in sorted(name.decode() for name in _bytes(answer)):
            report = await self._get(RouterReport, "router", router_id)
            if report is None:
                await self._connection.call("SREM", self._connection.key("routers"), router_id)
            else:
                found.append(report)
        return found

    async def control(self) -> ControlReport | None:
        """None: no controller is there."""
        return await self._get(ControlReport, "control")

    async def put_control(self, report: ControlReport, lease_s: float) -> None:
        await self._put(report, round(lease_s * 1000), "control")

    async def drop_control(self) -> None:
        await self._connection.call("DEL", self._connection.key("control"))

    async def _put(self, row: _Record, kept_ms: int, *key: str) -> None:
        await self._connection.call("SET", self._connection.key(*key), row.model_dump_json(), "PX", kept_ms)

    async def _get(self, kind: type[Row], *key: str) -> Row | None:
        """A damaged or foreign row is as if it were not there."""
        answer = await self._connection.call("GET", self._connection.key(*key))
        if not isinstance(answer, bytes):
            return None
        try:
            return kind.model_validate_json(answer)
        except ValidationError as error:
            wrong = "; ".join(".".join(map(str, item["loc"])) for item in error.errors(include_input=False))
            log.warning("board_row_refused", key=":".join(key), wrong=wrong)
            return None


def _bytes(answer: object) -> list[bytes]:
    return [item for item in answer if isinstance(item, bytes)] if isinstance(answer, (list, set, tuple)) else []
