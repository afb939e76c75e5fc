"""What a decode worker does: reserve room, take over KV, stream the rest; or compute the prompt as well.

Every method runs on the engine thread, but `committed`, which the reservation table calls from wherever a commit lands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import structlog

from baton.core import HandoffId, WorkerInfo
from baton.errors import DeadlineExceeded, HandoffError, InvalidRequest, StaleAttempt
from baton.ledger.ownership_table import RecordState
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2
from baton.worker import events
from baton.worker.census import Holding
from baton.worker.commands import deadline_after
from decode_workers.reservations import Reservations, State
from kvtransfer.handoff import CommitState, PushEnd, PushJob, PushResult

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.engine.blocks import Allocation
    from baton.engine.engine import Engine
    from baton.engine.outcome import StepResult
    from baton.history import Blocks
    from baton.ledger.ownership import OwnershipLog
    from baton.worker.loop import EngineLoop
    from baton.worker.session import Session
    from baton.worker.transfers import Pusher

log = structlog.get_logger(__name__)


class DecodeRole:
    """Handoffs arrive through `reservations`; from their commit on they are sequences of the engine."""

    def __init__(self, info: WorkerInfo, engine: Engine, loop: EngineLoop, records: OwnershipLog, clock: Clock) -> None:
        self._info = info
        self._engine = engine
        self._loop = loop
        self._records = records
        self._clock = clock
        self._history = engine.pool.history
        self._sessions: dict[HandoffId, Session] = {}
        self._adopted: set[HandoffId] = set()
        self.reservations = Reservations(info.fingerprint, self.committed, self.fetch, self._history)
        self._pusher: Pusher | None = None
        self._pins: dict[HandoffId, Allocation] = {}  # of what is being fetched from here

    def attach(self, pusher: Pusher) -> None:
        """`pusher` sends what prefill workers fetch."""
        self._pusher = pusher

    # --- commands ------------------------------------------------------------------------------------------------

    def command(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        """See `RoleBehaviour.command`."""
        match command.WhichOneof("command"):
            case "reserve":
                self._reserve(session, command.reserve)
            case "prefill":
                self._compute(session, command.prefill)
            case "fence":
                self._fence(session, convert.handoff_from_pb(command.fence.handoff))
            case "release":
                self._release(session, convert.handoff_from_pb(command.release.handoff))
            case kind:
                raise InvalidRequest.of(
                    "command", f"a decode worker takes reserve, prefill, fence and release, not {kind}"
                )

    def _reserve(self, session: Session, message: worker_pb2.Reserve) -> None:
        handoff = convert.handoff_from_pb(message.handoff)
        deadline = deadline_after(message.deadline_s, self._clock)
        if (refusal := self._refusal(handoff, message)) is not None:
            session.emit([refusal])
            return
        reservation = self._engine.reserve(message.known_tokens, message.prefix)
        if reservation is None:
            text = f"no room for {message.known_tokens} tokens now"
            session.emit([events.refused(handoff, worker_pb2.REFUSAL_REASON_NO_ROOM, text)])
            return
        self._history.blocks("reserved", handoff, reservation, shared=len(reservation.shared))
        self.reservations.open(handoff, reservation, message.known_tokens, deadline)
        self._sessions[handoff] = session
        session.handoffs.add(handoff)
        self._records.note(handoff, session.router_id, RecordState.RESERVED)
        session.emit([events.reserved(handoff, reservation.cached_tokens)])

    def _refusal(self, handoff: HandoffId, message: worker_pb2.Reserve) -> worker_pb2.WorkerEvent | None:
        if message.fingerprint != self._info.fingerprint:
            text = f"fingerprint: {message.fingerprint} asked, {self._info.fingerprint} is served here"
            return events.refused(handoff, worker_pb2.REFUSAL_REASON_FINGERPRINT, text)
        most = self._info.max_model_len
        if not 1 <= message.known_tokens < most or message.max_total > most:
            text = f"{message.known_tokens} tokens, {message.max_total} with all that may follow, of {most} at most"
            return events.refused(handoff, worker_pb2.REFUSAL_REASON_TOO_LONG, text)
        if handoff in self._sessions:
            return events.refused(handoff, worker_pb2.REFUSAL_REASON_STALE, f"{handoff} is here already")
        try:
            self.reservations.check_new(handoff)
        except StaleAttempt as error:
            return events.refused(handoff, worker_pb2.REFUSAL_REASON_STALE, str(error))
        return None

    def _compute(self, session: Session, message: worker_pb2.Prefill) -> None:
        """The prompt is computed here as well, in what was reserved for it: nobody hands it over."""
        handoff, spec = convert.handoff_from_pb(message.handoff), convert.spec_from_pb(message.spec)
        if message.HasField("to"):
            raise InvalidRequest.of("to", "a decode worker hands over to nobody")
        finish = self._engine.finish_of(spec) if spec.known else None
        mine = self._sessions.get(handoff) is session and handoff not in self._adopted
        reservation = self.reservations.take(handoff) if mine else None
        if reservation is None:
            text = f"nothing is reserved for {handoff} here"
            session.emit([events.refused(handoff, worker_pb2.REFUSAL_REASON_STALE, text)])
            return
        self._history.blocks("let_go", handoff, reservation)
        reservation.release()
        self._history.note("computes", handoff)
        if finish is not None:
            self._forget(handoff, "finished")
            session.emit([events.finished(handoff, finish)])
            return
        self._engine.submit(handoff, spec)
        self._adopted.add(handoff)
        self._records.note(handoff, session.router_id, RecordState.COMMITTED)

    def _fence(self, session: Session, handoff: HandoffId) -> None:
        owner = self._sessions.get(handoff, session)
        if handoff in self._adopted or self.reservations.fence(handoff) is State.COMMITTED:
            if owner is not session:  # to the owner, the Committed event is the answer: it was sent, or is about to be
                session.emit([events.committed(handoff)])
            return
        self._drop(handoff)
        for router in {owner, session}:
            router.emit([events.fenced(handoff)])

    def _release(self, session: Session, handoff: HandoffId) -> None:
        owner = self._sessions.get(handoff, session)
        self._drop(handoff)
        if owner is not session:
            owner.emit([events.failed(handoff, StaleAttempt(f"released by router {session.router_id}"))])

    def gone(self, session: Session) -> None:
        for handoff in list(session.handoffs):
            self._drop(handoff)

    def holdings(self) -> Iterator[Holding]:
        """See `RoleBehaviour.holdings`."""
        for entry in self.reservations.entries():
            yield self._holding(entry.handoff, entry.state.name.lower(), entry.reservation)
        for handoff, allocation in self._engine.holdings():
            yield self._holding(handoff, "decoding", allocation)
        for handoff, pin in self._pins.items():
            yield self._holding(handoff, "fetched", pin)

    def _holding(self, handoff: HandoffId, state: str, held: Blocks | None) -> Holding:
        session = self._sessions.get(handoff)
        return Holding(handoff, state, held.blocks if held else (), session.router_id if session else "")

    def _drop(self, handoff: HandoffId) -> None:
        """Forget a handoff in whatever state, and free its blocks."""
        if (session := self._sessions.get(handoff)) is not None:
            self._records.note(handoff, session.router_id, RecordState.ABORTED)
        reservation = self.reservations.take(handoff)
        if reservation is not None:
            self._history.blocks("let_go", handoff, reservation)
            reservation.release()
        self._engine.release(handoff)
        self._forget(handoff)

    def _forget(self, handoff: HandoffId, how: str = "released") -> None:
        self._adopted.discard(handoff)
        session = self._sessions.pop(handoff, None)
        if session is not None:
            self._history.note(how, handoff)
            session.handoffs.discard(handoff)
            self._records.note(handoff, session.router_id, RecordState.RELEASED)

    # --- the handoff ---------------------------------------------------------------------------------------------

    def committed(self, handoff: HandoffId, commit: CommitState) -> None:
        """The table accepted a commit: the engine thread takes it over. From any thread."""
        self._loop.submit(partial(self._adopt, handoff, commit))

    def _adopt(self, handoff: HandoffId, commit: CommitState) -> None:
        reservation = self.reservations.take(handoff)
        session = self._sessions.get(handoff)
        if reservation is None or session is None:
            return  # released between the commit and now: the blocks are free already
        assert commit.spec is not None  # the table has seen to it
        try:
            self._engine.adopt(handoff, commit.spec, reservation)
        except (InvalidRequest, ValueError) as error:
            self._history.blocks("let_go", handoff, reservation)
            reservation.release()
            self._forget(handoff, "failed")
            session.emit([events.failed(handoff, HandoffError(str(error)))])
            return
        self._adopted.add(handoff)
        self._history.tokens("adopted", handoff, commit.first)
        self._records.note(handoff, session.router_id, RecordState.COMMITTED)
        committed = events.committed(
            handoff,
            transfer_s=commit.transfer_s,
            commit_s=commit.commit_s,
            kv_bytes=commit.kv_bytes,
            transport=commit.transport,
        )
        session.emit([committed, events.tokens(handoff, commit.first)])

    # --- what a prefill worker lacks of it -----------------------------------------------------------------------

    def fetch(self, job: PushJob) -> None:
        """Push what is here already of a reservation to its prefill worker. From any thread."""
        self._loop.submit(partial(self._push_back, job))

    def _push_back(self, job: PushJob) -> None:
        shared = self.reservations.shared(job.handoff)
        if (
            self._pusher is None
            or job.handoff in self._pins
            or len(shared) * self._info.layout.block_size < job.known_tokens
        ):
            return  # it is over, or was asked for before
        pin = self._engine.pool.allocate(0, shared=shared)
        assert pin is not None  # nobody has to make room for what is held
        self._pins[job.handoff] = pin
        self._history.blocks("owned", job.handoff, pin, shared=len(pin), part="pin")
        try:
            self._pusher.begin(job)
        except (HandoffError, ValueError) as error:
            log.warning("fetch_refused", handoff=str(job.handoff), error=str(error))
            self._unpin(job.handoff)
            return
        self._pusher.computed(job.handoff, pin.blocks, self._info.layout.layers, job.known_tokens)
        self._pusher.finish(job.handoff, PushEnd())

    def push_ended(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        """The blocks that were fetched are not read any more. From a transfer thread, once per push."""
        self._loop.submit(partial(self._unpin, handoff))

    def _unpin(self, handoff: HandoffId) -> None:
        if (pin := self._pins.pop(handoff, None)) is not None:
            self._history.blocks("let_go", handoff, pin, part="pin")
            pin.release()

    # --- steps ---------------------------------------------------------------------------------------------------

    def stepped(self, result: StepResult) -> None:
        batches: dict[Session, list[worker_pb2.WorkerEvent]] = defaultdict(list)
        for item in result.outputs:
            if (session := self._sessions.get(item.key)) is not None:
                self._history.tokens("tokens", item.key, item.tokens)
                batches[session] += events.output(item)
        for key in result.preempted:
            if (session := self._sessions.get(key)) is not None:
                batches[session].append(events.preempted(key, "the KV pool is full"))
        for key, error in result.failed:
            if (session := self._sessions.get(key)) is not None:
                batches[session].append(events.failed(key, error))
        ended = [(item.key, "finished") for item in result.outputs if item.finish]
        ended += [(key, "preempted") for key in result.preempted] + [(key, "failed") for key, _ in result.failed]
        for key, how in ended:
            self._forget(key, how)
        for session, batch in batches.items():
            session.emit(batch)

    def tick(self) -> None:
        """Reclaim reservations whose deadline passed: fence, free, tell the router."""
        for handoff in self.reservations.expired(self._clock.monotonic()):
            if self.reservations.fence(handoff) is State.COMMITTED:
                continue
            session = self._sessions.get(handoff)
            self._drop(handoff)
            if session is not None:
                session.emit([events.failed(handoff, DeadlineExceeded("the reservation expired before a commit"))])
