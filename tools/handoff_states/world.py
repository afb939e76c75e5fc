"""One request, one prefill worker and one decode worker: the events that can happen next, and what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from baton.core import HandoffId
from baton.errors import ChannelBroken, WorkerLost
from baton.rpc.convert import handoff_from_pb
from baton.rpc.v1 import peer_pb2, worker_pb2
from kvtransfer.send_queue import NEVER
from router.request.lifecycle import DEATH_LIMIT
from tools.handoff_states.doubles import CREDITS, Items, Violation, expired
from tools.handoff_states.processes import (
    END,
    Decode,
    ExploredChannel,
    ExploredRun,
    Link,
    Mailbox,
    PeerStream,
    Prefill,
    Worker,
)

Event = tuple[str, int]  # a kind, and the number of a stream or of a late message
MOST_STEPS = 300  # until everything has ended after the last fault
TORN = 255


class World:
    """All processes. `faults` may still happen."""

    def __init__(self, faults: int) -> None:
        self.faults = self.most = faults
        self.commits: list[HandoffId] = []
        self.late: list[tuple[str, bytes]] = []
        self.streams: list[PeerStream] = []
        self.number = 0
        self.p, self.d = self._prefill(), self._decode()
        self.link_p, self.link_d = Link(self.p.info), self._link_d()
        self.run = ExploredRun()
        self.run.begin(self.link_p, self.link_d)

    def _prefill(self) -> Prefill:
        self.number += 1
        return Prefill(self.number, self.commits, self.connect)

    def _decode(self) -> Decode:
        self.number += 1
        return Decode(self.number, self.commits)

    def _link_d(self) -> Link:
        link = Link(self.d.info)
        link.fences = self.d.role.fences
        return link

    def connect(self, channel: ExploredChannel) -> PeerStream | None:
        """Open a channel of the prefill worker, unless its receiver is dead."""
        if channel.to.incarnation != self.d.ref.incarnation:
            return None
        stream = channel._stream = PeerStream(channel)
        self.streams.append(stream)
        self.d.admit(stream)
        return stream

    # Possible events

    def events(self) -> Iterator[Event]:
        """Yield the events without faults that can happen now, in the order in which the end of a path takes them."""
        yield from ((kind, 0) for kind, items in self._queues().items() if items)
        for number, stream in enumerate(self.streams):
            if stream.up:
                yield "up", number
            if stream.down:
                yield "down", number
            if stream.sender.ready and self._sends(stream):
                yield "send", number
            if stream.receiver is not None and stream.receiver.ready:
                yield "receive", number
        for kind, worker in self._workers().items():
            if worker.tasks:
                yield f"task_{kind}", 0
            if worker.computes:
                yield f"step_{kind}", 0
        yield from (("late", number) for number in range(len(self.late)))

    def faults_now(self) -> Iterator[Event]:
        """Yield the faults that can happen now."""
        if not self.faults:
            return
        if self.run.stage != "over":
            yield "cancel", 0
        for kind, link in (("p", self.link_p), ("d", self.link_d)):
            if _open(link):
                yield from ((f"cut_{kind}", 0), (f"die_{kind}", 0), (f"lapse_{kind}", 0))
        yield from ((f"copy_{kind}", 0) for kind, items in self._queues().items() if self._repeats(kind, items))
        yield from self._overdue()
        for number, stream in enumerate(self.streams):
            yield from ((kind, number) for kind in _faults_of(stream))

    def _overdue(self) -> Iterator[Event]:
        work = self.p.role._work.values()
        if any(one.first is None or one.waits for one in work):
            yield "overdue_p", 0
        if self.d.role.reservations.entries():
            yield "overdue_d", 0

    def _queues(self) -> dict[str, Items]:
        p, d = self.link_p, self.link_d
        return {"from_p": p.up, "from_d": d.up, "to_p": p.down, "to_d": d.down}

    def _repeats(self, kind: str, items: Items) -> bool:
        """Return whether the next message may come twice: within its stream, which ends with the worker's process."""
        lives = self.link_p.info == self.p.info if kind.endswith("_p") else self.link_d.info == self.d.info
        return lives and bool(items) and items[0] != END

    def _workers(self) -> dict[str, Worker]:
        return {"p": self.p, "d": self.d}

    def _sends(self, stream: PeerStream) -> bool:
        return stream.sender in self.p.sender._channels

    # Their effects

    def apply(self, event: Event) -> None:
        """Make `event` happen. Raises Violation or AssertionError if an invariant does not hold after it."""
        kind, number = event
        if kind in FAULTS or kind.startswith("copy_"):
            self.faults -= 1
        if kind.startswith("copy_"):
            kind = kind.removeprefix("copy_")
            self.late.append((kind, self._queue(kind, number)[0]))
        elif kind == "late":
            self._deliver(*self.late.pop(number))
        elif kind in ("from_p", "from_d", "to_p", "to_d", "up", "down"):
            self._deliver(kind, self._queue(kind, number).pop(0), number)
        else:
            EVENTS[kind](self, number)
        self._settle()
        self.check()

    def _queue(self, kind: str, number: int) -> Items:
        if kind in ("up", "down"):
            stream = self.streams[number]
            return stream.up if kind == "up" else stream.down
        return self._queues()[kind]

    def _deliver(self, kind: str, message: bytes, number: int = -1) -> None:
        """Deliver a message. A late one of a channel arrives on the newest channel."""
        if kind in ("up", "down"):
            if self.streams:
                self._deliver_peer(kind, self.streams[number], message)
        elif kind in ("from_p", "from_d"):
            self._to_router(self.link_p if kind == "from_p" else self.link_d, message)
        elif message:
            link, worker = (self.link_p, self.p) if kind == "to_p" else (self.link_d, self.d)
            if link.info == worker.info:
                self._command(link, worker, worker_pb2.RouterCommand.FromString(message))
        else:
            link, worker = (self.link_p, self.p) if kind == "to_p" else (self.link_d, self.d)
            link.gone = True
            worker.role.gone(link)

    def _command(self, link: Link, worker: Worker, command: worker_pb2.RouterCommand) -> None:
        running, before = self.d.running, len(link.fences)
        worker.role.command(link, command)
        if running.intersection(link.fences[before:]):
            raise Violation("one commit: a committed handoff is answered with Fenced")

    def _deliver_peer(self, kind: str, stream: PeerStream, message: bytes) -> None:
        if kind == "up" and stream.receiver is not None:
            stream.receiver.receive(message)
        elif kind == "down" and message:
            stream.sender.queue.take(peer_pb2.PeerReply.FromString(message))
        elif kind == "down":
            stream.sender.stop("the receiver ended the stream")

    def _to_router(self, link: Link, message: bytes) -> None:
        if not message:
            link.state = "lost"
            items: list[tuple[Mailbox, Any]] = [(box, WorkerLost("lost")) for box in link.mailboxes.values()]
        else:
            event = worker_pb2.WorkerEvent.FromString(message)
            box = link.mailboxes.get(handoff_from_pb(event.handoff))
            items = [] if box is None else [(box, event)]
        for mailbox, item in items:
            mailbox.items.append((link.info.role, item))
            self.run.resume()

    def _settle(self) -> None:
        """Do what follows without a choice: close broken channels, drop lost messages, connect, start an attempt."""
        for stream in self.streams:
            if not stream.sender.running or not self._sends(stream):
                stream.close()
                stream.down.clear()
            if stream.receiver is None or stream.receiver._receive_loop.over:
                stream.up.clear()
        self.streams = [one for one in self.streams if one.up or one.down or one.receiver_runs or self._runs(one)]
        if self.link_p.state == "lost" and not self.link_p.down:
            self.link_p = _connected(self.link_p, self.p)
        if self.link_d.state == "lost" and not self.link_d.down:
            self.link_d = _connected(self.link_d, self.d)
            self.link_d.fences = self.d.role.fences
        self.run.begin(self.link_p, self.link_d)

    def _runs(self, stream: PeerStream) -> bool:
        return stream.sender.running and self._sends(stream)

    def cut(self, kind: str) -> None:
        link = self.link_p if kind == "p" else self.link_d
        link.up[:], link.down[:] = [END], [END]
        self._no_late(kind)

    def _no_late(self, kind: str) -> None:
        """A stream delivers nothing after its end. Only a channel's messages are explored on a later channel."""
        self.late[:] = [late for late in self.late if late[0] not in (f"from_{kind}", f"to_{kind}")]

    def cut_channel(self, number: int) -> None:
        """Lose all messages and the end of both sides, which arrives later."""
        stream = self.streams[number]
        stream.up[:], stream.down[:] = [END], [END]

    def replace(self, kind: str) -> None:
        """Start a new incarnation of a worker. All that was on the way to and from the old one is lost."""
        self._no_late(kind)
        if kind == "p":
            self.link_p.up[:], self.link_p.down[:] = [END], []
            for stream in filter(self._sends, self.streams):
                stream.up[:] = [END]
            self.p = self._prefill()
        else:
            self.link_d.up[:], self.link_d.down[:] = [END], []
            for stream in self.streams:
                stream.down[:], stream.receiver = [END], None
            self.d = self._decode()

    def lapse(self, kind: str) -> None:
        """A worker notices that its lease is over, drops everything, and registers as a new incarnation."""
        worker, link = (self.p, self.link_p) if kind == "p" else (self.d, self.link_d)
        worker.role.gone(link)
        if kind == "p":
            for channel in self.p.sender._channels:
                channel.stop("the lease has lapsed")
        else:
            for session in self.d.peers:
                session.end(ChannelBroken("the lease has lapsed"))
        while worker.tasks:
            worker.run_task()
        worker.check_empty()
        self.replace(kind)

    def overdue(self, worker: Worker) -> None:
        with expired(worker.clock):
            worker.role.tick()

    def overdue_answer(self, number: int) -> None:
        queue = self.streams[number].sender.queue
        for push in queue._pushes.values():
            push.deadline = NEVER if push.deadline == NEVER else 0.0
        queue.expire()

    def tear(self, number: int) -> None:
        slot = self.streams[number].ends.slots[0]
        slot.content = bytes([TORN]) * len(slot.content)

    # Invariants

    def check(self) -> None:
        """Raise Violation or AssertionError if an invariant that holds in every state does not."""
        self.p.check()
        self.d.check()
        for stream in self.streams:
            window, receiver = stream.sender.queue.window, stream.receiver
            if not 0 <= window.in_flight <= CREDITS:
                raise Violation(f"window: {window.in_flight} frames are in flight")
            if receiver is not None and not 0 <= receiver.in_flight <= CREDITS:
                raise Violation(f"window: {receiver.in_flight} frames are in flight at the receiver")

    def drain(self, known: Callable[[World], bool]) -> None:
        """Let everything end without further faults, until `known` accepts a state. Then check what must be left."""
        for _ in range(MOST_STEPS):
            event = next(self.events(), None)
            if event is None:
                return self.check_end()
            self.apply(event)
            if known(self):
                return None
        raise Violation(f"deadlock: events follow each other without an end, the next is {event}")

    def check_end(self) -> None:
        """Raise Violation unless everything has ended: no event is left."""
        run, used = self.run, self.most - self.faults
        if run.stage != "over":
            raise Violation(f"deadlock: the request is in {run.stage!r} and nothing will happen")
        if not used and (run.client.outcome, run.observer.attempts) != ("finished", 1):
            raise Violation(f"one outcome: {run.client.outcome} after {run.observer.attempts} attempts without a fault")
        computing_ended = run.client.outcome == "EngineFault" and run._deaths >= DEATH_LIMIT
        if run.observer.attempts > 2 * used + 1:  # a fault may end an attempt whose KV was held, and is freed now
            raise Violation(f"one outcome: {run.observer.attempts} attempts after {used} faults")
        if run.client.outcome not in OUTCOMES and not computing_ended:
            raise Violation(f"one outcome: the request ended with {run.client.outcome}")
        self.p.check_empty()
        self.d.check_empty()
        for stream in self.streams:
            if stream.sender.queue._pushes or stream.sender.queue.window.in_flight:
                raise Violation("window: a push or a frame without its credit is left")
            if stream.receiver is not None and not stream.receiver.idle:
                raise Violation("leak: a session still has a handoff")


