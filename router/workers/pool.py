"""The pool of workers in the ledger, placements on them, and the latencies that a typical request may expect."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from baton.clock import Clock
from baton.core import BlockCounts, Channel, Incarnation, Load, Role, WorkerInfo, WorkerRef
from baton.errors import NoWorker, Overloaded, Violation
from baton.ledger.control_state import RouterReport, WorkerDemand
from baton.ledger.prefix_index import PrefixIndex
from baton.rpc.channel import PLAINTEXT, Wire
from baton.rpc.v1 import inference_pb2 as pb
from router.placement.fleet import Fleet, WorkerRow
from router.placement.policy import (
    AlonePolicy,
    Policy,
    chunked_s,
    decode_step_s,
    local_prefill,
    local_prefill_if_faster,
    prefill_s,
)
from router.placement.promise import Seat
from router.placement.snapshot import Ask, Facts, Snapshot, WorkerView, has_pair, misfit
from router.workers.placement import NO_REQUIREMENTS, Placement, Requirements
from router.workers.stream import WorkerStream

if TYPE_CHECKING:
    from baton.ledger.ownership import OwnershipRecord

log = structlog.get_logger(__name__)

# Returns the workers with a live lease: `Ledger.workers`, or a fixed list in tests. If it raises, nothing changes.
WorkerSource = Callable[[], Awaitable[Sequence[WorkerInfo]]]

_POLL_S = 0.5
_FAST_POLL_S = 0.1  # while no request can be served
_SETTLE_S = 2.0
_LOOK_S = 0.05
_NEW = 0.05  # weight of a new prompt in the mean


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a pool places requests. `local_prefill` lets decode workers compute prompts where that is faster; `colocated`
    lets them compute all, without prefill workers. `alone` is the policy for that. A step of a decode worker has at
    most `chunk` tokens and `rows` requests. `on_predicted` gets the error of each TTFT prediction in seconds. Workers
    with another `tokenizer` (`Tokenizer.identity`) get no requests.
    """

    alone: AlonePolicy = local_prefill
    chunk: float = math.inf
    local_prefill: bool = False
    colocated: bool = False
    slo_itl_s: float = math.inf
    rows: float = math.inf
    on_predicted: Callable[[float], None] = lambda off_s: None
    tokenizer: str = ""


class TypicalRequest:
    """A running mean of prompts: their known tokens, and how many of those were cached on the chosen worker."""

    def __init__(self) -> None:
        self.tokens = self.cached = 0.0

    def add(self, tokens: int, cached: int) -> None:
        new = _NEW if self.tokens else 1.0
        self.tokens += new * (tokens - self.tokens)
        self.cached += new * (cached - self.cached)


