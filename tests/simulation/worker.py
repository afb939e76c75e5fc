"""A worker process: the real role, engine, services and lease, with one coroutine as the engine thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from baton.core import HandoffId, Incarnation, Role, WorkerInfo, WorkerRef
from baton.engine.determinism.shapes import FixedShapes
from baton.errors import EngineFault, LedgerError
from baton.ledger.ownership import RecordState
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2
from baton.worker.lifecycle import _DRAIN_POLL_S, LEAVE_S, Lease
from baton.worker.service import Session, WorkerService
from decode_workers.worker import DecodeWorker
from kvtransfer.handoff import CommitState, TransferSettings
from kvtransfer.receiver import PeerService
from kvtransfer.transports.base import Choice
from prefill_workers.prefix_fetch import CostModel
from prefill_workers.worker import PrefillWorker
from tests.simulation.clock import LoopClock, OrderedSet
from tests.simulation.engine import BACKEND, engine_of
from tests.simulation.rpc import SimPeerStream, serving, shown
from tests.simulation.transfer import SimSender, SimTransport
from tests.simulation.world import PROCESS, Listener, Process, SimLedger, World

IDLE_S = 0.5


@dataclass(frozen=True)
class WorkerPlan:
    """Settings of all incarnations of a worker. `shapes`: for deterministic requests, or None if it takes none.
    `strays`: rate of wrong ordinary batches for these.
    """

    role: Role
    worker_id: str
    blocks: int
    batched: int
    running: int
    transfer: TransferSettings
    lease_s: float
    step_s: float
    shapes: FixedShapes | None = None
    strays: float = 0.0

    @property
    def bits(self) -> str:
        """Fingerprint of its deterministic requests."""
        return f"bits of {self.shapes.rows} x {self.shapes.tokens}" if self.shapes else ""


class SimDecode(DecodeWorker):
    """The role, with checks."""

    def command(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        if command.HasField("release"):
            process = PROCESS.get()
            process.world.facts.settled.add((process.name, convert.handoff_from_pb(command.release.handoff)))
        super().command(session, command)

    def committed(self, handoff: HandoffId, commit: CommitState) -> None:
        process = PROCESS.get()
        process.world.facts.committed(process.name, handoff)
        super().committed(handoff, commit)


class SimWorkerSession(Session):
    """A router's session, with checks and a reproducible order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.handoffs = cast("set[HandoffId]", OrderedSet())
        self._process = PROCESS.get()

    def emit(self, events: Any) -> None:
        events, world, name = list(events), self._process.world, self._process.name
        for event in events:
            kind = event.WhichOneof("event")
            world.note("emit", name, shown(event, kind))
            if kind == "fenced":
                world.facts.said_fenced(name, convert.handoff_from_pb(event.handoff))
            elif kind == "committed":
                world.facts.settled.add((name, convert.handoff_from_pb(event.handoff)))
        super().emit(events)


class SimCost(CostModel):
    """Decides by chance, mostly for a fetch, because virtual time has no compute costs."""

    def worth(self, tokens: int, nbytes: int) -> bool:
        return PROCESS.get().rng.random() < 0.7


class SimEngineLoop:
    """`EngineLoop` as a coroutine: jobs between steps, and delays for a step and for its results."""

    def __init__(self, host: WorkerHost) -> None:
        self.iterations = 0
        self.step_began = 0.0
        self._host = host
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = asyncio.Event()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self._wake.set()

    def progressed(self) -> None:
        """Do nothing, because steps are short here."""

    async def run(self) -> None:
        host, process = self._host, self._host.process
        while True:
            if not self._jobs and not host.engine.has_work():
                await self._sleep()
            await process.resumed()
            while self._jobs:
                self._jobs.popleft()()
            if host.engine.has_work():
                await self._step(process)
            host.role.tick()
            host.report()
            self.iterations += 1

    async def _sleep(self) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(IDLE_S):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _step(self, process: Process) -> None:
        host, self.step_began = self._host, LoopClock().monotonic()
        await asyncio.sleep(process.rng.expovariate(1 / host.plan.step_s))
        await process.resumed()
        result = host.engine.step()
        host.world.note("step", host.name, f"computed={result.computed}", *(str(o.key) for o in result.outputs))
        if process.rng.random() < 0.3:
            await process.turn()
        host.report()
        host.role.stepped(result)
        if not (result.computed or result.outputs or result.preempted or result.failed):
            await self._sleep()


