"""Base of both simulated worker roles: an engine, network ways for KV, and messages sent between steps."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from baton.core import Channel, Incarnation, KVLayout, Load, Role, WorkerInfo, WorkerRef
from baton.ledger.prefix_index import Change, Holder
from baton.planner.sim.block_pool import directory_hashes
from baton.planner.sim.engine import Engine, Row
from baton.planner.sim.network import Way
from baton.planner.sim.request import FINGERPRINT, SimLink
from baton.planner.sim.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core import HandoffId
    from baton.planner.sim.event_loop import Kernel
    from baton.planner.sim.request import Attempt
    from baton.planner.sim.router import SimRouter
    from baton.planner.sim.scenario import Pool, Scenario
    from baton.planner.sim.stats import Tally
    from baton.planner.sim.timing import Host

Message = tuple[Callable[..., None], tuple[Any, ...]]


class Simulation(Protocol):
    """The cluster as workers use it. `hosts`, `slow` and `ways` are by worker name."""

    scenario: Scenario
    kernel: Kernel
    tally: Tally
    router: SimRouter
    hosts: dict[str, Host]
    slow: dict[str, float]
    ways: dict[str, tuple[Way, Way]]

    def link_rate(self, name: str) -> float: ...


class Worker(ABC):
    """One incarnation of a worker. `attempts`: the router's attempts on it."""

    role: Role

    def __init__(self, cluster: Simulation, name: str, starts: int, pool: Pool) -> None:
        scenario, kernel = cluster.scenario, cluster.kernel
        self.cluster, self.kernel, self.name, self.starts = cluster, kernel, name, starts
        self.overheads, self.network = scenario.overheads, scenario.network
        self.tally = cluster.tally.prefill if self.role is Role.PREFILL else cluster.tally.decode
        self.ref = WorkerRef(name, Incarnation(1, starts), f"{name}:1")
        layout = layout_of(scenario)
        self.link = SimLink(WorkerInfo(self.ref, self.role, FINGERPRINT, "model", 2**31, pool.kv_blocks, layout))
        rng = Random(f"{scenario.seed} {name} {starts}")
        recompute = self.role is Role.PREFILL
        timing = Timing(pool, rng, cluster.hosts.get(name))
        timing.factor = cluster.slow.get(name, 1.0)
        self.engine = Engine(kernel, pool, self.tally, self, timing, recompute=recompute)
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
        self._paces = self.engine.paces.copy()
        cluster.router.directory.apply(Change(self._holder, 1, reset=True))
        self.engine.pool.on_hashes = self._record_hashes
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Create the state of the role."""

    # methods of baton.planner.sim.engine.Listener

    def chunk(self, row: Row, count: int, seconds: float) -> None:
        """See `Listener`."""
        return  # only a prefill worker pushes KV

    @abstractmethod
    def first(self, row: Row) -> None:
        """See `Listener`."""

    @abstractmethod
    def finished(self, row: Row) -> None:
        """See `Listener`."""

    @abstractmethod
    def preempted(self, row: Row) -> None:
        """See `Listener`."""

    def jobs_done(self) -> None:
        """Send queued messages and a report."""
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
        """Send a report and the queued messages."""
        self.kernel.after(self.overheads.hop_s, self._deliver, self._load(), teaches, self._news(), self._messages)
        self._messages = []

    def send(self, act: Callable[..., None], *facts: Any) -> None:
        """Queue a message between steps; the router runs `act` on receipt."""
        self._messages.append((act, facts))

    def stream(self, act: Callable[..., None], *facts: Any) -> None:
        """Queue tokens between steps; `act` runs when the client has received them."""
        self._tokens.append((act, facts))

    def row(self, handoff: HandoffId, attempt: Attempt, known: int, tokens: int, *, hold: bool = False) -> Row:
        """Return a new sequence for an attempt."""
        chain = attempt.request.content.chain if self._prefix_cache else None
        return Row(handoff, 0, known, known, chain=chain, base=known, tokens=tokens, owner=attempt, hold=hold)

    def die(self) -> None:
        """End the process and lose its state."""
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
            "claims": view.dispatched + view.queued_tokens + view.pending_blocks,
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
        engine, scheduler, paces = self.engine, self.engine.scheduler, self._paces
        return Load(
            step=engine.steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            queued_tokens=engine.queued_tokens,
            blocks=engine.pool.counts(),
            channels=self._channels,
            prefill_pace=paces.prefill,
            decode_pace=paces.decode,
            joint_pace=paces.joint,
            beside_pace=paces.beside,
        )

    def _teaches(self) -> bool:
        """Return whether the next report is used to fit costs."""
        due = self.kernel.now - self._learned_at >= self._report_s
        if due:
            self._learned_at, self._paces = self.kernel.now, self.engine.paces.copy()
        return due

    @property
    def _holder(self) -> Holder:
        return Holder(self.name, self.ref.incarnation)

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
