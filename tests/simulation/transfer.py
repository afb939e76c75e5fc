"""The real sender, send queue, receiver and session, with coroutines as threads and a ring that both ends share.

It leaves out the contention of two threads for a lock. Block reads and writes are atomic here. `tests/unit/kvtransfer`
and tests/unit/decode test with threads that `withdraw`, `fence` and `take` wait for a running one. Everything else may
happen in between, because links and sessions continue after random delays.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from baton.engine.memory.exposed import pattern
from baton.errors import BatonError, ChannelBroken, HandoffError
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer import wire
from kvtransfer.receive_loop import EndOfHandoff, Frame
from kvtransfer.receiver import Session
from kvtransfer.send_queue import SendQueue
from kvtransfer.sender import REASON_S, SendChannel, Sender
from kvtransfer.transports.base import ChannelEnd, ChannelName, KeyRelay, Ring, Side
from tests.simulation.clock import SimCondition, SimQueue
from tests.simulation.world import PROCESS, Process, World

_LOOKS = 4  # checks for overdue answers per deadline: fewer than in production


@dataclass(eq=False)
class Meeting:
    """A channel: a ring that both ends share, and the frames that have left the sender."""

    staging: Tensor
    control_socket: dict[Side, SimControlSocket] = field(default_factory=dict)
    packets: dict[Side, deque[bytes]] = field(default_factory=lambda: {side: deque() for side in Side})
    left: set[int] = field(default_factory=set)
    closed: set[Side] = field(default_factory=set)  # the sides that have seen the end
    changed: SimCondition = field(default_factory=SimCondition)

    def close(self, side: Side) -> None:
        self.closed.add(side)
        self.changed.notify_all()
        if side in self.control_socket:
            self.control_socket[side].changed.notify_all()


class SimControlSocket:
    """`ControlPath`: packets arrive in order, but in no order relative to the Peer stream."""

    def __init__(self, world: World, meeting: Meeting, side: Side) -> None:
        self.changed = SimCondition()
        self._world, self._meeting, self._side = world, meeting, side
        self._packets = meeting.packets[side]
        self._rng, self._last = PROCESS.get().rng, 0.0
        meeting.control_socket[side] = self

    def takes(self, nbytes: int) -> bool:
        return self._rng.random() < 0.8

    def send(self, packet: bytes) -> None:
        self._check()
        due = self._world.loop.time() + self._world.delay(self._rng)
        self._last = max(self._last + 1e-9, due)  # timers for the same moment have no order
        self._world.loop.call_at(self._last, self._arrive, packet)

    def _arrive(self, packet: bytes) -> None:
        other = Side(1 - self._side)
        self._meeting.packets[other].append(packet)
        if other in self._meeting.control_socket:
            self._meeting.control_socket[other].changed.notify_all()

    @property
    def ready(self) -> bool:
        return bool(self._packets) or self._side in self._meeting.closed

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Return a packet or None. Never waits; callers wait for `changed`."""
        if self._packets:
            return self._packets.popleft()
        self._check()
        return None

    def wake(self) -> None:
        self.changed.notify_all()

    def _check(self) -> None:
        if self._side in self._meeting.closed:
            raise ChannelBroken("closed")


class SimTransport:
    """The transport of all workers of a world. Half of the worlds have a control socket.

    `flips`: number of later frames with a flipped byte.
    """

    name = reach = "sim"
    one_sided, sends = False, True
    device = torch.device("cpu")

    def __init__(self, world: World) -> None:
        self.flips = 0
        self.fast = world.random_for("express").random() < 0.5
        self.meetings: dict[ChannelName, Meeting] = {}
        self.world = world

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> SimEnd:
        if name not in self.meetings:
            self.meetings[name] = Meeting(torch.zeros(ring.slots, ring.size, dtype=torch.uint8))
        end = SimEnd(self, self.meetings[name], side, deadline_s)
        PROCESS.get().on_death.append(end.close)
        return end

    def break_all(self, parts: Callable[[ChannelName], bool]) -> None:
        """Break these channels. Each end sees it after its own delay."""
        for name, meeting in self.meetings.items():
            for side in Side if parts(name) else ():
                self.world.loop.call_later(self.world.rng.random() * 0.1, meeting.close, side)


