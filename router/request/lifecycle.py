"""The life of a request: `serve_request`, `serve_choice`, and the state of a choice. `attempt.py` draws the states of
one attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from baton.clock import Clock
from baton.core import HandoffId, SequenceSpec, Token
from baton.errors import EngineFault, LedgerError
from baton.rpc import convert
from baton.rpc.v1 import common_pb2, worker_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.stages import Stage
from router.admission.admission import Admission, ticket_for
from router.audit_digest import Delivered, audit_digest
from router.observe.request_observer import ChoiceObserver
from router.request.attempt import Attempt, TakeoverAttempt
from router.request.client_request import ClientRequest, seed_of
from router.request.delivery import Delivery, EventStream
from router.request.thoughts import Thoughts, fitted
from router.workers.placement import Placement, Requirements
from router.workers.pool import WorkerPool
from router.workers.stream import WorkerStream

if TYPE_CHECKING:
    from baton.ledger.ownership import OwnershipRecord

DEADLY = 2  # as many lost workers suggest that the request itself is the cause


StreamSource = Callable[[str], Awaitable["OwnershipRecord | None"]]
"""Finds the decode worker that continues a stream, by its client's name: `OwnershipStore.find`. Raises LedgerError."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The parts of a router that give choices to workers. A choice has at most `attempts` when workers are lost."""

    admission: Admission[Placement]
    pool: WorkerPool
    streams: StreamSource
    clock: Clock
    attempts: int


async def serve_request(
    dispatch: Dispatch,
    call: ClientRequest,
    request: SequenceSpec,
    received: Sequence[Sequence[int]],
    client: EventStream,
) -> pb.Completed:
    """Serve one choice for each of `received`, the tokens that the client has already. The first choice computes the
    prompt; the others start after its first token and find the prompt in the prefix cache. Raises the one typed error
    that ended it. The failure of one choice ends the others.
    """
    call.prompt_tokens, call.deterministic = len(request.prompt), request.deterministic
    lives = [ChoiceRun(dispatch, call, choice, ids) for choice, ids in enumerate(received)]
    for life in lives if request.deterministic else ():
        life.delivery.logprobs = []
    if call.resumes and call.resumable_s:
        await asyncio.gather(*(life.look_for_it() for life in lives))
    try:
        completed = await (_all(request, lives, client) if lives[1:] else serve_choice(request, lives[0], client))
    finally:
        for life in lives:
            life.let_go()
    if request.deterministic:
        completed.usage.audit_digest = _audit(request, lives)
    completed.trace_id = call.observer.trace.context.trace_id
    if call.traced:
        await call.observer.trace.settled(call.deadline - dispatch.clock.monotonic())
        completed.spans.extend(call.observer.trace.spans())
    await client.completed(completed)
    call.observer.used(completed.usage)
    return completed


def _audit(request: SequenceSpec, lives: Sequence[ChoiceRun]) -> str:
    """Return the audit digest, or "" if another router delivered some of the logprobs."""
    answers = [Delivered(life.delivery.ids, life.delivery.logprobs or ()) for life in lives]
    if request.sampling.logprobs is not None and any(len(one.tokens) > len(one.logprobs) for one in answers):
        return ""
    return audit_digest(request.prompt, request.sampling, answers)


async def _all(request: SequenceSpec, lives: list[ChoiceRun], client: EventStream) -> pb.Completed:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_one(request, life, lives[0], client)) for life in lives]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    completed, *others = (task.result() for task in tasks)
    completed.usage.completion_tokens += sum(other.usage.completion_tokens for other in others)
    completed.usage.thinking_tokens += sum(other.usage.thinking_tokens for other in others)
    last = max((completed, *others), key=lambda one: one.timings.e2e_s)
    completed.timings.CopyFrom(last.timings)
    return completed


async def _one(request: SequenceSpec, life: ChoiceRun, first: ChoiceRun, client: EventStream) -> pb.Completed:
    if life is not first:
        await first.started.wait()
        seed = seed_of(f"{request.sampling.seed} {life.choice}")
        request = replace(request, sampling=replace(request.sampling, seed=seed))
    try:
        return await serve_choice(request, life, client)
    finally:
        life.started.set()


