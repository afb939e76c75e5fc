"""The decode worker role: reserve capacity, adopt received KV and stream the remaining tokens, or prefill locally.

Stateless functions come first: reservation checks, held blocks, events for routers. Then comes `DecodeWorker`. Every
method runs on the engine thread except `committed`, which the reservation table calls from any thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import structlog

from baton.core import HandoffId, SequenceSpec, Thought, WorkerInfo
from baton.errors import Cancelled, DeadlineExceeded, HandoffError, InvalidRequest, StaleAttempt
from baton.ledger.ownership import RecordState
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2
from baton.worker import events
from baton.worker.block_census import Holding
from baton.worker.handoff_timing import DecodeTimes
from baton.worker.service import deadline_after
from decode_workers.detached_streams import DetachedStreams, NoRouter
from decode_workers.fetch_pins import FetchPins
from decode_workers.reservations import Reservations, State

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.engine.engine import Engine
    from baton.engine.step_result import StepResult
    from baton.event_journal import Blocks
    from baton.ledger.ownership import OwnershipLog
    from baton.worker.engine_loop import EngineLoop
    from baton.worker.kv_endpoints import Pusher
    from baton.worker.service import Session
    from decode_workers.reservations import Entry
    from kvtransfer.handoff import CommitState

    Told = tuple[HandoffId, list[worker_pb2.WorkerEvent]]
    Owner = Session | NoRouter
    Batches = dict[Owner, list[worker_pb2.WorkerEvent]]


def refusal_of(
    message: worker_pb2.Reserve,
    handoff: HandoffId,
    info: WorkerInfo,
    reservations: Reservations,
    here: Container[HandoffId],
) -> worker_pb2.WorkerEvent | None:
    """Return the refusal if this can never be reserved here, else None. `here` holds the handoffs under way."""
    if message.fingerprint != info.fingerprint:
        text = f"fingerprint: {message.fingerprint} asked, {info.fingerprint} is served here"
        return events.refused(handoff, worker_pb2.REFUSAL_REASON_FINGERPRINT, text)
    most = info.max_model_len
    if not 1 <= message.known_tokens <= most or message.max_total > most:
        text = f"{message.known_tokens} tokens, {message.max_total} with all that may follow, of {most} at most"
        return events.refused(handoff, worker_pb2.REFUSAL_REASON_TOO_LONG, text)
    if handoff in here:
        return events.refused(handoff, worker_pb2.REFUSAL_REASON_STALE, f"{handoff} is here already")
    try:
        reservations.check_new(handoff)
    except StaleAttempt as error:
        return events.refused(handoff, worker_pb2.REFUSAL_REASON_STALE, str(error))
    return None


def held_blocks(
    open_: Iterable[Entry],
    decoding: Iterable[tuple[HandoffId, Blocks | None]],
    fetched: Mapping[HandoffId, Blocks],
    owners: Mapping[HandoffId, str],
) -> Iterator[Holding]:
    """List the blocks of each handoff with its router. `owners` has router ids, empty for a lost router."""
    for entry in open_:
        yield _holding(entry.handoff, entry.state.name.lower(), entry.reservation, owners)
    for handoff, allocation in decoding:
        yield _holding(handoff, "parked" if owners.get(handoff) == "" else "decoding", allocation, owners)
    for handoff, pin in fetched.items():
        yield _holding(handoff, "fetched", pin, owners)


def _holding(handoff: HandoffId, state: str, held: Blocks | None, owners: Mapping[HandoffId, str]) -> Holding:
    return Holding(handoff, state, held.blocks if held else (), owners.get(handoff, ""))


def adoption_events(handoff: HandoffId, commit: CommitState, times: DecodeTimes) -> list[worker_pb2.WorkerEvent]:
    """Return the commit event, then thoughts and first token again, because the prefill worker may have died."""
    committed = events.committed(
        handoff,
        transfer_s=commit.transfer_s,
        commit_s=commit.commit_s,
        kv_bytes=commit.kv_bytes,
        transport=commit.transport,
        spans=times.taken_over(commit),
    )
    made = commit.thinking.thoughts if commit.thinking is not None else ()
    thoughts = [Thought(chunk, token_ids) for chunk, token_ids in enumerate(made)]
    again = [events.thoughts(handoff, thoughts)] if thoughts else []
    return [committed, *again, events.tokens(handoff, commit.first)]


def stepped(result: StepResult, times: DecodeTimes) -> Iterator[Told]:
    """Yield events in the order in which routers must receive them: thoughts, tokens, ends."""
    times.verified(result)
    for key, thoughts in result.thoughts:
        yield key, [events.thoughts(key, thoughts)]
    for item in result.outputs:
        said = events.output(item)
        if item.finish is not None:
            said[-1].finish.verify_s = times.verify_s(item.key)
            said[-1].spans.extend(times.ended(item.key))
        yield item.key, said
    for key in result.preempted:
        yield key, [events.preempted(key, "the KV pool is full", times.ended(key))]
    for key, error in result.failed:
        yield key, [events.failed(key, error, spans=times.ended(key))]


def ended(result: StepResult) -> Iterator[tuple[HandoffId, str]]:
    """Yield the handoffs that hold nothing any more, each with the reason."""
    yield from ((item.key, "finished") for item in result.outputs if item.finish)
    yield from ((key, "preempted") for key in result.preempted)
    yield from ((key, "failed") for key, _ in result.failed)


log = structlog.get_logger(__name__)


class DecodeWorker:
    """The decode role. Handoffs arrive through `reservations` and become engine sequences when they commit."""

    def __init__(self, info: WorkerInfo, engine: Engine, loop: EngineLoop, records: OwnershipLog, clock: Clock) -> None:
        self._info, self._engine, self._loop = info, engine, loop
        self._records, self._clock = records, clock
        self._history = engine.pool.history
        self._sessions: dict[HandoffId, Owner] = {}
        self._adopted: set[HandoffId] = set()
        self.pins = FetchPins(info, engine, loop)
        self.push_ended = self.pins.push_ended
        self.reservations = Reservations(info.fingerprint, self.committed, self.pins.fetch, self._history)
        self.detached, self._times = DetachedStreams(clock), DecodeTimes(clock, engine.counters)
        self.draining = self._leaving = False
        if engine.backend.device.type == "cpu":  # on GPUs steps are short, and graphs call no layer hooks
            engine.watch(lambda work, layer: loop.progressed(), lambda sequence: None)

    def attach(self, pusher: Pusher) -> None:
        """Set the sender for KV that prefill workers fetch."""
        self.pins.attach(self.reservations.shared, pusher)

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
            case "attach":
                self._attach(session, command.attach)
            case kind:
                text = f"a decode worker takes reserve, prefill, fence, release and attach, not {kind}"
                raise InvalidRequest.of("command", text)

    def _reserve(self, session: Session, message: worker_pb2.Reserve) -> None:
        handoff = convert.handoff_from_pb(message.handoff)
        deadline = deadline_after(message.deadline_s, self._clock)
        deadline_after(message.resumable_s, self._clock, "resumable_s")  # checks the range
        if (refusal := refusal_of(message, handoff, self._info, self.reservations, self._sessions)) is not None:
            session.emit([refusal])
            return
        # The known tokens may fill the model's context: the request has ended then, and only its finish is sent.
        room = min(message.known_tokens, self._info.max_model_len - 1)
        reservation = None if self.draining else self._engine.reserve(room, message.prefix)
        if reservation is None:
            session.emit([events.stopping(handoff) if self.draining else events.no_room(handoff, message.known_tokens)])
            return
        self._history.blocks("reserved", handoff, reservation, shared=len(reservation.shared))
        self.reservations.open(handoff, reservation, message.known_tokens, deadline)
        cached = reservation.cached_tokens
        log.debug("handoff_reserved", handoff=handoff, known_tokens=message.known_tokens, cached=cached)
        self.detached.open(handoff, message.stream, message.resumable_s)
        self._sessions[handoff] = session
        session.handoffs.add(handoff)
        self._records.note(handoff, session.router_id, RecordState.RESERVED)
        session.emit([events.reserved(handoff, cached)])

    def _compute(self, session: Session, message: worker_pb2.Prefill) -> None:
        """Run the prefill locally, in the capacity that was reserved for the handoff."""
        handoff, spec = convert.handoff_from_pb(message.handoff), convert.spec_from_pb(message.spec)
        if message.HasField("to"):
            raise InvalidRequest.of("to", "a decode worker hands over to nobody")
        self._engine.validate(spec)
        finish = self._engine.finish_of(spec) if spec.known else None
        mine = self._sessions.get(handoff) is session and handoff not in self._adopted
        reservation = self.reservations.take(handoff, alone=True) if mine else None
        if reservation is None:
            stale = worker_pb2.REFUSAL_REASON_STALE
            session.emit([events.refused(handoff, stale, f"nothing is reserved for {handoff} here")])
            return
        self._history.blocks("let_go", handoff, reservation)
        reservation.release()
        self._history.step("computes", handoff)
        if finish is not None:
            self._forget(handoff, "finished")
            session.emit([events.finished(handoff, finish)])
            return
        self._times.begin(handoff, self._engine.submit(handoff, spec), alone=True)
        self._decodes(handoff, spec, session)

    def _decodes(self, handoff: HandoffId, spec: SequenceSpec, session: Owner) -> None:
        """Record that the engine runs the sequence."""
        self._adopted.add(handoff)
        self.detached.begin(handoff, spec)
        self._records.note(handoff, session.router_id, RecordState.COMMITTED, self.detached.name(handoff))

    def _attach(self, session: Session, message: worker_pb2.Attach) -> None:
        """Attach a new router to a stream, because its old router has died or is about to."""
        handoff, spec = convert.handoff_from_pb(message.handoff), convert.spec_from_pb(message.spec)
        missed = self.detached.attach(handoff, spec)
        if missed is None:
            text = f"nothing that follows {len(spec.known)} tokens of {handoff} is here"
            session.emit([events.refused(handoff, worker_pb2.REFUSAL_REASON_STALE, text)])
            return
        owner = self._sessions.get(handoff)
        if owner is not None and owner is not session:
            owner.handoffs.discard(handoff)
            owner.emit([events.failed(handoff, Cancelled(f"router {session.router_id} has taken over"))])
        if owner is not None:
            self._sessions[handoff] = session
        session.handoffs.add(handoff)  # also for an ended stream: its log is dropped or parked with the router
        session.emit([events.attached(handoff), *missed])

    def _fence(self, session: Session, handoff: HandoffId) -> None:
        owner = self._sessions.get(handoff, session)
        if handoff in self._adopted or self.reservations.fence(handoff) is State.COMMITTED:
            if owner is not session:  # the owner gets its own Committed event
                session.emit([events.committed(handoff)])
            return
        self._drop(handoff)
        for router in {owner, session}:
            router.emit([events.fenced(handoff)])

    def _release(self, session: Session, handoff: HandoffId) -> None:
        owner = self._sessions.get(handoff, session)
        if owner is not session and self.detached.name(handoff):
            return  # the session is a former owner and was notified
        session.handoffs.discard(handoff)  # also for an ended stream that is still remembered
        self._drop(handoff)
        if owner is not session:
            owner.emit([events.failed(handoff, StaleAttempt(f"released by router {session.router_id}"))])

    def drain(self) -> None:
        """See `WorkerRole.drain`."""
        self.draining = True

    @property
    def idle(self) -> bool:
        """See `WorkerRole.idle`. Ended streams that are only remembered do not count."""
        return not self._sessions and not self.pins

    def leave(self) -> None:
        """See `WorkerRole.leave`. Running sequences are preempted, as if the pool were full, and continue elsewhere."""
        self.draining = self._leaving = True
        for entry in self.reservations.entries():
            if self.reservations.fence(entry.handoff) is not State.COMMITTED:  # else `_adopt` follows
                owner = self._sessions[entry.handoff]
                self._drop(entry.handoff)
                owner.emit([events.stopping(entry.handoff)])
        for handoff in list(self._adopted):
            self._hand_back(handoff)

    def _hand_back(self, handoff: HandoffId) -> None:
        owner, spans = self._sessions[handoff], self._times.ended(handoff)
        self._drop(handoff)
        owner.emit([events.preempted(handoff, "this worker is stopping", spans)])

    def gone(self, session: Session) -> None:
        for handoff in list(session.handoffs):
            if self.detached.detach(handoff):
                self._park(session, handoff)
            else:
                self._drop(handoff)

    def _park(self, session: Session, handoff: HandoffId) -> None:
        session.handoffs.discard(handoff)
        if handoff in self._sessions:  # else it has ended, and its blocks are free
            self._sessions[handoff] = self.detached.nobody
            log.info("handoff_parked", handoff=handoff, router=session.router_id)

    def holdings(self) -> Iterator[Holding]:
        """See `RoleBehaviour.holdings`."""
        owners = {handoff: owner.router_id for handoff, owner in self._sessions.items()}
        return held_blocks(self.reservations.entries(), self._engine.holdings(), self.pins.holdings(), owners)

    def _drop(self, handoff: HandoffId) -> None:
        """Forget a handoff in any state and free its blocks."""
        if (session := self._sessions.get(handoff)) is not None:
            self._records.note(handoff, session.router_id, RecordState.ABORTED)
        reservation = self.reservations.take(handoff)
        if reservation is not None:
            self._history.blocks("let_go", handoff, reservation)
            reservation.release()
        self._engine.release(handoff)
        self.detached.drop(handoff)
        self._forget(handoff)

    def _forget(self, handoff: HandoffId, how: str = "released") -> None:
        """Forget a handoff that holds nothing any more. A resumable stream is kept until its router releases it."""
        self._adopted.discard(handoff)
        self._times.ended(handoff)
        session = self._sessions.pop(handoff, None)
        if session is not None:
            self._history.step(how, handoff)
            if not self.detached.name(handoff):
                session.handoffs.discard(handoff)
            self._records.note(handoff, session.router_id, RecordState.RELEASED)

    # --- the handoff ---------------------------------------------------------------------------------------------

    def committed(self, handoff: HandoffId, commit: CommitState) -> None:
        """Pass a commit that the table accepted to the engine thread. Called from any thread."""
        self._loop.submit(partial(self._adopt, handoff, commit))

    def _adopt(self, handoff: HandoffId, commit: CommitState) -> None:
        reservation = self.reservations.take(handoff)
        session = self._sessions.get(handoff)
        if reservation is None or session is None:
            return  # released after the commit: the blocks are already free
        assert commit.spec is not None  # checked by `Reservations.commit`
        try:
            tokens = self._engine.adopt(handoff, commit.spec, reservation, commit.thinking)
        except (InvalidRequest, ValueError) as error:
            self._history.blocks("let_go", handoff, reservation)
            reservation.release()
            self.detached.drop(handoff)
            self._forget(handoff, "failed")
            session.emit([events.failed(handoff, HandoffError(str(error)))])
            return
        self._history.tokens("adopted", handoff, commit.first)
        self._decodes(handoff, commit.spec, session)
        said = adoption_events(handoff, commit, self._times)
        self._times.begin(handoff, tokens, alone=False)
        self.detached.record(handoff, said)
        session.emit(said)
        if self._leaving:
            self._hand_back(handoff)

    def stepped(self, result: StepResult) -> None:
        batches: Batches = defaultdict(list)
        for item in result.outputs:
            if item.key in self._sessions:
                self._history.tokens("tokens", item.key, item.tokens)
        for key, said in stepped(result, self._times):
            self._say(batches, key, said)
        for key, how in ended(result):
            self._forget(key, how)
        for session, batch in batches.items():
            session.emit(batch)

    def _say(self, batches: Batches, key: HandoffId, said: list[worker_pb2.WorkerEvent]) -> None:
        if (session := self._sessions.get(key)) is not None:
            self.detached.record(key, said)
            batches[session] += said

    def tick(self) -> None:
        """Drop expired reservations and notify their routers; drop parked streams that no router resumed in time."""
        for handoff in self.detached.expired():
            log.info("handoff_parked_in_vain", handoff=handoff)
            self._drop(handoff)
        for handoff in self.reservations.expired(self._clock.monotonic()):
            if self.reservations.fence(handoff) is State.COMMITTED:
                continue
            session = self._sessions.get(handoff)
            self._drop(handoff)
            if session is not None:
                session.emit([events.failed(handoff, DeadlineExceeded("the reservation expired before a commit"))])
