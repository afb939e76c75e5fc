"""Simulated workers: a base with an engine, network ways for KV and messages sent between steps, and both roles.

`PrefillWorker` computes prompts and first tokens, and pushes their KV during the computation. `DecodeWorker` uses the
production reservation table; it also computes prompts when requested, which is always in colocated mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from baton.core import Channel, HandoffId, Incarnation, KVLayout, Load, Role, SequenceSpec, Token, WorkerInfo, WorkerRef
from baton.engine.block_pool import Reservation
from baton.engine.prefix_cache import BlockHashChain
from baton.errors import HandoffError
from baton.event_journal import History
from baton.ledger.prefix_index import Change, Holder
from baton.planner.sim.block_pool import directory_hashes
from baton.planner.sim.engine import Engine, Listener, Row
from baton.planner.sim.network import Flow, Way
from baton.planner.sim.request import FINGERPRINT, SAMPLING, Attempt, PrefillSide, SimLink, Simulation, deliver
from baton.planner.sim.scenario import Pool, Scenario
from baton.planner.sim.timing import Timing
from decode_workers.reservations import Reservations, State
from kvtransfer.handoff import CommitState, Offer

Message = tuple[Callable[..., None], tuple[Any, ...]]


class Worker(Listener):
    """One incarnation of a worker. `attempts` are the router's attempts on it."""

    role: Role

    def __init__(self, cluster: Simulation, name: str, starts: int, pool: Pool) -> None:
        scenario, kernel = cluster.scenario, cluster.kernel
        self.cluster, self.kernel, self.name, self.starts = cluster, kernel, name, starts
        self.overheads, self.network = scenario.overheads, scenario.network
        self.tally = cluster.tally.prefill if self.role is Role.PREFILL else cluster.tally.decode
        self.ref = WorkerRef(name, Incarnation(1, starts), f"{name}:1")
        blocks, layout = pool.kv_blocks, layout_of(scenario)
        self.link = SimLink(WorkerInfo(self.ref, self.role, FINGERPRINT, "model", 2**31, blocks, layout))
        timing = Timing(pool, Random(f"{scenario.seed} {name} {starts}"), cluster.hosts.get(name))
        timing.factor = cluster.slow.get(name, 1.0)
        self.engine = Engine(kernel, pool, self.tally, self, timing, recompute=self.role is Role.PREFILL)
        self.attempts: dict[Attempt, None] = {}
        self.dead = False
        rate = cluster.link_rate(name)
        self.way_out, self.way_in = cluster.ways.setdefault(name, (Way(rate), Way(rate)))
        self._prefix_cache = pool.prefix_cache
        self._channels = (Channel("", "simulated", self.network.bytes_per_s),)
        self._messages: list[Message] = []
        self._tokens: list[Message] = []
        self._hashes: dict[bytes, bool] = {}  # block hashes since the last report: whether they are cached
        self._changes = 1
        self._learned_at, self._report_s = -math.inf, scenario.router.report_s
        self._paces = copy(self.engine.paces)
        self._holder = Holder(name, self.ref.incarnation)
        cluster.router.directory.apply(Change(self._holder, 1, reset=True))
        self.engine.pool.on_hashes = self._record_hashes

    def jobs_done(self) -> None:
        if not (self._messages or self._tokens):
            return
        for act, facts in self._tokens:
            self.kernel.after(self.overheads.tell_s, act, *facts)
        self._tokens.clear()
        self._report(teaches=self._teaches())

    def beat(self) -> None:
        """Send a report if the last one for the cost fit is old."""
        if not self.dead and self._teaches():
            self._report(teaches=True)

    def _report(self, *, teaches: bool) -> None:
        self.kernel.after(self.overheads.hop_s, self._deliver, self._load(), teaches, self._news(), self._messages)
        self._messages = []

    def send(self, act: Callable[..., None], *facts: Any) -> None:
        """Queue a message between steps; the router runs `act` on receipt."""
        self._messages.append((act, facts))

    def stream(self, act: Callable[..., None], *facts: Any) -> None:
        """Queue tokens between steps; `act` runs when the client has received them."""
        self._tokens.append((act, facts))

    def row(self, attempt: Attempt, known: int, tokens: int, *, hold: bool = False) -> Row:
        chain = cast("BlockHashChain", attempt.request.content) if self._prefix_cache else None
        return Row(attempt.handoff, 0, known, known, chain=chain, base=known, tokens=tokens, owner=attempt, hold=hold)

    def die(self) -> None:
        self.dead = True
        self.engine.die()
        self.tally.record_peak(self.engine.pool)

    def idle_problems(self) -> list[str]:
        """Return leftovers that an idle worker must not have."""
        pool, scheduler, view = self.engine.pool, self.engine.scheduler, self.link.view
        counts = pool.counts().check()
        found = {
            "blocks in use": counts.owned + counts.reserved,
            "sequences": len(scheduler.running) + len(scheduler.waiting),
            "attempts": len(self.attempts),
            "placements": view.dispatched + view.queued_tokens + view.pending_blocks,
        }
        return [f"{self.ref} has {count} {what}" for what, count in found.items() if count]

    def _deliver(self, load: Load, teaches: bool, news: Change | None, messages: list[Message]) -> None:
        for act, facts in messages:
            act(*facts)
        if news is not None:
            self.cluster.router.directory.apply(news)
        self.cluster.router.pool.reported(self.link, load, teaches=teaches)

    def _load(self) -> Load:
        """Return the load. Its paces are from the last report that taught the cost fit."""
        engine, scheduler = self.engine, self.engine.scheduler
        load = Load(
            step=engine.rows.steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            queued_tokens=engine.queued_tokens,
            blocks=engine.pool.counts(),
            channels=self._channels,
        )
        return self._paces.into(load)

    def _teaches(self) -> bool:
        due = self.kernel.now - self._learned_at >= self._report_s
        if due:
            self._learned_at, self._paces = self.kernel.now, copy(self.engine.paces)
        return due

    def _record_hashes(self, added: Sequence[int], removed: Sequence[int]) -> None:
        self._hashes.update(dict.fromkeys(directory_hashes(added), True))
        self._hashes.update(dict.fromkeys(directory_hashes(removed), False))

    def _news(self) -> Change | None:
        if not self._hashes:
            return None
        hashes, self._hashes = self._hashes, {}
        self._changes += 1
        added = [one for one, cached in hashes.items() if cached]
        removed = [one for one, cached in hashes.items() if not cached]
        return Change(self._holder, self._changes, False, added, removed)


