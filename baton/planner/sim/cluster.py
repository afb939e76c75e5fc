"""One simulation: workers, router, requests and faults."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator

from baton.bench.traces import Arrival
from baton.core import Role
from baton.planner.sim.block_pool import BlockHashes
from baton.planner.sim.event_loop import Kernel
from baton.planner.sim.network import Way
from baton.planner.sim.request import Request, SimRouter
from baton.planner.sim.scenario import Death, Fault, Scenario, Slow, SlowLink
from baton.planner.sim.stats import Gaps, Report, Tally
from baton.planner.sim.timing import Timing
from baton.planner.sim.worker import DecodeWorker, PrefillWorker
from router.workers.placement import Placement

_COLLECT = 200_000  # new objects before a garbage collection
_QUIET = 1  # number of beats after the last request
SimWorker = PrefillWorker | DecodeWorker


class Cluster:
    """Simulated cluster. `ways` and `slow` are by worker name, across incarnations."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.kernel = Kernel()
        self.tally = Tally(scenario.slo)
        self.router = SimRouter(scenario, self.kernel)
        self.hashes = BlockHashes(scenario.decode.block_size)
        self.ways: dict[str, tuple[Way, Way]] = {}
        self.slow: dict[str, float] = {}
        self.hosts = hosts_of(scenario)
        self._slow_links: dict[str, float] = {}
        self._faults: list[Slow | SlowLink] = []  # active faults
        self._workers: dict[str, SimWorker] = {}
        pools = [pool for pool in (scenario.prefill, scenario.decode) if pool.workers]
        self._longest = min(pool.kv_blocks * pool.block_size for pool in pools)  # tokens that a worker can hold
        self._running, self._more_arrivals = 0, True
        self._beating, self._quiet = True, 0  # whether a beat is scheduled, and the number of idle beats
        self._first_at = self._last_at = 0.0
        for kind, pool in ((PrefillWorker, scenario.prefill), (DecodeWorker, scenario.decode)):
            for number in range(pool.workers):
                self._start(kind, f"{kind.role}-{number}", 1)
        for fault in scenario.faults:
            self.kernel.at(fault.at_s, self._apply_fault, fault)
        self.kernel.after(scenario.router.report_s, self._beat)

    def run(self, arrivals: Iterable[Arrival]) -> Report:
        """Run until all requests have ended. Raises AssertionError if something was lost or is left over."""
        self._next(iter(arrivals))
        before = gc.get_threshold()
        gc.set_threshold(_COLLECT, *before[1:])  # reference counting frees nearly everything
        try:
            self.kernel.run()
        finally:
            gc.set_threshold(*before)
        self._check()
        duration_s = self._last_at - self._first_at
        for worker in self._workers.values():
            worker.tally.record_peak(worker.engine.pool)
        self.tally.queue_peak = self.router.queue_peak
        return self.tally.report(self.scenario, duration_s, self.kernel.events)

    def ended(self, request: Request, outcome: str) -> None:
        self._running -= 1
        self._last_at = self.kernel.now
        if outcome == "completed":
            self.tally.completed(*request.latencies(), request.tokens, request.gaps)
        else:
            self.tally.outcomes[outcome] += 1

    def workers_of(self, placement: Placement) -> tuple[PrefillWorker | None, DecodeWorker]:
        decode = self._workers[placement.decode.info.ref.worker_id]
        assert isinstance(decode, DecodeWorker)
        if placement.prefill is None:
            return None, decode
        prefill = self._workers[placement.prefill.info.ref.worker_id]
        assert isinstance(prefill, PrefillWorker)
        return prefill, decode

    def link_rate(self, name: str) -> float:
        """Return the bytes per second of each way of a worker."""
        slow = self._slow_links
        return self.scenario.network.bytes_per_s * slow.get(name, 1.0) * slow.get("", 1.0)

    def _next(self, arrivals: Iterator[Arrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is not None:
            self.kernel.at(arrival.at_s + self.scenario.overheads.admit_s, self._arrive, arrival, arrivals)
        self._more_arrivals = arrival is not None

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival]) -> None:
        if not self.tally.arrivals:
            self._first_at = arrival.at_s
        self.tally.arrivals += 1
        self._running += 1
        self._quiet = 0
        if not self._beating:
            self._beating = True
            self.kernel.after(self.scenario.router.report_s, self._beat)
        request = Request(self, arrival, self.tally.arrivals)
        if arrival.total_tokens > self._longest:
            self.ended(request, "refused")
        else:
            request.find_placement()
        self._next(arrivals)

    def _beat(self) -> None:
        """Let all workers report while there are requests, and once more for reports that were not due yet."""
        for worker in self._workers.values():
            worker.beat()
        self._quiet = 0 if self._running else self._quiet + 1
        self._beating = (self._running > 0 or self._more_arrivals) and self._quiet <= _QUIET
        if self._beating:
            self.kernel.after(self.scenario.router.report_s, self._beat)

    def _check(self) -> None:
        assert not self._running, f"{self._running} requests have no outcome"
        outcomes = sum(self.tally.outcomes.values())
        assert outcomes == self.tally.arrivals, f"{self.tally.arrivals} requests have {outcomes} outcomes"
        problems = [problem for worker in self._workers.values() for problem in worker.idle_problems()]
        assert not problems, "; ".join(problems[:10])

    def _start(self, kind: type[PrefillWorker | DecodeWorker], name: str, starts: int) -> None:
        pool = self.scenario.prefill if kind.role is Role.PREFILL else self.scenario.decode
        worker = self._workers[name] = kind(self, name, starts, pool)
        if self.scenario.slo.itl_percentile is not None and kind.role is Role.DECODE:  # decode workers keep the gaps
            worker.engine.gaps = Gaps()
        self.router.pool.add(worker.link)

    def _apply_fault(self, fault: Fault) -> None:
        if isinstance(fault, Death):
            self._kill(fault)
        else:
            self._faults.append(fault)
            self._slow_down(fault)
            self.kernel.at(fault.until_s, self._recover, fault)

    def _recover(self, fault: Slow | SlowLink) -> None:
        self._faults.remove(fault)
        self._slow_down(fault)

    def _slow_down(self, fault: Slow | SlowLink) -> None:
        """Apply the product of the active faults of this kind at this worker."""
        same = [one for one in self._faults if type(one) is type(fault) and one.worker == fault.worker]
        factor = math.prod(one.factor for one in same)
        if isinstance(fault, Slow):
            self.slow[fault.worker] = factor
            engine = self._workers[fault.worker].engine
            engine.submit(engine.slow_down, factor)
            return
        self._slow_links[fault.worker] = factor
        for name, ways in self.ways.items():
            for way in ways:
                way.set_rate(self.link_rate(name))

    def _kill(self, fault: Death) -> None:
        worker = self._workers[fault.worker]
        if worker.dead:
            return
        worker.die()
        back_s = max(fault.back_after_s, fault.noticed_s)
        self.kernel.after(fault.noticed_s, self._notice_death, worker)
        self.kernel.after(back_s, self._start, type(worker), worker.name, worker.starts + 1)

    def _notice_death(self, worker: SimWorker) -> None:
        self.router.pool.drop(worker.link)
        for attempt in list(worker.attempts):
            attempt.lost(worker.role)
        for other in self._workers.values():
            if isinstance(other, DecodeWorker) and isinstance(worker, PrefillWorker) and not other.dead:
                other.table.lost(worker.ref)


def hosts_of(scenario: Scenario) -> dict[str, list[Timing]]:
    """Return the empty hosts of workers with neighbours, by worker name, assigned round-robin."""
    pools = (("prefill", scenario.prefill), ("decode", scenario.decode))
    names = [f"{role}-{number}" for role, pool in pools for number in range(pool.workers)]
    sizes = [pool.contention.workers for _, pool in pools if pool.contention is not None]
    if not sizes:
        return {}
    hosts: list[list[Timing]] = [[] for _ in range(math.ceil(len(names) / min(sizes)))]
    return {name: hosts[place % len(hosts)] for place, name in enumerate(names)}


def simulate(scenario: Scenario, arrivals: Iterable[Arrival]) -> Report:
    """Simulate the arrivals, which must be in order of time. Equal arguments give bit-identical reports."""
    return Cluster(scenario).run(arrivals)
