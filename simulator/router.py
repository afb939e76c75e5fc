"""The router of a simulation: production's admission, policies, claims, fitted costs and prefix map, without streams.

What is simplified:
- There is one router. What it costs in processor time is `Overheads` alone.
- A worker reports with each message that it sends (room granted, a first token, an end), a hop later, and every
  `report_s` in any case, as in production; but not after each step: between messages little changes but how far rows
  have grown into blocks that were left to them. Costs are fitted from a report of each worker every `report_s`, not
  from one every 8 steps.
- The prefix map knows whole blocks of arrivals, as of the worker's last report, which in production is a beat later.
- KV is never fetched from a decode worker to a prefill worker. There are no deadlines, priorities or tenants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.core import Role, Sampling, SequenceSpec, WorkerInfo
from baton.ledger.prefix_index import PrefixMap
from router.admission.admission import Admission, Bounds
from router.placement.policy import ALONE, POLICIES
from router.placement.snapshot import WorkerView
from router.workers.placement import NO_WISH, Claim, Wish
from router.workers.pool import WorkerPool
from router.workers.stream import WorkerLink

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.core import Load
    from simulator.kernel import Kernel
    from simulator.scenario import Scenario

_SHARED = SequenceSpec((), Sampling())  # of a request whose beginning others may have


class SimLink(WorkerLink):
    """A link that is up as long as its worker lives."""

    def __init__(self, info: WorkerInfo) -> None:  # not that of WorkerLink, which connects
        self.view = WorkerView(info)
        self.state = "connected"
        self.retired = False


class Directory(PrefixMap):
    """`asked`: the names of the request that is looked at, of blocks of `block_tokens`; workers have `block_size`."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.asked: Sequence[bytes] = ()
        self.block_tokens = 0
        self.most = 0  # tokens: one is left to compute
        self._block_size = block_size

    def leading(self, digests: Iterable[bytes]) -> list[tuple[int, int]]:
        """Of the request that is asked for, in blocks of workers."""
        each, size, most = self.block_tokens, self._block_size, self.most // self._block_size
        return [(bits, min(count * each // size, most)) for bits, count in super().leading(self.asked)]


class SimPool(WorkerPool):
    """Workers are added and dropped as they live and die. `asks(wish)` has the directory look for what is asked."""

    def __init__(self, scenario: Scenario, kernel: Kernel, directory: Directory) -> None:
        policy, itl_s = POLICIES[scenario.router.policy], scenario.router.slo_itl_s
        slo_itl_s = scenario.slo.itl_s if itl_s is None else itl_s
        super().__init__(_nobody, policy, "router", 10.0, kernel, prefixes=directory, slo_itl_s=slo_itl_s)
        self.alone, self.chunk = ALONE[scenario.router.policy], scenario.decode.max_batched_tokens
        self.colocated = scenario.mode == "colocated"
        self.local_prefill = scenario.router.local_prefill and scenario.router.policy == "predicted"
        self._there = dict.fromkeys(Role, 0)

    def add(self, link: SimLink) -> None:
        """It is there from now on."""
        self._there[link.info.role] += 1
        self._add(link)
        self.on_change()

    def drop(self, link: SimLink) -> None:
        """It is gone."""
        self._there[link.info.role] -= 1
        link.state = "lost"
        del self._links[link.info.ref]
        self._fleet.drop(link.info.ref)
        self.on_change()

    def reported(self, link: SimLink, load: Load, *, teaches: bool) -> None:
        """A report has come; `teaches`: one that costs are fitted from."""
        if link.state != "connected":
            return
        link.view.load, link.view.full = load, False
        if teaches:
            self._fleet.touch(link.info.ref)
        else:
            self._fleet.mark(link.info.ref)
        self.on_change()

    def has_pair(self, wish: Wish = NO_WISH) -> bool:
        """All workers fit each other, and none is looked at."""
        return not self.colocated and all(self._there.values())

    def serves(self, wish: Wish = NO_WISH) -> bool:
        return self._there[Role.DECODE] > 0


class SimRouter:
    """Admission before a pool."""

    def __init__(self, scenario: Scenario, kernel: Kernel) -> None:
        settings = scenario.router
        self.directory = Directory(scenario.decode.block_size)
        self.pool = SimPool(scenario, kernel, self.directory)
        self.admission: Admission[Claim] = Admission(
            self._claim,
            Claim.release,
            self.pool.serves,
            kernel,
            Bounds(settings.max_requests, settings.max_tokens, settings.max_wait_s),
        )
        self.pool.on_change = self._changed
        self.queue_peak = 0

    def wish(self, keep: SimLink | None, names: Sequence[bytes], block_tokens: int) -> AskedWish:
        """What a request has to do with the choice of its workers."""
        return AskedWish(Wish(keep, _SHARED if names else None), names, block_tokens)

    def _claim(self, tokens: int, asked: AskedWish) -> Claim | None:
        self.directory.asked, self.directory.block_tokens = asked.names, asked.block_tokens
        self.directory.most = tokens - 1
        return self.pool.claim(tokens, asked.wish)

    def _changed(self) -> None:
        waiting = self.admission.waiting
        if waiting:
            self.queue_peak = max(self.queue_peak, waiting)
            self.admission.changed()


class AskedWish:
    """A wish, and the names of the request's blocks in the directory."""

    __slots__ = ("block_tokens", "names", "wish")

    def __init__(self, wish: Wish, names: Sequence[bytes], block_tokens: int) -> None:
        self.wish, self.names, self.block_tokens = wish, names, block_tokens


async def _nobody() -> Sequence[WorkerInfo]:
    return ()