async def serve_choice(request: SequenceSpec, life: ChoiceRun, client: EventStream) -> pb.Completed:
    """Serve one choice of a request to its end. Another attempt follows if D runs full or a worker is lost. Raises the
    one typed error that ended it. The attempt's workers are released on every exit, including cancellation.
    """
    while True:
        life.observer.stages.enter(Stage.QUEUE)
        placement = life.claim_parked() or await life.admit(request)
        life.observer.stages.enter(Stage.ROUTE)
        async with life.attempt(placement, request) as attempt:
            life.observer.stages.enter(Stage.RESERVE)
            if not await attempt.reserve(life.remaining_s()):
                await life.handed_back(attempt, client)  # D ran full, or a worker was lost: back to the queue
                continue
            life.begin(attempt)
            await asyncio.sleep(0)  # the worker's command leaves before the client and the log are served
            await life.accept(client, attempt, len(request.prompt))
            async for tokens in attempt.outputs():  # P sends token 0 first; D repeats it and continues
                await life.thoughts.tell(client, attempt.thoughts)
                await client.tokens(life.choice, life.deliver(tokens))
            life.computed(attempt)
            if attempt.finish is None:
                await life.handed_back(attempt, client)
                continue  # D ran full, or a worker was lost: continue at the next index
        life.delivery.complete()
        life.thoughts.complete()
        await client.finished(life.choice, attempt.finish, len(life.delivery.ids))
        return life.completed(attempt, len(request.prompt))


@dataclass(frozen=True, slots=True)
class Held:
    """The KV of `spec`, which a prefill worker keeps after a lost attempt."""

    link: WorkerStream
    handoff: HandoffId
    spec: SequenceSpec


