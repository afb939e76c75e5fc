"""The worker process: it runs one incarnation after the other, each of the role that it was ordered to take.

Read `serve` first. Weights stay loaded between incarnations if both roles load them with the same settings; all else is
rebuilt. `HostedWorker` runs a worker on a thread of a process that it does not own, such as a Ray actor
(`WorkerActor`). If the worker ends by itself, so does that process; its supervisor gets 0 after an ordered drain.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter

import structlog

from baton import __version__
from baton.config import config_from_json
from baton.core import Role, WorkerRef
from baton.engine.engine import Engine
from baton.engine.model_backend import ModelBackend
from baton.errors import BatonError, Cancelled
from baton.logs import configure_logging, redirect_output
from baton.worker.engine_factory import (
    block_size_of,
    build_engine,
    free_memory,
    load_backend,
    settled,
    thinking_chunk,
    use_threads,
)
from baton.worker.lifecycle import Ready, run_incarnation
from baton.worker.role import Factories, RoleFactory
from baton.worker.settings import WorkerSettings, of_both_roles
from baton.worker.speculation_choice import MTP

log = structlog.get_logger(__name__)
_MODEL = ("backend", "dtype", "quantize", "kv_dtype", "thinking_prefill")
_LOADED = ("device", "threads", "tensor_parallel", "attention_splits", *_MODEL)
_LOADED_OF = attrgetter(*_LOADED)


async def serve(
    both: Mapping[Role, WorkerSettings], factories: Factories, role: Role, stop: asyncio.Event, ready: Ready
) -> None:
    """Run a worker until `stop` is set or a drain ends. Raises BatonError if it cannot start or must not go on."""
    model = _Model()
    with contextlib.closing(model):
        while True:
            settings = await asyncio.to_thread(settled, both[role])
            engine = await asyncio.to_thread(model.engine, settings)
            order = await run_incarnation(settings, engine, factories[role], stop, ready)
            del engine  # frees its KV before the next engine allocates
            if order is None or order.drain:
                return
            role = order.role


class _Model:
    """The loaded model, and the settings it was loaded with."""

    def __init__(self) -> None:
        self._loaded: tuple[WorkerSettings, ModelBackend] | None = None
        self._kv: Callable[[], object] = lambda: None  # of the last engine, while it exists

    def engine(self, settings: WorkerSettings) -> Engine:
        """Build a new engine. Loads the weights again only if the settings require it; raises the errors of loading."""
        use_threads(settings)
        if self._loaded is not None:
            if why := reasons_to_load(self._loaded[0], settings):
                log.info("model_loads_anew", worker=settings.worker_id, reasons=why)
                self.close()
            free_memory(self._kv)
        if self._loaded is None:
            self._loaded = settings, load_backend(settings)
        backend = self._loaded[1]
        backend.layout = replace(backend.layout, block_size=block_size_of(settings, thinking_chunk(backend)))
        engine = build_engine(settings, backend)
        self._kv = weakref.ref(engine.kv)
        return engine

    def close(self) -> None:
        if self._loaded is not None:
            self._loaded[1].close()
            self._loaded = None


def reasons_to_load(before: WorkerSettings, after: WorkerSettings) -> list[str]:
    """Return the load-time settings that differ. If none differ, the loaded model can be reused. Ranks also make their
    caches with the block size of the load.
    """
    found = list(zip(_LOADED, _LOADED_OF(before), _LOADED_OF(after), strict=True))
    if after.tensor_parallel > 1:
        found.append(("block_size", block_size_of(before), block_size_of(after)))
    if after.speculation == MTP:  # its layer is a part of the load
        found.append(("speculation", before.speculation, MTP))
    return [f"{name}: {left}, {right}" for name, left, right in found if left != right]


def run_worker_process(
    both: Mapping[Role, WorkerSettings], factories: Factories, role: Role, stop: threading.Event, ready: Ready
) -> None:
    """Run `serve` on its own event loop until `stop` is set from any thread. Blocks."""

    async def main() -> None:
        leave = asyncio.Event()
        loop = asyncio.get_running_loop()
        waiter = threading.Thread(target=_forward, args=(stop, loop, leave), daemon=True)
        waiter.start()
        await serve(both, factories, role, leave, ready)

    asyncio.run(main())


def _forward(stop: threading.Event, loop: asyncio.AbstractEventLoop, leave: asyncio.Event) -> None:
    stop.wait()
    with contextlib.suppress(RuntimeError):  # the loop has already ended
        loop.call_soon_threadsafe(leave.set)


Run = Callable[[threading.Event, Callable[[WorkerRef], None]], None]


class HostedWorker:
    """Runs `run(stop, ready)` on a thread."""

    def __init__(self, run: Run, *, exit_process: Callable[[int], None] = os._exit) -> None:
        self._run = run
        self._exit_process = exit_process
        self._stop = threading.Event()
        self._settled = threading.Event()
        self._failure: BaseException | None = None
        self._ref: WorkerRef | None = None
        self._thread = threading.Thread(target=self._main, name="worker", daemon=True)
        self._thread.start()

    def ready(self) -> WorkerRef:
        """Wait for registration. Raises the error that prevented the start, or Cancelled after `stop`."""
        self._settled.wait()
        if self._failure is not None:
            raise self._failure
        if self._ref is None:
            raise Cancelled("the worker was stopped before it was ready")
        return self._ref

    def stop(self, timeout_s: float = 10.0) -> None:
        self._stop.set()
        self._thread.join(timeout_s)

    def _ready(self, ref: WorkerRef) -> None:
        self._ref = ref
        self._settled.set()

    def _main(self) -> None:
        try:
            self._run(self._stop, self._ready)
        except Exception as error:
            # Task boundary: `ready` raises the error, or the process exits.
            if isinstance(error, BatonError):
                log.error("worker_failed", error=type(error).__name__, message=str(error))
            else:
                log.exception("worker_failed")
            self._failure = error
        was_ready = self._settled.is_set()
        self._settled.set()
        if was_ready and not self._stop.is_set():
            self._exit_process(0 if self._failure is None else 1)  # 0 after a drain


class WorkerActor:
    """Class wrapped in a Ray actor to host one worker of either role. It has no logic and does not import Ray.

    All arguments are plain values. Each construction is a new incarnation of `worker_id`. `config_json`: the whole
    `ClusterConfig`; `log_file`: destination of output, or "" to leave it to Ray; `factories`: how to build each role.
    """

    def __init__(
        self, config_json: str, role: str, worker_id: str, log_file: str, factories: dict[Role, RoleFactory]
    ) -> None:
        if log_file:
            redirect_output(log_file)
        config = config_from_json(config_json)
        configure_logging(config.log.level, config.log.format, worker_id)
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")  # set by Ray, or by the actor's options
        log.info("process_started", version=__version__, pid=os.getpid(), gpus=gpus)
        both, begins = of_both_roles(config, worker_id, Role(role)), Role(role)
        self._worker = HostedWorker(partial(run_worker_process, both, factories, begins))

    def ready(self) -> dict[str, object]:
        """Wait for registration. Returns the worker, its address and its pid."""
        ref = self._worker.ready()
        return {"worker": str(ref), "address": ref.address, "pid": os.getpid()}

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        self._worker.stop()
