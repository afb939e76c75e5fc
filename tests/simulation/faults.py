"""The faults of a schedule. Each strikes after some step of the trace, and some are repaired later."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core import Role
from tests.simulation.world import Process, Stream, T

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.cluster import Cluster
    from tests.simulation.worker import WorkerHost

KINDS = [f"{what} {role}" for what in ("crash", "pause") for role in Role]
KINDS += ["cut worker", "cut peer", "break channel", "flip", "crash router", "leave prefill", "leave decode"]
WEIGHTS = (4, 4, 2, 2, 2, 3, 3, 3, 1, 1, 1)
ORDERS = ("drain prefill", "drain decode", "turn prefill", "turn decode")
"""No faults: whatever is asked, nobody notices."""


@dataclass(frozen=True)
class Fault:
    """A fault after `step` of the trace. `number` chooses among its possible targets; `long_s`: duration of a pause."""

    kind: str
    step: int
    number: int
    long_s: float

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}"


def draw(rng: random.Random, lease_s: float, *, routers: int) -> list[Fault]:
    """Draw up to six faults. Every eighth schedule has none."""
    count = rng.choice((0, 1, 1, 2, 2, 3, 4, 6))
    kinds = rng.choices(KINDS, WEIGHTS, k=count)
    faults = [
        Fault(kind, int(rng.expovariate(1 / 200.0)), rng.randrange(1000), lease_s * rng.choice((0.1, 0.5, 1.2, 2.0)))
        for kind in kinds
    ]
    return [fault for fault in faults if fault.kind != "crash router" or routers > 1]


def orders(rng: random.Random) -> list[Fault]:
    kinds = rng.choices(ORDERS, k=rng.randint(1, 4))
    return [Fault(kind, int(rng.expovariate(1 / 200.0)), rng.randrange(1000), 0.0) for kind in kinds]


class Faults:
    """Injects faults into a cluster. `struck`: the kinds of those that took effect."""

    def __init__(self, cluster: Cluster, faults: list[Fault]) -> None:
        self.struck: list[str] = []
        self._cluster, self._world = cluster, cluster.world
        for fault in faults:
            self._world.at(max(1, fault.step), lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def _strike(self, fault: Fault) -> None:
        what, _, whom = fault.kind.partition(" ")
        if what in {"crash", "pause", "leave", "drain", "turn"} and whom != "router":
            hit = self._worker(fault, what, Role(whom))
        else:
            acts = {"crash": self._crash_router, "cut": self._cut, "break": self._break, "flip": self._flip}
            hit = acts[what](fault, whom)
        if hit and fault.kind in ORDERS:
            self._world.note("ORDER", fault.kind, hit)
        elif hit:
            self.struck.append(fault.kind)
            self._world.note("FAULT", fault.kind, hit)

    def _worker(self, fault: Fault, what: str, role: Role) -> str:
        hosts = [host for host in self._cluster.live if host.plan.role is role and not host.process.paused]
        if what in {"drain", "turn"}:
            hosts = [host for host in hosts if not (host.told or host.role.draining)]
        if what == "turn":  # operators would not turn a role's last worker, or its last one with shapes
            exact = {host for host in hosts if host.plan.shapes is not None}
            hosts = [host for host in hosts if (exact if host in exact else set(hosts)) - {host}]
        if not hosts:
            return ""
        host = hosts[fault.number % len(hosts)]
        if what == "crash":
            host.process.kill()
        elif what == "leave":
            host.leave()
        elif what in {"drain", "turn"}:
            host.drain(turn=what == "turn")
        else:
            self._pause(host, fault.long_s)
        return host.name

    def _pause(self, host: WorkerHost, long_s: float) -> None:
        host.process.pause()
        self._world.loop.call_later(long_s, self._resume, host.process)

    def _resume(self, process: Process) -> None:
        self._world.note("RESUME", process)
        process.resume()

    def _crash_router(self, fault: Fault, whom: str) -> str:
        alive = [router.process for router in self._cluster.routers if router.process.alive]
        return self._one(fault, alive if len(alive) > 1 else [], Process.kill)

    def _cut(self, fault: Fault, whom: str) -> str:
        return self._one(fault, [s for s in self._world.streams if s.kind == whom and s.open], Stream.cut)

    def _break(self, fault: Fault, whom: str) -> str:
        transport = self._cluster.transport
        open_ones = [name for name, meeting in transport.meetings.items() if not meeting.closed]
        return self._one(fault, open_ones, lambda broken: transport.break_all(lambda name: name == broken))

    def _one(self, fault: Fault, targets: list[T], act: Callable[[T], object]) -> str:
        """Act on one of the targets. Return its name, or an empty string without any."""
        if not targets:
            return ""
        target = targets[fault.number % len(targets)]
        act(target)
        return str(target)

    def _flip(self, fault: Fault, whom: str) -> str:
        self._cluster.transport.flips += 1
        return "the next frame"