def _open(link: Link) -> bool:
    return link.state == "connected" and END not in link.up and END not in link.down


def _connected(link: Link, worker: Worker) -> Link:
    """Return the link after it is connected again, to the same process or to its successor."""
    if link.info == worker.info:
        link.state, link.gone = "connected", False
        return link
    return Link(worker.info)


def _faults_of(stream: PeerStream) -> Iterator[str]:
    queue = stream.sender.queue
    if END not in stream.up and END not in stream.down:
        yield "cut_c"
        if any(push.deadline != NEVER for push in queue._pushes.values()):
            yield "overdue_c"
        if queue.window.in_flight and stream.ends.slots[0].content[:1] != bytes([TORN]):
            yield "tear"
    if stream.up and stream.up[0] != END:
        yield "copy_up"
    if stream.down and stream.down[0] != END:
        yield "copy_down"


EVENTS: dict[str, Callable[[World, int], None]] = {
    "send": lambda world, number: world.streams[number].sender.step(),
    "receive": lambda world, number: world.streams[number].receiver.step(),  # type: ignore[union-attr]
    "task_p": lambda world, number: world.p.run_task(),
    "task_d": lambda world, number: world.d.run_task(),
    "step_p": lambda world, number: world.p.step(),
    "step_d": lambda world, number: world.d.step(),
}
FAULTS: dict[str, Callable[[World, int], None]] = {
    "cancel": lambda world, number: world.run.over("cancelled"),
    "cut_p": lambda world, number: world.cut("p"),
    "cut_d": lambda world, number: world.cut("d"),
    "cut_c": lambda world, number: world.cut_channel(number),
    "die_p": lambda world, number: world.replace("p"),
    "die_d": lambda world, number: world.replace("d"),
    "lapse_p": lambda world, number: world.lapse("p"),
    "lapse_d": lambda world, number: world.lapse("d"),
    "overdue_p": lambda world, number: world.overdue(world.p),
    "overdue_d": lambda world, number: world.overdue(world.d),
    "overdue_c": lambda world, number: world.overdue_answer(number),
    "tear": lambda world, number: world.tear(number),
}
EVENTS |= FAULTS
OUTCOMES = {"finished", "cancelled", "WorkerLost", "DeadlineExceeded"}
