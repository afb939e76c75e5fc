"""Workers in an existing Ray cluster: a detached controller actor on its head, and the processes that follow it.

`ControllerActor` runs `LocalControl` on its own thread. Ray restarts it when it or the head ends; it then finds the
running workers and continues. `RemoteControl` is the supervisor's side. `baton up` itself never connects to that Ray,
because a client is lost when the head restarts, and routers must go on. A child process connects (`join`, `ensure`,
`follow`), ends when it loses the controller, and is restarted until it finds one.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
import structlog

from baton.clock import Clock, SystemClock
from baton.cluster.backend_process import BACKOFF_S, Child, ProcessSpec, StartError
from baton.cluster.backend_ray import LONGEST, RayPlacement, check_reachable, connect, namespace, this_ray
from baton.cluster.controller import LocalControl
from baton.cluster.follower_lease import FollowerLease
from baton.cluster.gpus import check_gpus
from baton.cluster.signals import Stop
from baton.config import ClusterConfig, RouterConfig, config_from_json
from baton.config.values import is_loopback_host
from baton.core import Role
from baton.errors import BatonError, ConfigError, LedgerError, NoWorker
from baton.ledger.control_state import ControlState
from baton.ledger.registry import Ledger
from baton.logs import configure_logging

POLL_S = 0.2
RETRY_S = 1.0
STOP_S = 30.0  # beyond the grace period

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """The worker's actor class and the role factories, which Ray imports by name on every host."""

    actor: type
    factories: Mapping[Role, object]


@dataclass(frozen=True, slots=True)
class ControllerProgress:
    """The progress of the controller. `error` is why a worker or the controller did not start; it keeps trying."""

    ready: bool
    workers: int
    error: BatonError | None = None


class ControllerActor:
    """The actor class. `config_json` is the `ClusterConfig` with password. `detached` workers outlive this process."""

    def __init__(self, config_json: str, parts: Parts, detached: bool) -> None:
        self._config_json = config_json
        self._config = config_from_json(config_json)
        configure_logging(self._config.log.level, self._config.log.format, "controller")
        placement = RayPlacement(lambda: self._config, parts.actor, parts.factories, this_ray, None, detached=detached)
        self._control = LocalControl(self._config, placement)
        self._stop = threading.Event()
        self._grace_s = 0.0
        self._state = ControllerProgress(ready=False, workers=0)
        self._thread = threading.Thread(target=self._main, name="controller", daemon=True)
        self._thread.start()

    def serves(self, config_json: str) -> bool:
        """Return whether this controller was started with exactly this config."""
        return config_json == self._config_json

    def state(self) -> ControllerProgress:
        return self._state

    def pid(self) -> int:
        return os.getpid()

    def stop(self, grace_s: float) -> None:
        """End all workers, with a grace period of `grace_s` seconds, and return when they have ended."""
        self._grace_s = grace_s
        self._stop.set()
        self._thread.join(grace_s + STOP_S)

    def _main(self) -> None:
        try:
            if self._begin():
                self._run()
                self._control.stop(self._grace_s)
        except Exception:
            log.exception("controller_failed")
            self._stop.wait(RETRY_S)
            os._exit(1)  # Ray restarts the actor

    def _begin(self) -> bool:
        """Start workers once Redis can be used. Returns False if stopped before."""
        while not self._stop.is_set():
            try:
                self._control.start(self._config.redis.url)
            except (LedgerError, ConfigError) as error:  # no Redis, or another controller of this name
                log.warning("controller_without_redis", error=str(error))
                self._state = ControllerProgress(ready=False, workers=0, error=error)
                self._stop.wait(RETRY_S)
            else:
                return True
        return False

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self._control.poll()
            error = None
            try:
                ready = self._control.ready()
            except BatonError as failure:
                ready, error = False, failure
            self._state = ControllerProgress(ready, self._control.size, error)


NAME = "controller"
ACTOR = "controller-2"  # the number changes with the path of the class, so that no release attaches to a lost path
FORMER_ACTORS = ("controller",)  # actors of earlier releases, which cannot restart after an upgrade
HEAD = {"node:__internal_head__": 0.001}  # any head node: a node id would not survive a restart of the head
WATCH_S = 2.0
ANSWER_S = 5.0
CHILD_WAIT_S = 5.0  # for Ray; then the child ends and is restarted
LOST_S = 20.0  # without an answer of one that runs
STARTS_S = 60.0  # of one that may be starting: Ray needs seconds, on a loaded machine 20
ENSURE_S = 180.0
DYING_S = 60.0  # in which each new controller dies
DETACH_S = 10.0  # for a child to end when its controller is detached
UNBOUNDED = 10**9


