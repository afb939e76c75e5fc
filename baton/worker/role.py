"""The interface between a role and its host, and the common parts of both roles: `HandoffRole` and `Transfers`.

The host imports no role: it gets a factory for each.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import grpc

from baton.clock import Clock
from baton.core import HandoffId, Load, Role, WorkerInfo
from baton.engine.engine import Engine
from baton.engine.step_result import StepResult
from baton.errors import HandoffError, InvalidRequest, StaleAttempt
from baton.event_journal import Blocks
from baton.ledger.prefix_directory import PrefixPublisher
from baton.ledger.registry import Ledger
from baton.metrics.worker import Counts
from baton.rpc import convert
from baton.rpc.channel import PLAINTEXT, Wire
from baton.rpc.v1 import peer_pb2_grpc, worker_pb2
from baton.worker import events
from baton.worker.block_census import Holding
from baton.worker.engine_loop import EngineLoop
from baton.worker.service import RoleBehaviour, Session, not_taken
from baton.worker.settings import WorkerSettings
from kvtransfer.handoff import HandoffTable, PushEnd, PushJob, PushResult
from kvtransfer.receiver import PeerService
from kvtransfer.sender import GrpcPeerStream, Sender
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.select import make_transports

Handler = Callable[[Session, worker_pb2.RouterCommand], None]
HandoffEvents = tuple[HandoffId, list[worker_pb2.WorkerEvent]]


class WorkerRole(RoleBehaviour, Protocol):
    """A role as the host sees it."""

    counts: Counts

    def stepped(self, result: StepResult) -> None: ...
    def tick(self) -> None: ...

    def load(self, load: Load) -> Load:
        """Add the role's figures to the engine's load report. On the engine thread."""

    def drain(self) -> None:
        """Accept nothing new; running work continues to its end. On the engine thread."""

    @property
    def idle(self) -> bool:
        """Whether no work is left, so that the worker can end. On the engine thread."""

    def leave(self, ahead: int) -> None:
        """Accept nothing new, and requeue at the routers all work that will not end here. Sequences that move may
        decode `ahead` more tokens here while their KV is sent. On the engine thread.
        """

    @property
    def busy(self) -> bool:
        """Whether work is left that will end soon."""

    async def close(self) -> None:
        """Stop transfers and background writers."""


@dataclass(frozen=True, slots=True)
class RoleDeps:
    """The arguments of a role factory."""

    settings: WorkerSettings
    info: WorkerInfo
    engine: Engine
    loop: EngineLoop
    ledger: Ledger
    server: grpc.aio.Server
    clock: Clock
    wire: Wire = PLAINTEXT


RoleFactory = Callable[[RoleDeps], WorkerRole]
Factories = Mapping["Role", RoleFactory]


class Owner(Protocol):
    """The receiver of a handoff's events: the session of its router, or a replacement for a lost router."""

    router_id: str
    handoffs: set[HandoffId]

    def emit(self, events: Iterable[worker_pb2.WorkerEvent]) -> None: ...


@dataclass(slots=True)
class Job:
    """One handoff on this worker."""

    session: Owner


JobT = TypeVar("JobT", bound=Job)


