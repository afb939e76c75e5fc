"""The load generator's loops: send the requests of a load and record a sample of each."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator

from baton.bench.report import Generator
from baton.bench.requests import CONCURRENCY, BenchRequest, Load, served
from baton.bench.sample import NOT_SENT, Sample
from baton.bench.targets import Server
from baton.clock import Clock
from baton.errors import BatonError, Overloaded

PAUSE_S = 0.1  # after a failure, so that a closed loop does not flood the server
MOST_PAUSE_S = 30.0  # limit of a server's retry-after
TICK_S = 0.02
MILLISECOND = 1e-3


class Run:
    """One run of a load on one server. `show` is called regularly to display progress."""

    def __init__(self, server: Server, load: Load, clock: Clock, show: Callable[[Run], None]) -> None:
        self.samples: list[Sample] = []
        self.failure: BatonError | None = None
        self.in_flight = self.clipped = 0
        self.began: float | None = None  # None until measured requests are sent
        self.load = load
        self.clock = clock
        self._server = server
        self._show = show
        self._lags_s: list[float] = []
        self._cpu_s = 0.0

    async def execute(self) -> None:
        """Run the whole load. Raises BatonError if it cannot be sent, for example because a prompt is too long."""
        try:
            found = served(await self._server.models(), self.load.plan.model)
            rest = self.load.requests(found)
            requests = itertools.chain(list(itertools.islice(rest, 1)), rest)  # made early, because it imports modules
            await self._warm(list(self.load.warmup(found)))
            watch = asyncio.create_task(self._watch())
            self.began, self._cpu_s = self.clock.monotonic(), time.process_time()
            await (self._open(requests, self.began) if self.load.plan.is_open else self._closed(requests, self.began))
            watch.cancel()
        finally:
            await self._server.close()

    def generator(self) -> Generator:
        wall_s = self.clock.monotonic() - (self.began or 0.0)
        cpu_s = time.process_time() - self._cpu_s
        began = self.clock.wall() - wall_s
        return Generator(began, cpu_s / wall_s, self._lags_s, self.in_flight, self.clipped)

    async def _warm(self, requests: list[BenchRequest]) -> None:
        """Send warmup requests. Their results and failures do not count, because failures will recur in the run."""
        waiting = iter(requests)

        async def in_turn() -> None:
            for request in waiting:
                try:
                    await self._server.send(request, Sample(0.0))
                except BatonError:
                    await asyncio.sleep(PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(requests), self.load.plan.concurrency or CONCURRENCY)):
                group.create_task(in_turn())

    async def _watch(self) -> None:
        """Measure how late a timer is, because all other work of this process is delayed equally."""
        while True:
            due = self.clock.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lags_s.append(max(0.0, self.clock.monotonic() - due))
            self._show(self)

    async def _closed(self, requests: Iterator[BenchRequest], began: float) -> None:
        until = math.inf if self.load.plan.duration is None else began + self.load.plan.duration

        async def in_turn() -> None:
            pause_s = 0.0
            for request in requests:  # the pause applies only if a request follows
                if self.clock.monotonic() + pause_s >= until:
                    return
                await asyncio.sleep(pause_s)
                if self.clock.monotonic() >= until:
                    return
                self.in_flight += 1
                pause_s = await self._send(request, self.clock.monotonic())

        async with asyncio.TaskGroup() as group:
            for _ in range(self.load.plan.concurrency or CONCURRENCY):
                group.create_task(in_turn())

    async def _open(self, requests: Iterator[BenchRequest], began: float) -> None:
        """Send each request at its time, regardless of the others. The next request is made before it is due."""
        async with asyncio.TaskGroup() as group:
            for request in requests:
                due = began + request.at_s
                await asyncio.sleep(max(0.0, due - self.clock.monotonic()))  # always yields
                if (left := due - self.clock.monotonic()) > 0:  # a timer counts whole milliseconds and can fire early
                    await asyncio.sleep(left + MILLISECOND)
                if self.in_flight >= self.load.plan.max_in_flight:
                    self.samples.append(Sample(due, end=self.clock.monotonic(), error=NOT_SENT))
                    continue
                self.in_flight += 1
                group.create_task(self._send(request, due))

    async def _send(self, request: BenchRequest, due: float) -> float:
        """Send one request, record its sample, and return the seconds to wait before the next one."""
        sample, wait = Sample(due, self.clock.monotonic(), deterministic=request.deterministic), 0.0
        try:
            await self._server.send(request, sample)
        except BatonError as error:
            self.failure, sample.error = error, type(error).__name__
            wait = min(MOST_PAUSE_S, error.retry_after_s) if isinstance(error, Overloaded) else PAUSE_S
        sample.end = self.clock.monotonic()
        self.in_flight -= 1
        self.clipped += request.clipped
        self.samples.append(sample)
        return wait
