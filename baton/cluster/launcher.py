"""The life of a cluster: starts Redis, workers and routers, watches them, and removes everything at the end."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import psutil
import structlog
import yaml
from prometheus_client.parser import text_string_to_metric_families

from baton.clock import Clock, SystemClock
from baton.cluster.backend_process import Child, ProcessSpec, StartError, stop_all, tail
from baton.cluster.interfaces import Control
from baton.cluster.signals import Stop
from baton.cluster.state_dir import ClusterState, ProcessId, StateFolder
from baton.config import ClusterConfig
from baton.errors import ConfigError, LedgerError
from baton.ledger.embedded_redis import EmbeddedRedis
from baton.ledger.registry import Ledger

POLL_S = 0.2
READY_POLL_S = 0.02
SERVING_S = 120.0  # connecting takes a second; a stalled machine needs longer
LISTENERS = ("grpc", "admin", "metrics", "http")
MORE_S = 1.0  # beyond router.drain_s, for a router to end
STOP_S = 10.0
REDIS_START_S = 60.0
REDIS_RESTART_S = 10.0  # shorter, because it is repeated and the supervisor waits for it
REDIS_RETRY_S = 1.0
REDIS_GIVE_UP_S = 60.0  # until restarts of Redis are given up: another process may have taken the port

log = structlog.get_logger(__name__)
messages = logging.getLogger(__name__)


def router_serves(metrics: str, workers: int) -> bool:
    """Return whether the router with this metrics address is ready and connected to at least `workers` workers."""
    try:
        if _get(metrics, "/ready")[0] != HTTPStatus.OK:
            return False
        families = text_string_to_metric_families(_get(metrics, "/metrics")[1])
        return sum(s.value for family in families for s in family.samples if s.name == "baton_workers") >= workers
    except (OSError, HTTPException):
        return False


def _get(address: str, path: str) -> tuple[int, str]:
    connection = HTTPConnection(address, timeout=2.0)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class SupervisedRedis:
    """An embedded Redis that is restarted at the same address when it dies. Its data is lost then."""

    def __init__(self, folder: Path, clock: Clock | None = None) -> None:
        self._folder = folder
        self._clock = clock or SystemClock()
        self._died_at: float | None = None
        self._retry_at = 0.0
        self._password = secrets.token_urlsafe(24)
        self._server = self._start()

    def _start(self, port: int = 0, deadline_s: float = REDIS_START_S) -> EmbeddedRedis:
        try:
            return EmbeddedRedis.start(self._folder, deadline_s=deadline_s, port=port, password=self._password)
        except OSError as error:  # no memory or too many processes
            raise LedgerError(f"embedded Redis was not started: {error}") from None

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server.alive else None

    def poll(self) -> None:
        """Restart the server if it died. Raises LedgerError if that has failed for `REDIS_GIVE_UP_S`."""
        if self._server.alive:
            self._died_at = None
            return
        now = self._clock.monotonic()
        if self._died_at is None:
            self._died_at = self._retry_at = now
            log.warning("redis_died", url=self._server.redacted)
        if now < self._retry_at:
            return
        try:
            self._server = self._start(self._server.port, REDIS_RESTART_S)
        except LedgerError as error:
            if now - self._died_at > REDIS_GIVE_UP_S:
                raise
            self._retry_at = now + REDIS_RETRY_S
            log.warning("redis_not_back", error=str(error))

    def stop(self) -> None:
        self._server.stop()


def check_redis(url: str, name: str) -> None:
    """Check that the Redis at `url` can be used for cluster `name`. Raises LedgerError with host, port and cause."""

    async def check() -> None:
        ledger = await Ledger.connect(url, f"baton:{name}", 1.0, SystemClock())
        try:
            await ledger.workers()
        finally:
            await ledger.close()

    asyncio.run(check())


class Supervisor:
    """Runs one cluster in the calling thread. `router_command` is the argv of the router process."""

    def __init__(
        self, config: ClusterConfig, folder: StateFolder, control: Control, router_command: Sequence[str]
    ) -> None:
        self._config, self._folder, self._control = config, folder, control
        self._redis: SupervisedRedis | None = None
        self._routers = [Child(ProcessSpec("router", router_command, folder.logs / "router.log"))]
        for index in range(1, config.router.replicas):
            name, argv = f"router-{index}", [*router_command, "--index", str(index)]
            self._routers.append(Child(ProcessSpec(name, argv, folder.logs / f"{name}.log")))
        self._router = self._routers[0]  # chooses ports that are not given; the others use the same
        self._redis_url = config.redis.url
        self._recorded: ClusterState | None = None  # in the state file
        self._state_is_old = False  # the last write failed

    def run(self, stop: Stop, ready: Callable[[ClusterState], None]) -> None:
        """Run until `stop`; call `ready` once all serve. Raises Cancelled before that, BatonError if a part fails."""
        self._folder.acquire()
        with ExitStack() as leaving:
            leaving.callback(self._folder.release)
            self._folder.start_logs()
            self._folder.write_state(self._state())  # so that `baton down` finds a cluster that is starting
            self._start_redis(leaving)
            self._write_config()
            leaving.callback(self._stop_processes, stop)
            stop.check()
            self._router.start()
            self._control.start(self._redis_url)
            self._router.wait_ready(stop)  # first: it fails quickly, while a model may load for minutes
            self._control.wait_ready(stop)
            self._wait_serving(stop, self._router)
            self._write_config()  # a restarted router listens where the first one did
            for other in self._routers[1:]:
                other.start()
            for other in self._routers[1:]:
                other.wait_ready(stop)
                self._wait_serving(stop, other)
            state = self._state()
            self._folder.write_state(state)
            self._recorded = state
            stop.serving.set()
            ready(state)
            self._watch(stop)

    def _wait_serving(self, stop: Stop, router: Child) -> None:
        """Wait until the router has found all workers, so that the first requests neither wait nor load one worker."""
        clock, workers = SystemClock(), self._control.size
        deadline = clock.monotonic() + SERVING_S
        while not router_serves(str(router.ready["metrics"]), workers):
            stop.check()
            if router.pid is None:
                raise router.failure()
            self._control.poll()
            if clock.monotonic() > deadline:
                text = f"the router did not find all {workers} workers in {SERVING_S:g} s"
                raise StartError(f"{text}:\n{tail(router.spec.log)}")
            stop.drain.wait(READY_POLL_S)

    def _start_redis(self, leaving: ExitStack) -> None:
        if self._config.redis.url != "embedded":
            check_redis(self._config.redis.url, self._config.name)
            return
        self._redis = SupervisedRedis(self._folder.logs)
        leaving.callback(self._redis.stop)
        self._redis_url = self._redis.url

    def _write_config(self) -> None:
        tree = self._config.model_dump(mode="json", exclude_unset=True)
        tree["redis"] = {"url": self._redis_url}
        tree.setdefault("model", {})["path"] = self._config.model.path
        listeners = {key: value for key, value in self._router.ready.items() if key in LISTENERS}
        tree["router"] = tree.get("router", {}) | listeners
        self._folder.write_private(self._folder.config, yaml.safe_dump(tree))

    def _watch(self, stop: Stop) -> None:
        while not stop.drain.wait(POLL_S):
            if self._redis is not None:
                self._redis.poll()
            self._control.poll()
            for router in self._routers:
                router.poll()
            self._folder.bound_logs()
            self._record_processes()

    def _record_processes(self) -> None:
        """Write the state file if processes or addresses have changed, or the file was damaged. The cluster runs on
        without it; the next poll tries again.
        """
        if (state := self._state()) == self._recorded and self._folder.state_kept():
            return
        try:
            self._folder.write_state(state)
        except ConfigError as error:
            if not self._state_is_old:
                messages.warning("%s; `baton status` shows old process ids until it is written", error)
            self._state_is_old = True
        else:
            self._recorded, self._state_is_old = state, False

    def _stop_processes(self, stop: Stop) -> None:
        """Stop the routers first, so that they finish their requests while the workers still run."""
        for router in self._routers:
            router.terminate()
        waited, most = 0.0, self._config.router.drain_s + MORE_S
        while any(router.pid is not None for router in self._routers) and waited < most and not stop.now.wait(POLL_S):
            waited += POLL_S
        stop_all(self._routers, 0.0 if stop.now.is_set() else STOP_S)
        self._control.stop(0.0 if stop.now.is_set() else STOP_S)

    def _processes(self) -> dict[str, ProcessId]:
        serving = {router.spec.name: router.pid for router in self._routers if not router.starting}
        pids = {**serving, **self._control.pids()}
        if self._redis is not None:
            pids["redis"] = self._redis.pid
        found: dict[str, ProcessId] = {}
        for name, pid in pids.items():
            if pid is not None:
                with suppress(psutil.NoSuchProcess):
                    found[name] = ProcessId.of(pid)
        return found

    def _state(self) -> ClusterState:
        ready = self._router.ready
        advertised = ready.get("advertised")
        addresses = advertised if isinstance(advertised, dict) else ready
        return ClusterState(
            name=self._config.name,
            supervisor=ProcessId.of(os.getpid()),
            grpc=str(addresses.get("grpc", "")),
            admin=str(addresses.get("admin", "")),
            metrics=str(addresses.get("metrics", "")),
            http=str(addresses.get("http", "")),
            redis_url=self._redis_url,
            ray=self._config.ray.address,
            processes=self._processes(),
            admins=[str(router.ready.get("admin", "")) for router in self._routers],
        )
