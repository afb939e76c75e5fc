"""One schedule's world: processes that crash and freeze, streams that break, a trace, violations, and a ledger."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from baton.errors import LedgerError
from baton.ledger.ownership import OwnershipRecord, RecordState
from tests.simulation.clock import VirtualLoop
from tests.support.ledger import OwnershipTable

if TYPE_CHECKING:
    from baton.core import HandoffId, WorkerInfo, WorkerRef

T = TypeVar("T")

PROCESS: ContextVar[Process] = ContextVar("process")
END = object()
"""The value that a pipe returns when its stream has ended."""


class World:
    """A simulated world. `at(n, act)` runs `act` right after the n-th step of the trace."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.loop = asyncio.get_running_loop()
        self.trace: deque[str] = deque(maxlen=60)
        self.steps = 0
        self.met: Counter[str] = Counter()
        self.violations: list[str] = []
        self.facts = Facts(self)
        self.listening: dict[str, Listener] = {}
        self.streams: list[Stream] = []
        self.slow = self.rng.choice((0.0, 0.0, 0.02, 0.2))  # the rate of slow messages
        self._due: dict[int, list[Callable[[], None]]] = {}
        self._names: Counter[str] = Counter()

    def note(self, kind: str, *facts: object) -> None:
        """Add one step to the trace."""
        self.steps += 1
        self.met[kind] += 1
        self.met.update(str(fact).partition("(")[0] for fact in facts[1:])
        self.trace.append(f"{self.loop.time() - 1000:9.4f} {self.steps:4} {kind} " + " ".join(map(str, facts)))
        for act in self._due.pop(self.steps, ()):
            self.loop.call_soon(act)

    def at(self, step: int, act: Callable[[], None]) -> None:
        self._due.setdefault(step, []).append(act)

    def broken(self, what: str) -> None:
        self.note("VIOLATION", what)
        self.violations.append(what)

    def random_for(self, name: str) -> random.Random:
        """Return a separate generator for each use, so that no draw depends on the order of other draws."""
        self._names[name] += 1
        return random.Random(f"{self.seed} {name} {self._names[name]}")

    def delay(self, rng: random.Random) -> float:
        """Return the delay of a message or thread in seconds, mostly close to 0."""
        if rng.random() < self.slow:
            return min(rng.expovariate(5.0), 0.5)  # capped, because a late heartbeat must not be possible by chance
        return rng.expovariate(2000.0)


class Facts:
    """The promises of decode workers about all handoffs of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.fenced: set[tuple[str, HandoffId]] = set()
        self.commits: dict[HandoffId, str] = {}
        self.settled: set[tuple[str, HandoffId]] = set()  # the router received the commit, or released the handoff

    def said_fenced(self, worker: str, handoff: HandoffId) -> None:
        self.fenced.add((worker, handoff))
        if self.commits.get(handoff) == worker and (worker, handoff) not in self.settled:
            self._world.broken(f"{worker} says that {handoff} is fenced, which it has committed")

    def committed(self, worker: str, handoff: HandoffId) -> None:
        if handoff in self.commits:
            self._world.broken(f"{worker} commits {handoff}, which {self.commits[handoff]} has committed")
        if (worker, handoff) in self.fenced:
            self._world.broken(f"{worker} commits {handoff}, of which it has said that it is fenced")
        self.commits[handoff] = worker


class Process:
    """Tasks that end together and freeze together."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive = True
        self.minted = 0  # names
        self.on_death: list[Callable[[], None]] = []
        self.rng = world.random_for(name)
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._running = asyncio.Event()
        self._running.set()

    def __str__(self) -> str:
        return self.name

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        return self.run(lambda: self.world.loop.create_task(work, name=f"{self.name} {name}"))

    def start(self, work: Coroutine[Any, Any, Any], name: str = "") -> None:
        """Start a task without waiting for it."""
        _ = self.spawn(work, name)

    def run(self, make: Callable[[], Any]) -> Any:
        """Call `make` as this process, so that its tasks belong to the process."""
        context = copy_context()
        context.run(PROCESS.set, self)
        return context.run(make)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        if not self.alive:
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and self.alive:
            self.world.broken(f"{self.name}: task {task.get_name()} failed: {error!r}")

    async def turn(self) -> None:
        """Let a thread of this process continue, after a delay and not while the process is stopped."""
        await asyncio.sleep(self.world.delay(self.rng))
        await self._running.wait()

    async def resumed(self) -> None:
        await self._running.wait()

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def kill(self) -> None:
        """End the process and its state. Its peers learn of that later."""
        if not self.alive:
            return
        self.alive = False
        for act in self.on_death:
            act()
        for task in list(self._tasks):
            task.cancel()
        self._running.set()