class HandoffRole(ABC, Generic[JobT]):
    """The jobs of a role by handoff, and the dispatch of commands. Every method runs on the engine thread."""

    def __init__(
        self, info: WorkerInfo, engine: Engine, loop: EngineLoop, clock: Clock, commands: Mapping[str, Handler]
    ) -> None:
        self._info, self._engine, self._loop, self._clock = info, engine, loop, clock
        self._history = engine.pool.history
        self._commands = commands  # by kind, without `release`, which both roles take
        self._work: dict[HandoffId, JobT] = {}
        self.draining = False

    def command(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        """See `RoleBehaviour.command`. Handlers raise StaleAttempt, before any side effect, to refuse as stale."""
        kind = command.WhichOneof("command")
        if kind == "release":
            self._release(session, convert.handoff_from_pb(command.release.handoff))
            return
        if (handler := self._commands.get(kind or "")) is None:
            text = f"a {self._info.role.value} worker accepts {', '.join(self._commands)} and release, not {kind}"
            raise InvalidRequest.of("command", text)
        try:
            handler(session, command)
        except StaleAttempt as error:
            session.emit(not_taken(command, str(error), worker_pb2.REFUSAL_REASON_STALE))

    def _add(self, handoff: HandoffId, job: JobT) -> None:
        self._work[handoff] = job
        job.session.handoffs.add(handoff)

    def _owner(self, handoff: HandoffId, session: Session) -> Owner:
        """Return the session of a handoff, or `session` if the handoff is not here."""
        return self._work[handoff].session if handoff in self._work else session

    def _release(self, session: Session, handoff: HandoffId) -> None:
        owner = self._owner(handoff, session)
        session.handoffs.discard(handoff)  # also for an ended stream that is still remembered
        self._drop(handoff)
        if owner is not session:
            owner.emit([events.failed(handoff, StaleAttempt(f"released by router {session.router_id}"))])

    @abstractmethod
    def _drop(self, handoff: HandoffId) -> None:
        """Forget a handoff in any state and free its blocks."""

    def _give_up(self, handoff: HandoffId, event: worker_pb2.WorkerEvent) -> None:
        job = self._work.get(handoff)
        self._drop(handoff)
        if job is not None:
            job.session.emit([event])

    def _pop(self, handoff: HandoffId, how: str) -> JobT | None:
        """Remove the job of a handoff that holds nothing any more."""
        job = self._work.pop(handoff, None)
        if job is not None:
            self._history.step(how, handoff)
        return job

    def gone(self, session: Session) -> None:
        for handoff in list(session.handoffs):
            self._drop(handoff)

    def drain(self) -> None:
        self.draining = True

    @property
    def idle(self) -> bool:
        return not self._work

    def _holding(self, handoff: HandoffId, state: str, held: Blocks | None) -> Holding:
        job = self._work.get(handoff)
        return Holding(handoff, state, held.blocks if held else (), job.session.router_id if job else "")

    def stepped(self, result: StepResult) -> None:
        """Send the events of a step, those of one session together."""
        batches: dict[Owner, list[worker_pb2.WorkerEvent]] = defaultdict(list)
        for item in result.outputs:
            if item.key in self._work:
                self._history.tokens("tokens", item.key, item.tokens)
        for handoff, of_handoff in self._step_events(result):
            batches[self._work[handoff].session] += of_handoff
        for session, batch in batches.items():
            session.emit(batch)

    @abstractmethod
    def _step_events(self, result: StepResult) -> Iterator[HandoffEvents]:
        """Yield the events of jobs here in the order for routers, then forget the handoffs that ended in the step."""


class Pusher(Protocol):
    """The part of `kvtransfer.sender.Sender` that the roles use."""

    def begin(self, job: PushJob) -> None: ...
    def computed(self, handoff: HandoffId, blocks: Sequence[int], layers: int, end: int) -> None: ...
    def withdraw(self, handoff: HandoffId) -> None: ...
    def finish(self, handoff: HandoffId, end: PushEnd) -> None: ...
    def abort(self, handoff: HandoffId) -> None: ...


class Transfers:
    """`sender` pushes KV; `table` accepts or rejects pushes to here. Raises ConfigError if the transport is missing."""

    def __init__(
        self,
        parts: RoleDeps,
        table: HandoffTable,
        on_done: Callable[[HandoffId, PushResult | HandoffError], None],
        on_unfetched: Callable[[HandoffId], None] = lambda handoff: None,
    ) -> None:
        info, kv, settings = parts.info, parts.engine.kv, parts.settings.transfer
        over_grpc = GrpcTransport(info.ref.address, parts.wire.sync)
        transports = make_transports(settings, kv, grpc=over_grpc)
        ends = (kv, info.ref, info.fingerprint, settings)
        connect = partial(GrpcPeerStream, dial=parts.wire.sync)
        self.sender = Sender(*ends, transports, on_done, on_unfetched=on_unfetched, connect=connect)
        self._peers = PeerService(*ends, table, transports, over_grpc)
        peer_pb2_grpc.add_PeerServicer_to_server(self._peers, parts.server)
        self._directory = PrefixPublisher(parts.ledger, info.ref)
        parts.engine.pool.on_index = self._directory.note

    async def close(self) -> None:
        """Close all channels, end every push, and stop publishing."""
        await asyncio.to_thread(self.sender.close)
        await self._peers.close()
        await self._directory.close()
