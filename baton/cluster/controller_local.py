"""A controller in the process and thread of its supervisor, for workers that do not outlive it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from baton.clock import SystemClock
from baton.cluster.autoscaler import Autoscaler
from baton.cluster.controller import Controller
from baton.cluster.interfaces import Placement
from baton.cluster.signals import Stop
from baton.config import ClusterConfig
from baton.errors import LedgerError
from baton.ledger.control_state import ControlState
from baton.ledger.registry import Ledger

READY_POLL_S = 0.05


class LocalControl:
    """A `Control` around a `Controller` in this process. Its event loop runs only within these calls."""

    def __init__(self, config: ClusterConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._runner = asyncio.Runner()
        self._ledger: Ledger | None = None
        self._controller: Controller | None = None

    def start(self, redis_url: str) -> None:
        self._placement.open()
        self._runner.run(self._begin(redis_url))

    async def _begin(self, redis_url: str) -> None:
        config, clock = self._config, SystemClock()
        self._ledger = await Ledger.connect(redis_url, f"baton:{config.name}", config.ledger.lease_s, clock)
        control_state = ControlState(self._ledger.connection)
        controller = Controller(config, self._placement, self._ledger, control_state, clock, Autoscaler(config))
        await controller.begin()
        await controller.poll()
        self._controller = controller

    @property
    def _started(self) -> Controller:
        assert self._controller is not None, "start comes first"
        return self._controller

    def wait_ready(self, stop: Stop) -> None:
        while not self.ready():
            self.poll()
            stop.drain.wait(READY_POLL_S)
            stop.check()

    def ready(self) -> bool:
        """Return whether as many workers are ready as planned. Raises the errors of `wait_ready`, except Cancelled."""
        if not self._started.ready:
            self._started.check_start()
        return self._started.ready

    def poll(self) -> None:
        self._runner.run(self._started.poll())

    def pids(self) -> dict[str, int]:
        return {worker_id: seen.pid for worker_id, seen in self._placement.look().items() if seen.pid is not None}

    @property
    def size(self) -> int:
        return self._started.plan.prefill + self._started.plan.decode

    def stop(self, grace_s: float) -> None:
        self._placement.stop(grace_s)
        self._runner.run(self._end())
        self._runner.close()

    async def _end(self) -> None:
        if self._controller is not None:
            with suppress(LedgerError):
                await self._controller.end()
        if self._ledger is not None:
            await self._ledger.close()
