"""The surroundings of a controller: workers, ledger and control state on a clock that the test moves."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from baton.cluster.backend_process import StartError
from baton.cluster.controller import Controller
from baton.cluster.interfaces import Seen
from baton.config import ClusterConfig
from baton.core import Incarnation, KVLayout, Role, WorkerInfo, WorkerRef
from baton.errors import BatonError, LedgerError
from baton.testing import FakeClock

LEASE_S = 9.0
LOAD_S = 2.0
WORK_S = 3.0  # remaining work of a worker when it receives a drain or role change
LAYOUT = KVLayout(1, 1, 1, 16, "float32")


@dataclass
class Process:
    """A simulated worker: it loads, registers, sends heartbeats, and obeys commands after some time."""

    worker_id: str
    role: Role
    born: float
    pid: int | None
    state: Literal["starting", "ready", "ended"] = "starting"
    incarnation: Incarnation | None = None
    frozen: bool = False
    error: BatonError | None = None
    busy_until: float | None = None


@dataclass
class World:
    """Placement, ledger and control state in one, with capacity for `room` workers."""

    prefill: int = 1
    decode: int = 1
    room: int = 100
    turn: bool = True
    answers_s: float = 1.0  # until a found worker has answered a new controller
    broken: set[str] = field(default_factory=set)  # worker ids whose process fails at start; "*": all
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self):
        self.processes: dict[str, Process] = {}
        self.unheard: dict[str, float] = {}  # until when a found worker has not answered
        self.leases: dict[str, tuple[WorkerInfo, float]] = {}
        self.said: Any = None
        self.orders: dict[str, Any] = {}
        self.report: Any = None
        self.kept: Any = None  # the last report, also of a controller that died long ago
        self.routed: list[Any] = []
        self.away = False  # Redis is unreachable for everything
        self.cut = False  # Redis is unreachable for workers
        self.minted = 0
        self.started: list[str] = []
        self.killed: list[str] = []
        self.followers: list[Any] = []

    def controller(self, autoscaler=None, **config) -> Controller:
        """Return a new controller, as after a restart."""
        file = {
            "name": "test",
            "ledger": {"lease_s": LEASE_S},
            "scaling": {"turn": self.turn},
            "prefill": {"replicas": self.prefill, "device": "cpu"},
            "decode": {"replicas": self.decode, "device": "cpu"},
        }
        self.processes = {name: one for name, one in self.processes.items() if one.state != "ended"}
        self.unheard = dict.fromkeys(self.found(), self.clock.monotonic() + self.answers_s)  # as with `RayPlacement`
        this: Any = self
        return Controller(ClusterConfig.model_validate(file | config), this, this, this, self.clock, autoscaler)

    def open(self):
        pass

    def found(self):
        return {p.worker_id: p.role for p in self.processes.values() if p.state != "ended"}

    def start(self, worker_id, role):
        assert worker_id not in self.processes, "it runs, or was not forgotten"
        self.processes[worker_id] = Process(worker_id, role, self.clock.monotonic(), None)
        self.unheard.pop(worker_id, None)
        self.started.append(worker_id)

    def look(self):
        return {p.worker_id: self._seen(p) for p in self.processes.values()}

    def _seen(self, process):
        if process.state == "ready" and self.clock.monotonic() < self.unheard.get(process.worker_id, 0.0):
            return Seen("starting", None)
        return Seen(process.state, process.pid, process.error)

    def kill(self, worker_id):
        self.killed.append(worker_id)
        self.die(worker_id, "killed")

    def forget(self, worker_id):
        assert self.processes.pop(worker_id).state == "ended"

    def _reach(self):
        if self.away:
            raise LedgerError("Redis at nowhere: gone")
        return self

    def follow(self, forgotten):
        self.followers.append(forgotten)

    async def workers(self):
        leases = sorted(self._reach().leases.items())
        return [info for _, (info, until) in leases if until > self.clock.monotonic()]

    async def plan(self):
        return self._reach().said

    async def put_plan(self, plan):
        if self._reach().said is not None and self.said.number >= plan.number:
            return False
        self.said = plan
        return True

    async def order(self, ref):
        found = self._reach().orders.get(ref.worker_id)
        return found if found is not None and found.incarnation == str(ref.incarnation) else None

    async def put_order(self, worker_id, order):
        self._reach().orders[worker_id] = order

    async def drop_order(self, worker_id):
        self._reach().orders.pop(worker_id, None)

    async def routers(self):
        return self._reach().routed

    async def control(self):
        return self._reach().report

    async def last_control(self):
        return self._reach().kept

    async def put_control(self, report, lease_s):
        self._reach().report = self.kept = report

    async def drop_control(self):
        self._reach().report = self.kept = None

    def die(self, worker_id, why="its cable was pulled"):
        process = self.processes[worker_id]
        process.state, process.error = "ended", StartError(f"{worker_id}: {why}")

    def freeze(self, worker_id):
        self.processes[worker_id].frozen = True

    def forget_store(self):
        """Empty the store. Live workers register again with their next heartbeat."""
        self.leases, self.orders, self.said, self.report, self.kept = {}, {}, None, None, None
        for forgotten in self.followers:
            forgotten()

    def ready(self, role) -> list[str]:
        """Return the workers that would serve: alive, registered, and without a stop command."""
        return [
            p.worker_id
            for p in self.processes.values()
            if p.state == "ready" and not p.frozen and p.role is role and p.busy_until is None
        ]

    def tell(self, **change) -> None:
        self.said = replace(self.said, **change, number=self.said.number + 1, by="operator")

    def slots(self) -> dict[str, Any]:
        return {slot.worker_id: slot for slot in self.report.slots}

    def states(self) -> dict[str, str]:
        return {name: slot.state for name, slot in self.slots().items()}

    def kinds(self) -> list[str]:
        return [decision.kind for decision in self.report.decisions]

    def advance(self, seconds: float) -> None:
        """Advance the clock and simulate each process."""
        self.clock.advance(seconds)
        for process in self.processes.values():
            if not process.frozen:
                self._live(process, self.clock.monotonic())

    def _live(self, process, now):
        if process.state == "starting":
            self._load(process, now)
        if process.state != "ready":
            return
        order = self.orders.get(process.worker_id)
        told = order is not None and order.incarnation == str(process.incarnation) and not order.wish
        if told and process.busy_until is None:
            process.busy_until = now + WORK_S
        if process.busy_until is None or now < process.busy_until:
            self._beat(process, now)
        else:
            self._obey(process, order, now)

    def _load(self, process, now):
        if process.pid is None:
            if sum(p.pid is not None and p.state != "ended" for p in self.processes.values()) >= self.room:
                return
            process.pid, process.born = 100 + len(self.started), now
        if self.broken & {process.worker_id, "*"}:
            self.die(process.worker_id, "no such model")
        elif now - process.born >= LOAD_S and not self.away:
            self._enter(process, now)

    def _enter(self, process, now):
        self.minted += 1
        process.state, process.incarnation, process.busy_until = "ready", Incarnation(1, self.minted), None
        self._beat(process, now)

    def _beat(self, process, now):
        if self.away or self.cut:
            return
        ref = WorkerRef(process.worker_id, process.incarnation, "127.0.0.1:1")
        info = WorkerInfo(ref, process.role, "f", "m", 100, 100, LAYOUT)
        self.leases[process.worker_id] = (info, now + LEASE_S)

    def _obey(self, process, order, now):
        self.leases.pop(process.worker_id, None)
        if order is None or order.drain:
            process.state, process.error = "ended", StartError("it ended with exit code 0")
        else:
            process.role = order.role
            self._enter(process, now)


async def run(world: World, controller: Controller, seconds: float, every_s: float = 0.5) -> None:
    for _ in range(round(seconds / every_s)):
        world.advance(every_s)
        await controller.poll()


async def begun(world: World, controller: Controller | None = None) -> Controller:
    controller = controller or world.controller()
    await controller.begin()
    await controller.poll()
    await run(world, controller, 3 * LOAD_S)
    assert controller.ready, world.report
    return controller


async def started(**sizes: Any) -> tuple[World, Controller]:
    world = World(**sizes)
    return world, await begun(world)


async def again(world: World, seconds: float) -> Controller:
    """Replace the controller, which was killed, and run the new one for `seconds`."""
    controller = world.controller()
    await controller.begin()
    await run(world, controller, seconds)
    return controller