class SimEnd:
    """A `ChannelEnd`. `arrived` waits until `finish` can return or raise."""

    ordered = False
    pool = None

    def __init__(self, transport: SimTransport, meeting: Meeting, side: Side, deadline_s: float) -> None:
        self._transport, self._meeting, self._side, self._deadline_s = transport, meeting, side, deadline_s
        self._world, self._rng = transport.world, PROCESS.get().rng
        self._last = 0.0
        self.control_socket: Any = SimControlSocket(self._world, meeting, side) if transport.fast else None

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def slot(self, number: int) -> Tensor:
        return self._meeting.staging[number % len(self._meeting.staging)]

    def start(self, number: int, nbytes: int) -> None:
        self._check()
        if self._side is Side.SENDER:
            if number >= wire.FRAMES and self._transport.flips:
                self._transport.flips -= 1
                self._world.note("flip", number)
                self.slot(number)[self._rng.randrange(nbytes)] ^= 1 << self._rng.randrange(8)
            self._last = max(self._last, self._world.loop.time() + self._world.delay(self._rng))
            self._world.loop.call_at(self._last, self._leave, number)

    def _leave(self, number: int) -> None:
        self._meeting.left.add(number)
        self._meeting.changed.notify_all()

    async def arrived(self, number: int) -> None:
        meeting = self._meeting
        await meeting.changed.until(lambda: self._side in meeting.closed or number in meeting.left, self._deadline_s)

    def finish(self, number: int) -> None:
        self._check()
        if self._side is Side.RECEIVER and number not in self._meeting.left:
            raise ChannelBroken(f"frame {number}: no progress")

    def close(self) -> None:
        """Close this end. The other end sees it later."""
        self._meeting.closed.add(self._side)
        self._world.loop.call_later(self._world.delay(self._rng), self._meeting.close, Side(1 - self._side))

    def _check(self) -> None:
        if self._side in self._meeting.closed:
            raise ChannelBroken("closed")


