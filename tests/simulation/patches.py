"""Simulated replacements for gRPC, threads, time and random numbers in the code under test."""

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import structlog

import baton.engine.determinism.shapes
import baton.engine.engine
import baton.engine.sampling.prompt_logprobs
import baton.tracing.trace
import baton.worker.service
import kvtransfer.receive_loop
import kvtransfer.receiver
import kvtransfer.send_queue
import kvtransfer.sender
import prefill_workers.prefix_fetch
import router.context
import router.parsing.generate_request
import router.request.client_request
import router.workers.pool
import router.workers.stream
from baton.metrics import Metrics
from tests.simulation.clock import LoopClock, SimCondition, SimQueue, SimThread
from tests.simulation.engine import PoisonedPool
from tests.simulation.rpc import SimStub, sim_channel
from tests.simulation.transfer import SimExecutor, SimLink, SimSession
from tests.simulation.worker import SimCost, SimWorkerSession
from tests.simulation.world import PROCESS

_BUGS = {"error", "exception", "critical"}
_NO_BUGS = {"lease_lost"}  # of a worker that was stopped for too long, as intended


class _Chance:
    """`random` and `secrets`, from the calling process."""

    def uniform(self, low: float, high: float) -> float:
        return PROCESS.get().rng.uniform(low, high)

    def token_urlsafe(self, nbytes: int) -> str:
        process = PROCESS.get()
        process.minted += 1
        return f"{process.name}-{process.minted}"

    token_hex = token_urlsafe


def _unwatched(*_: object) -> None:
    """Ignore registrations of routers at metrics."""


async def _at_once(function: Callable[..., Any], *args: Any) -> Any:
    """Replace `asyncio.to_thread`, because there is only one thread."""
    return function(*args)


def _record(_: Any, method: str, event: MutableMapping[str, Any]) -> NoReturn:
    """Add each log line to the trace. A line that only a bug would log is a violation."""
    process = PROCESS.get(None)
    if process is not None:
        facts = [f"{key}={value}" for key, value in event.items() if key not in {"event", "exc_info"}]
        process.world.note("log", process.name, event["event"], *facts)
        if method in _BUGS and event["event"] not in _NO_BUGS and process.alive:
            process.world.broken(f"{process.name} logged {event['event']}: {event.get('exc_info')}")
    raise structlog.DropEvent


@contextmanager
def simulated() -> Iterator[None]:
    """Run the code under test on the `World` of the calling process."""
    chance, clock = _Chance(), LoopClock()
    plain = SimpleNamespace(Lock=threading.Lock, Event=threading.Event, Thread=SimThread, Condition=SimCondition)
    stand_ins: list[tuple[Any, dict[str, Any]]] = [
        (baton.engine.engine, {"BlockPool": PoisonedPool}),
        (baton.engine.determinism.shapes, {"SHORT": 8, "SHORT_UNTIL": 16}),  # otherwise each prompt would be one chunk
        (baton.engine.sampling.prompt_logprobs, {"ROWS": 5}),  # otherwise each prompt would be one part
        (baton.tracing.trace, {"secrets": chance}),
        (baton.worker.service, {"Session": SimWorkerSession}),
        (kvtransfer.send_queue, {"threading": plain, "time": clock}),
        (kvtransfer.receiver, {"Session": SimSession, "threading": plain}),
        (
            kvtransfer.sender,
            {"threading": plain, "time": clock, "ThreadPoolExecutor": SimExecutor, "SendChannel": SimLink},
        ),
        (kvtransfer.receive_loop, {"queue": SimpleNamespace(SimpleQueue=SimQueue)}),
        (kvtransfer.receive_loop, {"time": clock}),
        (prefill_workers.prefix_fetch, {"CostModel": SimCost}),
        (router.context, {"secrets": chance, "Metrics": cache(Metrics)}),  # not read here
        (Metrics, dict.fromkeys(("watch_blocks", "watch_channels", "watch_verifying", "watch_queue"), _unwatched)),
        (router.request.client_request, {"secrets": chance, "time": SimpleNamespace(time=lambda: 0.0)}),
        (router.parsing.generate_request, {"asyncio": SimpleNamespace(to_thread=_at_once)}),
        (router.workers.stream, {"aio_channel": sim_channel, "WorkerStub": SimStub, "random": chance}),
        (router.workers.pool, {"random": chance}),
    ]
    before = structlog.get_config()
    with ExitStack() as leaving:
        for module, names in stand_ins:
            leaving.enter_context(patch.multiple(module, **names))
        leaving.callback(structlog.configure, **before)
        structlog.configure(processors=[_record])
        yield