class RemoteControl:
    """A `Control` by child processes. `command` is the argv of a child; `--follow` or `--stop` is added. A cluster that
    already ran is not ended by a start that fails or is interrupted, nor one that another `baton up` runs.
    """

    def __init__(self, config: ClusterConfig, command: Sequence[str], logs: Path) -> None:
        self._address, self._name = config.ray.address, config.name
        self._redis_url = ""
        self._ran = False  # when this start began
        self._starting: Stop | None = None
        self.size = config.prefill.replicas + config.decode.replicas
        self._begun = False
        self._command = [*command, f"--wait={CHILD_WAIT_S:g}"]
        self._log = logs / f"{NAME}.log"
        self._bound = config.redis.url == "embedded"  # because workers cannot outlive their ledger
        self._child = self._follower(*(["--bound"] if self._bound else []))

    def _follower(self, *options: str) -> Child:
        return Child(ProcessSpec(NAME, [*self._command, "--follow", *options], self._log, max_restarts=UNBOUNDED))

    def start(self, redis_url: str) -> None:
        check_reachable(self._address)
        self._redis_url = redis_url
        if not self._bound:
            found = asyncio.run(found_cluster(redis_url, self._name))
            self._ran = found.runs
            if found.serves:
                log.info("cluster_already_serves", workers=found.workers)
                self.size, self._child = 1, self._follower("--attach")  # routers wait for one worker
        self._begun = True
        self._child.start()

    def wait_ready(self, stop: Stop) -> None:
        self._starting = stop
        workers = int(str(self._child.wait_ready(stop)["workers"]))
        self.size = 1 if "--attach" in self._child.spec.argv else workers

    def poll(self) -> None:
        self._child.poll()

    def pids(self) -> dict[str, int]:
        """Return the child's id. Workers run on other hosts."""
        return {} if self._child.pid is None else {NAME: self._child.pid}

    def stop(self, grace_s: float) -> None:
        if not self._begun:
            return
        if not self._bound:  # first, because a child without a controller would create a new one
            self._end_child(DETACH_S)
            if reason := self._why_left():
                log.warning("cluster_left_running", reason=reason)
                return
        ending = Child(ProcessSpec("stop", [*self._command, "--stop"], self._log))
        try:
            ending.start(logged=False)
            ending.wait(grace_s + STOP_S)
            if ending.code:
                raise ending.failure()
        except BatonError as error:  # the child below must end all the same
            log.warning("controller_did_not_stop", error=str(error))
        if self._bound:  # last, because actors that are not detached end with the child
            self._end_child(grace_s)

    def _why_left(self) -> str:
        """Return why the cluster must go on, if so."""
        if self._ran and (self._starting is None or not self._starting.serving.is_set()):
            return "it ran before this start; `baton controller --stop` ends it"
        lease = FollowerLease(self._redis_url, self._name)
        try:
            lease.take()
        except ConfigError as error:
            return str(error)
        except LedgerError:  # nothing else runs it without Redis
            return ""
        lease.leave()
        return ""

    def _end_child(self, within_s: float) -> None:
        self._child.terminate()
        self._child.wait(within_s)


class FoundCluster(NamedTuple):
    """A cluster in the ledger. `runs`: there may be workers. `serves`: with a living controller and a decode worker."""

    runs: bool
    serves: bool
    workers: int


async def found_cluster(redis_url: str, name: str) -> FoundCluster:
    """Return the state of a cluster as its ledger has it. Raises LedgerError."""
    ledger = await Ledger.connect(redis_url, f"baton:{name}", 1.0, SystemClock())
    try:
        controlled, infos = await ControlState(ledger.connection).control(), await ledger.workers()
    finally:
        await ledger.close()
    serves = controlled is not None and any(info.role is Role.DECODE for info in infos)
    return FoundCluster(controlled is not None or bool(infos), serves, len(infos))


