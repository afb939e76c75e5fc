"""The faults of a soak. A strike is a context manager: a fault that does not end immediately lasts for its block."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import psutil
import redis

from benchmarks.faults.home import GONE_S, LEASE_S, NAME, ClusterBroken, Field, wait
from benchmarks.faults.load import Load
from tests.support.cluster_process import is_zombie

BRIEF_S = LEASE_S / 3
WITHIN_S = 180  # for the commands of an operator
STEP_S = 3600
SPARE_BYTES = 1 << 20  # that a process may still allocate
SLOW = ("rate", "4mbit", "burst", "32kbit", "latency", "400ms")
UNREACHABLE = ("127.0.0.1", 1)  # a master that makes Redis a replica, which rejects writes


@dataclass(frozen=True, slots=True)
class Scene:
    """The cluster, its clients, and the number that chooses among the processes of a kind."""

    field: Field
    load: Load
    draw: int

    def router(self) -> tuple[str, int]:
        names = sorted(name for name in self.field.cluster.state().processes if name.startswith("router"))
        name = names[self.draw % len(names)]
        return name, self.field.cluster.pid(name)

    def worker(self, role: str) -> tuple[str, int]:
        found = self.field.workers(role)
        if not found:
            raise ClusterBroken(f"no {role} worker")
        return found[self.draw % len(found)]

    def any(self) -> tuple[str, int]:
        return self.router() if self.draw % 3 == 0 else self.worker(("prefill", "decode")[self.draw % 2])

    def redis(self) -> tuple[str, int]:
        return "redis", self.field.cluster.pid("redis")

    def supervisor(self) -> tuple[str, int]:
        return "supervisor", self.field.cluster.state().supervisor.pid


Strike = Callable[[Scene], AbstractContextManager[str]]
Find = Callable[[Scene], tuple[str, int]]


@contextmanager
def _signalled(find: Find, number: signal.Signals, scene: Scene) -> Iterator[str]:
    """End a process and wait for its end. One that got SIGTERM first lets its requests go."""
    name, pid = find(scene)
    os.kill(pid, number)
    if not wait(lambda: is_zombie(pid), GONE_S):
        raise ClusterBroken(f"{name} does not end after {number.name}")
    yield name


@contextmanager
def _frozen(find: Find, seconds: float, scene: Scene) -> Iterator[str]:
    """Freeze a process for so long. A worker that is frozen for long loses its lease and is replaced."""
    name, pid = find(scene)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
        yield name
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def _killed_supervisor(scene: Scene) -> Iterator[str]:
    """Kill the supervisor, with which all processes die, as with a host. Then start the cluster again."""
    name, pid = scene.supervisor()
    os.kill(pid, signal.SIGKILL)
    wait(lambda: not scene.field.home.processes(), GONE_S)
    scene.field.up()
    yield name


@contextmanager
def _limited(find: Find, what: int, now: Callable[[psutil.Process], int], scene: Scene) -> Iterator[str]:
    """Let a process have no more of a resource than it has now."""
    name, pid = find(scene)
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (now(psutil.Process(pid)), before[1]))
    try:
        time.sleep(BRIEF_S)
        yield name
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, what, before)


@contextmanager
def _redis(
    during: Callable[[redis.Redis], object], after: Callable[[redis.Redis], object], scene: Scene
) -> Iterator[str]:
    with closing(redis.Redis.from_url(scene.field.cluster.state().redis_url)) as client:
        during(client)
        time.sleep(BRIEF_S)
        yield "redis"
        after(client)


@contextmanager
def _full_disk(scene: Scene) -> Iterator[str]:
    """Fill the disk of the state folder, the logs and the histories."""
    path = scene.field.home.path / "filler"
    try:
        with suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        time.sleep(BRIEF_S)
        yield "disk"
    finally:
        path.unlink()


@contextmanager
def _stepped(seconds: int, scene: Scene) -> Iterator[str]:
    """Let the wall clock of all processes jump, and jump back."""
    scene.field.step_clock(seconds)
    try:
        time.sleep(BRIEF_S)
        yield "wall clock"
    finally:
        scene.field.step_clock(0)


@contextmanager
def _commands(on: tuple[str, ...], off: tuple[str, ...], scene: Scene) -> Iterator[str]:
    subprocess.run(on, check=True)
    try:
        time.sleep(BRIEF_S)
        yield "loopback"
    finally:
        subprocess.run(off, check=True)


@contextmanager
def _operated(scene: Scene, *commands: tuple[str, ...]) -> Iterator[str]:
    for command in commands:
        done = scene.field.home.baton(*command, "--name", NAME, "--wait", WITHIN_S, timeout=2 * WITHIN_S)
        if done.returncode:
            raise ClusterBroken(f"baton {' '.join(command)}: {done.stdout}{done.stderr}")
    yield " ".join(commands[0])


@contextmanager
def _drained(scene: Scene) -> Iterator[str]:
    name, _ = scene.worker(("prefill", "decode")[scene.draw % 2])
    with _operated(scene, ("drain", name)):
        yield name


@contextmanager
def _left(scene: Scene) -> Iterator[str]:
    scene.load.leave_all()
    yield "clients"


def _scaled(*sizes: str) -> Strike:
    return lambda scene: _operated(scene, *(("scale", *size.split()) for size in sizes))


def _worker(role: str) -> Find:
    return lambda scene: scene.worker(role)


def _descriptors(process: psutil.Process) -> int:
    return process.num_fds()


def _memory(process: psutil.Process) -> int:
    return int(process.memory_info().vms) + SPARE_BYTES


_FINDS: dict[str, Find] = {"prefill": _worker("prefill"), "decode": _worker("decode")}
_FINDS |= {"router": Scene.router, "redis": Scene.redis, "supervisor": Scene.supervisor}

STRIKES: dict[str, Strike] = {
    **{
        f"kill-{name}": partial(_signalled, _FINDS[name], signal.SIGKILL)
        for name in ("router", "prefill", "decode", "redis")
    },
    **{f"freeze-{name}": partial(_frozen, find, BRIEF_S) for name, find in _FINDS.items()},
    **{f"freeze-{name}-long": partial(_frozen, _FINDS[name], 1.5 * LEASE_S) for name in ("prefill", "decode")},
    "kill-supervisor": _killed_supervisor,
    "term-worker": partial(_signalled, Scene.any, signal.SIGTERM),
    "empty-redis": partial(_redis, lambda client: client.flushall(), lambda client: None),
    "pause-redis": partial(_redis, lambda client: client.client_pause(int(1e3 * BRIEF_S)), lambda client: None),
    "readonly-redis": partial(_redis, lambda c: c.replicaof(*UNREACHABLE), lambda c: c.replicaof("NO", "ONE")),
    "descriptors": partial(_limited, Scene.any, resource.RLIMIT_NOFILE, _descriptors),
    "memory": partial(_limited, Scene.any, resource.RLIMIT_AS, _memory),
    "disk-full": _full_disk,
    "network-cut": partial(_commands, ("ip", "link", "set", "lo", "down"), ("ip", "link", "set", "lo", "up")),
    "network-slow": partial(
        _commands,
        ("tc", "qdisc", "add", "dev", "lo", "root", "tbf", *SLOW),
        ("tc", "qdisc", "del", "dev", "lo", "root"),
    ),
    "drain": _drained,
    "restart": lambda scene: _operated(scene, ("restart",)),
    "scale": _scaled("prefill=2 decode=3", "prefill=2 decode=2"),
    "turn": _scaled("prefill=1 decode=3", "prefill=2 decode=2"),
    "cancels": _left,
    "clock-forward": partial(_stepped, STEP_S),
    "clock-back": partial(_stepped, -STEP_S),
}
ISOLATED = frozenset({"disk-full", "network-cut", "network-slow"})


def why_not(kind: str, *, isolated: bool) -> str:
    """Return why a kind of fault is impossible here, or an empty string."""
    if kind in ISOLATED and not isolated:
        return "needs user namespaces (unshare --user --net --mount)"
    if kind == "network-slow" and not shutil.which("tc"):
        return "needs tc of iproute2"
    if kind.startswith("clock-") and not shutil.which("cc"):
        return "needs a C compiler (cc)"
    return ""
