"""Serving a request: `serve_request`, `serve_choice`, and the state of a choice. `attempt.py` draws the states of one
attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from baton.clock import Clock
from baton.core import HandoffId, SequenceSpec, Token, WorkerInfo
from baton.errors import EngineFault, InvalidRequest, LedgerError, NoWorker
from baton.rpc import convert
from baton.rpc.v1 import common_pb2, worker_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.stages import Stage
from router.admission.admission import Admission, ticket_for
from router.parsing.generate_request import seed_of
from router.request.attempt import Attempt, TakeoverAttempt
from router.request.client_request import ClientRequest
from router.request.delivery import EventStream, Thoughts
from router.request.observer import ChoiceObserver
from router.request.prompt_logprobs import PromptScores
from router.request.proofs import delivery_of, prove
from router.workers.placement import Placement, Requirements
from router.workers.pool import WorkerPool

if TYPE_CHECKING:
    from baton.ledger.ownership import OwnershipRecord

_NO_RECORD = "no decode worker has a complete record of this request's stream for this caller"
DEATH_LIMIT = 2  # this many lost workers suggest that the request itself is the cause

# Finds the decode worker that continues a stream, by its client's name: `OwnershipStore.find`. Raises LedgerError.
StreamSource = Callable[[str], Awaitable["OwnershipRecord | None"]]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The parts of a router that give choices to workers. A choice has at most `attempts` when workers are lost."""

    admission: Admission[Placement]
    pool: WorkerPool
    streams: StreamSource
    clock: Clock
    attempts: int


async def serve_request(dispatch: Dispatch, request: ClientRequest, client: EventStream) -> pb.Completed:
    """Serve all choices of a request. The first one computes the prompt; the others start after its first token and
    find the prompt in the prefix cache. Raises the one typed error that ended it. The failure of one choice ends the
    others.
    """
    call = request.call
    runs = [ChoiceRun(dispatch, request, choice) for choice in range(len(request.parsed.received))]
    if call.resumes and request.parsed.resumable_s:
        await asyncio.gather(*(run.find_detached() for run in runs))
    try:
        completed = await (_serve_all(runs, client) if runs[1:] else serve_choice(runs[0], client))
    finally:
        for run in runs:
            run.release_held()
    await prove(completed, request, [(run.delivery, run.observer) for run in runs])
    completed.trace_id = call.observer.trace.context.trace_id
    if request.parsed.wants_spans:
        await call.observer.trace.settled(call.deadline - dispatch.clock.monotonic())
        completed.spans.extend(call.observer.trace.spans())
    await client.completed(completed)
    call.observer.used(completed.usage)
    return completed


async def _serve_all(runs: Sequence[ChoiceRun], client: EventStream) -> pb.Completed:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_serve_after(runs[0], run, client)) for run in runs]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    completed, *others = (task.result() for task in tasks)
    completed.usage.completion_tokens += sum(other.usage.completion_tokens for other in others)
    completed.usage.thinking_tokens += sum(other.usage.thinking_tokens for other in others)
    last, ttft_s = max((completed, *others), key=lambda one: one.timings.e2e_s), completed.timings.ttft_s
    completed.timings.CopyFrom(last.timings)
    completed.timings.ttft_s = ttft_s  # the others begin after the first token
    return completed


async def _serve_after(first: ChoiceRun, run: ChoiceRun, client: EventStream) -> pb.Completed:
    if run is not first:
        await first.started.wait()
    try:
        return await serve_choice(run, client)
    finally:
        run.started.set()


async def serve_choice(run: ChoiceRun, client: EventStream) -> pb.Completed:
    """Serve one choice of a request to its end. Another attempt follows if D runs full or a worker is lost. Raises the
    one typed error that ended it. The attempt's workers are released on every exit, including cancellation.
    """
    while True:
        run.observer.stages.enter(Stage.QUEUE)
        placement = run.place_detached() or await run.admit()
        run.observer.stages.enter(Stage.ROUTE)
        async with run.attempt(placement) as attempt:
            run.observer.stages.enter(Stage.RESERVE)
            if not await attempt.reserve(run.remaining_s()):
                await run.requeue(attempt, client)  # D ran full, or a worker was lost: back to the queue
                continue
            run.start_prefill(attempt)
            await asyncio.sleep(0)  # the worker's command leaves before the client and the log are served
            await run.accept(client, attempt)
            async for tokens in attempt.outputs():  # P sends token 0 first; D repeats it and continues
                await run.scores.deliver(client)
                await run.thoughts.deliver(client, attempt.thoughts)
                await client.tokens(run.choice, run.deliver(tokens), recorded=attempt.recorded)
            run.note_cached(attempt)
            if attempt.finish is None:
                await run.requeue(attempt, client)
                continue  # D ran full, or a worker was lost: continue at the next index
        run.delivery.complete()
        run.thoughts.complete()
        await client.finished(run.choice, attempt.finish, len(run.delivery.ids))
        return run.completed(attempt)


