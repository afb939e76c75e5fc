"""The pool of workers in the ledger, and placements on them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog

from baton.clock import Clock
from baton.core import BlockCounts, Channel, Incarnation, Load, Role, WorkerInfo, WorkerRef
from baton.errors import Violation
from baton.ledger.control_state import RouterReport
from baton.ledger.prefix_index import PrefixIndex
from baton.rpc.channel import PLAINTEXT, Wire
from router.placement.demand import TypicalRequest, expected
from router.placement.fleet import Fleet
from router.placement.policy import Alone, AlonePolicy, Policy, local_prefill, local_prefill_if_faster
from router.placement.snapshot import Ask, has_pair, misfit
from router.workers.placement import NO_REQUIREMENTS, Placement, Requirements
from router.workers.stream import WorkerStream

log = structlog.get_logger(__name__)

WorkerSource = Callable[[], Awaitable[Sequence[WorkerInfo]]]
"""The workers with a live lease: `Ledger.workers`, or a fixed list in tests. May fail: then nothing changes."""

_POLL_S = 0.5
_HURRY_S = 0.1  # while no request can be served
_SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a pool places requests. `local_prefill` lets decode workers compute prompts where that is faster; `colocated`
    lets them compute all, without prefill workers. `alone` is the policy for that, `chunk` the tokens per step.
    `on_predicted` gets the error of each TTFT prediction in seconds.
    """

    alone: AlonePolicy = local_prefill
    chunk: float = math.inf
    local_prefill: bool = False
    colocated: bool = False
    slo_itl_s: float = math.inf
    on_predicted: Callable[[float], None] = lambda off_s: None


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
        self._options = options
        self._source = source
        self._policy = policy
        self._router_id = router_id
        self._silence_s = silence_s
        self._clock = clock
        self._wire = wire
        self._fleet = Fleet(prefixes, options.slo_itl_s)
        self._links: dict[WorkerRef, WorkerStream] = {}
        self._seen: dict[WorkerRef, float] = {}
        self._typical = TypicalRequest()
        self._turn = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def links(self) -> list[WorkerStream]:
        return list(self._links.values())

    async def start(self) -> None:
        """Read the ledger once, then poll it in the background."""
        await self._follow()
        self._task = asyncio.create_task(self._run(), name="worker pool")

    async def stop(self) -> None:
        """Close all streams."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.gather(*(link.stop() for link in self._links.values()))

    def place(self, tokens: int, requirements: Requirements = NO_REQUIREMENTS) -> Placement | None:
        """Return a placement for a request of `tokens` known tokens, or None if no capable workers have capacity. If no
        prefill worker is left, it is a decode worker alone.
        """
        snapshot, (keep, spec, determinism, _) = self._fleet.snapshot(), requirements
        snapshot.chunk = self._options.chunk
        if requirements.capability is not None and not self.can_serve(requirements):
            return None
        if not snapshot.has_room(tokens):
            return None
        kept = keep.info.ref if keep is not None and self._can_hand_over(keep, requirements) else None
        ask = self._fleet.ask(tokens, self._turn, kept, spec, determinism)
        pair = None if self._options.colocated else self._policy(snapshot, ask)
        if pair is None:
            found = None if self.has_pair(requirements) else self._options.alone(snapshot, ask)
            return None if found is None else self._alone(tokens, found, ask)
        if self._options.local_prefill and (sooner := local_prefill_if_faster(snapshot, ask, pair)) is not None:
            return self._alone(tokens, sooner, ask)
        self._turn += 1
        prefill = self._links[self._fleet.ref(Role.PREFILL, pair.prefill)]
        decode = self._links[self._fleet.ref(Role.DECODE, pair.decode)]
        cached = int(ask.prefill_cached[pair.prefill])
        self._typical.saw(tokens, cached)
        placement = Placement(prefill, decode, tokens, cached, self._fleet.mark, self.on_change)
        return self._predict(placement, pair.ttft_s if kept is None else 0.0)

    def _predict(self, placement: Placement, ttft_s: float) -> Placement:
        """Compare the predicted TTFT in seconds with the real one later, unless it is 0, which means unknown."""
        if ttft_s:
            placement.on_first = partial(self._compare, ttft_s, self._clock.monotonic())
        return placement

    def _alone(self, tokens: int, found: Alone, ask: Ask) -> Placement:
        self._turn += 1
        row = found.decode
        decode, cached = self._links[self._fleet.ref(Role.DECODE, row)], int(ask.decode_cached[row])
        self._typical.saw(tokens, cached)
        placement = Placement(None, decode, tokens, cached, self._fleet.mark, self.on_change)
        return self._predict(placement, found.ttft_s)

    def expected(self) -> RouterReport:
        """Return the load of its workers and the predicted latencies of a typical request, without the queue."""
        self._fleet.snapshot()
        rows = [(link.view, facts) for link, facts in self._fleet.rows() if link.usable]
        return expected(self._router_id, rows, self._typical, self._options.chunk if self._options.colocated else None)

    def place_on(self, worker_id: str, incarnation: Incarnation) -> Placement | None:
        """Return a placement on a decode worker that already decodes the stream, or None if it is not connected."""
        link = self._link(worker_id, incarnation)
        if link is None or link.state != "connected" or link.info.role is not Role.DECODE:
            return None
        return Placement(None, link, 0, 0, self._fleet.mark, self.on_change)

    async def wait_known(self, worker_id: str, incarnation: Incarnation) -> None:
        """Wait, at most 2 s, for the first connect to this worker or its failure."""
        link = self._link(worker_id, incarnation)
        if link is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(link.settled.wait(), _SETTLE_S)

    def _link(self, worker_id: str, incarnation: Incarnation) -> WorkerStream | None:
        found = [ref for ref in self._links if (ref.worker_id, ref.incarnation) == (worker_id, incarnation)]
        return self._links[found[0]] if found else None

    def _compare(self, predicted_s: float, since: float) -> None:
        self._options.on_predicted(abs(self._clock.monotonic() - since - predicted_s))

    def has_pair(self, requirements: Requirements = NO_REQUIREMENTS) -> bool:
        """Return whether two live workers can hand over such requests, whatever their capacity."""
        if self._options.colocated:
            return False
        views = ([link.view for link in self._usable(role, requirements)] for role in (Role.PREFILL, Role.DECODE))
        return has_pair(*views, alike=requirements.deterministic)

    def can_serve(self, requirements: Requirements = NO_REQUIREMENTS) -> bool:
        """Return whether a capable decode worker is connected, whatever its capacity and prefill workers."""
        return bool(self._usable(Role.DECODE, requirements)) and not (requirements.thinks and not self.thinking_chunk())

    def reasons_not_to_serve(self, requirements: Requirements) -> list[Violation]:
        """Return why no known worker is capable. Empty if one may be, or if none is known."""
        wrong = [Violation(field, "the model that is served does not think") for field in requirements.thinks]
        wrong = wrong if self.thinking_chunk() == 0 else []
        if requirements.deterministic and not requirements.determinism and (reason := self.nondeterminism()):
            wrong.append(Violation("deterministic", f"no worker computes such requests: {reason}"))
        return wrong

    def nondeterminism(self) -> str:
        """Return why no known worker takes deterministic requests. "" if one does, or if none is known."""
        infos = [link.info for link in self._links.values() if not link.retired]
        if any(info.determinism for info in infos):
            return ""
        return "; ".join(dict.fromkeys(info.nondeterminism or "they do not say why" for info in infos))

    def max_model_len(self) -> int | None:
        """Return the smallest maximum length of the workers, or None while no worker is known."""
        return min((link.info.max_model_len for link in self._links.values()), default=None)

    def thinking_chunk(self) -> int | None:
        """Return the smallest chunk size for thoughts; 0 if a model does not think, None while no worker is known."""
        return min((link.info.thinking_chunk for link in self._links.values() if not link.retired), default=None)

    def blocks(self) -> dict[Role, list[BlockCounts]]:
        """Return the block counts of connected workers, as last reported."""
        connected = [link for link in self._links.values() if link.state == "connected"]
        return {role: [link.view.load.blocks for link in connected if link.info.role is role] for role in Role}

    def channels(self) -> list[tuple[str, Channel]]:
        """Return the open data channels of connected workers, each with its worker's id."""
        connected = [link for link in self._links.values() if link.state == "connected"]
        return [(link.info.ref.worker_id, channel) for link in connected for channel in link.view.load.channels]

    def loads(self) -> list[tuple[str, Load]]:
        """Return the last reports of connected workers, each with its worker's id."""
        links = self._links.values()
        return [(link.info.ref.worker_id, link.view.load) for link in links if link.state == "connected"]

    def told_metrics(self) -> list[tuple[str, str]]:
        """Return the ids of workers and the addresses of their metrics."""
        infos = [link.info for link in self._links.values()]
        return [(info.ref.worker_id, info.metrics) for info in infos if info.metrics]

    def misfit(self, link: WorkerStream) -> str:
        """Return why a worker fits none of the others. "" if it fits one or is alone."""
        return misfit(link.info, [other.info for other in self._links.values() if other.usable])

    def note(self, link: WorkerStream) -> str:
        """Return a note on a worker for operators, or ""."""
        if link.info.role is Role.DECODE and not (self._options.colocated or self._usable(Role.PREFILL)):
            return "no prefill worker is there: it computes prompts itself"
        reason = self.misfit(link)
        return f"fits no other worker: {reason}" if reason else ""

    def _can_hand_over(self, keep: WorkerStream, requirements: Requirements) -> bool:
        """Return whether `keep` and a decode worker for its KV are connected. Otherwise waiting for them is useless."""
        takers = self._usable(Role.DECODE, requirements) if keep.usable else []
        return any(link.info.fingerprint == keep.info.fingerprint for link in takers)

    def _usable(self, role: Role, requirements: Requirements = NO_REQUIREMENTS) -> list[WorkerStream]:
        links = self._links.values()
        return [link for link in links if link.info.role is role and link.usable and requirements.accepts(link.info)]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep((_POLL_S if self._complete() else _HURRY_S) * random.uniform(0.8, 1.2))
            await self._follow()

    def _complete(self) -> bool:
        return self.can_serve() if self._options.colocated else self.has_pair()

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
                self._add(
                    WorkerStream(info, self._router_id, self._silence_s, partial(self._changed, info.ref), self._wire)
                )
                link = self._links[info.ref]
                if reason := self.misfit(link):
                    log.warning("worker_does_not_fit", worker=info.ref, reason=reason)
        for ref, link in list(self._links.items()):
            await self._check(ref, link, now - self._seen[ref])

    def _add(self, link: WorkerStream) -> None:
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
