"""The life of a request, in `serve_choice`. The states of one attempt are drawn in `attempt.py`."""

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

DEADLY = 2  # a request that as many workers died of may be the reason


async def serve_choice(request: SequenceSpec, life: ChoiceRun, client: EventStream) -> pb.Completed:
    """Carry one choice of a request from arrival to its end, through as many attempts as it takes: decode workers run
    full, and workers are lost.

    Raises the one typed error that ended it. In whatever state that happens, also by cancellation, the attempt's
    workers are released on the way out.
    """
    while True:
        life.stages.enter(Stage.QUEUE)
        placement = life.claim_parked() or await life.admit(request)  # waits for a pair of workers with room
        life.stages.enter(Stage.ROUTE)
        async with life.attempt(placement, request) as attempt:
            life.stages.enter(Stage.RESERVE)
            if not await attempt.reserve(life.remaining_s()):
                await life.handed_back(attempt, client)  # D filled up meanwhile, or one was lost: back to the queue
                continue
            life.begin(attempt)
            await asyncio.sleep(0)  # the worker is told before the client and the log
            await life.accept(client, attempt, len(request.prompt))
            async for tokens in attempt.outputs():  # token 0 from P at once; D repeats it and goes on
                await life.thoughts.tell(client, attempt.thoughts)
                await client.tokens(life.choice, life.deliver(tokens))
            life.computed(attempt)
            if attempt.finish is None:
                await life.handed_back(attempt, client)
                continue  # D ran full, or one was lost: what the client has is known, go on at the same index
        life.delivery.complete()
        life.thoughts.complete()
        await client.finished(life.choice, attempt.finish, len(life.delivery.ids))
        return life.completed(attempt, len(request.prompt))


@dataclass(frozen=True, slots=True)
class Held:
    """What a prefill worker keeps of an attempt that was lost: the KV of `spec`."""

    link: WorkerStream
    handoff: HandoffId
    spec: SequenceSpec


class ChoiceRun:
    """The state of one choice of a request: its names, its clock, and what its client has of it.

    `call` is what the choices of a request have in common, `received` what the client has from a router that was lost.
    Workers know the choice by its `request_id`.
    """

    def __init__(
        self, context: RouterContext, call: ClientRequest, choice: int = 0, received: Sequence[int] = ()
    ) -> None:
        self.call, self.choice = call, choice
        self.request_id = call.life_id(choice)
        self.started = asyncio.Event()  # the first token is there
        self.track = Track(context.router_id, choice, context.clock, call.arrived)
        self.stages = self.track.stages
        call.trace.tracks.append(self.track)
        self.delivery, self._received = Delivery(received), len(received)
        self.thoughts = Thoughts(choice, call.asked)
        self.attempts = self._failures = self._deaths = 0
        self.placed: Placement | None = None  # of the last attempt
        self.cached_tokens: int | None = None  # as the client is told; None: not accepted yet
        self._context = context
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._computed = False
        self._held: Held | None = None
        self._parked: OwnershipRecord | None = None  # another router has gone from it, a decode worker has not
        self._waits_since: float | None = None  # for room; a claim that came to nothing does not end it
        self.note("arrived", **({"known": len(received)} if received else {}))
        log.debug("request_arrived", request_id=self.request_id, known=len(received))

    @property
    def accepted(self) -> bool:
        return self.cached_tokens is not None

    def note(self, event: str, **facts: object) -> None:
        """Into the history: about the attempt that runs, or ran last."""
        if self._context.history.kept:
            self._context.history.note(event, HandoffId(self.request_id, self.attempts), **facts)

    def remaining_s(self) -> float:
        """Seconds until the deadline; never 0, which would mean "none" to a worker."""
        return max(self.call.deadline - self._context.clock.monotonic(), 0.001)

    def known(self, request: SequenceSpec) -> SequenceSpec:
        """What the next attempt starts from: what the client has is never sampled again. KV that is held is of less."""
        return self._held.spec if self._held else replace(request, known=tuple(self.delivery.ids))

    async def admit(self, request: SequenceSpec) -> Placement:
        """A pair of workers; a request that has been there before keeps its place in the queue."""
        known, ticket = self.known(request), ticket_for(self.call.arrival, request.priority)
        self._waits_since = self._waits_since or self._context.clock.monotonic()
        thinks = () if self.call.accepted else self.call.asked.fields  # later nobody is refused for it any more
        requirements = Requirements(self._held.link if self._held else None, known, self.call.determinism, thinks)

        async def admit() -> Placement:
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

        if not requirements.is_special:
            return await admit()
        since = None if self.call.accepted else self._waits_since
        return await self._context.alike.admitted(requirements, admit, deadline_s=self.remaining_s(), since=since)

    async def look_for_it(self) -> None:
        """Find out whether a decode worker still goes on with what another router began."""
        name = self.call.stream(self.choice)
        try:
            self._parked = await self._context.streams(name)
        except LedgerError as error:
            log.warning("not_looked_for", request_id=self.request_id, stream=name, error=str(error))
        if self._parked is not None:
            await self._context.pool.wait_known(self._parked.worker_id, self._parked.incarnation)

    def claim_parked(self) -> Placement | None:
        """Of the decode worker that goes on with it, once."""
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
        """The next attempt. What is held is of no use to another worker."""
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
        """Have the prompt computed, or what is held of it handed over."""
        held, self._held = self._held, None
        self._waits_since = None
        if held is not None:
            attempt.repush(held.handoff, self.remaining_s())
        else:
            attempt.prefill(self.remaining_s())

    async def accept(self, client: EventStream, attempt: Attempt, prompt_tokens: int) -> None:
        """Tell the client, once, that decode room is reserved."""
        if self.accepted:
            return
        self.cached_tokens = 0  # what P finds, it says with its first token; what D has is only not moved
        self.note("accepted")
        log.info(
            "request_accepted",
            request_id=self.request_id,
            stream=self.call.stream(self.choice),  # as its client calls it
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
        """What of `tokens` is new to the client, in order."""
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
        """Whether the first token came within `slo.ttft_ms`, and the others within `slo.itl_ms` each on average."""
        settings, first, last = self._context.settings, self._first_token_at, self._last_token_at
        if first is None or last is None:  # no token, no wait for one
            return True
        itl_s = (last - first) / max(len(self.delivery.ids) - self._received - 1, 1)
        return self.stages.timings().ttft_s <= settings.slo_ttft_s and itl_s <= settings.slo_itl_s

    def computed(self, attempt: Attempt) -> None:
        """What the first attempt found cached was saved; what a later one finds there, this request may have left."""
        if not self._computed:
            self.cached_tokens = max(self.cached_tokens or 0, attempt.prefill_cached)
        self._computed = True

    async def handed_back(self, attempt: Attempt, client: EventStream) -> None:
        """The attempt did not end the request: another one follows. Raises its failure if that was one too many."""
        self.delivery.drop_pending()
        self._failures += attempt.lost is not None
        self._deaths += attempt.died
        self.stages.note(ended=attempt.handed_back, **({"error": type(attempt.lost).__name__} if attempt.lost else {}))
        if self._deaths >= DEADLY:  # first: that error says that no retry helps
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
        """Nothing is held for another attempt any more."""
        held, self._held = self._held, None
        if held is not None:
            held.link.send(release=worker_pb2.Release(handoff=convert.handoff_to_pb(held.handoff)))

    def completed(self, attempt: Attempt, prompt_tokens: int) -> pb.Completed:
        """Taken at the end: the stages sum to the time from arrival until now."""
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