class WorkerPool:
    """One stream for each live incarnation in the ledger, and the placements on them. `on_change` is called when
    capacity may have grown; the queue, which needs the pool, sets it. A stream is closed after `silence_s` without a
    message or a lease of its worker. Policies use `prefixes`.
    """

    def __init__(
        self,
        source: WorkerSource,
        policy: Policy,
        router_id: str,
        silence_s: float,
        clock: Clock,
        wire: Wire = PLAINTEXT,
        *,
        prefixes: PrefixIndex | None = None,
        options: PoolOptions = PoolOptions(),
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.starting = ""  # decode workers that the controller is starting, as text, while none can serve
        self._source, self._policy, self._options = source, policy, options
        self._router_id, self._silence_s = router_id, silence_s
        self._clock, self._wire = clock, wire
        self._fleet = Fleet(prefixes, options.slo_itl_s)
        self._links: dict[WorkerRef, WorkerStream] = {}
        self._seen: dict[WorkerRef, float] = {}
        self._typical = TypicalRequest()
        self._turn = self._awaited = 0
        self._even = True  # all workers have the same context
        self._task: asyncio.Task[None] | None = None

    @property
    def links(self) -> list[WorkerStream]:
        return list(self._links.values())

    @property
    def connected(self) -> list[WorkerStream]:
        return [link for link in self._links.values() if link.state == "connected"]

    async def start(self) -> None:
        """Read the ledger once, then poll it in the background."""
        await self._follow()
        self._task = asyncio.create_task(self._run(), name="worker pool")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.gather(*(link.stop() for link in self._links.values()))

    def place(
        self,
        tokens: int,
        requirements: Requirements = NO_REQUIREMENTS,
        avoid: Collection[WorkerRef] = (),
        itl_s: float = math.inf,
    ) -> Placement | None:
        """Return a placement for `tokens` known tokens, or None if no capable workers have capacity. Without a capable
        prefill worker, it is a decode worker alone. Workers in `avoid` get nothing new. `itl_s` limits a step with a
        prompt on a decode worker.
        """
        snapshot, (keep, spec, determinism, *_) = self._fleet.snapshot(), requirements
        snapshot.chunk, snapshot.slo_itl_s = self._options.chunk, min(self._options.slo_itl_s, itl_s)
        self._fleet.hide(avoid)
        if spec is not None and not self._even:
            self._fleet.hide(self._too_short(requirements, len(spec.prompt) + spec.sampling.max_tokens))
        if requirements.capability is not None and not self.can_serve(requirements):
            return None
        if not snapshot.has_capacity(tokens):
            return None
        keep = keep if keep is not None and self.can_hand_over(keep, requirements) else None
        if keep is not None and keep.info.role is Role.DECODE:
            return self._moved(snapshot, self._fleet.ask(tokens, self._turn, None, spec, determinism), keep)
        kept = None if keep is None else keep.info.ref
        ask = self._fleet.ask(tokens, self._turn, kept, spec, determinism)
        pair = None if self._options.colocated else self._policy(snapshot, ask)
        if pair is None:
            alone = None if self.has_pair(requirements) else self._options.alone(snapshot, ask)
            return None if alone is None else self._placed(ask, None, alone.decode, alone.ttft_s)
        if self._options.local_prefill and (faster := local_prefill_if_faster(snapshot, ask, pair)) is not None:
            return self._placed(ask, None, faster.decode, faster.ttft_s)
        return self._placed(ask, pair.prefill, pair.decode, pair.ttft_s if kept is None else 0.0)

    def _too_short(self, requirements: Requirements, needed: int) -> Iterator[WorkerRef]:
        """Yield the workers with a context of less than `needed` tokens that the request can do without: a pair has
        room, or a worker that can take their place.
        """

        def kind(link: WorkerStream) -> tuple[Role, str, str]:
            return link.info.role, link.info.fingerprint, link.info.determinism if requirements.deterministic else ""

        paired = not self._options.colocated and bool(self._usable(Role.PREFILL))
        roles = (Role.DECODE, Role.PREFILL) if paired else (Role.DECODE,)
        links = [link for role in roles for link in self._usable(role, requirements) if link is not requirements.keep]
        long = {kind(link) for link in links if link.info.max_model_len >= needed}
        pair = requirements.keep is None and any(all((role, *same) in long for role in roles) for _, *same in long)
        short = (link for link in links if link.info.max_model_len < needed)
        yield from (link.info.ref for link in short if pair or kind(link) in long)

    def outlook(self, tokens: int, requirements: Requirements) -> tuple[list[Seat], list[Seat]]:
        """Return the usable prefill and decode workers as forecasts see them."""
        self._fleet.snapshot()
        ask = self._fleet.ask(tokens, self._turn, None, requirements.spec, requirements.determinism)
        seats: dict[Role, list[Seat]] = {role: [] for role in Role}
        for row, link, facts in self._fleet.rows():
            if link.usable and requirements.accepts(link.info):
                by_row = ask.prefill_cached if link.info.role is Role.PREFILL else ask.decode_cached
                cached = float(by_row[row])
                seats[link.info.role].append(self._seat(link, facts, cached))
        prefills = [] if self._options.colocated else seats[Role.PREFILL]
        return prefills, seats[Role.DECODE]

    def seats_of(self, placement: Placement) -> tuple[Seat | None, Seat]:
        """Return the prefill worker, if any, and the decode worker of a new placement, as they were before it."""
        prefill, decode, facts = placement.prefill, placement.decode, self._fleet.facts
        source = None if prefill is None else self._seat(prefill, facts(prefill.info.ref), placement.cached)
        return source, self._seat(decode, facts(decode.info.ref), 0.0)

    def _seat(self, link: WorkerRow, facts: Facts[float], cached: float) -> Seat:
        move_s = facts.token_bytes * self._fleet.byte_s
        return Seat(link.info.ref, facts, cached, link.info.layout.block_size, move_s, self._options.rows)

    def _moved(self, snapshot: Snapshot, ask: Ask, source: WorkerStream) -> Placement | None:
        """Return a placement for a sequence that `source`, a decode worker, holds, or None if no other has capacity."""
        same = source.info.fingerprint
        self._fleet.hide(ref for ref, link in self._links.items() if link is source or link.info.fingerprint != same)
        if (found := self._options.alone(snapshot, ask)) is None:
            return None
        decode = self._links[self._fleet.ref(Role.DECODE, found.decode)]
        cached = int(ask.decode_cached[found.decode])
        return Placement(source, decode, ask.tokens, cached, self._fleet.mark, self.on_change)

    def _placed(self, ask: Ask, prefill_row: int | None, decode_row: int, ttft_s: float) -> Placement:
        """Return the placement on these rows. Its TTFT is compared with the predicted `ttft_s`, unless that is 0."""
        self._turn += 1
        prefill, cached = None, ask.decode_cached[decode_row]
        if prefill_row is not None:
            prefill, cached = self._links[self._fleet.ref(Role.PREFILL, prefill_row)], ask.prefill_cached[prefill_row]
        decode = self._links[self._fleet.ref(Role.DECODE, decode_row)]
        self._typical.add(ask.tokens, int(cached))
        placement = Placement(prefill, decode, ask.tokens, int(cached), self._fleet.mark, self.on_change)
        if ttft_s:
            placement.on_first = partial(self._compare, ttft_s, self._clock.monotonic())
        return placement

    def _compare(self, predicted_s: float, since: float) -> None:
        self._options.on_predicted(abs(self._clock.monotonic() - since - predicted_s))

    def expected(self) -> RouterReport:
        """Return the load of its workers and the predicted latencies of a typical request, without the queue."""
        self._fleet.snapshot()
        rows = [(link.view, facts) for _, link, facts in self._fleet.rows() if link.usable]
        return expected(self._router_id, rows, self._typical, self._options.chunk if self._options.colocated else None)

    def place_on(self, stream: OwnershipRecord) -> Placement | None:
        """Return a placement on the decode worker of a stream that another router began. None if the worker is not
        connected, or if a request of this router has the stream: it may be another tenant's.
        """
        link = self._link(stream.worker_id, stream.incarnation)
        if link is None or link.foreign or link.state != "connected" or link.info.role is not Role.DECODE:
            return None
        if stream.handoff in link.mailboxes:
            return None  # its events would go to one of the two
        return Placement(None, link, 0, 0, self._fleet.mark, self.on_change)

    async def wait_connected(self, worker_id: str, incarnation: Incarnation) -> None:
        """Wait, at most 2 s, for the first connect to this worker or its failure."""
        link = self._link(worker_id, incarnation)
        if link is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(link.settled.wait(), _SETTLE_S)

    def _link(self, worker_id: str, incarnation: Incarnation) -> WorkerStream | None:
        wanted = worker_id, incarnation
        return next((self._links[ref] for ref in self._links if (ref.worker_id, ref.incarnation) == wanted), None)

    def has_pair(self, requirements: Requirements = NO_REQUIREMENTS) -> bool:
        """Return whether two live workers can hand over such requests, whatever their capacity."""
        if self._options.colocated:
            return False
        views = ([link.view for link in self._usable(role, requirements)] for role in (Role.PREFILL, Role.DECODE))
        return has_pair(*views, bitwise=requirements.deterministic)

    def can_serve(self, requirements: Requirements = NO_REQUIREMENTS) -> bool:
        """Return whether a capable decode worker is connected, whatever its capacity and prefill workers."""
        return bool(self._usable(Role.DECODE, requirements)) and not (requirements.thinks and not self.thinking_chunk())

    def reasons_not_to_serve(self, requirements: Requirements) -> list[Violation]:
        """Return why no known worker is capable. Empty if one may be, or if none is known."""
        wrong = [Violation(field, "the served model does not think") for field in requirements.thinks]
        wrong = wrong if self.thinking_chunk() == 0 else []
        if requirements.deterministic and not requirements.determinism and (reason := self.nondeterminism()):
            wrong.append(Violation("deterministic", f"no worker can compute such requests: {reason}"))
        return wrong

    def nondeterminism(self) -> str:
        """Return why no known worker takes deterministic requests. "" if one does, or if none is known."""
        infos = [link.info for link in self._own() if not link.retired]
        if any(info.determinism for info in infos):
            return ""
        return "; ".join(dict.fromkeys(info.nondeterminism or "no reason reported" for info in infos))

    def max_model_len(self) -> int | None:
        """Return the smallest maximum length of the workers, or None while no worker is known."""
        return min((link.info.max_model_len for link in self._own()), default=None)

    async def length_for(self, request: pb.GenerateRequest, within_s: float, at_once: int) -> int | None:
        """Return `max_model_len`. A chat whose answer may have the rest of the context waits until a worker is known,
        at most `within_s` and `at_once` of them together. Others never wait. Raises NoWorker, Overloaded.
        """
        takes_rest = request.HasField("chat") and not request.sampling.HasField("max_tokens")
        if self._own() or not takes_rest or request.HasField("ttft_ms") or request.HasField("itl_ms"):
            return self.max_model_len()
        if self._awaited >= at_once:
            raise Overloaded(f"{at_once} chats wait already for the first worker, no more are accepted", within_s)
        self._awaited += 1
        try:
            async with asyncio.timeout(within_s):
                while not self._own():  # noqa: ASYNC110 (the router has nothing else to do)
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise NoWorker(f"waited {within_s:g} s: no worker is known, whose context limits this answer") from None
        finally:
            self._awaited -= 1
        return self.max_model_len()

    def thinking_chunk(self) -> int | None:
        """Return the smallest chunk size for thoughts; 0 if a model does not think, None while no worker is known."""
        return min((link.info.thinking_chunk for link in self._own() if not link.retired), default=None)

    def blocks(self) -> dict[Role, list[BlockCounts]]:
        return {role: [link.view.load.blocks for link in self.connected if link.info.role is role] for role in Role}

    def channels(self) -> list[tuple[str, Channel]]:
        return [(worker_id, channel) for worker_id, load in self.loads() for channel in load.channels]

    def loads(self) -> list[tuple[str, Load]]:
        return [(link.info.ref.worker_id, link.view.load) for link in self.connected]

    def metrics_addresses(self) -> list[tuple[str, str]]:
        infos = [link.info for link in self._links.values()]
        return [(info.ref.worker_id, info.metrics) for info in infos if info.metrics]

    def misfit(self, link: WorkerStream) -> str:
        """Return why a worker gets no requests of this router, or hands over to no other one. "" if it does, or may."""
        if link.foreign:
            return f"its tokenizer is not that of this router's model: it serves {link.info.model}"
        return misfit(link.info, [other.info for other in self._links.values() if other.usable])

    def note(self, link: WorkerStream) -> str:
        reason = self.misfit(link)
        if link.foreign:
            return reason
        if link.info.role is Role.DECODE and not (self._options.colocated or self._usable(Role.PREFILL)):
            return "no prefill worker takes requests: it computes prompts itself"
        return f"is compatible with no other worker: {reason}" if reason else ""

    def can_hand_over(self, keep: WorkerStream, requirements: Requirements) -> bool:
        """Return whether `keep` and a decode worker for its KV are connected. Otherwise waiting for them is useless. A
        decode worker hands over while it drains.
        """
        able = keep.usable or (keep.info.role is Role.DECODE and keep.state == "connected")
        takers = [link for link in self._usable(Role.DECODE, requirements) if able and link is not keep]
        return any(link.info.fingerprint == keep.info.fingerprint for link in takers)

    def _usable(self, role: Role, requirements: Requirements = NO_REQUIREMENTS) -> list[WorkerStream]:
        links = self._links.values()
        return [link for link in links if link.info.role is role and link.usable and requirements.accepts(link.info)]

    def _own(self) -> list[WorkerStream]:
        return [link for link in self._links.values() if not link.foreign]

    async def _run(self) -> None:
        while True:
            complete = self.can_serve() if self._options.colocated else self.has_pair()
            await asyncio.sleep((_POLL_S if complete else _FAST_POLL_S) * random.uniform(0.8, 1.2))
            await self._follow()

    async def _follow(self) -> None:
        try:
            infos = await self._source()
        except Exception as error:  # noqa: BLE001  (known workers stay: their streams show whether they live)
            log.warning("ledger_unreachable", error=repr(error))
            self._seen = dict.fromkeys(self._seen, self._clock.monotonic())  # an error is no sign that they left
            return
        now = self._clock.monotonic()
        for info in infos:
            self._seen[info.ref] = now
            if info.ref not in self._links:
                on_change = partial(self._changed, info.ref)
                link = WorkerStream(info, self._router_id, self._silence_s, on_change, self._wire)
                self._add(link)
                if reason := self.misfit(link):
                    log.warning("worker_does_not_fit", worker=info.ref, reason=reason)
        self._even = len({link.info.max_model_len for link in self._own()}) < 2
        for ref, link in list(self._links.items()):
            await self._check(ref, link, now - self._seen[ref])

    def _add(self, link: WorkerStream) -> None:
        ours, theirs = self._options.tokenizer, link.info.tokenizer
        link.foreign = bool(ours and theirs) and ours != theirs
        self._links[link.info.ref] = link
        self._fleet.add(link)

    def _changed(self, ref: WorkerRef) -> None:
        self._fleet.touch(ref)
        self.on_change()

    async def _check(self, ref: WorkerRef, link: WorkerStream, absent_s: float) -> None:
        """Retire a worker without a lease. It is dropped when its stream ends, or after `silence_s`: a ledger that
        restarts empty must not end requests on live workers.
        """
        before, link.retired = link.retired, absent_s > 0
        if before is not link.retired:
            self._changed(ref)
        if link.retired and (link.state != "connected" or absent_s > self._silence_s):
            log.info("worker_dropped", worker=ref, absent_s=round(absent_s, 1))
            del self._links[ref], self._seen[ref]
            self._fleet.drop(ref)
            await link.stop()


def expected(
    router_id: str, rows: Sequence[tuple[WorkerView, Facts[float]]], typical: TypicalRequest, chunk: float | None = None
) -> RouterReport:
    """Return the load of these workers, and the predicted latencies of a typical prompt. TTFT is that of prefill
    workers even if local prefill would be faster, because a prefill pool that needs this help is too small. If `chunk`
    is set, the decode workers are colocated ones, and compute so many tokens a step.
    """
    if chunk is None:
        prefills = [at for view, at in rows if view.info.role is Role.PREFILL]
        ttft_s, ttft_alone_s = _least(prefills, lambda at: prefill_s(at, typical.tokens, typical.cached))
    else:
        workers = [at for _, at in rows]
        ttft_s, ttft_alone_s = _least(workers, lambda at: chunked_s(at, typical.tokens, typical.cached, chunk))
    decodes = [at for view, at in rows if view.info.role is Role.DECODE]
    itl_s, itl_alone_s = _least(decodes, lambda at: decode_step_s(at, typical.tokens))
    return RouterReport(
        router_id=router_id,
        prompt_tokens=typical.tokens,
        ttft_s=ttft_s,
        ttft_alone_s=ttft_alone_s,
        itl_s=itl_s,
        itl_alone_s=itl_alone_s,
        workers={view.info.ref.worker_id: _worker(view, at) for view, at in rows},
    )


def _least(workers: Sequence[Facts[float]], seconds_of: Callable[[Facts[float]], float]) -> tuple[float, float]:
    """Return the least seconds of any able worker, or else of any worker; and those of that worker without load."""
    offers = ((not at.able, seconds_of(at), seconds_of(_idle(at))) for at in workers)
    _, now, alone = min(offers, default=(True, 0.0, 0.0))
    return now, alone


def _idle(at: Facts[float]) -> Facts[float]:
    return at._replace(requests=0.0, backlog=0.0, kv_tokens=0.0)


def _worker(view: WorkerView, at: Facts[float]) -> WorkerDemand:
    load, prefills = view.load, view.info.role is Role.PREFILL
    total = load.blocks.total or 1
    return WorkerDemand(
        role=view.info.role,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=view.prefill_backlog,
        used=(load.blocks.owned + load.blocks.reserved) / total,
        reserved=load.blocks.reserved / total,
        step_s=0.0 if prefills or not at.requests else decode_step_s(at, 0.0, more=0.0),
        busy_s=load.prefill_pace.seconds if prefills else 0.0,
    )
