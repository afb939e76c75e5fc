"""Run one role in this process, until it is stopped."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from baton import __version__
from baton.cli.importing import uncollected
from baton.cli.setup.config import effective
from baton.clock import SystemClock
from baton.cluster.backend_process import die_with_parent, report_ready
from baton.cluster.gpus import VISIBLE, narrow
from baton.config import ClusterConfig, load_config
from baton.core import Role, WorkerRef
from baton.errors import ConfigError
from baton.limits import http_waiting
from baton.logs import configure_logging, redirect_output
from baton.network import raise_open_files, reachable_address

if TYPE_CHECKING:
    from baton.worker.role import RoleFactory
    from router.context import RouterSettings

GC_EVERY = 10_000  # new objects per collection; a router makes dozens per token, and hardly any cycles
log = structlog.get_logger(__name__)


def _prepare(
    file: Path, sets: Sequence[str], log_file: Path | None, process: str, role: Role | None = None
) -> ClusterConfig:
    die_with_parent()
    if log_file is not None:
        redirect_output(str(log_file))
    files = raise_open_files()
    config = load_config(file, sets, os.environ)
    config = narrow(config, role, os.environ) if role is not None else config
    configure_logging(config.log.level, config.log.format, process)
    gpus = os.environ.get(VISIBLE)
    shown = effective(config)
    log.info("process_started", version=__version__, pid=os.getpid(), open_files=files, gpus=gpus, config=shown)
    if config.redis.url == "embedded":
        text = "a single role needs a running Redis: set redis.url=redis://... (`baton up` starts an embedded one)"
        raise ConfigError(f"redis.url: {text}")
    return config


def run_role(role: Role, file: Path, sets: Sequence[str], worker_id: str, log_file: Path | None) -> None:
    """Run one worker until SIGTERM, SIGINT or a drain command."""
    config = _prepare(file, sets, log_file, worker_id, role)
    if role not in config.bounds:
        raise ConfigError(f"mode: {config.mode} has no {role.value} workers; start one of the other role")
    with uncollected():
        from baton.worker.process import run_worker_process
        from baton.worker.settings import of_both_roles

        factories = role_factories()

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    reported = threading.Event()

    def ready(ref: WorkerRef) -> None:
        if reported.is_set():
            return  # after a role change; the start was reported before
        reported.set()
        report_ready({"worker": str(ref), "address": ref.address, "pid": os.getpid()})

    run_worker_process(of_both_roles(config, worker_id, role), factories, role, stop, ready)


def role_factories() -> dict[Role, RoleFactory]:
    """Return the factories of both roles. No other module imports both."""
    from decode_workers.worker import HostedDecode
    from prefill_workers.worker import HostedPrefill

    return {Role.PREFILL: HostedPrefill, Role.DECODE: HostedDecode}


def run_router(file: Path, sets: Sequence[str], log_file: Path | None, index: int = 0) -> None:
    """Run a router until SIGTERM or SIGINT. A second signal ends it immediately."""
    import uvloop  # saves 0.1 ms per first token, which takes a dozen passes of the event loop

    config = _prepare(file, sets, log_file, f"router-{index}" if index else "router")
    uvloop.run(_route(config, index))


async def _route(config: ClusterConfig, index: int) -> None:
    with uncollected():
        from baton.ledger.control_state import ControlState
        from baton.ledger.ownership import OwnershipStore
        from baton.ledger.prefix_directory import PrefixReplica
        from baton.ledger.registry import Ledger
        from baton.tokenizer import load_tokenizer
        from router.server import serve

    ledger = await Ledger.connect(config.redis.url, f"baton:{config.name}", config.ledger.lease_s, SystemClock())
    tokenizer = load_tokenizer(config.model.path)
    directory = PrefixReplica(ledger.connection)
    following = asyncio.create_task(directory.run(), name="prefix directory")
    handle = await serve(
        router_settings(config, index),
        ledger.workers,
        tokenizer,
        prefixes=directory.prefixes,
        streams=OwnershipStore(ledger.connection).find,
        control_state=ControlState(ledger.connection),
    )
    gc.collect()
    gc.freeze()  # objects that exist now stay, so collections may skip them
    gc.set_threshold(GC_EVERY, *gc.get_threshold()[1:])
    bound = {"grpc": handle.grpc, "admin": handle.admin, "metrics": handle.metrics}
    bound |= {"http": handle.http} if handle.http else {}
    router, url = config.router, config.redis.url
    where = (router.advertise, router.interface, url, "router.interface")
    advertised = {name: reachable_address(address, *where) for name, address in bound.items()}
    handle.metrics_at = advertised["metrics"]
    log.info("router_told", **advertised)
    report_ready({**bound, "advertised": advertised, "pid": os.getpid()})
    await _stop_signal()
    await handle.stop(config.router.drain_s)
    following.cancel()
    await asyncio.wait([following])
    await ledger.close()


def run_gateway(file: Path, sets: Sequence[str], target: str | None, log_file: Path | None) -> None:
    """Run the HTTP gateway alone until stopped. `target` is its router, or None for `router.grpc` of the file."""
    import uvloop

    if log_file is not None:
        redirect_output(str(log_file))
    raise_open_files()
    config = load_config(file, sets, os.environ)
    configure_logging(config.log.level, config.log.format, "gateway")
    if config.router.http is None:
        raise ConfigError(f"{file}: router.http: must be set, such as --set router.http=127.0.0.1:8000")
    uvloop.run(_serve_http(config, config.router.http, target or config.router.grpc))


async def _serve_http(config: ClusterConfig, address: str, target: str) -> None:
    from baton.metrics import Metrics
    from router.openai.server import GatewaySettings, HttpServer

    router, counts = config.router, Metrics(config.name, __version__)
    settings = GatewaySettings(
        __version__,
        router.http_body,
        stall_s=router.slow_reader_s,
        counts=counts,
        tls=config.security.tls,
        waiting=http_waiting(router.queue.max_requests),
        names=router.http_names if config.security.tokens is None else None,
        origins=router.http_origins,
        ignores_unknown=router.http_unknown == "ignore",
    )
    server = HttpServer(address, settings)
    await server.start(target)
    log.info("gateway_started", http=server.address, target=target)
    report_ready({"http": server.address, "target": target, "pid": os.getpid()})
    await _stop_signal()
    await server.stop(router.drain_s)


async def _stop_signal() -> None:
    """Wait for SIGTERM or SIGINT. The next one ends the process immediately."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await stopping.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)