def layout_of(scenario: Scenario) -> KVLayout:
    """Return a KV layout with about the network's bytes per token, because policies weigh the bytes to transfer."""
    network, size = scenario.network, scenario.decode.block_size
    elements = max(1, round(network.token_bytes / network.layers / 4))
    return KVLayout(network.layers, 1, elements, size, "bfloat16")


@dataclass(slots=True, eq=False)
class Push:
    """The KV push of one handoff. `waits`: it has no receiver until a retransfer or a release."""

    row: Row
    skip: int  # tokens that need no transfer
    flow: Flow | None = None
    ready: float = 0.0  # tokens with KV queued in the flow
    computed: bool = False
    computed_at: float = 0.0
    waits: bool = False


class PrefillWorker(Worker):
    """See `prefill_workers.worker`. `pushes` are by their current or last attempt."""

    role = Role.PREFILL

    def __init__(self, cluster: Simulation, name: str, starts: int, pool: Pool) -> None:
        super().__init__(cluster, name, starts, pool)
        self.pushes: dict[Attempt, Push] = {}

    def lost_peer(self, attempt: Attempt) -> None:
        """Keep the KV of an attempt after the death of its decode worker."""
        if (push := self.pushes.get(attempt)) is not None:
            push.waits = True
            if push.flow is not None:
                push.flow.cancel()

    def prefill(self, attempt: Attempt) -> None:
        if attempt.over and not attempt.kept:
            return
        row = self.row(attempt, attempt.known, 1, hold=True)
        push = self.pushes[attempt] = Push(row, attempt.cached)
        self._begin(attempt, push)
        self.engine.add(row)

    def repush(self, held: Attempt, attempt: Attempt) -> None:
        push = self.pushes.pop(held, None)
        if push is None:
            self.send(attempt.kv_dropped)
            return
        self.pushes[attempt] = push
        push.row.owner, push.row.key, push.skip = attempt, attempt.handoff, attempt.cached
        push.waits, push.ready = False, 0.0
        self._begin(attempt, push)
        if push.computed:
            attempt.first_at, push.computed_at = held.first_at, self.kernel.now
            self.stream(attempt.first)
            self._finish(attempt, push)

    def _begin(self, attempt: Attempt, push: Push) -> None:
        decode = attempt.decode
        try:
            if decode.dead:
                raise HandoffError(f"{decode.ref} is gone")
            decode.table.offer(attempt.handoff, self.ref, Offer(FINGERPRINT, attempt.known, push.skip))
        except HandoffError:
            push.waits = True  # dead or fenced; the router decides what follows
            return
        if self.network.token_bytes:
            push.flow = Flow(self.kernel, self.way_out, decode.way_in, lambda: self._moved(attempt, push))

    def release(self, attempt: Attempt) -> None:
        push = self.pushes.pop(attempt, None)
        if push is not None:
            if push.flow is not None:
                push.flow.cancel()
            self.engine.release(push.row)

    def chunk(self, row: Row, count: int, seconds: float) -> None:
        """Queue the KV of earlier chunks, and all layers but the last of this chunk, spread over the step."""
        push = self.pushes[row.owner]
        if push.flow is None or (row.known - push.skip) * self.network.token_bytes <= self.network.coalesce_below:
            return
        layers = self.network.layers
        self._ready(push, row.computed)
        self.kernel.after(seconds / layers, self._ready, push, row.computed + count * (1 - 1 / layers))

    def _ready(self, push: Push, tokens: float) -> None:
        more = tokens - max(push.ready, push.skip)
        if more > 0 and push.flow is not None:
            push.ready = tokens
            push.flow.add(more * self.network.token_bytes)

    def first(self, row: Row) -> None:
        attempt: Attempt = row.owner
        push = self.pushes[attempt]
        push.computed = True
        push.computed_at = attempt.first_at = self.kernel.now
        self.stream(attempt.first)
        if attempt.tokens == 1:
            self.stream(attempt.finished)
            self.engine.submit(self.release, attempt)
        else:
            self._finish(attempt, push)

    def _finish(self, attempt: Attempt, push: Push) -> None:
        if push.waits:
            return
        if push.flow is None:
            self._moved(attempt, push)
        else:
            self._ready(push, attempt.known)
            push.flow.close()

    def _moved(self, attempt: Attempt, push: Push) -> None:
        delay_s = self.network.latency_s + self.overheads.commit_s
        self.cluster.tally.transfer.add(self.kernel.now - push.computed_at + delay_s)
        if push.flow is not None:
            self.cluster.tally.moved_bytes += push.flow.moved
        self.kernel.after(delay_s, attempt.decode.commit, attempt, self)

    def jobs_done(self) -> None:
        """Drop KV without receiver if prompts find no block and nothing else will free any, as in production."""
        while self.engine.starved and (spare := self._spare()) is not None:
            self.engine.submit(self.release, spare)
        super().jobs_done()

    def _spare(self) -> Attempt | None:
        computed = [(attempt, push.waits) for attempt, push in self.pushes.items() if push.computed]
        return computed[0][0] if computed and all(waits for _, waits in computed) else None

    def finished(self, row: Row) -> None:
        raise AssertionError(row)

    preempted = finished

    def die(self) -> None:
        super().die()
        for push in self.pushes.values():
            if push.flow is not None:
                push.flow.cancel()


