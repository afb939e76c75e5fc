"""Simulated router: production's admission, policies, placements, cost fit and prefix map, without streams.

Its requests are in `request`. Simplifications:
- There is one router. Its processor time is `Overheads` alone.
- A worker reports one hop after each message that it sends (reserved, first token, end), and every `report_s`. It does
  not report after each step, because little changes between messages. Costs are fitted from one report per worker and
  `report_s`, instead of one every 8 steps.
- The prefix map has whole blocks of arrivals, as of the last report. In production it is one beat later.
- KV is never fetched from a decode worker. There are no deadlines, priorities or tenants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.core import Role, WorkerInfo
from baton.ledger.prefix_index import PrefixIndex
from router.admission.admission import Admission, QueueLimits
from router.placement.policy import ALONE, POLICIES
from router.workers.placement import NO_REQUIREMENTS, Placement, Requirements
from router.workers.pool import PoolOptions, WorkerPool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.core import Load
    from baton.planner.sim.event_loop import Kernel
    from baton.planner.sim.request import SimLink, SimRequirements
    from baton.planner.sim.scenario import Scenario


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
        options = PoolOptions(alone, chunk, local, scenario.mode == "colocated", slo_itl_s)
        super().__init__(_no_workers, policy, "router", 10.0, kernel, prefixes=directory, options=options)
        self._there = dict.fromkeys(Role, 0)

    def add(self, link: SimLink) -> None:
        """Add a worker."""
        self._there[link.info.role] += 1
        self._add(link)
        self.on_change()

    def drop(self, link: SimLink) -> None:
        """Drop a dead worker."""
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

    def serves(self, requirements: Requirements = NO_REQUIREMENTS) -> bool:
        return self._there[Role.DECODE] > 0


class SimRouter:
    """Admission in front of a pool."""

    def __init__(self, scenario: Scenario, kernel: Kernel) -> None:
        settings = scenario.router
        self.directory = Directory(scenario.decode.block_size)
        self.pool = SimPool(scenario, kernel, self.directory)
        self.admission: Admission[Placement] = Admission(
            self._place,
            Placement.release,
            self.pool.can_serve,
            kernel,
            QueueLimits(settings.max_requests, settings.max_tokens, settings.max_wait_s),
        )
        self.pool.on_change = self._changed
        self.queue_peak = 0

    def _place(self, tokens: int, requirements: SimRequirements) -> Placement | None:
        self.directory.hashes, self.directory.block_tokens = requirements.hashes, requirements.block_tokens
        self.directory.most = tokens - 1
        return self.pool.place(tokens, requirements.requirements)

    def _changed(self) -> None:
        waiting = self.admission.waiting
        if waiting:
            self.queue_peak = max(self.queue_peak, waiting)
            self.admission.changed()


async def _no_workers() -> Sequence[WorkerInfo]:
    return ()
