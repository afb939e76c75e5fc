"""The life of a request, in `run`. The states of one attempt are drawn in `attempt.py`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from baton.clock import Clock
from baton.core import Finish, HandoffId, Token
from baton.telemetry import Metrics, Stage, StageClock, Timings
from router.admission import Admission
from router.attempt import Attempt
from router.delivery import Delivery
from router.parse import Request
from router.workers import Claim

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Summary:
    """How a finished request went: what a client's Completed event says."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timings: Timings
    prefill_worker: str
    decode_worker: str  # "" when the first token ended the request
    kv_bytes: int
    transport: str
    attempts: int


class Client(Protocol):
    """Where a request's events go. Each method may wait for a client that reads slowly."""

    async def accepted(self, prompt_tokens: int, cached_tokens: int) -> None: ...

    async def tokens(self, tokens: list[Token]) -> None: ...  # none: nothing is sent

    async def finished(self, finish: Finish, delivered: int) -> None: ...

    async def completed(self, summary: Summary) -> None: ...


@dataclass(slots=True)
class Floor:
    """What all requests of a router share."""

    admission: Admission[Claim]
    metrics: Metrics
    clock: Clock
    tickets: itertools.count[int] = field(default_factory=itertools.count)


async def run(request: Request, life: Life, client: Client) -> Summary:
    """Carry one request from arrival to its end, through as many attempts as decode workers that run full make it take.

    Raises the one typed error that ended it. In whatever state that happens, also by cancellation, the attempt's
    workers are released on the way out.
    """
    while True:
        life.stages.enter(Stage.QUEUE)
        spec = request.spec(life.delivery.ids)
        claim = await life.admit(len(spec))  # waits for a pair of workers with room
        life.stages.enter(Stage.ROUTE)
        async with life.attempt(claim, request) as attempt:
            life.stages.enter(Stage.RESERVE)
            if not await attempt.reserve(life.remaining_s()):
                continue  # it filled up meanwhile: back to our place in the queue
            await life.accept(client, attempt, len(request.prompt))
            life.stages.enter(Stage.PREFILL)
            attempt.prefill(life.remaining_s())
            async for tokens in attempt.outputs():  # token 0 from P at once; D repeats it and goes on
                await client.tokens(life.deliver(tokens))
            if attempt.finish is None:
                life.handed_back(attempt)
                continue  # D ran full: prefill again what the client has, and go on at the same index
        life.delivery.complete()
        summary = life.summary(request, attempt)
        await client.finished(attempt.finish, len(life.delivery.ids))
        await client.completed(summary)
        return summary


class Life:
    """One request's own state: its names, its clock, and what its client has."""

    def __init__(self, request_id: str, floor: Floor, deadline: float) -> None:
        self.request_id = request_id
        self.stages = StageClock(floor.clock)
        self.delivery = Delivery()
        self.attempts = 0
        self.cached_tokens: int | None = None  # None: not accepted yet
        self._floor = floor
        self._deadline = deadline
        self._ticket = next(floor.tickets)
        self._last_token_at: float | None = None

    @property
    def accepted(self) -> bool:
        return self.cached_tokens is not None

    def remaining_s(self) -> float:
        """Seconds until the deadline; never 0, which would mean "none" to a worker."""
        return max(self._deadline - self._floor.clock.monotonic(), 0.001)

    async def admit(self, known_tokens: int) -> Claim:
        """A pair of workers; a request that has been there before keeps its place in the queue."""
        return await self._floor.admission.admit(self._ticket, known_tokens, returning=self.attempts > 0)

    def attempt(self, claim: Claim, request: Request) -> Attempt:
        """The next attempt: what the client has been sent is known, and is never sampled again."""
        self.attempts += 1
        handoff = HandoffId(self.request_id, self.attempts)
        return Attempt(handoff, claim, request.spec(self.delivery.ids), self.stages, self._floor.metrics)

    async def accept(self, client: Client, attempt: Attempt, prompt_tokens: int) -> None:
        """Tell the client, once, that decode room is reserved."""
        if self.accepted:
            return
        self.cached_tokens = attempt.cached_tokens or 0
        log.info(
            "request_accepted",
            request_id=self.request_id,
            prompt_tokens=prompt_tokens,
            prefill=attempt.claim.prefill.info.ref.worker_id,
            decode=attempt.claim.decode.info.ref.worker_id,
        )
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

    def handed_back(self, attempt: Attempt) -> None:
        """The attempt ended without a failure and without an end: another one follows."""
        self.delivery.forget_early()
        self._floor.metrics.recovery(attempt.handed_back)
        log.info(
            "request_handed_back",
            request_id=self.request_id,
            attempt=attempt.handoff.attempt,
            reason=attempt.handed_back,
            delivered=len(self.delivery.ids),
        )

    def summary(self, request: Request, attempt: Attempt) -> Summary:
        """Taken at the end: the stages sum to the time from arrival until now."""
        committed = attempt.committed
        return Summary(
            prompt_tokens=len(request.prompt),
            cached_tokens=self.cached_tokens or 0,
            completion_tokens=len(self.delivery.ids),
            timings=self.stages.timings(),
            prefill_worker=attempt.claim.prefill.info.ref.worker_id,
            decode_worker=attempt.claim.decode.info.ref.worker_id if committed else "",
            kv_bytes=committed.kv_bytes if committed else 0,
            transport=committed.transport if committed else "",
            attempts=self.attempts,
        )
