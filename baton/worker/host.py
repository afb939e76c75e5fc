"""The host process of a worker: one incarnation after the other, each of the role that it was told to be of.

The weights stay loaded from one to the next if both roles want them alike. All else is built anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

import structlog

from baton.worker.build import build_engine, free_memory, load_backend, use_threads
from baton.worker.life import Ready, live
from baton.worker.shapes import settled

if TYPE_CHECKING:
    from baton.core import Role
    from baton.engine.backend import ModelBackend
    from baton.engine.engine import Engine
    from baton.worker.hosted import Factories
    from baton.worker.settings import WorkerSettings

log = structlog.get_logger(__name__)
_LOADED = ("device", "dtype", "threads", "tensor_parallel", "block_size", "attention_splits", "thinking_prefill")
_LOADED_OF = attrgetter(*_LOADED)


async def serve(
    both: Mapping[Role, WorkerSettings], factories: Factories, role: Role, stop: asyncio.Event, ready: Ready
) -> None:
    """Run a worker until `stop` is set, or until it is told to drain and end. `ready` is called for each incarnation.

    Raises BatonError when it cannot start, or must not go on.
    """
    model = _Model()
    with contextlib.closing(model):
        while True:
            settings = await asyncio.to_thread(settled, both[role])
            engine = await asyncio.to_thread(model.engine, settings)
            order = await live(settings, engine, factories[role], stop, ready)
            del engine  # with its KV, before the next one's is made
            if order is None or order.drain:
                return
            role = order.role


class _Model:
    """What is loaded, and for which settings."""

    def __init__(self) -> None:
        self._loaded: tuple[WorkerSettings, ModelBackend] | None = None

    def engine(self, settings: WorkerSettings) -> Engine:
        """A new one, of the loaded weights if they will do. Raises what loading raises."""
        free_memory()
        use_threads(settings)
        if self._loaded is not None and (why := reasons_to_load(self._loaded[0], settings)):
            log.info("model_loads_anew", worker=settings.worker_id, reasons=why)
            self.close()
        if self._loaded is None:
            self._loaded = settings, load_backend(settings)
        return build_engine(settings, self._loaded[1])

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded[1].close()
            self._loaded = None
            free_memory()


def reasons_to_load(before: WorkerSettings, after: WorkerSettings) -> list[str]:
    """What differs of that which a model is loaded with; nothing: the loaded one will do."""
    found = zip(_LOADED, _LOADED_OF(before), _LOADED_OF(after), strict=True)
    return [f"{name}: {left}, {right}" for name, left, right in found if left != right]


def run_worker(
    both: Mapping[Role, WorkerSettings], factories: Factories, role: Role, stop: threading.Event, ready: Ready
) -> None:
    """`serve` on an event loop of its own, until `stop` is set from any thread. Blocks."""

    async def main() -> None:
        leave = asyncio.Event()
        loop = asyncio.get_running_loop()
        waiter = threading.Thread(target=_forward, args=(stop, loop, leave), daemon=True)
        waiter.start()
        await serve(both, factories, role, leave, ready)

    asyncio.run(main())


def _forward(stop: threading.Event, loop: asyncio.AbstractEventLoop, leave: asyncio.Event) -> None:
    stop.wait()
    with contextlib.suppress(RuntimeError):  # the loop has ended already
        loop.call_soon_threadsafe(leave.set)
