"""The life of one choice of a request: `serve_choice` and its state. `attempt.py` draws the states of one attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import structlog

from baton.core import HandoffId, SequenceSpec, Token
from baton.errors import EngineFault, LedgerError
from baton.rpc import convert
from baton.rpc.v1 import common_pb2, worker_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.stages import Stage
from router.admission.admission import ticket_for
from router.context import RouterContext
from router.request.attempt import Attempt, TakeoverAttempt
from router.request.delivery import Delivery, EventStream
from router.request.thoughts import Thoughts, fitted
from router.request.traces import Track
from router.workers.placement import Placement, Requirements
from router.workers.stream import WorkerStream

if TYPE_CHECKING:
    from baton.ledger.ownership import OwnershipRecord
    from router.request.client_request import ClientRequest

log = structlog.get_logger(__name__)

DEADLY = 2  # as many lost workers suggest that the request itself is the cause


async def serve_choice(request: SequenceSpec, life: ChoiceRun, client: EventStream) -> pb.Completed:
    """Serve one choice of a request to its end. Another attempt follows if D runs full or a worker is lost. Raises the
    one typed error that ended it. The attempt's workers are released on every exit, including cancellation.
    """
    while True:
        life.stages.enter(Stage.QUEUE)
        placement = life.claim_parked() or await life.admit(request)
        life.stages.enter(Stage.ROUTE)
        async with life.attempt(placement, request) as attempt:
            life.stages.enter(Stage.RESERVE)
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

    def __init__(
        self, context: RouterContext, call: ClientRequest, choice: int = 0, received: Sequence[int] = ()
    ) -> None:
        self.call, self.choice = call, choice
        self.request_id = call.life_id(choice)
        self.started = asyncio.Event()  # set with the first token
        self.track = Track(context.router_id, choice, context.clock, call.arrived)
        self.stages = self.track.stages
        call.trace.tracks.append(self.track)
        self.delivery, self._received = Delivery(received), len(received)
        self.thoughts = Thoughts(choice, call.asked)
        self.attempts = self._failures = self._deaths = 0
        self.placed: Placement | None = None
        self.cached_tokens: int | None = None  # None until accepted
        self._context = context
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._computed = False
        self._held: Held | None = None
        self._parked: OwnershipRecord | None = None  # of a stream that continues on its decode worker without a router
        self._waits_since: float | None = None  # for capacity; only a granted reservation ends the wait
        self.note("arrived", **({"known": len(received)} if received else {}))
        log.debug("request_arrived", request_id=self.request_id, known=len(received))

    @property
    def accepted(self) -> bool:
        return self.cached_tokens is not None

    def note(self, event: str, **facts: object) -> None:
        """Record an event of the current or last attempt in the history."""
        if self._context.history.kept:
            self._context.history.note(event, HandoffId(self.request_id, self.attempts), **facts)

    def remaining_s(self) -> float:
        """Return the seconds until the deadline: at least 1 ms, because 0 means no deadline to a worker."""
        return max(self.call.deadline - self._context.clock.monotonic(), 0.001)

    def known(self, request: SequenceSpec) -> SequenceSpec:
        """Return the sequence to start the next attempt from: all delivered tokens, or what held KV covers."""
        return self._held.spec if self._held else replace(request, known=tuple(self.delivery.ids))

    async def admit(self, request: SequenceSpec) -> Placement:
        """Wait for a placement. A request that returns to the queue keeps its place."""
        known, ticket = self.known(request), ticket_for(self.call.arrival, request.priority)
        self._waits_since = self._waits_since or self._context.clock.monotonic()
        thinks = () if self.call.accepted else self.call.asked.fields  # an accepted request is never rejected for this
        requirements = Requirements(self._held.link if self._held else None, known, self.call.determinism, thinks)
        return await self._context.admission.admit(
            ticket,
            len(known),
            requirements,
            returning=self.attempts > 0,
            accepted=self.call.accepted,
            tenant=self.call.tenant or request.cache_scope,
            deadline_s=self.remaining_s(),
            since=self._waits_since,
        )

    async def look_for_it(self) -> None:
        """Find the decode worker that continues the stream of a lost router, if any."""
        name = self.call.stream(self.choice)
        try:
            self._parked = await self._context.streams(name)
        except LedgerError as error:
            log.warning("not_looked_for", request_id=self.request_id, stream=name, error=str(error))
        if self._parked is not None:
            await self._context.pool.wait_known(self._parked.worker_id, self._parked.incarnation)

    def claim_parked(self) -> Placement | None:
        """Return a placement on the decode worker that continues the stream, or None. Returns it at most once."""
        if self._parked is None:
            return None
        placement = self._context.pool.claim_of(self._parked.worker_id, self._parked.incarnation)
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
        self.attempts += 1
        self.placed = placement
        workers = {"prefill": placement.prefill, "decode": placement.decode}
        refs = {role: str(link.info.ref) for role, link in workers.items() if link is not None}
        self.note("attempt", **refs)
        self.stages.attempt = self.attempts
        self.stages.note(**refs)
        log.debug("request_attempted", request_id=self.request_id, attempt=self.attempts, workers=[*refs.values()])
        info, known, parked = placement.decode.info, self.known(request), self._parked
        rest = (placement, fitted(known, info), self.track, self._context.metrics, self.call.lasting(self.choice))
        self.thoughts.begin(len(request.prompt), info.thinking_chunk, parked=parked is not None)
        self._parked = None
        if parked is not None:
            return TakeoverAttempt(parked.handoff, *rest)
        return Attempt(HandoffId(self.request_id, self.attempts), *rest)

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
        self.cached_tokens = 0  # P reports it with its first token; tokens cached on D are only not moved
        self.note("accepted")
        log.info(
            "request_accepted",
            request_id=self.request_id,
            stream=self.call.stream(self.choice),
            prompt_tokens=prompt_tokens,
            workers=attempt.workers,
            trace_id=self.call.trace.context.trace_id,
        )
        if attempt.spec.deterministic:
            self.call.determinism = attempt.determinism
        if self.choice == 0:
            self._context.metrics.accepted(prompt_tokens)
            await client.accepted(prompt_tokens, self.cached_tokens, attempt.determinism)

    def deliver(self, tokens: list[Token]) -> list[Token]:
        """Return those of `tokens` that the client does not have yet, in order."""
        fresh = self.delivery.merge(tokens)
        if fresh:
            self.started.set()
            self.note("delivered", first=fresh[0].index, count=len(fresh))
            now = self._context.clock.monotonic()
            gap_s = None if self._last_token_at is None else now - self._last_token_at
            self._context.seen.tokens(self, len(fresh), gap_s)
            if gap_s is None:
                self._first_token_at = now
                log.debug("request_first_token", request_id=self.request_id, attempt=self.attempts)
                self._context.metrics.first(len(fresh))
            else:
                self._context.metrics.gap(gap_s, len(fresh), self.call.exemplar)
            self._last_token_at = now
        return fresh

    def met_slo(self) -> bool:
        """Return whether TTFT was within `slo.ttft_ms` and the mean ITL within `slo.itl_ms`."""
        settings, first, last = self._context.settings, self._first_token_at, self._last_token_at
        if first is None or last is None:
            return True
        itl_s = (last - first) / max(len(self.delivery.ids) - self._received - 1, 1)
        return self.stages.timings().ttft_s <= settings.slo_ttft_s and itl_s <= settings.slo_itl_s

    def computed(self, attempt: Attempt) -> None:
        """Record the cached tokens of the first attempt; a later one may find blocks of this very request."""
        if not self._computed:
            self.cached_tokens = max(self.cached_tokens or 0, attempt.prefill_cached)
        self._computed = True

    async def handed_back(self, attempt: Attempt, client: EventStream) -> None:
        """Prepare another attempt. Raises the failure if no more attempts are allowed."""
        self.delivery.drop_pending()
        self._failures += attempt.lost is not None
        self._deaths += attempt.died
        self.stages.note(ended=attempt.handed_back, **({"error": type(attempt.lost).__name__} if attempt.lost else {}))
        if self._deaths >= DEADLY:  # checked first, because this error means that no retry helps
            raise EngineFault(
                f"{self._deaths} workers were lost while they computed this request: it is not tried again"
            )
        if attempt.lost is not None and self._failures >= self._context.settings.attempts:
            raise attempt.lost
        if attempt.held:
            attempt.kept = True
            self._held = Held(attempt.prefill_link, attempt.handoff, attempt.spec)
        reason = attempt.handed_back
        self._context.metrics.recovery(reason)
        self._context.seen.recovered(self, attempt)
        self.note("recovered", reason=reason)
        log.info("request_handed_back", handoff=attempt.handoff, reason=reason, workers=attempt.workers)
        if attempt.lost is not None and self.accepted:
            await client.recovered(self.attempts + 1, reason)

    def let_go(self) -> None:
        """Release the KV held for another attempt, if any."""
        held, self._held = self._held, None
        if held is not None:
            held.link.send(release=worker_pb2.Release(handoff=convert.handoff_to_pb(held.handoff)))

    def completed(self, attempt: Attempt, prompt_tokens: int) -> pb.Completed:
        """Return the summary of the choice, at its end. The stages sum to the time from arrival until now."""
        self.stages.end()
        timings, (prefill, decode) = self.stages.timings(), attempt.workers
        if attempt.finish is not None:
            self._context.metrics.finished(attempt.finish.reason)
        done = pb.Completed(
            usage=pb.Usage(prompt_tokens=prompt_tokens, completion_tokens=len(self.delivery.ids)),
            timings=common_pb2.Timings(**asdict(timings), e2e_s=timings.e2e_s),
            placement=pb.Placement(prefill_worker=prefill, attempts=self.attempts),
            system_fingerprint=attempt.determinism,
        )
        done.usage.cached_tokens = self.cached_tokens or 0
        done.usage.thinking_tokens = self.thoughts.tokens
        if attempt.alone:
            done.placement.decode_worker = decode
        if (moved := attempt.committed) is not None:
            done.placement.MergeFrom(
                pb.Placement(decode_worker=decode, kv_bytes=moved.kv_bytes, transport=moved.transport)
            )
        return done
