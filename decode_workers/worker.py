"""The decode worker role: reserve capacity, adopt received KV and stream the remaining tokens, or prefill locally.

Events for routers come first, then `FetchPins`, then `DecodeWorker` and its composition with transfers. Every method of
the role runs on the engine thread except `committed`, which the reservation table calls from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import structlog

from baton.clock import Clock
from baton.core import HandoffId, Load, SequenceSpec, ThinkingState, Thought, Token, WorkerInfo
from baton.engine.block_pool import Allocation, Reservation
from baton.engine.engine import Engine
from baton.engine.step_result import StepResult
from baton.errors import TOO_LONG, Cancelled, DeadlineExceeded, HandoffError, InvalidRequest, StaleAttempt
from baton.ledger.ownership import OwnershipLog, RecordState
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2
from baton.worker import events
from baton.worker.block_census import Holding
from baton.worker.engine_loop import EngineLoop
from baton.worker.handoff_timing import DecodeTimes
from baton.worker.role import HandoffEvents, HandoffRole, Job, Pusher, RoleDeps, Transfers
from baton.worker.service import Session, deadline_after
from decode_workers.detached_streams import DetachedStreams
from decode_workers.moves import Moves
from decode_workers.reservations import Reservations, State
from kvtransfer.handoff import CommitState, PushEnd, PushJob, PushResult


def adoption_events(handoff: HandoffId, commit: CommitState, times: DecodeTimes) -> list[worker_pb2.WorkerEvent]:
    """Return the commit event, then thoughts and first token again, because the prefill worker may have died."""
    committed = events.committed(handoff, commit, times.taken_over(commit))
    made = commit.state.thoughts if isinstance(commit.state, ThinkingState) else ()
    thoughts = [Thought(chunk, token_ids) for chunk, token_ids in enumerate(made)]
    again = [events.thoughts(handoff, thoughts)] if thoughts else []
    return [committed, *again, events.tokens(handoff, commit.first)]


def stepped(result: StepResult, times: DecodeTimes) -> Iterator[HandoffEvents]:
    """Yield events in the order in which routers must receive them: thoughts, tokens, ends."""
    times.stepped(result)
    for key, thoughts in result.thoughts:
        yield key, [events.thoughts(key, thoughts)]
    for key, part in result.prompts:
        yield key, [events.prompt_part(key, part)]
    for item in result.outputs:
        sent = events.output(item)
        if item.finish is not None:
            sent[-1].finish.verify_s = times.verify_s(item.key)
            sent[-1].spans.extend(times.ended(item.key))
        yield item.key, sent
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

RENEW_S = 100.0  # a third of the life of a released record


class FetchPins:
    """Blocks that prefill workers fetch from here, pinned until the push has ended. Every method runs on the engine
    thread, except `fetch`. Fetches are ignored before `attach`.
    """

    def __init__(self, info: WorkerInfo, engine: Engine, loop: EngineLoop) -> None:
        self._info = info
        self._engine = engine
        self._loop = loop
        self._history = engine.pool.history
        self._pins: dict[HandoffId, Allocation] = {}
        self._pusher: Pusher | None = None
        self._shared: Callable[[HandoffId], list[int]] = lambda handoff: []

    def __len__(self) -> int:
        return len(self._pins)

    def attach(self, shared: Callable[[HandoffId], list[int]], pusher: Pusher) -> None:
        """Set `shared`, which returns the blocks cached before a reservation, and `pusher`, which sends them."""
        self._shared, self._pusher = shared, pusher

    def holdings(self) -> Mapping[HandoffId, Allocation]:
        return self._pins

    def fetch(self, job: PushJob) -> None:
        """Push cached blocks of a reservation to its prefill worker. Called from any thread."""
        self._loop.submit(partial(self._push_back, job))

    def _push_back(self, job: PushJob) -> None:
        shared = self._shared(job.handoff)
        if (
            self._pusher is None
            or job.handoff in self._pins
            or len(shared) * self._info.layout.block_size < job.known_tokens
            or not self._engine.pool.can_share(shared)
        ):
            return  # over, already requested, or invalidated by a failed step
        pin = self._engine.pool.allocate(0, shared=shared)
        assert pin is not None  # sharing needs no free blocks
        self._pins[job.handoff] = pin
        self._history.blocks("owned", job.handoff, pin, shared=len(pin), part="pin")
        try:
            self._pusher.begin(job)
        except (HandoffError, ValueError) as error:
            log.warning("fetch_refused", handoff=job.handoff, error=str(error))
            self.unpin(job.handoff)
            return
        self._pusher.computed(job.handoff, pin.blocks, self._info.layout.layers, job.known_tokens)
        self._pusher.finish(job.handoff, PushEnd())

    def unpin(self, handoff: HandoffId) -> None:
        if (pin := self._pins.pop(handoff, None)) is not None:
            self._history.blocks("let_go", handoff, pin, part="pin")
            pin.release()


@dataclass(slots=True)
class DecodeJob(Job):
    """One handoff on this worker."""

    adopted: bool = False  # whether the engine runs it
    spec: SequenceSpec | None = None  # as decoding began here
    last: Token | None = None  # the last one sent to the router


class DecodeWorker(HandoffRole[DecodeJob]):
    """The decode role. Handoffs arrive through `reservations` and become engine sequences when they commit."""

    def __init__(self, info: WorkerInfo, engine: Engine, loop: EngineLoop, records: OwnershipLog, clock: Clock) -> None:
        commands = {"reserve": self._reserve, "prefill": self._compute, "fence": self._fence, "attach": self._attach}
        commands["repush"] = self._repush
        super().__init__(info, engine, loop, clock, commands)
        self._records = records
        self.pins = FetchPins(info, engine, loop)
        self.moves = Moves(engine)
        self.reservations = Reservations(info.fingerprint, self.committed, self.pins.fetch, self._history)
        self.detached, self._times = DetachedStreams(clock), DecodeTimes(clock, engine.counters)
        self._leaving = False
        self._ahead = 0
        self._renewed = clock.monotonic()
        on_cpu = engine.backend.device.type == "cpu"  # on GPUs steps are short, and graphs call no layer hooks
        engine.watch((lambda work, layer: loop.progressed()) if on_cpu else None, self.moves.freed)

    def attach(self, pusher: Pusher) -> None:
        self.pins.attach(self.reservations.shared, pusher)
        self.moves.attach(pusher)

    # --- commands ------------------------------------------------------------------------------------------------

    def _reserve(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        message = command.reserve
        handoff = convert.handoff_from_pb(message.handoff)
        deadline = deadline_after(message.deadline_s, self._clock)
        deadline_after(message.resumable_s, self._clock, "resumable_s")  # checks the range
        if (refusal := self._refusal(message, handoff)) is not None:
            session.emit([refusal])
            return
        for old in self.detached.superseded(handoff) if handoff.attempt > 1 else ():
            self._drop(old)
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
        self.detached.open(handoff, message, session.router_id)
        self._add(handoff, DecodeJob(session))
        self._records.note(handoff, session.router_id, RecordState.RESERVED)
        session.emit([events.reserved(handoff, cached)])

    def _refusal(self, message: worker_pb2.Reserve, handoff: HandoffId) -> worker_pb2.WorkerEvent | None:
        """Return the refusal if this can never be reserved here, else None. Raises StaleAttempt if it is not new."""
        served, most = self._info.fingerprint, self._info.max_model_len
        if message.fingerprint != served:
            text = f"fingerprint: {message.fingerprint} is requested, {served} is served here"
            return events.refused(handoff, worker_pb2.REFUSAL_REASON_FINGERPRINT, text)
        if not 1 <= message.known_tokens <= most or message.max_total > most:
            text = f"{TOO_LONG} {most} tokens; {message.known_tokens} are known, {message.max_total} are possible"
            return events.refused(handoff, worker_pb2.REFUSAL_REASON_TOO_LONG, text)
        if handoff in self._work:
            raise StaleAttempt(f"{handoff} is already here")
        self.reservations.check_new(handoff)
        return None

    def _compute(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        """Run the prefill locally, in the capacity that was reserved for the handoff."""
        message = command.prefill
        handoff, spec = convert.handoff_from_pb(message.handoff), convert.spec_from_pb(message.spec)
        if message.HasField("to"):
            raise InvalidRequest.of("to", "must not be set for a prefill on a decode worker")
        self._engine.validate(spec)
        finish = self._engine.finish_of(spec) if spec.known else None
        job = self._work.get(handoff)
        mine = job is not None and job.session is session and not job.adopted
        reservation = self.reservations.take(handoff, alone=True) if mine else None
        if job is None or reservation is None:
            raise StaleAttempt(f"{handoff} has no reservation here")
        self._free(handoff, reservation)
        self._history.step("computes", handoff)
        if finish is not None:
            self._forget(handoff, "finished")
            session.emit([events.finished(handoff, finish)])
            return
        self._times.begin(handoff, self._engine.submit(handoff, spec), alone=True)
        self._decodes(handoff, spec, job)

    def _decodes(self, handoff: HandoffId, spec: SequenceSpec, job: DecodeJob) -> None:
        job.adopted, job.spec = True, spec
        self.detached.begin(handoff, spec)
        self._records.note(handoff, job.session.router_id, RecordState.COMMITTED, self.detached.name(handoff))

    def _attach(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        """Attach a new router to a stream, because its old router has died or is about to."""
        message = command.attach
        handoff, spec = convert.handoff_from_pb(message.handoff), convert.spec_from_pb(message.spec)
        missed = self.detached.attach(handoff, spec, session.router_id)
        if missed is None:
            raise StaleAttempt(f"the events of {handoff} after {len(spec.known)} tokens are not here")
        job = self._work.get(handoff)
        if job is not None and job.session is not session:
            job.session.handoffs.discard(handoff)
            job.session.emit([events.failed(handoff, Cancelled(f"router {session.router_id} has taken over"))])
            job.session = session
        session.handoffs.add(handoff)  # also for an ended stream: its log is dropped or parked with the router
        session.emit([events.attached(handoff, self.detached.attached(handoff, len(spec.known))), *missed])

    def _repush(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        """Push a held sequence to another decode worker."""
        message = command.repush
        held, handoff = convert.handoff_from_pb(message.held), convert.handoff_from_pb(message.handoff)
        to = convert.ref_from_pb(message.to, "to")
        deadline_after(message.deadline_s, self._clock)  # checks the range
        if handoff in self._work:
            raise StaleAttempt(f"{handoff} is already here")
        self.reservations.check_new(handoff)
        if not self.moves.push(held, PushJob(handoff, to, 0, message.skip), session):
            raise StaleAttempt(f"no KV of {held} is held here")

    def push_ended(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        """Handle the end of a push: the sender no longer reads its blocks. Called once, from a transfer thread."""
        self._loop.submit(partial(self._push_ended, handoff, outcome))

    def _push_ended(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        if not self.moves.ended(handoff, outcome):
            self.pins.unpin(handoff)
        elif isinstance(outcome, PushResult):
            counts = self.reservations.counts
            counts.moved("sent", outcome.transport, outcome.nbytes, outcome.frames, outcome.exposed_s)

    def _fence(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        handoff = convert.handoff_from_pb(command.fence.handoff)
        job, owner = self._work.get(handoff), self._owner(handoff, session)
        if (job is not None and job.adopted) or self.reservations.fence(handoff) is State.COMMITTED:
            if owner is not session:  # the owner gets its own Committed event
                session.emit([events.committed(handoff)])
            return
        self._drop(handoff)
        for router in {owner, session}:
            router.emit([events.fenced(handoff)])

    def _release(self, session: Session, handoff: HandoffId) -> None:
        if self._router(handoff) in {"", session.router_id}:
            super()._release(session, handoff)  # otherwise another router has attached to the stream

    def _router(self, handoff: HandoffId) -> str:
        return self.detached.router(handoff) or self.moves.router(handoff)

    @property
    def idle(self) -> bool:
        """See `WorkerRole.idle`. Ended streams that are only remembered do not count."""
        return super().idle and not self.pins and not self.moves

    def leave(self, ahead: int = 0) -> None:
        """See `WorkerRole.leave`. Running sequences are preempted and continue elsewhere, with their KV if possible."""
        self.draining = self._leaving = True
        self._ahead = 0 if self._info.thinking_chunk else ahead  # thoughts may roll KV back
        for entry in self.reservations.entries():
            if self.reservations.fence(entry.handoff) is not State.COMMITTED:  # else `_adopt` follows
                self._give_up(entry.handoff, events.stopping(entry.handoff))
        self.stepped(self._engine.land())
        for handoff in [handoff for handoff, job in self._work.items() if job.adopted]:
            self._hand_back(handoff)

    def _hand_back(self, handoff: HandoffId) -> None:
        job, spans = self._work[handoff], self._times.ended(handoff)
        preempted = partial(events.preempted, handoff, "this worker is stopping", spans)
        moves = self.moves.offer(handoff, job.spec, job.last, job.session, self._ahead) if job.spec is not None else 0
        if not moves:
            self._give_up(handoff, preempted())
            return
        self.detached.drop(handoff)
        self._pop(handoff, "preempted")
        self._records.note(handoff, job.session.router_id, RecordState.RELEASED)
        job.session.emit([preempted(moves=moves)])

    def gone(self, session: Session) -> None:
        """See `RoleBehaviour.gone`. Resumable streams are parked."""
        for handoff in list(session.handoffs):
            if self.moves.drop(handoff):
                continue
            if handoff not in self._work and self._router(handoff) not in {"", session.router_id}:
                pass  # it has ended, and another router has attached to it
            elif not self.detached.detach(handoff):
                self._drop(handoff)
            elif (job := self._work.get(handoff)) is not None:  # else it has ended, and its blocks are free
                job.session = self.detached.no_router
                log.info("handoff_parked", handoff=handoff, router=session.router_id)
            session.handoffs.discard(handoff)

    def holdings(self) -> Iterator[Holding]:
        for entry in self.reservations.entries():
            yield self._holding(entry.handoff, entry.state.name.lower(), entry.reservation)
        for handoff, allocation in self._engine.holdings():
            yield from (moving := list(self.moves.holding(handoff, allocation.blocks if allocation else [])))
            if moving:
                continue
            job = self._work.get(handoff)
            yield self._holding(handoff, "parked" if job and not job.session.router_id else "decoding", allocation)
        for handoff, pin in self.pins.holdings().items():
            yield self._holding(handoff, "fetched", pin)

    def _drop(self, handoff: HandoffId) -> None:
        if self.moves.drop(handoff):
            return
        if (job := self._work.get(handoff)) is not None:
            self._records.note(handoff, job.session.router_id, RecordState.ABORTED)
        reservation = self.reservations.take(handoff)
        if reservation is not None:
            self._free(handoff, reservation)
        self._engine.release(handoff)
        self.detached.drop(handoff)
        self._forget(handoff)

    def _free(self, handoff: HandoffId, reservation: Reservation) -> None:
        self._history.blocks("let_go", handoff, reservation)
        reservation.release()

    def _forget(self, handoff: HandoffId, how: str = "released") -> None:
        """Forget a handoff that holds nothing any more. A resumable stream is kept until its router releases it."""
        self._times.ended(handoff)
        if (job := self._pop(handoff, how)) is not None:
            if not self.detached.name(handoff):
                job.session.handoffs.discard(handoff)
            self._records.note(handoff, job.session.router_id, RecordState.RELEASED)

    # --- the handoff ---------------------------------------------------------------------------------------------

    def committed(self, handoff: HandoffId, commit: CommitState) -> None:
        """Pass a commit that the table accepted to the engine thread. Called from any thread."""
        self._loop.submit(partial(self._adopt, handoff, commit))

    def _adopt(self, handoff: HandoffId, commit: CommitState) -> None:
        reservation = self.reservations.take(handoff)
        job = self._work.get(handoff)
        if reservation is None or job is None:
            return  # released after the commit: the blocks are already free
        assert commit.spec is not None  # checked by `Reservations.commit`
        try:
            tokens = self._engine.adopt(handoff, commit.spec, reservation, commit.state)
        except (InvalidRequest, ValueError) as error:
            self._free(handoff, reservation)
            self.detached.drop(handoff)
            self._forget(handoff, "failed")
            job.session.emit([events.failed(handoff, HandoffError(str(error)))])
            return
        self._history.tokens("adopted", handoff, commit.first)
        job.last = commit.first[-1]
        self._decodes(handoff, commit.spec, job)
        sent = adoption_events(handoff, commit, self._times)
        self._times.begin(handoff, tokens, alone=False)
        self.detached.record(handoff, sent)
        job.session.emit(sent)
        if self._leaving:
            self._hand_back(handoff)

    def _step_events(self, result: StepResult) -> Iterator[HandoffEvents]:
        self.moves.stepped(result)
        for item in result.outputs:
            if item.tokens and (job := self._work.get(item.key)) is not None:
                job.last = item.tokens[-1]
        for key, sent in stepped(result, self._times):
            if key in self._work:
                self.detached.record(key, sent)
                yield key, sent
        for key, how in ended(result):
            self._forget(key, how)

    def tick(self) -> None:
        """Drop expired reservations and notify their routers; drop parked streams that no router resumed in time."""
        for handoff in self.detached.expired():
            log.info("handoff_parked_in_vain", handoff=handoff)
            self._drop(handoff)
        for handoff in self.reservations.expired(self._clock.monotonic()):
            if self.reservations.fence(handoff) is not State.COMMITTED:
                error = DeadlineExceeded("the reservation expired before a commit")
                self._give_up(handoff, events.failed(handoff, error))
        self._renew()

    def _renew(self) -> None:
        """Write the records of ended streams again, before they expire: a router may still ask for the streams."""
        now = self._clock.monotonic()
        if now - self._renewed < RENEW_S:
            return
        self._renewed = now
        for handoff, name in self.detached.names().items():
            if handoff not in self._work:
                self._records.note(handoff, "", RecordState.RELEASED, name)


class HostedDecode(DecodeWorker):
    """The role with its peer listener, the sender for fetched KV, and the writer of ownership records."""

    def __init__(self, parts: RoleDeps) -> None:
        self._log = OwnershipLog(parts.ledger, parts.info.ref)
        super().__init__(parts.info, parts.engine, parts.loop, self._log, parts.clock)
        self.counts = self.reservations.counts
        self._transfers = Transfers(parts, self.reservations, self.push_ended)
        self.attach(self._transfers.sender)

    @property
    def busy(self) -> bool:
        return bool(self.moves)

    def load(self, load: Load) -> Load:
        return replace(load, channels=self._transfers.sender.channels(), draining=self.draining)

    async def close(self) -> None:
        await self._transfers.close()
        await self._log.close()
