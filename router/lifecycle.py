"""The life of a request, in `run`. The states of one attempt are drawn in `attempt.py`."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import asdict, replace

import structlog

from baton.core import HandoffId, SequenceSpec, Token
from baton.errors import BatonError
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.telemetry import Stage, StageClock
from router.admission import ticket_for
from router.attempt import Attempt
from router.delivery import Delivery, EventStream
from router.floor import Floor
from router.workers import Claim

log = structlog.get_logger(__name__)


async def run(request: SequenceSpec, life: Life, client: EventStream) -> pb.Completed:
    """Carry one request from arrival to its end, through as many attempts as decode workers that run full make it take.

    Raises the one typed error that ended it. In whatever state that happens, also by cancellation, the attempt's
    workers are released on the way out.
    """
    while True:
        life.stages.enter(Stage.QUEUE)
        spec = replace(request, known=tuple(life.delivery.ids))  # what the client has is never sampled again
        claim = await life.admit(spec)  # waits for a pair of workers with room
        life.stages.enter(Stage.ROUTE)
        async with life.attempt(claim, spec) as attempt:
            life.stages.enter(Stage.RESERVE)
            if not await attempt.reserve(life.remaining_s()):
                continue  # it filled up meanwhile: back to our place in the queue
            await life.accept(client, attempt, len(request.prompt))
            life.stages.enter(Stage.PREFILL)
            attempt.prefill(life.remaining_s())
            async for tokens in attempt.outputs():  # token 0 from P at once; D repeats it and goes on
                await client.tokens(life.deliver(tokens))
            life.computed(attempt)
            if attempt.finish is None:
                life.handed_back(attempt)
                continue  # D ran full: prefill again what the client has, and go on at the same index
        life.delivery.complete()
        completed = life.completed(attempt, len(request.prompt))
        await client.ended(attempt.finish, len(life.delivery.ids), completed)
        return completed


class Life:
    """One request's own state: its names, its clock, and what its client has. It ends after `within_s` at the latest.

    `scope` is what its task runs in; `end` makes the task leave it with `reason`, in whatever state it is.
    """

    def __init__(self, floor: Floor, task: asyncio.Task[None], within_s: float) -> None:
        self.task = task
        self.request_id = secrets.token_urlsafe(16)
        self.within_s = within_s
        self.scope = asyncio.timeout(within_s)
        self.reason: BatonError | None = None
        self.stages = StageClock(floor.clock)
        self.delivery = Delivery()
        self.attempts = 0
        self.cached_tokens: int | None = None  # as the client is told; None: not accepted yet
        self._floor = floor
        self._deadline = floor.clock.monotonic() + within_s
        self._arrival = next(floor.arrivals)
        self._last_token_at: float | None = None
        self._computed = False

    @property
    def accepted(self) -> bool:
        return self.cached_tokens is not None

    def end(self, reason: BatonError) -> None:
        """Release its workers and answer its client with `reason`. The first reason counts."""
        if self.reason is None and not self.scope.expired():
            self.reason = reason
            self.scope.reschedule(asyncio.get_running_loop().time())

    def remaining_s(self) -> float:
        """Seconds until the deadline; never 0, which would mean "none" to a worker."""
        return max(self._deadline - self._floor.clock.monotonic(), 0.001)

    async def admit(self, spec: SequenceSpec) -> Claim:
        """A pair of workers; a request that has been there before keeps its place in the queue."""
        ticket = ticket_for(self._arrival, spec.priority)
        return await self._floor.admission.admit(ticket, len(spec), returning=self.attempts > 0)

    def attempt(self, claim: Claim, spec: SequenceSpec) -> Attempt:
        """The next attempt."""
        self.attempts += 1
        return Attempt(HandoffId(self.request_id, self.attempts), claim, spec, self.stages, self._floor.metrics)

    async def accept(self, client: EventStream, attempt: Attempt, prompt_tokens: int) -> None:
        """Tell the client, once, that decode room is reserved."""
        if self.accepted:
            return
        self.cached_tokens = attempt.cached_tokens or 0
        log.info("request_accepted", request_id=self.request_id, tokens=prompt_tokens, workers=attempt.workers)
        await client.accepted(prompt_tokens, self.cached_tokens)

    def deliver(self, tokens: list[Token]) -> list[Token]:
        """What of `tokens` is new to the client, in order."""
        fresh = self.delivery.take(tokens)
        if fresh:
            now = self._floor.clock.monotonic()
            if self._last_token_at is not None:
                self._floor.metrics.gap(now - self._last_token_at, len(fresh))
            self._last_token_at = now
        return fresh

    def computed(self, attempt: Attempt) -> None:
        """What the first attempt found cached was saved; what a later one finds there, this request may have left."""
        if not self._computed:
            self.cached_tokens = max(self.cached_tokens or 0, attempt.prefill_cached)
        self._computed = True

    def handed_back(self, attempt: Attempt) -> None:
        """The attempt ended without a failure and without an end: another one follows."""
        self.delivery.forget_early()
        self._floor.metrics.recovery(attempt.handed_back)
        log.info("request_handed_back", request_id=self.request_id, attempt=self.attempts, reason=attempt.handed_back)

    def completed(self, attempt: Attempt, prompt_tokens: int) -> pb.Completed:
        """Taken at the end: the stages sum to the time from arrival until now."""
        timings, (prefill, decode) = self.stages.timings(), attempt.workers
        done = pb.Completed(
            usage=pb.Usage(prompt_tokens=prompt_tokens, completion_tokens=len(self.delivery.ids)),
            timings=common_pb2.Timings(**asdict(timings), e2e_s=timings.e2e_s),
            placement=pb.Placement(prefill_worker=prefill, attempts=self.attempts),
        )
        done.usage.cached_tokens = self.cached_tokens or 0
        if (moved := attempt.committed) is not None:
            done.placement.MergeFrom(
                pb.Placement(decode_worker=decode, kv_bytes=moved.kv_bytes, transport=moved.transport)
            )
        return done
