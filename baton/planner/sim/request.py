"""Simulated requests and their router.

`Attempt` mirrors `router.request.attempt`, and `Request` mirrors `router.request.lifecycle`. `SimRouter` has
production's admission, policies, placements, cost fit and prefix map, without streams. Simplifications:
- There is one router. Its processor time is `Overheads` alone.
- A worker reports one hop after each message that it sends (reserved, first token, end), and every `report_s`. It does
  not report after each step, because little changes between messages. Costs are fitted from one report per worker and
  `report_s`, instead of one every 8 steps.
- The prefix map has whole blocks of arrivals, as of the last report. In production it is one beat later.
- KV is never fetched from a decode worker. There are no deadlines, priorities or tenants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.bench.traces import Arrival
from baton.core import HandoffId, Load, Role, Sampling, SequenceSpec, WorkerInfo, WorkerRef
from baton.errors import DeadlineExceeded, NoWorker, Overloaded
from baton.ledger.prefix_index import PrefixIndex
from baton.planner.sim.block_pool import UNSHARED, BlockHashes
from baton.planner.sim.engine import Engine
from baton.planner.sim.event_loop import Kernel
from baton.planner.sim.network import Way
from baton.planner.sim.scenario import Scenario
from baton.planner.sim.stats import Tally
from baton.planner.sim.timing import Timing
from decode_workers.reservations import Reservations
from router.admission.admission import QueueLimits, ticket_for
from router.admission.promising import Promises, PromisingAdmission
from router.parsing.ranges import NO_PROMISE, Promise
from router.placement.policy import ALONE, POLICIES
from router.placement.promise import Flight, Seat
from router.placement.snapshot import WorkerView
from router.request.lifecycle import DEATH_LIMIT
from router.workers.placement import NO_REQUIREMENTS, Placement, Requirements
from router.workers.pool import PoolOptions, WorkerPool
from router.workers.stream import WorkerStream

FINGERPRINT = "simulated"
SAMPLING = Sampling()
_SHARED = SequenceSpec((), SAMPLING)  # spec of requests with shared prefixes
_LEFT_BY_WORKER = {"no_room", "preempted"}  # reasons after which nothing is left at the decode worker


class SimLink(WorkerStream):
    """A worker stream that is connected while its worker lives."""

    def __init__(self, info: WorkerInfo) -> None:  # without the constructor of WorkerStream, which connects
        self.view = WorkerView(info)
        self.state = "connected"
        self.retired = False


@dataclass(slots=True, eq=False)
class SimRequirements:
    """Requirements, and the request's block hashes in the directory."""

    requirements: Requirements
    hashes: Sequence[bytes]
    block_tokens: int

    @property
    def flight(self) -> Flight | None:
        return self.requirements.flight