_FIRST = (Token(0, 0, ""),)


class _SilentHistory(History):
    """A history that drops events, because simulated time is not logged."""

    def step(self, event: str, handoff: HandoffId, **facts: object) -> None:
        pass


class DecodeWorker(Worker):
    """See `decode_workers.worker`."""

    role = Role.DECODE

    def __init__(self, cluster: Simulation, name: str, starts: int, pool: Pool) -> None:
        super().__init__(cluster, name, starts, pool)
        self.table = Reservations(FINGERPRINT, self._committed, lambda job: None, _SilentHistory())
        self.rows: dict[Attempt, Row] = {}
        self.committing: Attempt | None = None

    def commit(self, attempt: Attempt, sender: PrefillSide) -> None:
        if self.dead or sender.dead:
            return
        spec = SequenceSpec(cast("tuple[int, ...]", range(attempt.known)), SAMPLING, (0,))
        self.committing = attempt
        try:
            self.table.commit(attempt.handoff, sender.ref, CommitState(spec, _FIRST, 0.0, 0.0, 0, "simulated"))
        except HandoffError:
            return  # fenced; the router handles that
        self.kernel.after(self.overheads.hop_s, deliver, sender, sender.release, attempt)

    def reserve(self, attempt: Attempt) -> None:
        if attempt.over:
            return
        full, spare = (attempt.known - 1) // self.engine.block_size, self.engine.scheduler.watermark
        hashes = attempt.request.content.hashes[:full] if self._prefix_cache else ()
        digests, layout = cast("Iterable[bytes]", hashes), self.link.info.layout
        reservation = Reservation.of(self.engine.pool, layout, attempt.known + 1, digests, spare)
        if reservation is None:
            self.send(attempt.no_room)
            return
        self.table.open(attempt.handoff, reservation, attempt.known, None)
        self.send(attempt.reserved, reservation.cached_tokens)

    def compute(self, attempt: Attempt) -> None:
        reservation = self.table.take(attempt.handoff)
        if reservation is None:
            return
        reservation.release()
        row = self.rows[attempt] = self.row(attempt, attempt.known, attempt.tokens)
        self.engine.add(row)

    def _committed(self, handoff: HandoffId, commit: CommitState) -> None:
        assert self.committing is not None
        assert self.committing.handoff is handoff
        self.engine.submit(self._adopt, self.committing)

    def _adopt(self, attempt: Attempt) -> None:
        reservation = self.table.take(attempt.handoff)
        if reservation is None:
            return  # released between the commit and now
        row = self.row(attempt, attempt.known + 1, attempt.tokens - 1)
        row.computed = row.prefill_end = attempt.known
        row.allocation = reservation.activate()
        row.last_at = attempt.first_at
        self.rows[attempt] = row
        self.engine.adopt(row, reservation.cached_tokens)
        self.send(attempt.adopted)

    def fence(self, attempt: Attempt) -> None:
        if attempt in self.rows or self.table.fence(attempt.handoff) is State.COMMITTED:
            return  # the router receives the commit
        self.release(attempt)
        self.send(attempt.fenced)

    def release(self, attempt: Attempt) -> None:
        reservation = self.table.take(attempt.handoff)
        if reservation is not None:
            reservation.release()
        if (row := self.rows.pop(attempt, None)) is not None:
            self.engine.release(row)

    def first(self, row: Row) -> None:
        attempt: Attempt = row.owner
        attempt.decoding = True
        self.stream(attempt.first)
        if attempt.tokens == 1:
            self.finished(row)

    def finished(self, row: Row) -> None:
        attempt: Attempt = row.owner
        self._keep_gaps(attempt, row)
        del self.rows[attempt]
        self.stream(attempt.finished)

    def preempted(self, row: Row) -> None:
        attempt: Attempt = row.owner
        self._keep_gaps(attempt, row)
        del self.rows[attempt]
        self.send(attempt.preempted, self._delivered(attempt, row))

    def _keep_gaps(self, attempt: Attempt, row: Row) -> None:
        """Keep the gaps of a sequence that leaves for any reason. Without a token it has none, and has not `joined`."""
        gaps = self.engine.gaps
        if gaps is None or not self.engine.generated(row):
            return
        gaps.forget(min((one.joined for one in self.rows.values()), default=self.engine.rows.steps))
        attempt.request.gaps += gaps.of(row.joined, self.engine.rows.steps) + [(wait_s, 1) for wait_s in row.waits]

    def progress(self, attempt: Attempt) -> int:
        """Return the answer tokens of this attempt and those before it, or 0 while it does not decode."""
        row = self.rows.get(attempt)
        return self._delivered(attempt, row) if row is not None else 0

    def _delivered(self, attempt: Attempt, row: Row) -> int:
        return attempt.before + row.base - attempt.known + self.engine.generated(row)

    def die(self) -> None:
        super().die()
        for attempt, row in self.rows.items():
            attempt.request.deliver(self._delivered(attempt, row))
            self._keep_gaps(attempt, row)

    def idle_problems(self) -> list[str]:
        left = {"reservations": len(self.table), "rows": len(self.rows)}
        return super().idle_problems() + [f"{self.ref} has {count} {what}" for what, count in left.items() if count]
