"""The prefill worker role: compute a prompt and its first token, push the KV during the computation, then forget it.

Events for routers come first, then `PrefillJob` and choices over all jobs, then `PrefillWorker` and its composition
with transfers. Every method of the role runs on the engine thread except `push_ended` and `fetch_ended`, which other
threads call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from baton.clock import Clock
from baton.core import HandoffId, Load, PromptPart, SequenceSpec, SequenceState, WorkerInfo
from baton.engine.engine import Engine
from baton.engine.sequence import ScheduledSequence as StepWork
from baton.engine.step_result import SequenceOutput, StepResult
from baton.errors import DeadlineExceeded, DigestMismatch, HandoffError, InvalidRequest, StaleAttempt
from baton.metrics.worker import Counts
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2
from baton.worker import events
from baton.worker.block_census import Holding
from baton.worker.engine_loop import EngineLoop
from baton.worker.events import Thoughts
from baton.worker.handoff_timing import PrefillTimes
from baton.worker.role import HandoffEvents, HandoffRole, Job, Pusher, RoleDeps, Transfers
from baton.worker.service import Attempts, Session, deadline_after
from kvtransfer.handoff import PushEnd, PushJob, PushResult
from prefill_workers.prefix_fetch import Fetches

Event = worker_pb2.WorkerEvent


def stepped(result: StepResult, works: Mapping[HandoffId, PrefillJob]) -> Iterator[HandoffEvents]:
    """Yield events in the order in which routers must receive them. Failed jobs are not forgotten yet."""
    for key, thoughts in result.thoughts:
        if (work := works.get(key)) is not None:
            work.thoughts.add(thoughts)
            yield key, [events.thoughts(key, thoughts)]
    for key, part in result.prompts:
        if (work := works.get(key)) is not None:
            work.prompt_parts.append(part)
            yield key, [events.prompt_part(key, part)]
    for item in result.outputs:
        if (work := works.get(item.key)) is not None:
            yield item.key, _output(item, work)
    for key, error in result.failed:
        if (work := works.get(key)) is not None:
            yield key, [events.failed(key, error, spans=work.times.take_spans())]


def _output(item: SequenceOutput, work: PrefillJob) -> list[worker_pb2.WorkerEvent]:
    sent = events.output(item)
    work.times.computed(len(work.spec), item.cached_tokens)
    if item.finish is not None:
        sent[-1].spans.extend(work.times.take_spans())
    return sent


def pushed(handoff: HandoffId, outcome: PushResult | HandoffError, work: PrefillJob) -> Event:
    """Return the event for an ended push."""
    if isinstance(outcome, PushResult):
        sent = events.pushed(handoff, outcome)
        figures = {"kv_bytes": outcome.nbytes, "frames": outcome.frames, "exposed_s": f"{outcome.exposed_s:.6f}"}
        work.times.pushed(**figures, transport=outcome.transport)
    else:
        sent = events.failed(handoff, outcome, held=work.waits)
        work.times.pushed(error=type(outcome).__name__)
    sent.spans.extend(work.times.take_spans())
    return sent


@dataclass(slots=True)
class PrefillJob(Job):
    """One handoff on this worker."""

    spec: SequenceSpec
    deadline: float | None
    streams: bool  # whether KV is sent layer by layer, because it is long
    times: PrefillTimes
    first: SequenceOutput | None = None  # the sampled first token
    waits: bool = False  # its push failed, and its KV waits for a retransfer or a Release
    thoughts: Thoughts = field(default_factory=Thoughts)
    prompt_parts: list[PromptPart] = field(default_factory=list)  # with log-probabilities

    def replay(self, handoff: HandoffId) -> list[worker_pb2.WorkerEvent]:
        """Repeat all events about the output under the new handoff, because the router may have left the old one."""
        first = events.output(replace(self.first, key=handoff)) if self.first is not None else []
        return self.thoughts.events(handoff) + [events.prompt_part(handoff, each) for each in self.prompt_parts] + first

    def end(self, state: SequenceState | None) -> PushEnd:
        """Return the end of the push, which includes the sampled first token."""
        tokens = self.first.tokens if self.first is not None else ()
        known = (*self.spec.known, *(token.token_id for token in tokens))
        return PushEnd(replace(self.spec, known=known), tokens, state)

    @property
    def state(self) -> str:
        if self.waits:
            return "waiting"
        return "prefilling" if self.first is None else "pushing"


def sendable(item: StepWork, layer: int, layers: int) -> Iterator[tuple[int, int]]:
    """Yield (layers, positions) of KV that may be sent once `layer` is written. KV of earlier steps is final in all
    layers. KV of this step is final in the layers up to `layer`, unless a rollback may remove its end (not `settled`).
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


