"""The prefill worker role: compute a prompt and its first token, push the KV during the computation, then forget it.

Events for routers come first, then `PrefillJob` and choices over all jobs, then `PrefillWorker`. Every method runs on
the engine thread except `push_ended` and `fetch_ended`, which other threads call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from baton.core import HandoffId, SequenceSpec, WorkerInfo
from baton.errors import DeadlineExceeded, DigestMismatch, HandoffError, InvalidRequest, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2
from baton.worker import events
from baton.worker.block_census import Holding
from baton.worker.handoff_timing import PrefillTimes
from baton.worker.service import Attempts, deadline_after
from baton.worker.thought_log import Thoughts
from kvtransfer.handoff import PushEnd, PushJob, PushResult
from prefill_workers.prefix_fetch import Fetches

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from baton.clock import Clock
    from baton.core import ThinkingState
    from baton.engine.engine import Engine
    from baton.engine.sequence import ScheduledSequence as StepWork
    from baton.engine.step_result import SequenceOutput, StepResult
    from baton.event_journal import Blocks
    from baton.worker.engine_loop import EngineLoop
    from baton.worker.kv_endpoints import Pusher
    from baton.worker.service import Session

    Event = worker_pb2.WorkerEvent


def in_step(step: Iterable[StepWork], works: Mapping[HandoffId, PrefillJob], began: float) -> None:
    """Record for each job that the first layer of a step is done; the step began at `began`."""
    for item in step:
        if (work := works.get(item.sequence.key)) is not None:
            work.times.in_step(began, streams=work.streams)


def stepped(
    result: StepResult, works: Mapping[HandoffId, PrefillJob]
) -> Iterator[tuple[PrefillJob, list[worker_pb2.WorkerEvent]]]:
    """Yield events in the order in which routers must receive them. Failed jobs are not forgotten yet."""
    for key, thoughts in result.thoughts:
        if (work := works.get(key)) is not None:
            work.thoughts.add(thoughts)
            yield work, [events.thoughts(key, thoughts)]
    for item in result.outputs:
        if (work := works.get(item.key)) is not None:
            yield work, _output(item, work)
    for key, error in result.failed:
        if (work := works.get(key)) is not None:
            yield work, [events.failed(key, error, spans=work.times.said())]


def _output(item: SequenceOutput, work: PrefillJob) -> list[worker_pb2.WorkerEvent]:
    said = events.output(item)
    work.times.computed(len(work.spec), item.cached_tokens)
    if item.finish is not None:
        said[-1].spans.extend(work.times.said())
    return said


def pushed(handoff: HandoffId, outcome: PushResult | HandoffError, work: PrefillJob) -> Event:
    """Return the event for an ended push."""
    if isinstance(outcome, PushResult):
        said = events.pushed(
            handoff,
            kv_bytes=outcome.nbytes,
            exposed_s=outcome.exposed_s,
            round_trip_s=outcome.round_trip_s,
            frames=outcome.frames,
        )
        figures = {"kv_bytes": outcome.nbytes, "frames": outcome.frames, "exposed_s": f"{outcome.exposed_s:.6f}"}
        work.times.pushed(**figures, transport=outcome.transport)
    else:
        said = events.failed(handoff, outcome, held=work.waits)
        work.times.pushed(error=type(outcome).__name__)
    said.spans.extend(work.times.said())
    return said


@dataclass(slots=True)
class PrefillJob:
    """One handoff on this worker."""

    session: Session
    spec: SequenceSpec
    deadline: float | None
    streams: bool  # whether KV is sent layer by layer, because it is long
    times: PrefillTimes
    first: SequenceOutput | None = None  # the sampled first token
    waits: bool = False  # its push failed, and its KV waits for a retransfer or a Release
    thoughts: Thoughts = field(default_factory=Thoughts)

    def said(self, handoff: HandoffId) -> list[worker_pb2.WorkerEvent]:
        """Repeat all events about the output under the new handoff, because the router may have left the old one."""
        first = events.output(replace(self.first, key=handoff)) if self.first is not None else []
        return self.thoughts.said(handoff) + first

    def end(self, thinking: ThinkingState | None) -> PushEnd:
        """Return the end of the push, which includes the sampled first token."""
        tokens = self.first.tokens if self.first is not None else ()
        known = (*self.spec.known, *(token.token_id for token in tokens))
        return PushEnd(replace(self.spec, known=known), tokens, thinking)

    @property
    def state(self) -> str:
        """State of a job that has blocks."""
        if self.waits:
            return "waiting"
        return "prefilling" if self.first is None else "pushing"


def final(item: StepWork, layer: int, layers: int) -> Iterator[tuple[int, int]]:
    """Yield (layers, positions) of KV that may be sent once `layer` is written. KV from before the step is final in all
    layers. So is KV of the step, unless the sequence is not settled: a rollback may still remove its end.
    """
    sequence = item.sequence
    if layer == 0 and sequence.computed:
        yield layers, sequence.computed
    if sequence.settled:
        yield layer + 1, sequence.computed + item.count


def overdue(works: Mapping[HandoffId, PrefillJob], now: float) -> list[tuple[HandoffId, PrefillJob]]:
    """Return jobs that passed their deadline before they were computed, or while their KV waited for a retransfer."""
    late = [(handoff, work) for handoff, work in works.items() if work.deadline is not None and work.deadline <= now]
    return [(handoff, work) for handoff, work in late if work.first is None or work.waits]


def spare(works: Mapping[HandoffId, PrefillJob]) -> HandoffId | None:
    """Return the job to drop if prompts find no capacity: the oldest that waits for a retransfer. Return None while a
    push is under way, because it will free blocks. Otherwise the jobs may deadlock: the next decode worker may have no
    capacity before one of these prompts is computed.
    """
    computed = [(handoff, work.waits) for handoff, work in works.items() if work.first is not None]
    return computed[0][0] if computed and all(waits for _, waits in computed) else None


def held_blocks(
    works: Mapping[HandoffId, PrefillJob],
    fetched: Mapping[HandoffId, Blocks],
    computed: Iterable[tuple[HandoffId, Blocks | None]],
) -> Iterator[Holding]:
    """List the blocks of each handoff with its router."""
    for handoff, fetch in fetched.items():
        yield _holding(works.get(handoff), handoff, "fetching", fetch)
    for handoff, allocation in computed:
        yield _holding(works.get(handoff), handoff, "", allocation)


def _holding(work: PrefillJob | None, handoff: HandoffId, state: str, held: Blocks | None) -> Holding:
    blocks = held.blocks if held else []
    state = state or (work.state if work and blocks else "queued")
    return Holding(handoff, state, blocks, work.session.router_id if work else "")


log = structlog.get_logger(__name__)


class PrefillWorker:
    """The prefill role: prompts arrive as commands and leave as KV through the sender given to `attach`."""

    def __init__(
        self,
        info: WorkerInfo,
        engine: Engine,
        loop: EngineLoop,
        clock: Clock,
        *,
        coalesce_below: int = 0,  # bytes; more KV is sent while the prompt is computed, less KV afterwards
        fetch_s: float = 10.0,  # timeout of a fetch, which is tried only if cheaper than computing
    ) -> None:
        self._info, self._engine, self._loop = info, engine, loop
        self._clock = clock
        self._history = engine.pool.history
        self._coalesce_below = coalesce_below
        self._work: dict[HandoffId, PrefillJob] = {}
        self._attempts = Attempts()
        self.draining = False
        self._pusher: Pusher | None = None
        self.fetches = Fetches(engine, clock, fetch_s, self.fetch_ended, thinks=info.thinking_chunk > 0)
        self.transfer_bytes, self.transport = 0, ""

    def attach(self, pusher: Pusher) -> None:
        self._pusher = pusher
        self._engine.watch(self._layer_done, lambda sequence: pusher.withdraw(sequence.key))

    # --- commands ------------------------------------------------------------------------------------------------

    def command(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        """See `RoleBehaviour.command`."""
        match command.WhichOneof("command"):
            case "prefill":
                self._prefill(session, command.prefill)
            case "repush":
                self._repush(session, command.repush)
            case "release":
                self._release(session, convert.handoff_from_pb(command.release.handoff))
            case kind:
                raise InvalidRequest.of("command", f"a prefill worker takes prefill, repush and release, not {kind}")

    def _prefill(self, session: Session, message: worker_pb2.Prefill) -> None:
        handoff = convert.handoff_from_pb(message.handoff)
        spec, to = convert.spec_from_pb(message.spec), convert.ref_from_pb(message.to, "to")
        deadline = deadline_after(message.deadline_s, self._clock)
        if not self._is_new(session, handoff):
            return
        if self.draining:
            session.emit([events.stopping(handoff)])
            return
        streams = self._streams(spec, message.skip)
        self._engine.validate(spec)
        self._attempts.saw(handoff)
        if spec.known and (finish := self._engine.finish_of(spec)) is not None:
            session.emit([events.finished(handoff, finish)])
            return
        self._history.step("prefill", handoff)
        self._work[handoff] = PrefillJob(session, spec, deadline, streams, PrefillTimes(self._clock))
        session.handoffs.add(handoff)
        fetch = self.fetches.begin(handoff, spec, to, message.skip)
        if fetch is None:
            self._engine.submit(handoff, spec, hold=True)
        self._begin(PushJob(handoff, to, len(spec), message.skip, fetch, spec.deterministic))

    def fetch_ended(self, handoff: HandoffId) -> None:
        """Continue with a prompt after its fetch succeeded or failed. Called from any thread."""
        self._loop.submit(partial(self._fetched, handoff))

    def _fetched(self, handoff: HandoffId) -> None:
        """Submit the prompt to the engine, which computes only the part without KV."""
        ended, work = self.fetches.end(handoff), self._work.get(handoff)
        if ended and work is not None:
            self._engine.submit(handoff, work.spec, hold=True)

    def _repush(self, session: Session, message: worker_pb2.Repush) -> None:
        held, handoff = convert.handoff_from_pb(message.held), convert.handoff_from_pb(message.handoff)
        to, deadline = convert.ref_from_pb(message.to, "to"), deadline_after(message.deadline_s, self._clock)
        if not self._is_new(session, handoff):
            return
        work = self._work.get(held)
        streams = work is not None and self._streams(work.spec, message.skip)
        if work is None or work.session is not session:
            session.emit([events.refused(handoff, worker_pb2.REFUSAL_REASON_STALE, f"nothing of {held} is held here")])
            return
        self._fetched(held)
        if self._pusher is not None:
            self._pusher.withdraw(held)
            self._pusher.abort(held)
        self._engine.rename(held, handoff)
        self._history.step("repush", handoff, held=held.attempt)
        self._attempts.saw(handoff)
        self._work[handoff] = self._work.pop(held)
        session.handoffs.discard(held)
        session.handoffs.add(handoff)
        work.streams, work.deadline, work.waits = streams, deadline, False
        work.times.repushed()
        self._begin(PushJob(handoff, to, len(work.spec), message.skip, verify=work.spec.deterministic))
        if work.first is not None:
            self._history.tokens("tokens", handoff, work.first.tokens)
        session.emit(work.said(handoff))
        if work.first is not None:
            self._finish(handoff, work)

    def _is_new(self, session: Session, handoff: HandoffId) -> bool:
        try:
            self._attempts.check_new(handoff)
        except StaleAttempt as error:
            session.emit([events.refused(handoff, worker_pb2.REFUSAL_REASON_STALE, str(error))])
            return False
        if handoff in self._work:  # too old for `Attempts` to remember
            raise InvalidRequest.of("handoff", f"{handoff} is already here")
        return True

    def _streams(self, spec: SequenceSpec, skip: int) -> bool:
        if not 0 <= skip < len(spec):
            raise InvalidRequest.of("skip", f"must be less than {len(spec)} tokens, got {skip}")
        layout = self._info.layout
        return (len(spec) - skip) * layout.layers * layout.layer_token_bytes > self._coalesce_below

    def _begin(self, job: PushJob) -> None:
        assert self._pusher is not None
        try:
            self._pusher.begin(job)
        except (HandoffError, ValueError) as error:  # rejected, so nothing else reports its end
            log.warning("push_refused", handoff=job.handoff, error=str(error))
            self._pushed(job.handoff, error if isinstance(error, HandoffError) else HandoffError(str(error)))

    def _release(self, session: Session, handoff: HandoffId) -> None:
        work = self._work.get(handoff)
        self._drop(handoff)
        if work is not None and work.session is not session:
            work.session.emit([events.failed(handoff, StaleAttempt(f"released by router {session.router_id}"))])

    def drain(self) -> None:
        """See `WorkerRole.drain`. KV that waits for a retransfer is still handed over."""
        self.draining = True

    @property
    def idle(self) -> bool:
        """See `WorkerRole.idle`."""
        return not self._work  # each fetch belongs to one of these

    def leave(self) -> None:
        """See `WorkerRole.leave`. Computed prompts may still be handed over; the rest is computed elsewhere."""
        self.drain()
        for handoff, work in list(self._work.items()):
            if work.first is None:
                self._drop(handoff)
                work.session.emit([events.stopping(handoff)])

    def gone(self, session: Session) -> None:
        for handoff in list(session.handoffs):
            self._drop(handoff)

    def holdings(self) -> Iterator[Holding]:
        """See `RoleBehaviour.holdings`."""
        return held_blocks(self._work, self.fetches.holdings(), self._engine.holdings())

    def _drop(self, handoff: HandoffId) -> None:
        """Abort a handoff and its push. The engine withdraws the push before it frees the blocks."""
        self.fetches.end(handoff)
        if handoff in self._work and self._pusher is not None:
            self._pusher.abort(handoff)
        self._forget(handoff, "aborted")

    def _forget(self, handoff: HandoffId, how: str) -> None:
        self._engine.release(handoff)
        work = self._work.pop(handoff, None)
        if work is not None:
            self._history.step(how, handoff)
            work.session.handoffs.discard(handoff)

    # --- steps ---------------------------------------------------------------------------------------------------

    def stepped(self, result: StepResult) -> None:
        self.fetches.step_ended(result.computed)
        batches: dict[Session, list[worker_pb2.WorkerEvent]] = defaultdict(list)
        for item in result.outputs:
            if item.key in self._work:
                self._history.tokens("tokens", item.key, item.tokens)
        for work, said in stepped(result, self._work):
            batches[work.session] += said
        for key, _ in result.failed:
            self._drop(key)
        for session, batch in batches.items():
            session.emit(batch)  # the first token leaves before the last of its KV does
        for item in result.outputs:
            self._hand_over(item)

    def _layer_done(self, step: list[StepWork], layer: int) -> None:
        """Pass finished KV of one layer to the sender, in the middle of a step."""
        assert self._pusher is not None
        self._loop.progressed()
        if layer == 0:
            self.fetches.step_began()
            in_step(step, self._work, self._loop.step_began)
        for item in step:
            sequence = item.sequence
            work = self._work.get(sequence.key)
            if work is None or not work.streams or sequence.allocation is None:
                continue
            for layers, end in final(item, layer, self._info.layout.layers):
                self._pusher.computed(sequence.key, sequence.allocation.blocks, layers, end)

    def _hand_over(self, item: SequenceOutput) -> None:
        work = self._work.get(item.key)
        if work is None or self._pusher is None:
            return
        if item.finish is not None:
            self._drop(item.key)  # the first token ended the request: nothing to commit
            return
        work.first = item
        self._finish(item.key, work)

    def _finish(self, handoff: HandoffId, work: PrefillJob) -> None:
        assert self._pusher is not None
        blocks = self._engine.held(handoff).blocks
        self._pusher.computed(handoff, blocks, self._info.layout.layers, len(work.spec))
        self._pusher.finish(handoff, work.end(self._engine.thinking_state(handoff)))

    def push_ended(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        """Handle the end of a push: the sender no longer reads its blocks. Called once, from a transfer thread."""
        self._loop.submit(partial(self._pushed, handoff, outcome))

    def _pushed(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        self._fetched(handoff)  # waits no longer for a fetch, because its source is gone
        work = self._work.get(handoff)
        if isinstance(outcome, PushResult):
            self._forget(handoff, "pushed")
            self.transfer_bytes += outcome.nbytes
            self.transport = outcome.transport
        elif work is not None and not isinstance(outcome, DigestMismatch):
            work.waits = True
            self._history.step("failed", handoff, error=type(outcome).__name__, held=True)
        else:
            self._forget(handoff, "failed")  # corrupted KV is computed again
        if work is not None:
            work.session.emit([pushed(handoff, outcome, work)])

    def tick(self) -> None:
        """Drop overdue prompts and KV that blocks other prompts; stop waiting for late fetches."""
        if (held := spare(self._work)) is not None and self._engine.load().starved:
            self._drop(held)
        for handoff in self.fetches.late():
            self._fetched(handoff)
        for handoff, work in overdue(self._work, self._clock.monotonic()):
            self._drop(handoff)
            if not work.waits:
                error = DeadlineExceeded("the prompt was not computed in time")
                work.session.emit([events.failed(handoff, error)])
