"""Workers as Ray actors, and this process's connection to a Ray cluster: a local one of its own, or an existing one.

Ray places, starts and ends processes. Its own restart is disabled, because the worker supervisor restarts workers: it
also detects frozen processes. In a Ray of many hosts each worker has a placement group of one bundle. The group's name
holds the worker's first role, so that the next controller finds the worker. The caller passes the actor class in, so no
role is imported. A local Ray listens on the loopback only, without a dashboard, and requires a token of this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import structlog

from baton.clock import Clock, SystemClock
from baton.cluster.backend_process import StartError, tail
from baton.cluster.gpus import VISIBLE, GpuAssignment, uses_gpus
from baton.cluster.interfaces import Seen
from baton.config import ClusterConfig
from baton.config.schema import PoolConfig
from baton.core import Role
from baton.errors import BatonError, Cancelled, NoWorker

LOCAL = "local"
CONNECT_S = 5.0
START_ATTEMPTS = 3  # of a local Ray
SERVER = "gcs_server"  # the first process of a local Ray
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MB; Baton stores nothing in it

# Ray reads these at import or start. The third one binds a local Ray to 127.0.0.1.
LOCAL_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray hides the GPUs of workers with `device: cuda:N`
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",  # else all other workers see all GPUs
}


def namespace(cluster: str) -> str:
    """Return the Ray namespace of a cluster's actors. Their names are worker ids."""
    return f"baton-{cluster}"


def start_local(scratch: Callable[[], Path], cluster: str, gpus: int, check: Callable[[], None] = lambda: None) -> Any:
    """Start a Ray with `gpus` GPUs that ends with this process, and return the module `ray`. `scratch` creates its
    folder, with a short path because the folder holds unix sockets (107 bytes). Ray waits 30 s for its first server
    and does not notice that server's death, so a failed start is repeated. `check` raises Cancelled after a stop
    signal. Raises StartError, Cancelled.
    """
    os.environ.update(LOCAL_ENVIRONMENT)
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    options: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "num_cpus": 1}
    options["num_gpus"] = gpus  # Ray itself also counts GPUs that torch cannot use
    options["_temp_dir"] = str(scratch())
    for attempt in range(1, START_ATTEMPTS + 1):
        check()
        try:
            return _init(LOCAL, namespace=namespace(cluster), **options)
        except ConnectionError as error:
            failure = error
            log.warning("ray_not_started", attempt=attempt, attempts=START_ATTEMPTS, error=str(error)[:LONGEST])
            _end_partial_start()
    raise StartError(f"ray.address: Ray did not start: {failure}") from failure


def _end_partial_start() -> None:
    """Kill the servers of a Ray that did not start. `ray.shutdown` ends only those of one that did."""
    servers = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == SERVER:
                child.kill()
                servers.append(child)
    psutil.wait_procs(servers, END_S)


def connect(address: str, cluster: str) -> Any:
    """Join the Ray at `address`, and return the module `ray`. Raises NoWorker, Cancelled."""
    check_reachable(address)
    try:
        return _init(address, namespace=namespace(cluster))
    except ConnectionError as error:
        raise NoWorker(f"ray.address: cannot use Ray at {address!r}: {error}") from error


def _init(address: str, **options: Any) -> Any:
    """Call `ray.init`. Raises ConnectionError, Cancelled."""
    import ray

    ours = signal.getsignal(signal.SIGTERM)
    options |= {"configure_logging": False, "logging_level": logging.ERROR, "log_to_driver": False}
    try:
        ray.init(address=address, **options)
    except SystemExit:
        raise Cancelled("stopped while Ray was starting") from None
    except Exception as error:  # a process boundary: any error means that there is no Ray
        ray.shutdown()  # cleans up a partial start
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, ours)  # Ray's own handler would end the process without a drain
    return ray