def _own(address: str, index: int) -> str:
    """Return an address for router `index`; only the first router has the file's port."""
    return f"{address.rpartition(':')[0]}:0" if index > 0 else address


def router_settings(config: ClusterConfig, index: int = 0) -> RouterSettings:
    """Return the settings of router `index`. All share the client addresses; later ones use any free operator ports."""
    from router.context import RouterSettings

    router = config.router
    admin, metrics = (_own(each, index) for each in (router.admin, router.metrics))
    return RouterSettings(
        attempts=config.retry.attempts,
        name=config.name,
        model=config.model.name,
        aliases=config.model.names[1:],
        generation_defaults=config.model.generation_defaults == "model",
        history=config.history,
        tls=config.security.tls,
        tokens=config.security.tokens,
        receipt_key=config.security.receipt_key,
        version=__version__,
        grpc=router.grpc,
        admin=admin,
        metrics=metrics,
        share_port=router.replicas > 1,
        http=router.http,
        http_body=router.http_body,
        http_names=router.http_names,
        http_origins=router.http_origins,
        http_ignores_unknown=router.http_unknown == "ignore",
        tool_parser=router.tool_parser,
        reasoning_parser=router.reasoning_parser,
        policy=router.policy,
        resumable_s=config.resumable_s,
        think_while_decoding=config.thinking.while_decoding,
        local_prefill=router.local_prefill == "auto",
        slo_ttft_s=config.slo.ttft_ms / 1000,
        slo_itl_s=config.slo.itl_ms / 1000,
        queue_max_requests=router.queue.max_requests,
        queue_max_tokens=router.queue.max_tokens,
        queue_max_wait_s=router.queue.max_wait_s,
        tenants=router.tenants,
        scale=config.bounds,
        colocated=config.mode == "colocated",
        chunk=config.decode.max_batched_tokens,
        rows=config.decode.max_running,
        prefill_chunk=config.prefill.max_batched_tokens,
        drain_s=config.scaling.drain_s,
        client_stall_s=router.slow_reader_s,
        traces=config.tracing.keep,
        otlp=config.tracing.otlp,
        trace_sample=config.tracing.sample,
        worker_silence_s=config.ledger.lease_s,  # the ledger's lease: at least three heartbeats
    )
