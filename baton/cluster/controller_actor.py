"""The controller as a detached actor on the head of a Ray. Thin: `LocalControl` on a thread of its own.

Ray starts it again when it ends, also after the head was; it then finds the workers that run, and goes on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from baton.cluster.local import LocalControl
from baton.cluster.placement import Placement
from baton.cluster.ray_cluster import RayPlace, RayPlacement
from baton.cluster.ray_session import this_ray
from baton.config import ClusterConfig, config_from_json
from baton.core import Role
from baton.errors import BatonError, LedgerError
from baton.logs import configure_logging

POLL_S = 0.2
RETRY_S = 1.0
STOP_S = 30.0  # beyond its grace

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What this package does not know: classes and functions that Ray finds by their names, on every host."""

    actor: type
    factories: Mapping[Role, object]
    control: Callable[[ClusterConfig, Placement], LocalControl]


@dataclass(frozen=True, slots=True)
class ControlState:
    """How far it is. `error`: why a worker, or the controller itself, did not start; it goes on trying."""

    ready: bool
    workers: int
    error: BatonError | None = None


class ControllerActor:
    """`config_json`: the `ClusterConfig`, password included. `detached`: its workers outlive this process."""

    def __init__(self, config_json: str, parts: Parts, detached: bool) -> None:
        self._given = config_json
        self._config = config_from_json(config_json)
        configure_logging(self._config.log.level, self._config.log.format, "controller")
        place = RayPlace(None, detached=detached)
        self._placement = RayPlacement(lambda: self._config, parts.actor, parts.factories, this_ray, place)
        self._control = parts.control(self._config, self._placement)
        self._stop = threading.Event()
        self._grace_s = 0.0
        self._state = ControlState(ready=False, workers=0)
        self._thread = threading.Thread(target=self._main, name="controller", daemon=True)
        self._thread.start()

    def serves(self, config_json: str) -> bool:
        """Whether it was given this very config."""
        return config_json == self._given

    def state(self) -> ControlState:
        return self._state

    def pid(self) -> int:
        return os.getpid()

    def stop(self, grace_s: float) -> None:
        """End all workers, gently for so long; returns when they have ended."""
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
            os._exit(1)  # Ray starts the next one

    def _begin(self) -> bool:
        """False: told to stop before Redis could be used."""
        while not self._stop.is_set():
            try:
                self._control.start(self._config.redis.url)
            except LedgerError as error:
                log.warning("controller_without_redis", error=str(error))
                self._state = ControlState(ready=False, workers=0, error=error)
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
            self._state = ControlState(ready, self._control.size, error)