def join(config: ClusterConfig, wait_s: float, stop: Stop, clock: Clock | None = None) -> Any:
    """Return `ray`, connected within `wait_s`. Raises NoWorker, Cancelled, ConfigError (address, device, ledger)."""
    check_gpus(config, ())
    if config.ray.address in {"local", "none"}:
        raise ConfigError(f"ray.address: must be auto or the address of a Ray cluster, got {config.ray.address!r}")
    clock = clock or SystemClock()
    deadline = clock.monotonic() + wait_s
    while True:
        stop.check()
        try:
            ray = connect(config.ray.address, config.name)
        except NoWorker:
            if clock.monotonic() > deadline:
                raise
            stop.drain.wait(BACKOFF_S[2])
        else:
            hosts = [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
            check_ledger(config.redis.url, hosts)
            return ray


def ensure(
    ray: Any,
    config: ClusterConfig,
    parts: Parts,
    stop: Stop,
    *,
    detached: bool,
    clock: Clock | None = None,
    renew: Callable[[], None] = lambda: None,
) -> Any:
    """Return the cluster's controller once it answers, creating it if needed. A frozen one, or one with another config,
    is replaced; its workers stay. Raises StartError. Raises Cancelled on `stop`, so that none is created during a stop.
    `renew` is called before each look at it, and its LedgerErrors are ignored.
    """
    clock = clock or SystemClock()
    settings = config.model_copy(update={"router": RouterConfig()}).model_dump_json()  # the router's ports may change
    began = asked = clock.monotonic()
    controller = None
    while True:
        stop.check()
        error = None
        with suppress(LedgerError):
            renew()
        if controller is None:  # keep the handle: an actor that is not detached ends with its creator's
            controller = _found_or_made(ray, config, settings, parts, detached=detached)
        try:
            if ray.get(controller.serves.remote(settings), timeout=ANSWER_S):
                return controller
        except ray.exceptions.RayError as raised:  # it is starting, ending or frozen
            error = raised
        now, died = clock.monotonic(), isinstance(error, ray.exceptions.ActorDiedError)
        if now - began > (DYING_S if died else ENSURE_S):
            raise StartError(f"the controller did not start: {type(error).__name__}: {str(error).strip()[-LONGEST:]}")
        if died or error is None or now - asked > STARTS_S:
            ray.kill(controller, no_restart=True)
            controller, asked = None, now
        time.sleep(POLL_S)


def _found_or_made(ray: Any, config: ClusterConfig, settings: str, parts: Parts, *, detached: bool) -> Any:
    with suppress(ValueError):
        return ray.get_actor(ACTOR, namespace=namespace(config.name))
    _end_former(ray, config)
    options = {
        "name": ACTOR,
        "namespace": namespace(config.name),
        "get_if_exists": True,  # another process may create it at the same time
        "lifetime": "detached" if detached else None,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 4,
        "num_cpus": 0,
        "resources": HEAD,
    }
    return ray.remote(ControllerActor).options(**options).remote(settings, parts, detached)


def _end_former(ray: Any, config: ClusterConfig) -> None:
    """End the controller of an earlier release. Its workers go on, and the next controller finds them."""
    for name in FORMER_ACTORS:
        with suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=namespace(config.name)), no_restart=True)


def follow(
    ray: Any,
    controller: Any,
    stop: Stop,
    ready: Callable[[ControllerProgress], None],
    clock: Clock | None = None,
    *,
    attach: bool = False,
    renew: Callable[[], None] = lambda: None,
) -> None:
    """Watch the controller until `stop`; call `ready` once. Raises start errors before that, NoWorker if it is lost.
    `attach`: the cluster already serves, so a worker that does not start is no error. `renew` is called every 2 s, and
    its LedgerErrors are ignored.
    """
    clock, reported = clock or SystemClock(), False
    answered_at = clock.monotonic()
    while not stop.drain.wait(WATCH_S if reported else POLL_S):
        with suppress(LedgerError):
            renew()
        try:
            state = ray.get(controller.state.remote(), timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            if clock.monotonic() - answered_at > LOST_S:
                raise NoWorker(f"the controller in Ray does not answer: {type(error).__name__}") from None
            continue
        answered_at = clock.monotonic()
        if not reported and state.error is not None:
            if not attach:
                raise state.error
            log.warning("worker_did_not_start", error=str(state.error))
        if not reported and (state.ready or attach):
            reported = True
            ready(state)


def end(ray: Any, config: ClusterConfig, grace_s: float) -> None:
    """End workers and controller, including workers without a controller."""
    _end_former(ray, config)
    with suppress(ValueError):
        controller = ray.get_actor(ACTOR, namespace=namespace(config.name))
        try:
            ray.get(controller.stop.remote(grace_s), timeout=grace_s + STOP_S)
        except ray.exceptions.RayError as error:
            log.warning("controller_did_not_stop", error=type(error).__name__)
        ray.kill(controller, no_restart=True)
    left = RayPlacement(lambda: config, object, {}, lambda: ray, None)  # never starts workers
    left.open()
    left.found()
    left.stop(grace_s)


def check_ledger(url: str, hosts: Sequence[str]) -> None:
    """Raise ConfigError if any of `hosts` cannot reach the ledger."""
    here = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    elsewhere = sorted(host for host in hosts if host not in here and not is_loopback_host(host))
    local = url == "embedded" or url.startswith("unix:") or is_loopback_host(urlsplit(url).hostname or "localhost")
    if elsewhere and local:
        text = f"only this machine reaches it, but Ray has nodes at {', '.join(elsewhere[:4])}"
        raise ConfigError(f"redis.url: {text}; must be a Redis that all nodes reach, such as redis://HOST:6379")
