"""The processes of one handoff: the router's request, a prefill worker and a decode worker, with their streams.

All decisions are made by production classes. A thread is a method that makes its next step. A stream is a list of
messages that were sent and have not arrived.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine, Iterable
from types import SimpleNamespace
from typing import Any

from baton.core import Finish, HandoffId, Incarnation, Role, Sampling, SequenceSpec, Token, WorkerInfo, WorkerRef
from baton.errors import BatonError, ChannelBroken, HandoffError
from baton.rpc.convert import handoff_from_pb
from baton.rpc.v1 import peer_pb2, worker_pb2
from decode_workers.reservations import State
from decode_workers.worker import DecodeWorker
from kvtransfer.handoff import CommitState, PushJob, PushResult, Reports, TransferSettings
from kvtransfer.receive_loop import EndOfHandoff, Frame, ReceiveLoop
from kvtransfer.receiver import Session
from kvtransfer.send_queue import Push, SendQueue
from kvtransfer.sender import SendChannel, Sender
from kvtransfer.transports.base import Choice, Endpoint
from prefill_workers.worker import PrefillWorker
from router.request.attempt import Attempt, StreamRetention
from router.request.delivery import Delivery, Thoughts
from router.request.lifecycle import ChoiceRun
from router.request.prompt_logprobs import PromptScores
from tools.handoff_states.doubles import (
    BLOCKS,
    CREDITS,
    LAYOUT,
    MAX_TOKENS,
    NOTHING,
    TIMES,
    UNLOCKED,
    Clock,
    Ends,
    Engine,
    Items,
    Tasks,
    Violation,
)

REQUEST, FINGERPRINT = "r", "f"
PROMPT = (1, 2)
ATTEMPTS = 3
SETTINGS = TransferSettings(transport="explored", credits=CREDITS, coalesce_below=0)
TRANSPORT = SimpleNamespace(name="explored", reach="here", one_sided=False, sends=True)
CHOICE = Choice((TRANSPORT,))
END = b""  # the last item of a stream: it has ended


class Waits(Exception):
    """A coroutine waits for an event that has not come."""


def finished(work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that waits for nothing. Raises Waits."""
    try:
        while True:
            work.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        work.close()


# --- streams ----------------------------------------------------------------------------------------------------------


class Link:
    """The stream between the router and one incarnation of a worker. `up` leads to the router."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.state = "connected"
        self.up, self.down = Items(), Items()
        self.mailboxes: dict[HandoffId, Mailbox] = {}
        self.router_id, self.handoffs = "router", set[HandoffId]()  # of the worker's session
        self.fences: list[HandoffId] = []  # that the worker has sent
        self.gone = False  # whether the worker has seen the end of the stream

    def open(self, handoff: HandoffId, mailbox: Mailbox, part: Role) -> None:
        assert part is self.info.role  # no decode worker leaves here
        self.mailboxes[handoff] = mailbox

    def close(self, handoff: HandoffId, late: object = None) -> None:
        self.mailboxes.pop(handoff, None)

    def send(self, **command: Any) -> None:
        if self.state == "connected" and not self.gone and END not in self.down:
            self.down.put(worker_pb2.RouterCommand(**command).SerializeToString(deterministic=True))

    def emit(self, events: Iterable[worker_pb2.WorkerEvent]) -> None:
        for event in events:
            if event.HasField("failed"):  # texts name channels, and equal states must be equal
                event.failed.message = ""
            elif event.HasField("refused"):
                event.refused.detail = ""
            elif event.HasField("fenced"):
                self.fences.append(handoff_from_pb(event.handoff))
            if self.state == "connected" and not self.gone and END not in self.up:
                self.up.put(event.SerializeToString(deterministic=True))


class Mailbox:
    """The router's `EventMailbox`. Its reader runs as soon as there is an item."""

    lag_s = 0.0

    def __init__(self, limit: int) -> None:
        self.items: list[tuple[Role, Any]] = []

    def take(self) -> list[tuple[Role, Any]]:
        if not self.items:
            raise Waits
        items, self.items = self.items, []
        return items

    def left(self) -> list[tuple[Role, Any]]:
        return [item for item in self.items if not isinstance(item[1], BatonError)]


