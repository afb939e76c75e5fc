"""The cluster of a soak in its own folder, and everything that it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from baton import Client
from baton.errors import BatonError
from tests.support.cluster_process import ClusterProcess, Home, is_zombie

NAME = "soak"
ROUTERS, WORKERS = 2, 4
LEASE_S = 3.0
SETS = (
    f"name={NAME}",
    "model.max_model_len=1024",
    f"router.replicas={ROUTERS}",
    "router.queue.max_wait_s=60",
    "router.local_prefill=never",
    "prefill.replicas=2",
    "decode.replicas=2",
    "decode.kv_memory=4MiB",
    f"ledger.lease_s={LEASE_S}",
    "ledger.heartbeat_s=0.3",
    "transfer.frame_deadline_s=3",
    "scaling.drain_s=10",
)
CONTROL = ("retry.attempts=1",)
KEPT = {"lock", "logs", "up.out"}  # files of a stopped cluster
CLOCK_STEP = Path(__file__).with_name("clock_step.c")
SEGMENTS = Path("/dev/shm")
INSIDE = "BATON_SOAK_NAMESPACE"  # set in a namespace of this program
ENTER = """
set -e
ip link set lo up
mount -t tmpfs -o size=256m soak "$0"
mount -t tmpfs -o size=1g soak /dev/shm
exec "$@"
"""
READY_S, GONE_S = 120.0, 30.0


class ClusterBroken(Exception):
    """The cluster cannot be started, or does not come back."""


def wait(look: Callable[[], Any], within_s: float, every_s: float = 0.05) -> Any:
    """Wait until `look()` is true and return it, or its last false result after `within_s`."""
    deadline = time.monotonic() + within_s
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(every_s)
    return found


def enter(folder: Path, command: list[str]) -> int | None:
    """Run a command in its own network and mount namespace, with a small disk at `folder`. None if that is impossible.

    Network and disk can fail there without root, and without an effect on other programs.
    """
    isolate = ["unshare", "--user", "--map-root-user", "--mount", "--net"]
    script = [*isolate, "bash", "-c", ENTER, str(folder)]
    try:
        if subprocess.run([*script, "true"], capture_output=True, check=False).returncode:
            return None
    except OSError:
        return None
    with subprocess.Popen([*script, *command], env={**os.environ, INSIDE: "1"}) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()  # it stops its cluster, and the end of the block waits for that
            raise


def _free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class Field:
    """A cluster at fixed addresses, so that clients find it again when all of it has died."""

    def __init__(self, folder: Path, history: Path, model: str, *, ray: bool, control: bool) -> None:
        self.isolated = INSIDE in os.environ
        self.home = Home(folder)
        self.history = history
        self.grpc, self.http = _free_address(), _free_address()
        self._config = "configs/local.yaml" if ray else "configs/no-ray.yaml"
        addresses = (f"router.grpc={self.grpc}", f"router.http={self.http}", "router.metrics=127.0.0.1:0")
        self._sets = [f"model.path={model}", *addresses, *SETS, *(CONTROL if control else ())]
        self._segments = _names(SEGMENTS)
        self.cluster = ClusterProcess(self.home, NAME)
        self._clock = folder / "clock"

    def wrap_clock(self) -> None:
        """Let the wall clock of all processes started from now on follow `step_clock`, if there is a C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            return
        library = self._clock.with_suffix(".so")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(CLOCK_STEP), "-o", str(library)], check=True)
        self.step_clock(0)
        os.environ |= {"LD_PRELOAD": str(library), "BATON_CLOCK_STEP": str(self._clock)}

    def step_clock(self, seconds: int) -> None:
        """Set the seconds that the wall clock is ahead."""
        self._clock.touch()
        with self._clock.open("r+b", buffering=0) as file:  # in place, because processes map it
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))

    def up(self) -> None:
        """Start the cluster. Raises ClusterBroken."""
        sets = [part for item in (*self._sets, f"history={self.history}") for part in ("--set", item)]
        done = self.home.baton("up", "-c", self._config, *sets, "--detach", timeout=READY_S)
        if done.returncode or not wait(self.healthy, READY_S):
            raise ClusterBroken(f"not ready: {done.stdout}{done.stderr}{self.home.logs()}")

    def healthy(self) -> bool:
        """Return whether all processes live and all routers are connected to two workers of each role."""
        state = self.cluster.state()
        if len(state.admins) != ROUTERS or any(is_zombie(process.pid) for process in state.processes.values()):
            return False
        return all(state.admins) and all(map(self._sees_all, state.admins))

    def _sees_all(self, admin: str) -> bool:
        try:
            with Client(self.grpc, admin=admin, timeout=3, max_retries=0) as client:
                infos = [one.info for one in client.cluster().workers if one.state == "connected"]
        except BatonError:
            return False
        roles = sorted(info.role.value for info in infos if not is_zombie(info.pid))
        return roles == ["decode"] * 2 + ["prefill"] * 2

    def workers(self, role: str) -> list[tuple[str, int]]:
        """Return names and process ids of the workers of a role that a router is connected to."""
        found = wait(lambda: [one for one in self._connected() if one.info.role.value == role], READY_S)
        return sorted((one.info.ref.worker_id, one.info.pid) for one in found)

    def _connected(self) -> list[Any]:
        try:
            return list(self.cluster.connected().values())
        except (BatonError, AssertionError):
            return []

    def census(self) -> dict[str, Any]:
        """Return the census of all workers, after up to a minute for releases and parked streams to end."""

        def idle() -> dict[str, Any] | None:
            census: dict[str, Any] = self._census()
            held = [one for worker in census["workers"] for one in worker["held"]]
            return None if held or census["problems"] or len(census["workers"]) != WORKERS else census

        return wait(idle, 60.0, 1.0) or self._census()

    def _census(self) -> dict[str, Any]:
        done = self.home.baton("status", "--census", "--json", "--name", NAME)
        if not done.stdout.strip():
            return {"workers": [], "problems": [f"no census: {done.stderr}"]}
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def down(self) -> dict[str, list[str]]:
        """Stop the cluster. Return processes, files and shared memory segments that are left."""
        self.home.baton("down", "--name", NAME)
        wait(lambda: not self.home.processes(), GONE_S)
        left = self.home.kill_all()
        files = sorted(_names(self.home.path / NAME) - KEPT)
        segments = sorted(_names(SEGMENTS) - self._segments) if self.isolated else []
        return {"processes": left, "files": files, "segments": segments}

    @contextlib.contextmanager
    def running(self) -> Iterator[Field]:
        """Run the cluster during the block. Kill what is left if the block fails."""
        try:
            self.up()
            yield self
        except BaseException:
            print(self.home.kill_all(), file=sys.stderr)
            raise