def job_to_drop(works: Mapping[HandoffId, PrefillJob]) -> HandoffId | None:
    """Return the job to drop if prompts find no capacity: the oldest that waits for a retransfer. Return None during a
    push, because it will free blocks. Without a drop, held KV waits for a decode worker, which waits for capacity that
    only a prompt on this worker can free, and this prompt waits for the held KV's blocks.
    """
    computed = [(handoff, work.waits) for handoff, work in works.items() if work.first is not None]
    return computed[0][0] if computed and all(waits for _, waits in computed) else None


log = structlog.get_logger(__name__)


class PrefillWorker(HandoffRole[PrefillJob]):
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
        super().__init__(info, engine, loop, clock, {"prefill": self._prefill, "repush": self._repush})
        self._coalesce_below = coalesce_below
        self._attempts = Attempts()
        self._pusher: Pusher  # set by `attach`, before the first command
        stateful = info.thinking_chunk > 0 or info.layout.state_size > 0
        if stateful:
            log.info("prefix_fetch_off", reason="the KV of a prefix would come without its state")
        self.fetches = Fetches(engine, clock, fetch_s, self.fetch_ended, stateful=stateful)
        self.transfer_bytes, self.transport = 0, ""

    def attach(self, pusher: Pusher) -> None:
        self._pusher = pusher
        self._engine.watch(self._layer_done, lambda sequence: pusher.withdraw(sequence.key))

    # --- commands ------------------------------------------------------------------------------------------------

    def _prefill(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        message = command.prefill
        handoff = convert.handoff_from_pb(message.handoff)
        spec, to = convert.spec_from_pb(message.spec), convert.ref_from_pb(message.to, "to")
        deadline = deadline_after(message.deadline_s, self._clock)
        self._check_new(handoff)
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
        self._add(handoff, PrefillJob(session, spec, deadline, streams, PrefillTimes(self._clock)))
        plain = spec.sampling.max_tokens > 0 and spec.prompt_logprobs is None
        fetch = self.fetches.begin(handoff, spec, to, message.skip) if plain else None
        if fetch is None:
            self._engine.submit(handoff, spec, hold=True)
        if spec.sampling.max_tokens:  # else the request ends here
            self._begin(PushJob(handoff, to, len(spec), message.skip, fetch, spec.deterministic))

    def fetch_ended(self, handoff: HandoffId) -> None:
        """Continue with a prompt after its fetch succeeded or failed. Called from any thread."""
        self._loop.submit(partial(self._fetched, handoff))

    def _fetched(self, handoff: HandoffId) -> None:
        """Submit the prompt to the engine, which computes only the part without KV."""
        ended, work = self.fetches.end(handoff), self._work.get(handoff)
        if ended and work is not None:
            self._engine.submit(handoff, work.spec, hold=True)

    def _repush(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        message = command.repush
        held, handoff = convert.handoff_from_pb(message.held), convert.handoff_from_pb(message.handoff)
        to, deadline = convert.ref_from_pb(message.to, "to"), deadline_after(message.deadline_s, self._clock)
        self._check_new(handoff)
        work = self._work.get(held)
        streams = work is not None and self._streams(work.spec, message.skip)
        if work is None or work.session is not session:
            raise StaleAttempt(f"no KV of {held} is held here")
        self._fetched(held)
        self._pusher.withdraw(held)
        self._pusher.abort(held)
        self._engine.rename(held, handoff)
        self._history.step("repush", handoff, held=held.attempt)
        self._attempts.saw(handoff)
        self._add(handoff, self._work.pop(held))
        session.handoffs.discard(held)
        work.streams, work.deadline, work.waits = streams, deadline, False
        work.times.repushed()
        self._begin(PushJob(handoff, to, len(work.spec), message.skip, verify=work.spec.deterministic))
        if work.first is not None:
            self._history.tokens("tokens", handoff, work.first.tokens)
        session.emit(work.replay(handoff))
        if work.first is not None:
            self._finish(handoff, work)

    def _check_new(self, handoff: HandoffId) -> None:
        self._attempts.check_new(handoff)
        if handoff in self._work:  # too old for `Attempts` to remember
            raise InvalidRequest.of("handoff", f"{handoff} is already here")

    def _streams(self, spec: SequenceSpec, skip: int) -> bool:
        if not 0 <= skip < len(spec):
            raise InvalidRequest.of("skip", f"must be less than {len(spec)} tokens, got {skip}")
        nbytes = (len(spec) - skip) * self._info.layout.layers * self._info.layout.layer_token_bytes
        return spec.sampling.max_tokens > 0 and nbytes > self._coalesce_below

    def _begin(self, job: PushJob) -> None:
        try:
            self._pusher.begin(job)
        except (HandoffError, ValueError) as error:  # rejected, so nothing else reports its end
            log.warning("push_refused", handoff=job.handoff, error=str(error))
            self._pushed(job.handoff, error if isinstance(error, HandoffError) else HandoffError(str(error)))

    def leave(self, ahead: int = 0) -> None:
        """See `WorkerRole.leave`. Computed prompts may still be handed over; the rest is computed elsewhere."""
        self.drain()
        for handoff, work in list(self._work.items()):
            if work.first is None:
                self._give_up(handoff, events.stopping(handoff))

    def holdings(self) -> Iterator[Holding]:
        for handoff, fetch in self.fetches.holdings().items():
            yield self._holding(handoff, "fetching", fetch)
        for handoff, allocation in self._engine.holdings():
            work, blocks = self._work.get(handoff), allocation.blocks if allocation else ()
            yield self._holding(handoff, work.state if work and blocks else "queued", allocation)

    def _drop(self, handoff: HandoffId) -> None:
        """Abort a handoff and its push. The engine withdraws the push before it frees the blocks."""
        self.fetches.end(handoff)
        if handoff in self._work:
            self._pusher.abort(handoff)
        self._forget(handoff, "aborted")

    def _forget(self, handoff: HandoffId, how: str) -> None:
        self._engine.release(handoff)
        if (work := self._pop(handoff, how)) is not None:
            work.session.handoffs.discard(handoff)

    # --- steps ---------------------------------------------------------------------------------------------------

    def stepped(self, result: StepResult) -> None:
        self.fetches.step_ended(result.computed)
        super().stepped(result)  # the first token leaves before the last of its KV does
        for item in result.outputs:
            self._hand_over(item)

    def _step_events(self, result: StepResult) -> Iterator[HandoffEvents]:
        yield from stepped(result, self._work)
        for key, _ in result.failed:
            self._drop(key)

    def _layer_done(self, step: list[StepWork], layer: int) -> None:
        """Pass finished KV of one layer to the sender, in the middle of a step."""
        self._loop.progressed()
        if layer == 0:
            self.fetches.step_began()
        for item in step:
            sequence = item.sequence
            work = self._work.get(sequence.key)
            if work is not None and layer == 0:
                work.times.in_step(self._loop.step_began, sequence, streams=work.streams)
            if work is None or not work.streams or sequence.allocation is None:
                continue
            for layers, end in sendable(item, layer, self._info.layout.layers):
                self._pusher.computed(sequence.key, sequence.allocation.blocks, layers, end)

    def _hand_over(self, item: SequenceOutput) -> None:
        work = self._work.get(item.key)
        if work is None:
            return
        if item.finish is not None:
            self._drop(item.key)  # the first token ended the request: nothing to commit
            return
        work.first = item
        self._finish(item.key, work)

    def _finish(self, handoff: HandoffId, work: PrefillJob) -> None:
        blocks = self._engine.held(handoff).blocks
        self._pusher.computed(handoff, blocks, self._info.layout.layers, len(work.spec))
        self._pusher.finish(handoff, work.end(self._engine.state_of(handoff)))

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
        if (held := job_to_drop(self._work)) is not None and self._engine.load().starved:
            self._drop(held)
        for handoff in self.fetches.late():
            self._fetched(handoff)
        for handoff, work in overdue(self._work, self._clock.monotonic()):
            if work.waits:
                self._drop(handoff)
            else:
                self._give_up(handoff, events.failed(handoff, DeadlineExceeded("the prompt was not computed in time")))


class HostedPrefill(PrefillWorker):
    """The role with its sender, and with the listener for KV that it fetches."""

    def __init__(self, parts: RoleDeps) -> None:
        self.counts = Counts()
        transfer = parts.settings.transfer
        less, fetch_s = transfer.coalesce_below, transfer.frame_deadline_s
        super().__init__(parts.info, parts.engine, parts.loop, parts.clock, coalesce_below=less, fetch_s=fetch_s)
        self._transfers = Transfers(parts, self.fetches, self.push_ended, self.fetch_ended)
        self.attach(self._transfers.sender)

    def push_ended(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        if isinstance(outcome, PushResult):
            self.counts.ended("pushed")
            self.counts.moved("sent", outcome.transport, outcome.nbytes, outcome.frames, outcome.exposed_s)
        else:
            self.counts.ended("aborted" if isinstance(outcome, StaleAttempt) else "failed")
        super().push_ended(handoff, outcome)

    @property
    def busy(self) -> bool:
        return any(not work.waits for work in list(self._work.values()))

    def load(self, load: Load) -> Load:
        return replace(
            load,
            transfer_bytes=self.transfer_bytes,
            transport=self.transport,
            fetched_tokens=self.fetches.fetched_tokens,
            channels=self._transfers.sender.channels(),
            draining=self.draining,
        )

    async def close(self) -> None:
        await self._transfers.close()