class SimLink(SendChannel):
    """`_run` and `_serve` as coroutines, with the same steps."""

    async def _run(self) -> None:  # type: ignore[override]
        with ExitStack() as leaving:
            try:
                await self._go(PROCESS.get(), leaving)
            except HandoffError as error:
                await _condition(self.queue).until(lambda: self.queue.broken, REASON_S)
                self.queue.stop(error)

    async def _go(self, process: Process, leaving: ExitStack) -> None:
        queue, deadline_s = self.queue, self._end.settings.frame_deadline_s
        await process.turn()
        self._stream = self._connect(self.to.address, queue.take, self.stop)
        leaving.callback(self._stream.close)
        self._put(pb.PeerCommand(hello=self._hello()))
        await _until(queue, lambda: queue._welcome, deadline_s)
        transport, ring, _ = queue.welcome()
        channel = self._open(transport, ring)
        leaving.callback(channel.close)
        queue.control_socket = channel.control_socket
        if channel.control_socket is not None:
            cast("SimControlSocket", channel.control_socket).changed = _condition(queue)
        else:
            queue.window.batch = max(1, ring.slots // 2)
        await self._prove(channel, ring)
        while True:
            await process.turn()
            if not queue._pick():
                queue.window.flush()
            await _until(queue, queue._pick, None)
            await self._slot(deadline_s)
            if (found := queue._pick()) is not None:
                await self._one(process, channel, ring, *found)

    async def _slot(self, deadline_s: float) -> None:
        queue = self.queue
        if not queue.window.room:
            queue.window.flush()
        await _until(queue, lambda: queue.window.room, deadline_s)
        queue.wait_credit()

    async def _one(self, process: Process, channel: ChannelEnd, ring: Ring, push: Any, frame: Any) -> None:
        await process.turn()
        if frame is None:
            self.queue.commit(push)
        elif self._fill(channel, push, frame):
            process.world.note("read", process, push.job.handoff, frame)
            await process.turn()
            self._send(channel, ring, push, frame)

    async def _prove(self, channel: ChannelEnd, ring: Ring) -> None:
        queue, frame = self.queue, wire.frame(ring)
        for number in range(wire.FRAMES):
            await self._slot(self._end.settings.frame_deadline_s)
            channel.slot(queue.window.number)[: frame.nbytes].copy_(pattern(number, frame.nbytes))
            self._send(channel, ring, None, frame)
        queue.window.flush()
        await _until(queue, lambda: queue._probed >= wire.FRAMES, self._end.settings.frame_deadline_s)
        queue.wait_probed(wire.FRAMES)


async def _until(queue: SendQueue, ready: Callable[[], Any], within_s: float | None) -> None:
    """Wait for the change that the queue waits for; its own waiting then returns or raises immediately."""
    clock, control_socket = asyncio.get_running_loop().time, cast("SimControlSocket | None", queue.control_socket)
    due = None if within_s is None else clock() + within_s

    def heard() -> bool:
        return control_socket is not None and control_socket.ready

    while True:
        left = None if due is None else max(0.0, due - clock())
        await _condition(queue).until(lambda: queue.broken or ready() or heard(), left)
        await PROCESS.get().resumed()
        if control_socket is None or queue.broken or ready() or not heard():
            break
        if (packet := control_socket.receive()) is not None:
            queue.take(pb.PeerReply.FromString(packet))
    if queue._error is not None:
        raise queue._error
    if not ready():
        raise queue._late("answer")


def _condition(queue: SendQueue) -> SimCondition:
    return cast("SimCondition", queue._changed)


class SimSender(Sender):
    """Checks deadlines in a coroutine."""

    async def _watch_deadlines(self) -> None:  # type: ignore[override]
        while True:
            await asyncio.sleep(self._end.settings.frame_deadline_s / _LOOKS)
            await PROCESS.get().resumed()
            for link in self._all():
                link.queue.expire()


class SimExecutor:
    """A `ThreadPoolExecutor` of one thread."""

    def __init__(self, workers: int, thread_name_prefix: str = "") -> None:
        assert workers == 1
        self._jobs = SimQueue()
        PROCESS.get().start(self._run(PROCESS.get()), thread_name_prefix)

    def submit(self, call: Callable[..., None], *args: Any) -> None:
        self._jobs.put((call, args))

    async def _run(self, process: Process) -> None:
        while True:
            call, args = await self._jobs.take()
            await process.turn()
            call(*args)


class SimSession(Session):
    """A session's thread as a coroutine, with the same steps."""

    async def _run(self) -> None:  # type: ignore[override]
        deadline_s = self._end.settings.frame_deadline_s
        try:
            opened = self._transport.open(self._name, Side.RECEIVER, self._keys, self._ring, deadline_s)
            with closing(opened) as channel:
                await self._go(PROCESS.get(), cast("SimEnd", channel))
        except BatonError as error:
            self._in_loop(self.end, error)

    async def _go(self, process: Process, channel: SimEnd) -> None:
        intake, queue, control_socket = self._receive_loop, self._receive_loop.queue, channel.control_socket
        queue.control_socket = control_socket
        todo: deque[Frame | EndOfHandoff | None] = deque()
        early: deque[EndOfHandoff] = deque()
        while not intake.over:
            while not todo or queue.ready:
                if control_socket is None:
                    await cast("SimQueue", queue._items).filled()
                else:
                    await control_socket.changed.until(lambda: queue.ready, None)
                await process.turn()
                intake._take_up(channel, todo, early)
            item = todo.popleft()
            if isinstance(item, Frame):
                await channel.arrived(item.number)
                await process.turn()
                intake._receive(channel, item)
            elif isinstance(item, EndOfHandoff):
                intake._conclude(item)
            intake._credit(at_once=not todo and not queue.ready)