class PeerStream:
    """One channel: its control stream, its data path and its two ends. `up` leads to the receiver."""

    def __init__(self, sender: ExploredChannel) -> None:
        self.sender = sender
        self.receiver: ExploredSession | None = None
        self.up, self.down, self.ends = Items(), Items(), Ends()
        self.committed: list[HandoffId] = []

    @property
    def receiver_runs(self) -> bool:
        return self.receiver is not None and not self.receiver._receive_loop.over

    def send(self, command: peer_pb2.PeerCommand) -> None:
        if command.HasField("commit"):
            handoff = handoff_from_pb(command.commit.handoff)
            if handoff in self.committed:
                raise Violation(f"one commit: {handoff} is sent again")
            self.committed.append(handoff)
        if END not in self.up:
            self.up.put(command.SerializeToString(deterministic=True))

    def put_nowait(self, reply: peer_pb2.PeerReply | None) -> None:
        """Send a reply of the session; None ends the stream."""
        if END in self.down:
            return
        if reply is not None and reply.HasField("refused"):
            reply.refused.detail = ""
        self.down.put(END if reply is None else reply.SerializeToString(deterministic=True))

    def close(self) -> None:
        if END not in self.up:
            self.up.put(END)


# --- the prefill worker -----------------------------------------------------------------------------------------------


class ExploredChannel(SendChannel):
    """`_serve` in steps. The channel is open from the start, without a probe."""

    def __init__(self, end: Endpoint, connect: Any, job: PushJob, generation: int, reports: Reports) -> None:
        self.to, self._end, self.channel = job.to, end, None
        self._name: Any = "explored"
        self.queue = SendQueue(end, "channel", self._put, NOTHING, reports)  # type: ignore[arg-type]
        self.queue._changed = UNLOCKED  # type: ignore[assignment]
        self.filled: tuple[Push, Any] | None = None
        self._stream: Any = None
        self.queue.add(job)
        self._stream = connect(self)
        if self._stream is None:
            self.stop("nothing listens there")

    @property
    def running(self) -> bool:
        return not self.queue.broken

    @property
    def ready(self) -> bool:
        return self.running and (self.filled is not None or (self.queue._pick() is not None and self.queue.window.room))

    def step(self) -> None:
        """Read a frame into staging, send the frame that was read, or commit."""
        ends, ring = self._stream.ends, self._end.ring
        if self.filled is not None:
            (push, frame), self.filled = self.filled, None
            return self._send(ends, ring, push, frame)
        push, frame = self.queue.next()
        self._end.kv.user = push.job.handoff  # type: ignore[attr-defined]
        if frame is None:
            self.queue.commit(push)
        elif self._fill(ends, push, frame):
            self.filled = push, frame
        return None


class Numbers:
    """An `itertools.count` that can be copied."""

    def __init__(self) -> None:
        self.last = 0

    def __next__(self) -> int:
        self.last += 1
        return self.last