class ChoiceRun:
    """The state of one choice of a request: its ids, its clock, and its delivered tokens. `call` is the request that
    all its choices share, `received` the tokens that the client has from a lost router. On workers, `request_id` names
    the choice.
    """

    def __init__(self, dispatch: Dispatch, call: ClientRequest, choice: int = 0, received: Sequence[int] = ()) -> None:
        self.call, self.choice = call, choice
        self.request_id = call.life_id(choice)
        self.observer = ChoiceObserver(
            call.observer, choice, self.request_id, call.stream(choice), call.prompt_tokens, len(received)
        )
        self.started = asyncio.Event()  # set with the first token
        self.delivery = Delivery(received)
        self.thoughts = Thoughts(choice, call.asked)
        self._failures = self._deaths = 0
        self.cached_tokens = 0  # P reports it with its first token; tokens cached on D are only not moved
        self._dispatch = dispatch
        self._computed = False
        self._held: Held | None = None
        self._parked: OwnershipRecord | None = None  # of a stream that continues on its decode worker without a router
        self._waits_since: float | None = None  # for capacity; only a granted reservation ends the wait

    @property
    def accepted(self) -> bool:
        return self.observer.is_accepted

    def remaining_s(self) -> float:
        """Return the seconds until the deadline: at least 1 ms, because 0 means no deadline to a worker."""
        return max(self.call.deadline - self._dispatch.clock.monotonic(), 0.001)

    def known(self, request: SequenceSpec) -> SequenceSpec:
        """Return the sequence to start the next attempt from: all delivered tokens, or what held KV covers."""
        return self._held.spec if self._held else replace(request, known=tuple(self.delivery.ids))

    async def admit(self, request: SequenceSpec) -> Placement:
        """Wait for a placement. A request that returns to the queue keeps its place."""
        known, ticket = self.known(request), ticket_for(self.call.arrival, request.priority)
        self._waits_since = self._waits_since or self._dispatch.clock.monotonic()
        thinks = () if self.call.accepted else self.call.asked.fields  # an accepted request is never rejected for this
        requirements = Requirements(self._held.link if self._held else None, known, self.call.determinism, thinks)
        return await self._dispatch.admission.admit(
            ticket,
            len(known),
            requirements,
            returning=self.observer.attempts > 0,
            accepted=self.call.accepted,
            tenant=self.call.tenant or request.cache_scope,
            deadline_s=self.remaining_s(),
            since=self._waits_since,
        )

    async def look_for_it(self) -> None:
        """Find the decode worker that continues the stream of a lost router, if any."""
        try:
            self._parked = await self._dispatch.streams(self.call.stream(self.choice))
        except LedgerError as error:
            self.observer.not_looked_for(error)
        if self._parked is not None:
            await self._dispatch.pool.wait_known(self._parked.worker_id, self._parked.incarnation)

    def claim_parked(self) -> Placement | None:
        """Return a placement on the decode worker that continues the stream, or None. Returns it at most once."""
        if self._parked is None:
            return None
        placement = self._dispatch.pool.claim_of(self._parked.worker_id, self._parked.incarnation)
        if placement is not None and self.call.determinism not in {"", placement.determinism}:
            placement.release()
            placement = None
        if placement is None:
            self._parked = None
        return placement

    def attempt(self, placement: Placement, request: SequenceSpec) -> Attempt:
        """Begin the next attempt. Held KV is released if the placement has another prefill worker."""
        if self._held is not None and self._held.link is not placement.prefill:
            self.let_go()
        self.observer.attempted(placement)
        info, parked, seen = placement.decode.info, self._parked, self.observer
        spec, lasting = fitted(self.known(request), info), self.call.lasting(self.choice)
        rest = (placement, spec, seen.track, seen.metrics, lasting)
        self.thoughts.begin(len(request.prompt), info.thinking_chunk, parked=parked is not None)
        self._parked = None
        if parked is not None:
            return TakeoverAttempt(parked.handoff, *rest)
        return Attempt(HandoffId(self.request_id, self.observer.attempts), *rest)

    def begin(self, attempt: Attempt) -> None:
        """Have the prompt computed, or have held KV sent to the new decode worker."""
        held, self._held = self._held, None
        self._waits_since = None
        if held is not None:
            attempt.repush(held.handoff, self.remaining_s())
        else:
            attempt.prefill(self.remaining_s())

    async def accept(self, client: EventStream, attempt: Attempt, prompt_tokens: int) -> None:
        """Report to the client, once, that decode capacity is reserved."""
        if self.accepted:
            return
        self.observer.accepted(attempt)
        if attempt.spec.deterministic:
            self.call.determinism = attempt.determinism
        if self.choice == 0:
            await client.accepted(prompt_tokens, self.cached_tokens, attempt.determinism)

    def deliver(self, tokens: list[Token]) -> list[Token]:
        """Return those of `tokens` that the client does not have yet, in order."""
        fresh = self.delivery.merge(tokens)
        if fresh:
            self.started.set()
            self.observer.delivered(fresh)
        return fresh

    def computed(self, attempt: Attempt) -> None:
        """Record the cached tokens of the first attempt; a later one may find blocks of this very request."""
        if not self._computed:
            self.cached_tokens = max(self.cached_tokens, attempt.prefill_cached)
        self._computed = True

    async def handed_back(self, attempt: Attempt, client: EventStream) -> None:
        """Prepare another attempt. Raises the failure if no more attempts are allowed."""
        self.delivery.drop_pending()
        self._failures += attempt.lost is not None
        self._deaths += attempt.died
        self.observer.handed_back(attempt)
        if self._deaths >= DEADLY:  # checked first, because this error means that no retry helps
            raise EngineFault(
                f"{self._deaths} workers were lost while they computed this request: it is not tried again"
            )
        if attempt.lost is not None and self._failures >= self._dispatch.attempts:
            raise attempt.lost
        if attempt.held:
            attempt.kept = True
            self._held = Held(attempt.prefill_link, attempt.handoff, attempt.spec)
        self.observer.recovered(attempt)
        if attempt.lost is not None and self.accepted:
            await client.recovered(self.observer.attempts + 1, attempt.handed_back)

    def let_go(self) -> None:
        """Release the KV held for another attempt, if any."""
        held, self._held = self._held, None
        if held is not None:
            held.link.send(release=worker_pb2.Release(handoff=convert.handoff_to_pb(held.handoff)))

    def completed(self, attempt: Attempt, prompt_tokens: int) -> pb.Completed:
        """Return the summary of the choice, at its end."""
        timings, (prefill, decode) = self.observer.finished(attempt.finish), attempt.workers
        done = pb.Completed(
            usage=pb.Usage(prompt_tokens=prompt_tokens, completion_tokens=len(self.delivery.ids)),
            timings=common_pb2.Timings(**asdict(timings)),
            placement=pb.Placement(prefill_worker=prefill, attempts=self.observer.attempts),
            system_fingerprint=attempt.determinism,
        )
        done.usage.cached_tokens = self.cached_tokens
        done.usage.thinking_tokens = self.thoughts.tokens
        if attempt.alone:
            done.placement.decode_worker = decode
        if (moved := attempt.committed) is not None:
            done.placement.MergeFrom(
                pb.Placement(decode_worker=decode, kv_bytes=moved.kv_bytes, transport=moved.transport)
            )
        return done