def fitted(spec: SequenceSpec, info: WorkerInfo) -> SequenceSpec:
    """Return `spec` for this worker. A model that does not think ignores the default of the cluster file."""
    if info.thinking_chunk or not spec.think_while_decoding:
        return spec
    return replace(spec, think_while_decoding=False)


class ChoiceRun:
    """The state of one choice of a request: its ids, its clock, and its delivered tokens. On workers, `request_id`
    names the choice.
    """

    def __init__(self, dispatch: Dispatch, request: ClientRequest, choice: int) -> None:
        call, parsed = request.call, request.parsed
        self.request, self.choice = request, choice
        self.spec, received = parsed.spec, parsed.received[choice]
        if choice:
            seed = seed_of(f"{self.spec.sampling.seed} {choice}")
            self.spec = replace(self.spec, sampling=replace(self.spec.sampling, seed=seed), prompt_logprobs=None)
        self.request_id = call.worker_name(choice)
        self.observer = ChoiceObserver(
            call.observer, choice, self.request_id, call.stream(choice), parsed.spec, len(received), parsed.promise
        )
        self.started = asyncio.Event()  # set with the first token
        self.delivery = delivery_of(parsed, choice)
        self.thoughts = Thoughts(choice, parsed.spell)
        self.scores = PromptScores(self.spec, parsed.scored)
        self._failures = self._deaths = 0
        self._cached_tokens: int | None = None  # on P, which reports it with its first token
        self._dispatch = dispatch
        self._held: Attempt | None = None  # one that ended, and whose KV a worker keeps
        self._detached: OwnershipRecord | None = None  # of a stream that continues on its decode worker
        self._waits_since: float | None = None  # for capacity; only a granted reservation ends the wait

    def remaining_s(self) -> float:
        """Return the seconds until the deadline: at least 1 ms, because 0 means no deadline to a worker."""
        return max(self.request.call.deadline - self._dispatch.clock.monotonic(), 0.001)

    def _next_spec(self) -> SequenceSpec:
        """Return the sequence to start the next attempt from: all delivered tokens, or those that held KV covers."""
        if self._held is not None and not self._held.moves:
            return self._held.spec
        known, wanted = tuple(self.delivery.ids[: -1 if self._held else None]), self.spec.prompt_logprobs
        return replace(self.spec, known=known, prompt_logprobs=wanted if self.scores.missing else None)

    def _room(self, spec: SequenceSpec) -> int:
        """Return the tokens whose KV the next decode worker receives: those of `spec`, or more in a move."""
        return max(len(spec), self._held.known_tokens if self._held else 0)

    async def admit(self) -> Placement:
        """Wait for a placement. A request that returns to the queue keeps its place. Raises InvalidRequest if it must
        not be computed again.
        """
        call, spec = self.request.call, self._next_spec()
        if self.request.parsed.exact and not spec.known:
            raise InvalidRequest.of("request_id", _NO_RECORD)
        accepted = call.observer.is_accepted
        self._waits_since = self._waits_since or self._dispatch.clock.monotonic()
        thinks = () if accepted else self.request.parsed.thinks  # an accepted request is never rejected for this
        keep = self._held.holder if self._held else None
        return await self._dispatch.admission.admit(
            ticket_for(call.arrival, spec.priority),
            self._room(spec),
            Requirements(keep, spec, self.request.determinism, thinks, self.observer.flight),
            returning=self.observer.attempts > 0,
            accepted=accepted,
            tenant=call.tenant or spec.cache_scope,
            deadline_s=self.remaining_s(),
            since=self._waits_since,
        )

    async def find_detached(self) -> None:
        """Find the decode worker that continues the stream of a lost router, if any has all that is missing."""
        if self.scores.missing:
            return
        try:
            self._detached = await self._dispatch.streams(self.request.call.stream(self.choice))
        except LedgerError as error:
            self.observer.lookup_failed(error)
            if self.request.parsed.exact:
                raise NoWorker("the cluster cannot look the stream up now") from error
        if self._detached is not None:
            await self._dispatch.pool.wait_connected(self._detached.worker_id, self._detached.incarnation)

    def place_detached(self) -> Placement | None:
        """Return a placement on the decode worker that continues the stream, or None. Returns it at most once."""
        if self._detached is None:
            return None
        placement = self._dispatch.pool.place_on(self._detached)
        if placement is not None and self.request.determinism not in {"", placement.determinism}:
            placement.release()
            placement = None
        if placement is None:
            self._detached = None
        return placement

    def attempt(self, placement: Placement) -> Attempt:
        """Begin the next attempt. Held KV is released if the placement has another prefill worker."""
        if self._held is not None and self._held.holder is not placement.prefill:
            self.release_held()
        self.observer.attempted(placement)
        info = placement.decode.info
        detached, self._detached = self._detached, None
        retention = self.request.retention(self.choice)
        spec = fitted(self._next_spec(), info)
        rest = (placement, spec, self.observer.track, self.observer.metrics, retention, self._room(spec), self.scores)
        self.thoughts.begin(len(self.spec.prompt), info.thinking_chunk, detached=detached is not None)
        if detached is not None:
            self.observer.taken_over = detached.handoff.request_id
            return TakeoverAttempt(detached.handoff, *rest)
        return Attempt(HandoffId(self.request_id, self.observer.attempts), *rest)

    def start_prefill(self, attempt: Attempt) -> None:
        """Have the prompt computed, or have held KV sent to the new decode worker."""
        held, self._held = self._held, None
        self._waits_since = None
        if held is not None:
            attempt.retransfer(held.handoff, self.remaining_s())
        else:
            attempt.prefill(self.remaining_s())

    async def accept(self, client: EventStream, attempt: Attempt) -> None:
        """Report to the client, once, that decode capacity is reserved."""
        if self.observer.is_accepted:
            return
        self.observer.accepted(attempt)
        if attempt.spec.deterministic:
            self.request.determinism = attempt.determinism
        if self.choice == 0:
            parsed = self.request.parsed
            rest = attempt.determinism, parsed.defaults, parsed.in_reasoning
            await client.accepted(len(self.spec.prompt), self._cached_tokens or 0, *rest)

    def deliver(self, tokens: list[Token]) -> list[Token]:
        """Return those of `tokens` that the client does not have yet, in order."""
        fresh = self.delivery.merge(tokens)
        if fresh:
            self.started.set()
            self.observer.delivered(fresh)
        return fresh

    def note_cached(self, attempt: Attempt) -> None:
        """Record the cached tokens of the first attempt; a later one may find blocks of this very request."""
        if self._cached_tokens is None:
            self._cached_tokens = min(attempt.prefill_cached, len(self.spec.prompt))

    async def requeue(self, attempt: Attempt, client: EventStream) -> None:
        """Prepare another attempt. Raises the failure if no more attempts are allowed."""
        self.delivery.drop_pending()
        self._failures += attempt.lost is not None
        self._deaths += attempt.died
        self.observer.unfinished(attempt)
        if self._deaths >= DEATH_LIMIT:  # checked first, because this error means that no retry helps
            raise EngineFault(f"{self._deaths} workers were lost while they computed this request; it is not retried")
        if attempt.lost is not None and self._failures >= self._dispatch.attempts:
            raise attempt.lost
        movable = not self.scores.missing and self._finds_a_taker(attempt) if attempt.moves else True
        if attempt.held and movable:
            attempt.kept = True
            self._held = attempt
        self.observer.recovered(attempt)
        if attempt.lost is not None and self.observer.is_accepted:
            await client.recovered(self.observer.attempts + 1, attempt.retry_reason)

    def _finds_a_taker(self, attempt: Attempt) -> bool:
        """Return whether another decode worker could take the KV now. Otherwise the leaving worker must not wait."""
        wanted = Requirements(spec=self.spec, determinism=self.request.determinism)
        return self._dispatch.pool.can_hand_over(attempt.holder, wanted)

    def release_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.holder.send(release=worker_pb2.Release(handoff=convert.handoff_to_pb(held.handoff)))

    def completed(self, attempt: Attempt) -> pb.Completed:
        timings, (prefill, decode) = self.observer.finished(attempt.finish), attempt.workers
        usage = pb.Usage(
            prompt_tokens=len(self.spec.prompt),
            cached_tokens=self._cached_tokens or 0,
            completion_tokens=len(self.delivery.ids),
            thinking_tokens=self.thoughts.tokens,
        )
        placement = pb.Placement(prefill_worker=prefill, attempts=self.observer.attempts)
        if attempt.alone or attempt.committed is not None:
            placement.decode_worker = decode
        if (moved := attempt.committed) is not None:
            placement.kv_bytes, placement.transport = moved.kv_bytes, moved.transport
        return pb.Completed(
            usage=usage,
            timings=common_pb2.Timings(**asdict(timings)),
            placement=placement,
            system_fingerprint=attempt.determinism,
        )