class ExploredSender(Sender):
    """A sender without threads: reports arrive immediately, as tasks of the engine."""

    def __init__(self, worker: Prefill, connect: Any) -> None:
        self._end = Endpoint(worker.engine.kv, worker.ref, FINGERPRINT, SETTINGS, CHOICE)  # type: ignore[arg-type]
        self._connect, self._on_done = connect, worker.role.push_ended
        self._callbacks = Reports(self._report, self.unfetched)
        self._lock: Any = UNLOCKED
        self._channels, self._failures = [], {}
        self._generations = Numbers()  # type: ignore[assignment]
        self._closed, self._reports = NOTHING, worker.tasks  # type: ignore[assignment]

        self.commits = worker.commits
        self.reported: list[HandoffId] = []

    def _report(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        if handoff in self.reported:
            raise Violation(f"one outcome: the push {handoff} is reported again")
        if isinstance(outcome, PushResult) and handoff not in self.commits:
            raise Violation(f"one commit: {handoff} is acknowledged and was not accepted")
        self.reported.append(handoff)
        super()._report(handoff, outcome)

    def unfetched(self, handoff: HandoffId) -> None:
        raise Violation(f"{handoff} fetched nothing")


class Worker(ABC):
    """The parts of both roles."""

    role: Any

    def __init__(self, role: Role, number: int, commits: list[HandoffId]) -> None:
        self.commits = commits  # of all decode workers
        self.ref = WorkerRef(role.value, Incarnation(1, number), "here")
        self.info = WorkerInfo(self.ref, role, FINGERPRINT, "m", 64, BLOCKS, LAYOUT)
        self.clock, self.engine, self.tasks = Clock(), Engine(number), Tasks()

    @property
    @abstractmethod
    def computes(self) -> bool:
        """Whether a step would do anything."""

    @abstractmethod
    def step(self) -> None:
        """Run one step of the engine."""

    def run_task(self) -> None:
        self.tasks.pop(0)()

    def check(self) -> None:
        self.engine.owners()
        self.engine.pool.counts()

    def check_empty(self) -> None:
        """Raise Violation if anything is held though all that was started has ended."""
        left = [*self.role._work, *self.engine.owners().values(), *self.tasks]
        if left or self.engine.pool.counts().free != BLOCKS:
            raise Violation(f"leak: the {self.info.role.value} worker still has {left or 'blocks'}")


class Prefill(Worker):
    """A prefill worker. Its prompt is computed in two steps; the first position leaves after the first one."""

    def __init__(self, number: int, commits: list[HandoffId], connect: Any) -> None:
        super().__init__(Role.PREFILL, number, commits)
        engine: Any = self.engine
        self.role = PrefillWorker(self.info, engine, self.tasks, self.clock)  # type: ignore[arg-type]
        self.role.fetches = TIMES
        self.sender = ExploredSender(self, connect)
        self.role.attach(self.sender)
        self.engine.withdraw = self.withdraw

    def withdraw(self, sequence: Any) -> None:
        self.sender.withdraw(sequence.key)

    @property
    def computes(self) -> bool:
        return any(not one.held for one in self.engine.sequences.values())

    def step(self) -> None:
        for key, one in self.engine.sequences.items():
            if not one.computed:
                self.engine.kv.compute(one.allocation.blocks, 0, 1)
                one.computed = 1
                self.sender.computed(key, one.allocation.blocks, 1, 1)
                return
        self.role.stepped(self.engine.step(hold=True))


# --- the decode worker ------------------------------------------------------------------------------------------------


class ExploredSession(Session):
    """A session whose thread makes steps."""

    def __init__(self, worker: Decode, stream: PeerStream) -> None:
        sender = stream.sender._end.me
        self.sender, self._table, self._keys = sender, worker.role.reservations, NOTHING  # type: ignore[assignment]
        self._end = Endpoint(worker.engine.kv, worker.ref, FINGERPRINT, SETTINGS, CHOICE)  # type: ignore[arg-type]
        self._replies: Any = stream
        self._receive_loop = ReceiveLoop(self._end, self._table, sender, TRANSPORT, self._reply)
        self._receive_loop.queue._items = Items()  # type: ignore[assignment]
        self._name: Any = "explored"
        self._stream, self.todo, self.early = stream, deque[Any](), deque[EndOfHandoff]()

    def _in_loop(self, call: Any, argument: Any) -> None:
        call(argument)

    @property
    def ready(self) -> bool:
        return not self._receive_loop.over and bool(self.todo or self._receive_loop.queue.ready)

    @property
    def in_flight(self) -> int:
        return self._receive_loop.announced - self._receive_loop.received

    def receive(self, message: bytes) -> None:
        """Handle a message in the event loop. A session that has ended handles none."""
        try:
            if message:
                self._take(peer_pb2.PeerCommand.FromString(message))
            else:
                self.end(None)
        except BatonError as error:
            self.end(error)

    def step(self) -> None:
        """Handle one item in the receiving thread."""
        loop = self._receive_loop
        try:
            while loop.queue.ready:
                loop._take_up(self._stream.ends, self.todo, self.early)  # type: ignore[arg-type]
            if not self.todo:
                return
            item = self.todo.popleft()
            if isinstance(item, Frame):
                self._end.kv.user = item.inbound and item.inbound.handoff  # type: ignore[attr-defined]
                loop._receive(self._stream.ends, item)  # type: ignore[arg-type]
            elif item is not None:
                loop._conclude(item)
            loop._credit(at_once=not self.todo and not loop.queue.ready)
        except BatonError as error:
            self.end(error)


class ExploredDecode(DecodeWorker):
    """Counts commits and adoptions."""

    commits: list[HandoffId]
    fences: list[HandoffId]

    def committed(self, handoff: HandoffId, commit: CommitState) -> None:
        if handoff in self.commits:
            raise Violation(f"one commit: {handoff} is committed again")
        if handoff in self.fences:
            raise Violation(f"one commit: {handoff} is committed after a fence")
        self.commits.append(handoff)
        super().committed(handoff, commit)


class Decode(Worker):
    """A decode worker and its sessions with prefill workers."""

    def __init__(self, number: int, commits: list[HandoffId]) -> None:
        super().__init__(Role.DECODE, number, commits)
        engine: Any = self.engine
        self.role = ExploredDecode(self.info, engine, self.tasks, NOTHING, self.clock)  # type: ignore[arg-type]
        self.role.commits, self.role.fences, self.role._times = commits, [], TIMES
        self.role.reservations.counts = NOTHING
        self.role.attach(NOTHING)
        self.engine.reserved = self.reserved
        self.peers: list[ExploredSession] = []

    def reserved(self) -> list[tuple[HandoffId, Any]]:
        return [(entry.handoff, entry.reservation) for entry in self.role.reservations.entries()]

    def admit(self, stream: PeerStream) -> None:
        """Open a channel as `PeerService` does: older ones of the same sender end first."""
        stream.receiver = ExploredSession(self, stream)
        for older in [peer for peer in self.peers if peer.sender == stream.receiver.sender]:
            older.end(ChannelBroken("a newer channel took over"))
        self.peers = [peer for peer in self.peers if not peer._receive_loop.over] + [stream.receiver]
        welcome = peer_pb2.PeerWelcome(credits=len(stream.ends.slots), frame_size=LAYOUT.layer_token_bytes)
        welcome.transport = TRANSPORT.name
        stream.sender.queue.take(peer_pb2.PeerReply(welcome=welcome))
        stream.sender.queue.take(peer_pb2.PeerReply(probed=peer_pb2.Probed(frames=1)))

    @property
    def running(self) -> set[HandoffId]:
        """The handoffs that are committed and held."""
        entries = self.role.reservations.entries()
        return {one.handoff for one in entries if one.state is State.COMMITTED} | set(self.engine.sequences)

    @property
    def computes(self) -> bool:
        return bool(self.engine.sequences)

    def step(self) -> None:
        self.role.stepped(self.engine.step(hold=False))


# --- the router -------------------------------------------------------------------------------------------------------


class ExploredAttempt(Attempt):
    """An attempt that raises `Waits` instead of waiting."""

    async def _received(self, timeout_s: float | None) -> list[tuple[Role, Any]]:
        return self._mailbox.take()  # type: ignore[attr-defined, no-any-return]


class Placed:
    """A placement."""

    determinism = ""

    def __init__(self, prefill: Link, decode: Link) -> None:
        self.prefill, self.decode, self.released = prefill, decode, False

    def reserved(self) -> None: ...

    computed = prefill_done = reserved

    def release(self) -> None:
        if self.released:
            raise Violation("one outcome: a placement is released twice")
        self.released = True


class Observer:
    """The observer of a choice."""

    track = metrics = NOTHING

    def __init__(self) -> None:
        self.attempts, self.is_accepted = 0, False

    def attempted(self, placement: Placed) -> None:
        self.attempts += 1

    def accepted(self, attempt: Attempt) -> None:
        self.is_accepted = True

    def ignored(self, *_: object) -> None: ...

    delivered = unfinished = recovered = ignored


class Client:
    """The receiver of the answer."""

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.outcome = ""

    async def tokens(self, choice: int, tokens: list[Token]) -> None:
        for one in tokens:
            self.indices.append(one.index)
            if one.index != len(self.indices) - 1:
                raise Violation(f"numbered tokens: {one} follows {self.indices[:-1]}")

    async def accepted(self, *_: object) -> None: ...

    recovered = thought = accepted

    async def finished(self, choice: int, finish: Finish, delivered: int) -> None:
        if len(self.indices) != MAX_TOKENS:
            raise Violation(f"numbered tokens: the stream ends after {self.indices}")
        self.end("finished")

    def end(self, outcome: str) -> None:
        if self.outcome:
            raise Violation(f"one outcome: {self.outcome}, then {outcome}")
        self.outcome = outcome


def never() -> bool:
    """Return that this router is not leaving."""
    return False


def kept(choice: int) -> StreamRetention:
    """Return that streams end with their router."""
    return StreamRetention(parks=never)


class ExploredRun(ChoiceRun):
    """One choice: `serve_choice` continues with each event. `stage` is the place where it waits."""

    def __init__(self) -> None:
        self.choice, self.request_id = 0, REQUEST
        self.spec = SequenceSpec(PROMPT, Sampling(max_tokens=MAX_TOKENS, seed=1))
        call, parsed = SimpleNamespace(deadline=60.0), SimpleNamespace(defaults=None, in_reasoning=False)
        self.request: Any = SimpleNamespace(call=call, parsed=parsed, retention=kept, determinism="")
        self._dispatch: Any = SimpleNamespace(attempts=ATTEMPTS, clock=Clock())
        self.observer: Any = Observer()
        self.started: Any = NOTHING
        self.delivery, self.thoughts, self.scores = Delivery(), Thoughts(), PromptScores(self.spec)
        self._failures = self._deaths = 0
        self._cached_tokens = self._held = self._detached = self._waits_since = None
        self.client: Any = Client()
        self.at: ExploredAttempt | None = None
        self.stage = "queue"

    def begin(self, prefill: Link, decode: Link) -> None:
        """Begin an attempt, if the request waits in the queue and both workers are connected."""
        if self.stage == "queue" and prefill.state == decode.state == "connected":
            self.at = self.attempt(Placed(prefill, decode))  # type: ignore[arg-type, assignment]
            assert self.at is not None
            finished(self.at.__aenter__())
            self.stage = "reserve"
            self.resume(self.at.reserve(self.remaining_s()))

    def resume(self, reserving: Coroutine[Any, Any, bool] | None = None) -> None:
        """Continue until the next event is missing."""
        try:
            if self.stage == "reserve":
                assert self.at is not None
                self._reserved(finished(reserving or self.at._granted()))
            if self.stage == "outputs":
                finished(self._outputs())
        except Waits:
            return
        except BatonError as error:
            self._leave()
            self.over(type(error).__name__)

    def _reserved(self, granted: bool) -> None:
        assert self.at is not None
        if granted:
            self.start_prefill(self.at)
            finished(self.accept(self.client, self.at))
            self.stage = "outputs"
        else:
            self._again(self.at)

    async def _outputs(self) -> None:
        attempt = self.at
        assert attempt is not None
        async for tokens in attempt.outputs():
            await self.client.tokens(0, self.deliver(tokens))
        self.note_cached(attempt)
        if attempt.finish is None:
            return self._again(attempt)
        self._leave()
        self.delivery.complete()
        await self.client.finished(0, attempt.finish, len(self.delivery.ids))
        return self.over("")

    def _again(self, attempt: ExploredAttempt) -> None:
        finished(self.requeue(attempt, self.client))
        self._leave()
        self.stage = "queue"

    def _leave(self) -> None:
        attempt, self.at = self.at, None
        if attempt is not None:
            finished(attempt.__aexit__())

    def over(self, outcome: str) -> None:
        """End the request; without `outcome` it was reported already."""
        self._leave()
        self.release_held()
        self.stage = "over"
        if outcome:
            self.client.end(outcome)
