"""Workers as Ray actors. Ray places, starts and replaces the processes; it carries no tokens and no KV.

The actor class is given by the caller, so this module knows no role. A local Ray listens on the loopback only, has
no dashboard, and asks for a token that lives as long as this process.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from baton.clock import Clock, SystemClock
from baton.cluster.pool import WorkerPlan
from baton.cluster.processes import POLL_S, START_TIMEOUT_S, StartError, tail
from baton.cluster.stop import Stop
from baton.config import load_config
from baton.core import Role
from baton.errors import BatonError, Cancelled, NoWorker

MAX_RESTARTS = 100
HOPELESS_S = 120.0  # so long without a replacement, and none will come
LOCAL = "local"
CONNECT_S = 5.0
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MB; nothing of ours goes through it

# Read by Ray when it is imported or started. The third makes a local Ray use 127.0.0.1 and nothing else.
LOCAL_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

log = structlog.get_logger(__name__)


class RayWorkers:
    """Workers as actors of a Ray that is started here (`local`) or of the one at `address`.

    `scratch` makes the folder of a local Ray; its path must be short, since it holds unix sockets (107 bytes).
    """

    def __init__(
        self,
        address: str,
        cluster: str,
        actor: type,
        factories: Mapping[Role, Callable[..., object]],
        scratch: Callable[[], Path],
        clock: Clock | None = None,
    ) -> None:
        self._address = address
        self._cluster = cluster
        self._actor = actor
        self._factories = factories
        self._scratch = scratch
        self._clock = clock or SystemClock()
        self._ray: Any = None
        self._handles: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}  # the answer that is awaited: one at a time, an actor may be frozen
        self._missing_since: dict[str, float] = {}
        self._plans: dict[str, WorkerPlan] = {}
        self._pids: dict[str, int] = {}

    def start(self, plans: Sequence[WorkerPlan]) -> None:
        """Begin to start all of them. Raises StartError (a local Ray) or NoWorker (another) when there is no Ray."""
        self._init()
        for plan in plans:
            options = {
                "name": f"baton-{self._cluster}-{plan.worker_id}",
                "max_restarts": MAX_RESTARTS,
                "max_task_retries": 0,
                "num_cpus": 0,
                "max_concurrency": 4,
            }
            remote = self._ray.remote(self._actor).options(**options)
            given = load_config(plan.config).model_dump_json(), plan.role.value, plan.worker_id, str(plan.log)
            self._handles[plan.worker_id] = remote.remote(*given, dict(self._factories))
            self._plans[plan.worker_id] = plan

    def _init(self) -> None:
        options: dict[str, Any] = {"configure_logging": False, "logging_level": logging.ERROR, "log_to_driver": False}
        if self._address == LOCAL:
            os.environ.update(LOCAL_ENVIRONMENT)
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "num_cpus": 1}
            options["_temp_dir"] = str(self._scratch())
        _check_reachable(self._address)
        import ray

        self._ray, ours = ray, signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=self._address, **options)
        except SystemExit:
            raise Cancelled("stopped while Ray was starting") from None
        except Exception as error:  # a process boundary: whatever Ray raises, there is no Ray
            reason = f"{type(error).__name__}: {error}"
            if self._address == LOCAL:
                raise StartError(f"ray.address: Ray did not start: {reason}") from error
            raise NoWorker(f"ray.address: no use of the Ray at {self._address!r}: {reason}") from error
        finally:
            signal.signal(signal.SIGTERM, ours)  # Ray puts one of its own there, which ends the process undrained

    def wait_ready(self, stop: Stop) -> None:
        deadline = self._clock.monotonic() + START_TIMEOUT_S
        waiting = {worker_id: handle.ready.remote() for worker_id, handle in self._handles.items()}
        while waiting:
            stop.check()
            for worker_id, answer in self._answers(waiting):
                try:
                    self._pids[worker_id] = int(self._ray.get(answer)["pid"])
                except self._ray.exceptions.RayError as error:
                    raise self._start_error(worker_id, error) from None
            if waiting and self._clock.monotonic() > deadline:
                raise StartError(f"not ready within {START_TIMEOUT_S:g} s: {', '.join(waiting)}")

    def _answers(self, waiting: dict[str, Any]) -> list[tuple[str, Any]]:
        """Those that have come by now; they are taken out of `waiting`."""
        done, _ = self._ray.wait(list(waiting.values()), num_returns=len(waiting), timeout=POLL_S)
        found = [(worker_id, answer) for worker_id, answer in waiting.items() if answer in done]
        for worker_id, _ in found:
            del waiting[worker_id]
        return found

    def _start_error(self, worker_id: str, error: Exception) -> BatonError:
        cause = _cause(error)
        if isinstance(cause, BatonError):
            return cause
        return StartError(f"{worker_id} did not start ({type(cause).__name__}):\n{tail(self._plans[worker_id].log)}")

    def poll(self) -> None:
        """Ray replaces the processes that died; a new one that cannot start is ended here, so that another follows."""
        for worker_id, handle in self._handles.items():
            if worker_id not in self._asked:
                self._asked[worker_id] = handle.ready.remote()
        for worker_id, answer in self._answers(self._asked):
            try:
                self._pids[worker_id] = int(self._ray.get(answer)["pid"])
                self._missing_since.pop(worker_id, None)
            except self._ray.exceptions.RayError as error:
                self._refused(worker_id, error)

    def _refused(self, worker_id: str, error: Exception) -> None:
        now = self._clock.monotonic()
        if now - self._missing_since.setdefault(worker_id, now) > HOPELESS_S:
            raise self._start_error(worker_id, error)
        if isinstance(_cause(error), BatonError):  # the process lives, its worker does not: Redis was away, say
            log.warning("worker_did_not_start", worker=worker_id, error=str(_cause(error)))
            self._ray.kill(self._handles[worker_id], no_restart=False)

    def pids(self) -> dict[str, int]:
        """Empty with a Ray elsewhere: there the same numbers are other processes."""
        return dict(self._pids) if self._address == LOCAL else {}

    def stop(self, grace_s: float) -> None:
        if self._ray is None:
            return
        try:
            self._stop_actors(grace_s)
        except Exception as error:  # noqa: BLE001  (a process boundary: Ray itself may be what died)
            log.warning("ray_did_not_stop_its_actors", error=repr(error))
        finally:
            self._ray.shutdown()  # also of a Ray that did not start to the end

    def _stop_actors(self, grace_s: float) -> None:
        stopping = [handle.stop.remote() for handle in self._handles.values()]
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=grace_s)
        for handle in self._handles.values():
            self._ray.kill(handle, no_restart=True)


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes. Raises NoWorker."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise NoWorker(f"ray.address: nothing answers at {address}: {error}") from None


def _cause(error: Exception) -> BaseException:
    """What an actor's method raised; `error` itself if the actor could not be asked."""
    return vars(error).get("cause") or error