class Pipe:
    """One direction of a stream. Messages arrive late and in order; after a cut, none arrive from some point on."""

    def __init__(self, world: World, name: str, to: Process) -> None:
        self._world, self._to = world, to
        self.rng = world.random_for(name)
        self._flight: deque[Any] = deque()
        self._arrived: deque[Any] = deque()
        self._filled = asyncio.Event()
        self._last = 0.0
        self.closed = False

    def send(self, message: Any) -> None:
        if self.closed:
            return
        if message is END:
            self.closed = True
        self._flight.append(message)
        self._last = max(self._last, self._world.loop.time() + self._world.delay(self.rng))
        self._world.loop.call_at(self._last, self._arrive)

    def cut(self) -> None:
        """Deliver a random part of the messages in transit, then, after a delay, the end."""
        if self.closed:
            return
        self._flight = deque(list(self._flight)[: self.rng.randint(0, len(self._flight))])
        self._last += self.rng.choice((0.0, 0.001, 0.05, 0.5)) * self.rng.random()
        self.send(END)

    def drop(self) -> None:
        """Stop reading at this end."""
        self.closed = True
        self._flight.clear()
        self._arrived.clear()

    def _arrive(self) -> None:
        if self._flight:
            self._arrived.append(self._flight.popleft())
            self._filled.set()

    async def receive(self) -> Any:
        """Return the next message or END. Waits while the receiver is stopped."""
        while True:
            await self._filled.wait()
            await self._to.resumed()
            if self._arrived:
                break
            self._filled.clear()
        if self._arrived[0] is END:
            return END
        return self._arrived.popleft()


@dataclass(eq=False)
class Stream:
    """Two pipes between a client and a server process."""

    kind: str
    name: str
    client: Process
    server: Process
    up: Pipe
    down: Pipe
    returned: bool = False  # whether the server's handler ended the stream by itself

    def __str__(self) -> str:
        return self.name

    @property
    def open(self) -> bool:
        return not self.up.closed and not self.down.closed

    def cut(self) -> None:
        """Break the stream. Each end sees it after its own delay."""
        self.up.cut()
        self.down.cut()

    def leave(self, who: Process) -> None:
        """Close one end. It receives nothing more, and the other end sees the close later."""
        mine, theirs = (self.down, self.up) if who is self.client else (self.up, self.down)
        mine.drop()
        theirs.cut()


Handler = Callable[[Stream], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Listener:
    """The process that listens at an address, and its handlers by kind of stream."""

    process: Process
    handlers: dict[str, Handler]


def connect(world: World, client: Process, address: str, kind: str) -> Stream | None:
    """Open a stream to the process that listens there, or return None without one."""
    listener = world.listening.get(address)
    if listener is None or not listener.process.alive:
        return None
    server = listener.process
    name = f"{kind} {client}>{server}"
    stream = Stream(kind, name, client, server, Pipe(world, name + " up", server), Pipe(world, name + " down", client))
    world.streams.append(stream)
    client.on_death.append(stream.up.cut)
    server.on_death.append(stream.down.cut)
    server.start(listener.handlers[kind](stream), kind)
    return stream


def task_factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """Create a task that belongs to the process that starts it."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
    process = PROCESS.get(None)
    if process is not None:
        process.adopt(task)
    return task


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work` on a new loop. All remaining tasks are cancelled."""
    loop = VirtualLoop()
    loop.set_task_factory(task_factory)
    try:
        return loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


# --- the cluster's registry with its leases


class SimLedger:
    """A ledger that is never away: the parts of `baton.ledger.registry.Ledger` that leases and worker pools use.

    It is the ownership log too. Records are visible immediately, unless the schedule loses them.
    """

    def __init__(self, world: World, lease_s: float) -> None:
        self._world, self._lease_s = world, lease_s
        self._entries: dict[str, tuple[WorkerInfo, float]] = {}
        self._owned = OwnershipTable()
        self._streams: dict[str, str] = {}
        self._rng = world.random_for("ledger")

    async def register(self, info: WorkerInfo) -> bool:
        """Register a worker. If two have the same id, the later minted one stays."""
        found = self._entries.get(info.ref.worker_id)
        if found is not None and found[0].ref.incarnation.counter > info.ref.incarnation.counter:
            return False
        self._entries[info.ref.worker_id] = (info, self._until())
        return True

    async def renew(self, ref: WorkerRef, progress: int) -> bool:
        """Renew a lease. Return False if the worker is not registered."""
        found = self._entries.get(ref.worker_id)
        if found is None or found[0].ref != ref or found[1] < self._world.loop.time():
            return False
        self._entries[ref.worker_id] = (found[0], self._until())
        return True

    async def workers(self) -> list[WorkerInfo]:
        return [info for info, until in self._entries.values() if until >= self._world.loop.time()]

    def note(self, handoff: HandoffId, owner: WorkerRef, router_id: str, state: RecordState, stream: str) -> None:
        self._owned.write(handoff, owner, router_id, state)
        if stream:
            self._streams[stream] = handoff.request_id

    async def find(self, stream: str) -> OwnershipRecord | None:
        """Find a record like `OwnershipStore.find`. Sometimes none is found, or Redis is away."""
        await asyncio.sleep(self._world.delay(self._rng))
        if self._rng.random() < 0.1:
            raise LedgerError("away")
        return self._owned.read(self._streams.get(stream, stream)) if self._rng.random() < 0.9 else None

    def _until(self) -> float:
        return self._world.loop.time() + self._lease_s