class Directory(PrefixIndex):
    """Prefix index for one request at a time: `hashes` are those of its blocks of `block_tokens` tokens."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.hashes: Sequence[bytes] = ()
        self.block_tokens = 0
        self.most = 0  # tokens; one is left to compute
        self._block_size = block_size

    def leading(self, digests: Iterable[bytes]) -> list[tuple[int, int]]:
        """Return the matches of the current request, in blocks of workers."""
        each, size, most = self.block_tokens, self._block_size, self.most // self._block_size
        return [(bits, min(count * each // size, most)) for bits, count in super().leading(self.hashes)]


class SimPool(WorkerPool):
    """Worker pool that adds and drops workers as they start and die."""

    def __init__(self, scenario: Scenario, kernel: Kernel, directory: Directory) -> None:
        policy, itl_s = POLICIES[scenario.router.policy], scenario.router.slo_itl_s
        slo_itl_s = scenario.slo.itl_s if itl_s is None else itl_s
        local = scenario.router.local_prefill and scenario.router.policy == "predicted"
        alone, chunk = ALONE[scenario.router.policy], scenario.decode.max_batched_tokens
        options = PoolOptions(alone, chunk, local, scenario.mode == "colocated", slo_itl_s, scenario.decode.max_running)
        super().__init__(_no_workers, policy, "router", 10.0, kernel, prefixes=directory, options=options)
        self._there = dict.fromkeys(Role, 0)

    def add(self, link: SimLink) -> None:
        self._there[link.info.role] += 1
        self._add(link)
        self.on_change()

    def drop(self, link: SimLink) -> None:
        self._there[link.info.role] -= 1
        link.state = "lost"
        del self._links[link.info.ref]
        self._fleet.drop(link.info.ref)
        self.on_change()

    def reported(self, link: SimLink, load: Load, *, teaches: bool) -> None:
        """Apply a report. `teaches`: costs are fitted from it."""
        if link.state != "connected":
            return
        link.view.load, link.view.full = load, False
        if teaches:
            self._fleet.touch(link.info.ref)
        else:
            self._fleet.mark(link.info.ref)
        self.on_change()

    def has_pair(self, requirements: Requirements = NO_REQUIREMENTS) -> bool:
        """Return whether both roles have workers, which are all compatible."""
        return not self._options.colocated and all(self._there.values())

    def can_serve(self, requirements: Requirements = NO_REQUIREMENTS) -> bool:
        return self._there[Role.DECODE] > 0


async def _no_workers() -> Sequence[WorkerInfo]:
    return ()


class SimRouter:
    """Admission in front of a pool."""

    def __init__(self, scenario: Scenario, kernel: Kernel) -> None:
        settings = scenario.router
        self.directory = Directory(scenario.decode.block_size)
        self.pool = SimPool(scenario, kernel, self.directory)
        chunk = scenario.prefill.max_batched_tokens
        self.promises = Promises(self._outlook, self._place, self.pool.seats_of, kernel, chunk)
        self.admission = PromisingAdmission(
            self.promises,
            Placement.release,
            self.pool.can_serve,
            kernel,
            QueueLimits(settings.max_requests, settings.max_tokens, settings.max_wait_s),
        )
        self.pool.on_change = self._changed
        self.queue_peak = 0

    def _place(
        self, tokens: int, requirements: SimRequirements, avoid: Collection[WorkerRef], itl_s: float
    ) -> Placement | None:
        self._find(tokens, requirements)
        return self.pool.place(tokens, requirements.requirements, avoid, itl_s)

    def _outlook(self, tokens: int, requirements: SimRequirements) -> tuple[list[Seat], list[Seat]]:
        self._find(tokens, requirements)
        return self.pool.outlook(tokens, requirements.requirements)

    def _find(self, tokens: int, requirements: SimRequirements) -> None:
        self.directory.hashes, self.directory.block_tokens = requirements.hashes, requirements.block_tokens
        self.directory.most = tokens - 1

    def _changed(self) -> None:
        if waiting := self.admission.queued:
            self.queue_peak = max(self.queue_peak, waiting)
            self.admission.changed()


class _Side(Protocol):
    """A worker. Its methods are messages for `deliver`, except for `lost_peer` and `commit`, which are calls."""

    attempts: dict[Attempt, None]
    dead: bool
    engine: Engine
    name: str
    ref: WorkerRef

    def release(self, attempt: Attempt) -> None: ...


class PrefillSide(_Side, Protocol):
    """A prefill worker as attempts use it."""

    link: SimLink

    def prefill(self, attempt: Attempt) -> None: ...
    def repush(self, held: Attempt, attempt: Attempt) -> None: ...
    def lost_peer(self, attempt: Attempt) -> None: ...


class DecodeSide(_Side, Protocol):
    """A decode worker as attempts and prefill workers use it."""

    table: Reservations
    way_in: Way

    def reserve(self, attempt: Attempt) -> None: ...
    def compute(self, attempt: Attempt) -> None: ...
    def fence(self, attempt: Attempt) -> None: ...
    def progress(self, attempt: Attempt) -> int: ...
    def commit(self, attempt: Attempt, sender: PrefillSide) -> None: ...


Pair = tuple[PrefillSide | None, DecodeSide]  # without a prefill worker, the decode worker computes the prompt


class Simulation(Protocol):
    """The cluster as requests and workers use it. `hosts`, `slow` and `ways` are by worker name."""

    scenario: Scenario
    kernel: Kernel
    tally: Tally
    hashes: BlockHashes
    router: SimRouter
    hosts: dict[str, list[Timing]]
    slow: dict[str, float]
    ways: dict[str, tuple[Way, Way]]

    def ended(self, request: Request, outcome: str) -> None: ...
    def link_rate(self, name: str) -> float: ...
    def workers_of(self, placement: Placement) -> Pair: ...


class Attempt:
    """One attempt: `known` tokens to compute, `tokens` to generate, and `before` answer tokens that the client has."""

    __slots__ = (
        "_kernel", "_placement", "before", "cached", "committed", "computed", "decode", "decoding", "died", "failed",
        "fencing", "first_at", "handoff", "kept", "known", "over", "prefill", "repushes", "request", "sent", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, placement: Placement, workers: Pair, known: int, before: int) -> None:
        self.request, self._placement, self._kernel = request, placement, request.kernel
        prefill, decode = workers
        self.prefill, self.decode = prefill, decode
        self.handoff = HandoffId(request.name, request.attempts)
        self.known, self.before, self.tokens = known, before, request.tokens - before
        self.cached = 0  # cached tokens at the decode worker
        self.first_at = 0.0  # time of the first token at its worker
        self.over = self.kept = self.failed = self.died = False
        self.sent = self.repushes = self.computed = self.decoding = self.committed = self.fencing = False
        decode.attempts[self] = None
        if prefill is not None:
            prefill.attempts[self] = None
        self._send(decode, decode.reserve, self)
        if prefill is None:  # now, because a prompt sent after the answer waits one more step
            self._send(decode, decode.compute, self)

    @property
    def held(self) -> bool:
        """Whether the prefill worker has the KV that the next attempt needs."""
        prefill, over = self.prefill, self.decoding or self.fencing  # fencing: the prefill worker is gone
        return self.sent and not over and prefill is not None and self in prefill.attempts

    # messages from workers

    def reserved(self, cached: int) -> None:
        if self.over:
            return
        self._placement.reserved()
        self.cached, self.sent = cached, True
        self.request.accepted = True
        prefill, held = self.prefill, self.request.held
        self.request.held = None
        if prefill is None:
            return  # `compute` was sent with `reserve`
        if held is not None:
            self.repushes = True
            self._send(prefill, prefill.repush, held, self)
        else:
            self._send(prefill, prefill.prefill, self)

    def no_room(self) -> None:
        self._placement.decode.view.full = True
        self.end("no_room")

    def first(self) -> None:
        if self.over:
            return
        self.computed = True
        self.request.deliver(self.before + 1, first=True)
        if self.prefill is None:
            self._placement.prefill_done()
        else:
            self._placement.computed()

    def adopted(self) -> None:
        """Handle the adoption: the decode worker needs no other worker from now on."""
        self.committed, self.fencing = True, False
        if not self.over:
            self.decoding = True
            self._placement.prefill_done()

    def finished(self) -> None:
        if not self.over:
            self.request.deliver(self.request.tokens)
            self.end("")

    def preempted(self, delivered: int) -> None:
        if not self.over:
            self.request.deliver(delivered)
            self.end("preempted")

    def kv_dropped(self) -> None:
        self.end("kv_dropped")

    def fenced(self) -> None:
        """Handle the fence: the handoff will never be committed."""
        self.failed = True
        self.end("prefill_lost")

    def lost(self, role: Role) -> None:
        if self.over:
            return
        decodes = self.decoding or self.prefill is None
        prefills = self.sent and not (self.computed or self.repushes)
        self.died = self.died or (decodes if role is Role.DECODE else prefills)
        if role is Role.DECODE:
            self.failed = True
            if self.prefill is not None:
                self.prefill.lost_peer(self)
            self.end("decode_lost")
        elif not self.sent:
            self.failed = True
            self.end("prefill_lost")
        elif not (self.committed or self.fencing):
            self.fencing = True
            self._send(self.decode, self.decode.fence, self)

    def end(self, reason: str) -> None:
        """End the attempt once. An empty reason means all tokens; others give the cause of another attempt."""
        if not self.over:
            self.over = True
            self._kernel.at(self._kernel.now, self.request.over, self, reason)

    def leave(self, reason: str) -> None:
        """Release the attempt at both workers, except for kept KV and at workers that ended it themselves."""
        prefill, decode = self.prefill, self.decode
        del decode.attempts[self]
        if reason not in _LEFT_BY_WORKER and not (self.decoding and not reason):
            self._send(decode, decode.release, self)
        if prefill is not None:
            del prefill.attempts[self]
            if reason and not (self.decoding or self.kept):
                self._send(prefill, prefill.release, self)
        self._placement.release()

    def _send(self, worker: PrefillSide | DecodeSide, act: Callable[..., None], *facts: Attempt) -> None:
        self._kernel.after(self.request.overheads.hop_s, deliver, worker, act, *facts)


def deliver(worker: PrefillSide | DecodeSide, act: Callable[..., None], *facts: Attempt) -> None:
    """Have a worker handle a message between two steps. A dead worker does not receive it."""
    if not worker.dead:
        worker.engine.submit(act, *facts)


class Request:
    """One request. `deliver` records the client's progress; `gaps` are its own gaps, if they are kept."""

    __slots__ = (
        "_arrival", "_cluster", "_deaths", "_directory_hashes", "_failures", "_first_at", "_last_at", "_since",
        "accepted", "arrived_at", "attempts", "content", "delivered", "flight", "gaps", "held", "kernel", "name",
        "number", "overheads", "tokens",
    )  # fmt: skip

    def __init__(self, cluster: Simulation, arrival: Arrival, number: int) -> None:
        self._cluster, self._arrival = cluster, arrival
        self.kernel, self.overheads = cluster.kernel, cluster.scenario.overheads
        self.number, self.name = number, str(number)
        self.tokens = max(1, arrival.max_tokens)
        self.content, self._directory_hashes = cluster.hashes.of(arrival) if arrival.blocks else (UNSHARED, [])
        self.attempts = self.delivered = self._failures = self._deaths = 0
        self.arrived_at = arrival.at_s
        slo, settings = cluster.scenario.slo, cluster.scenario.router
        promise = Promise(slo.ttft_s, slo.itl_s) if arrival.at_s >= settings.promises_from_s else NO_PROMISE
        self.flight: Flight | None = None
        if settings.promises_from_s < math.inf:
            self.flight = Flight(arrival.prompt_tokens, self.tokens, arrival.at_s, promise)
        self._since: float | None = None  # start of the current search for a pair
        self.accepted = False
        self.held: Attempt | None = None  # attempt with KV kept at its prefill worker
        self.gaps: list[tuple[float, int]] = []
        self._first_at = self._last_at = 0.0

    def deliver(self, tokens: int, *, first: bool = False) -> None:
        """Record that the client has `tokens` tokens. `first`: first one of an attempt; its gap is separate."""
        now = self.kernel.now
        if tokens <= self.delivered:
            return
        if not self.delivered:
            self._first_at = now
        elif first:
            self._cluster.tally.itl.add(now - self._last_at)
            self.gaps.append((now - self._last_at, 1))
        self.delivered, self._last_at = tokens, now
        if self.flight is not None:
            self.flight.seen(tokens, now)

    def over(self, attempt: Attempt, reason: str) -> None:
        if attempt.sent:
            self._since = None
        attempt.kept = attempt.failed and attempt.held
        attempt.leave(reason)
        if not reason:
            self._end("completed")
            return
        self._failures += attempt.failed
        self._deaths += attempt.died
        if attempt.kept:
            self.held = attempt
        if self._deaths >= DEATH_LIMIT or (attempt.failed and self._failures >= self._cluster.scenario.router.attempts):
            self._end("failed")
            return
        self._cluster.tally.recoveries[reason] += 1
        if self.delivered < self.tokens:
            self.find_placement()
        else:
            self._end("completed")

    def find_placement(self) -> None:
        """Look for a pair of workers. Usually one is free immediately, so no task is needed."""
        if self._since is None:
            self._since = self.kernel.now
        held = self.held
        known = held.known if held is not None else self._arrival.prompt_tokens + self.delivered
        link = held.prefill.link if held is not None and held.prefill is not None else None
        hashes = self._directory_hashes
        wanted = Requirements(link, _SHARED if hashes else None, flight=self.flight)
        requirements = SimRequirements(wanted, hashes, self._arrival.block_tokens)
        placement = self._cluster.router.admission.admit_now(known, requirements, returning=self.attempts > 0)
        if placement is None:
            self.kernel.spawn(self._wait(known, requirements, self._since))
        else:
            self._attempt(placement)

    async def _wait(self, known: int, requirements: SimRequirements, since: float) -> None:
        ticket, returning = ticket_for(self.number, 0), self.attempts > 0
        admit = self._cluster.router.admission.admit
        accepted = self.accepted
        try:
            placement = await admit(ticket, known, requirements, returning=returning, accepted=accepted, since=since)
        except Overloaded:
            waited = self.attempts or self.kernel.now > self.arrived_at + self.overheads.admit_s
            self._end("expired" if waited else "refused")
        except (NoWorker, DeadlineExceeded):
            self._end("expired")
        else:
            self._attempt(placement)

    def _end(self, outcome: str) -> None:
        self._release_held()
        if self.flight is not None:
            complete = outcome == "completed"
            self._cluster.router.promises.settle(self.flight, complete=complete, failed=not complete)
        self._cluster.ended(self, outcome)

    def _attempt(self, placement: Placement) -> None:
        if not self.attempts:
            self._cluster.tally.queue.add(self.kernel.now - self.arrived_at)
        workers = self._cluster.workers_of(placement)
        prefill = workers[0]
        if self.held is not None and self.held.prefill is not prefill:
            self._release_held()
        self.attempts += 1
        held = self.held
        before = self.delivered if held is None else held.before
        known = self._arrival.prompt_tokens + before if held is None else held.known
        if prefill is None:
            self._cluster.tally.local_prefills += 1
        attempt = Attempt(self, placement, workers, known, before)
        if self.flight is not None:
            self.flight.count = lambda: max(workers[1].progress(attempt), self.delivered)

    def _release_held(self) -> None:
        held, self.held = self.held, None
        if held is not None and held.prefill is not None:
            deliver(held.prefill, held.prefill.release, held)

    def latencies(self) -> tuple[float, float]:
        return self._first_at - self.arrived_at, self._last_at - self.arrived_at