class WorkerHost:
    """One incarnation of a worker."""

    def __init__(
        self, world: World, plan: WorkerPlan, counter: int, ledger: SimLedger, transport: SimTransport
    ) -> None:
        self.world, self.plan, self.next_plan = world, plan, plan
        self.told = False  # to drain, or to change its role
        self.name = f"{plan.worker_id}#{counter}"
        self.process = Process(world, self.name)
        self._ledger, self._transport = ledger, transport
        self._counter = counter
        self.process.run(self._build)

    def _build(self) -> None:
        plan, clock, prefill = self.plan, LoopClock(), self.plan.role is Role.PREFILL
        ref = WorkerRef(plan.worker_id, Incarnation(1, self._counter), f"{plan.worker_id}:1")
        self.engine = engine_of(self.world, self.name, plan)
        bits: dict[str, Any] = {"determinism": plan.bits, "nondeterminism": "" if plan.bits else "so it is planned"}
        sizes = self.engine.max_model_len, self.engine.pool.total, self.engine.layout
        self.info = WorkerInfo(ref, plan.role, BACKEND.fingerprint, "oracle", *sizes, **bits)
        self.loop = SimEngineLoop(self)
        loop: Any = self.loop
        ends = self.engine.kv, ref, self.info.fingerprint, plan.transfer
        if prefill:
            less, fetch_s = plan.transfer.coalesce_below, plan.transfer.frame_deadline_s
            role = PrefillWorker(self.info, self.engine, loop, clock, coalesce_below=less, fetch_s=fetch_s)
            self.role: PrefillWorker | SimDecode = role
            table: Any = role.fetches
            unfetched: Callable[[HandoffId], None] = role.fetch_ended
        else:
            self.role = SimDecode(self.info, self.engine, loop, cast("Any", self), clock)
            table, unfetched = self.role.reservations, lambda handoff: None
        self.sender = SimSender(
            *ends, Choice([self._transport]), self.role.push_ended, on_unfetched=unfetched, connect=SimPeerStream
        )
        self.role.attach(self.sender)
        self.report()
        self.service = WorkerService(self.info, loop, self.role, lambda: convert.load_to_pb(self._load))
        self.peers = PeerService(*ends, table, Choice([self._transport]))
        handlers = {"worker": serving(self._routers), "peer": serving(self._peers)}
        self.world.listening[ref.address] = Listener(self.process, handlers)
        self.process.start(self.loop.run(), "engine")
        self.process.start(self._beat(clock), "beat")

    async def _routers(self, requests: Any, context: Any, stream: Any) -> None:
        async for message in self.service.Connect(requests, context):
            await context.write(message)

    async def _peers(self, requests: Any, context: Any, stream: Any) -> None:
        await self.peers.Connect(requests, context)

    def note(self, handoff: HandoffId, router_id: str, state: RecordState, stream: str = "") -> None:
        self._ledger.note(handoff, self.info.ref, router_id, state, stream)

    def leave(self) -> None:
        """End like `baton.worker.process.serve` after SIGTERM."""
        self.loop.submit(self.role.leave)
        self.world.loop.call_later(LEAVE_S, self.process.kill)

    def drain(self, *, turn: bool) -> None:
        """Drain like `baton.worker.lifecycle.run_incarnation`. `turn`: the next incarnation has the other role."""
        self.told = True
        if turn:
            role = Role.DECODE if self.plan.role is Role.PREFILL else Role.PREFILL
            self.next_plan = replace(self.plan, role=role)
        self.loop.submit(self.role.drain)
        self.process.start(self._drain(), "drain")

    async def _drain(self) -> None:
        over = False
        while not over:
            over = self.drained
            self.service.beat()
            await asyncio.sleep(_DRAIN_POLL_S)
        self.loop.submit(self.role.leave)
        await self.service.finish(LEAVE_S)
        await asyncio.sleep(LEAVE_S)  # the last messages arrive
        self.process.kill()

    def report(self) -> None:
        """Report after each step and tick, with the pool's own check of its blocks."""
        draining = self.role.draining
        self._load = replace(self.engine.load(), channels=self.sender.channels(), draining=draining)
        self.drained = draining and self.role.idle

    async def _beat(self, clock: LoopClock) -> None:
        """Beat like `baton.worker.lifecycle.Beats`: a process that has lost its lease ends."""
        lease, seen = Lease(cast("Any", self._ledger), self.info, self.plan.lease_s, clock), -1
        try:
            await lease.take()
            while True:
                lease.check()
                self.service.beat()
                if self.loop.iterations != seen:
                    seen = self.loop.iterations
                    await lease.renew(seen)
                await asyncio.sleep(self.plan.lease_s / 3)
                await self.process.turn()
        except (LedgerError, EngineFault) as error:
            self.world.note("fenced by its lease", self.name, error)
            self.process.kill()

    def leftovers(self) -> list[str]:
        """Return problems if something is held although no handoff runs."""
        counts, role = self.engine.pool.counts(), self.role
        found = {
            "reserved": counts.reserved,
            "owned": counts.owned,
            "quarantined": counts.quarantined,
            "requests": len(self.engine._requests),
            "pushes": sum(len(link.queue._pushes) for link in self.sender._all()),
            "poisoned": not cast("Any", self.engine.pool).untouched(),
        }
        found["work"] = len(role._work)
        if isinstance(role, PrefillWorker):
            found["fetches"] = len(role.fetches._fetches)
        else:
            found |= {"reservations": len(role.reservations), "pins": len(role.pins), "parked": len(role.detached)}
        return [f"{self.name} has {what}: {number}" for what, number in found.items() if number]