def check_reachable(address: str) -> None:
    """Check that something answers at `address`, because Ray would retry for minutes. Raises NoWorker."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise NoWorker(f"ray.address: nothing answers at {address}: {error}") from None


def this_ray() -> Any:
    """Return the module `ray` in a process that Ray started."""
    import ray

    return ray


ASK_S = 0.5  # interval of calls to an actor that answers
SILENT_S = 10.0  # a found worker that does not answer for this long is judged by its lease
END_S = 5.0  # for killed actors to be gone
KIND_S = 1.0  # for actors ended by Ray to be gone before they are killed
LONGEST = 500  # characters of a text from Ray

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Worker:
    """One actor. `answer` is its pending call: one at a time, because the actor may be frozen."""

    role: Role
    born: float
    handle: Any = None
    answer: Any = None
    asked_at: float = -ASK_S
    found: bool = False
    pid: int | None = None
    process: psutil.Process | None = None  # on this machine; psutil signals no other process that has its id later
    ready: bool = False
    killed: bool = False
    ended: BatonError | None = None
    unplaced: NoWorker | None = None


class RayPlacement:
    """A `Placement` of Ray actors. `actor` is constructed with the config as JSON, the role, the id, a log file (empty
    for none) and `factories`. `open` calls `config` and `connect`, which returns the module `ray` in use. `logs` is a
    folder on this machine, or None with other hosts: then Ray keeps the output. `detached` actors outlive this process.
    Ray assigns GPUs, but `named` assigns those of pools with `device: cuda:N`, which Ray could not share.
    """

    def __init__(
        self,
        config: Callable[[], ClusterConfig],
        actor: type,
        factories: Mapping[Role, object],
        connect: Callable[[], Any],
        logs: Path | None,
        *,
        named: GpuAssignment | None = None,
        detached: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._named = named
        self._load_config, self._connect = config, connect
        self._logs = logs
        self._local = logs is not None
        self._actor, self._factories, self._detached = actor, factories, detached
        self._clock = clock or SystemClock()
        self._config: ClusterConfig
        self._json = ""
        self._ray: Any = None
        self._away = False
        self._workers: dict[str, _Worker] = {}

    def open(self) -> None:
        self._config = self._load_config()
        self._json = self._config.model_dump_json()
        self._ray = self._connect()

    def found(self) -> Mapping[str, Role]:
        """Return the workers that have a placement group. A group without its actor is removed."""
        if self._local:
            return {}
        prefix, roles = self._group_name(""), {}
        for entry in self._ray.util.placement_group_table().values():
            worker_id, _, role = entry["name"].removeprefix(prefix).rpartition(":")
            if entry["name"].startswith(prefix) and entry["state"] != "REMOVED":
                worker = _Worker(Role(role), self._clock.monotonic(), found=True)
                try:
                    worker.handle = self._ray.get_actor(worker_id, namespace=namespace(self._config.name))
                except ValueError:
                    self._give_back(worker_id, worker)
                else:
                    self._workers[worker_id] = worker
                    roles[worker_id] = worker.role
        return roles

    def start(self, worker_id: str, role: Role) -> None:
        worker = self._workers[worker_id] = _Worker(role, self._clock.monotonic())
        log_file = str(self._logs / f"{worker_id}.log") if self._logs is not None else ""
        try:
            actor = self._ray.remote(self._actor).options(**self._options(worker_id, role))
            worker.handle = actor.remote(self._json, role.value, worker_id, log_file, dict(self._factories))
        except Exception as error:  # noqa: BLE001  (a process boundary: any error means that no worker was started)
            worker.ended = StartError(f"{worker_id} was not started ({type(error).__name__}): {str(error)[:LONGEST]}")

    def _options(self, worker_id: str, role: Role) -> dict[str, Any]:
        """Return the actor's options, and begin to create its placement group."""
        lifetime = {"lifetime": "detached"} if self._detached else {}
        named = {"name": worker_id, "namespace": namespace(self._config.name), **lifetime}
        options = {**named, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 4}
        pool = self._config.prefill if role is Role.PREFILL else self._config.decode
        if self._local:
            return options | {"num_cpus": 0, **self._local_gpus(worker_id, role, pool)}
        gpus = pool.tensor_parallel if uses_gpus(self._config, pool, self._count_gpus()) else 0
        cpus = pool.threads * pool.tensor_parallel if pool.threads != "auto" else 1
        labels = self._labels(role)
        group = self._ray.util.placement_group(
            [{"CPU": cpus, **({"GPU": gpus} if gpus else {})}],
            strategy="STRICT_PACK",
            name=self._group_name(worker_id, role),
            bundle_label_selector=[labels] if labels else None,
            **lifetime,
        )
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        return options | {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}

    def _local_gpus(self, worker_id: str, role: Role, pool: PoolConfig) -> dict[str, Any]:
        """Return the options that give a worker of this machine its GPUs."""
        if self._named is None or not self._named.is_named(role):
            return {"num_gpus": pool.gpus}
        gpus = ",".join(self._named.take(worker_id, role) or ())
        return {"num_gpus": 0, "runtime_env": {"env_vars": {VISIBLE: gpus}}}

    def _count_gpus(self) -> int:
        return int(self._ray.cluster_resources().get("GPU", 0))

    def _group_name(self, worker_id: str, role: Role | None = None) -> str:
        return ":".join(["baton", self._config.name, *([worker_id, role.value] if role else [""])])

    def _labels(self, role: Role) -> dict[str, str]:
        pool = self._config.prefill if role is Role.PREFILL else self._config.decode
        return self._config.ray.node_labels | pool.node_labels

    def look(self) -> Mapping[str, Seen]:
        """Return all states without waiting. An actor that owes an answer gets no call; without Ray, none changes."""
        try:
            self._ask()
            self._away = False
        except Exception as error:  # noqa: BLE001  (a process boundary: the Ray head may be restarting)
            if not self._away:
                log.warning("ray_does_not_answer", error=type(error).__name__)
            self._away = True
        return {worker_id: self._seen(worker) for worker_id, worker in self._workers.items()}

    def _seen(self, worker: _Worker) -> Seen:
        if worker.ended is not None:
            return Seen("ended", error=worker.ended)
        silent = worker.found and worker.pid is None and self._clock.monotonic() - worker.born > SILENT_S
        return Seen("ready" if worker.ready or silent else "starting", worker.pid, worker.unplaced)

    def _ask(self) -> None:
        now = self._clock.monotonic()
        live = {name: worker for name, worker in self._workers.items() if worker.ended is None}
        for name, worker in live.items():
            if now - worker.asked_at < ASK_S:
                continue
            worker.asked_at = now
            if worker.killed:
                self._end(name, worker)  # again, because Ray may have been away
            if worker.answer is None:
                worker.answer = (worker.handle.pid if worker.pid is None else worker.handle.ready).remote()
            elif worker.pid is None:
                worker.unplaced = self._why_unplaced(name, worker)
        asked = [worker.answer for worker in live.values() if worker.answer is not None]
        done = self._ray.wait(asked, num_returns=len(asked), timeout=0)[0] if asked else []
        for name, worker in live.items():
            if worker.answer in done:
                answer, worker.answer = worker.answer, None
                self._take(name, worker, answer)

    def _take(self, worker_id: str, worker: _Worker, answer: Any) -> None:
        errors = self._ray.exceptions
        try:
            answered = self._ray.get(answer)
        except (errors.ActorDiedError, errors.RayTaskError) as error:
            self._end(worker_id, worker)  # after a RayTaskError the process still lives
            worker.ended = self._why_ended(worker_id, error)
        except errors.RayError as error:  # temporarily unreachable
            log.warning("actor_does_not_answer", worker=worker_id, error=type(error).__name__)
        else:
            if worker.pid is None:
                worker.pid, worker.unplaced, worker.asked_at = int(answered), None, -ASK_S
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.process = psutil.Process(worker.pid) if self._local else None
            else:
                worker.ready = True

    def _why_unplaced(self, worker_id: str, worker: _Worker) -> NoWorker | None:
        if self._local:
            return None
        with contextlib.suppress(ValueError):  # its group is gone
            group = self._ray.util.get_placement_group(self._group_name(worker_id, worker.role))
            entry = self._ray.util.placement_group_table(group)
            if entry["state"] != "CREATED":
                wanted = f"{entry['bundles'][0]} and the labels {self._labels(worker.role)}"
                return NoWorker(f"{worker_id} waits for a Ray node with {wanted}"[:LONGEST])
        return None

    def _why_ended(self, worker_id: str, error: Exception) -> BatonError:
        cause = vars(error).get("cause") or error
        if isinstance(cause, BatonError):
            return cause
        words = str(error).strip().splitlines() or [""]
        details = f"\n{tail(self._logs / f'{worker_id}.log')}" if self._logs else f" {words[-1][:LONGEST]}"
        return StartError(f"{worker_id} ended ({type(cause).__name__}):{details}")

    def kill(self, worker_id: str) -> None:
        worker = self._workers[worker_id]
        worker.killed = True
        self._end(worker_id, worker)

    def _end(self, worker_id: str, worker: _Worker) -> None:
        """End the process immediately, even a frozen one, for which Ray alone would need 5 s."""
        try:
            if worker.handle is not None:
                self._ray.kill(worker.handle, no_restart=True)
            self._give_back(worker_id, worker)
        except Exception as error:  # noqa: BLE001  (a process boundary)
            log.warning("actor_not_ended", worker=worker_id, error=type(error).__name__)
        if worker.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.process.kill()

    def _give_back(self, worker_id: str, worker: _Worker) -> None:
        """Remove the worker's placement group, which ends every process in it."""
        if not self._local:
            with contextlib.suppress(ValueError):  # already gone
                group = self._ray.util.get_placement_group(self._group_name(worker_id, worker.role))
                self._ray.util.remove_placement_group(group)

    def forget(self, worker_id: str) -> None:
        self._workers.pop(worker_id)
        if self._named is not None:
            self._named.give_back(worker_id)

    def stop(self, grace_s: float) -> None:
        if self._ray is None:
            return
        try:
            self._stop_actors(grace_s)
        except Exception as error:  # noqa: BLE001  (a process boundary: Ray itself may have died)
            log.warning("ray_did_not_stop_its_actors", error=repr(error))
        finally:
            if self._local:
                self._ray.shutdown()

    def _wait_until_gone(self, workers: list[_Worker]) -> None:
        """Let Ray end the actors, because it prints an error for processes that end in another way."""
        for handle in (worker.handle for worker in workers if worker.handle is not None):
            self._ray.kill(handle, no_restart=True)
        psutil.wait_procs([worker.process for worker in workers if worker.process is not None], timeout=KIND_S)

    def _stop_actors(self, grace_s: float) -> None:
        live = {name: worker for name, worker in self._workers.items() if worker.ended is None}
        stopping = [worker.handle.stop.remote() for worker in live.values() if worker.pid is not None]
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=grace_s)
        if self._local:
            with contextlib.suppress(Exception):  # a process boundary: the rest is killed anyway
                self._wait_until_gone(list(live.values()))
        for name in live:
            self.kill(name)
        ending = [worker.handle.pid.remote() for worker in live.values()]  # the call fails when the actor has ended
        if ending:
            self._ray.wait(ending, num_returns=len(ending), timeout=END_S)
