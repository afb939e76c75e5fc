"""The state of all pushes on one send channel. It has no thread and does no I/O except `enqueue`, which never waits.

The life of a push. Any state may end in a report; Commit or Abort follows every accepted offer on the wire:

    WAITING --probed--> OFFERED --accepted--> ACCEPTED --all sent, finished--> COMMITTED --ack--> reported
    (channel not up)    (deadline)            (frames leave as KV is computed) (deadline)

The engine thread calls `computed` and `finish`. The channel's thread takes the next frame, reads, announces and
commits. Other calls come from any thread, and `expire` from a thread that nothing blocks. Blocks are read only inside
`reading`, into staging. A push that ends during a read is reported after it, any other push immediately; `withdraw`
waits for the read too.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from baton.core import HandoffId, LeftOut
from baton.engine.kv_cache import Mark
from baton.errors import BatonError, ChannelBroken, HandoffError, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer import wire
from kvtransfer.frames import FrameSpec, KVDigest, Progress, whole_layers
from kvtransfer.handoff import PushEnd, PushJob, PushResult, Reports
from kvtransfer.transports.base import ControlPath, Endpoint, KeyRelay, Ring
from kvtransfer.wire import announcement, commit_of, offer_of, places_of, refusal_from_pb, state_parts

NEVER = float("inf")


class State(enum.Enum):
    """State of a push; see the module docstring."""

    WAITING = enum.auto()
    OFFERED = enum.auto()
    ACCEPTED = enum.auto()
    COMMITTED = enum.auto()


class Written(NamedTuple):
    """The mark after which the first `layers` layers are written up to position `end`."""

    layers: int
    end: int
    mark: Mark


@dataclass(slots=True, eq=False)
class Push:
    """One push. The lock guards its state; fields below `outcome` belong to the channel's thread."""

    job: PushJob
    progress: Progress
    state: State = State.WAITING
    deadline: float = NEVER  # of the receiver's answer
    blocks: Sequence[int] = ()  # up to the last computed position
    marks: deque[Written] = field(default_factory=deque)  # GPU work that must end before the blocks are read
    generations: list[int] = field(default_factory=list)  # of `blocks` in exposed memory
    listed: int = 0  # blocks whose places the receiver has
    withdrawals: int = 0
    frames: int = 0
    end: PushEnd | None = None
    offered_at: float = 0.0
    round_trip_s: float = 0.0
    finished_at: float = 0.0
    nbytes: int = 0
    reading: bool = False
    outcome: HandoffError | None = None  # set while `reading`, reported after it
    digests: list[bytes] = field(default_factory=list)
    whole: KVDigest | None = None
    filling_s: float = 0.0

    def result(self, transport: str) -> PushResult:
        """Return the result of a push that was acknowledged now."""
        return PushResult(
            nbytes=self.nbytes,
            frames=self.frames,
            exposed_s=time.monotonic() - self.finished_at,
            round_trip_s=self.round_trip_s,
            filling_s=self.filling_s,
            transport=transport,
        )


class FlowControl:
    """The frames in flight on a channel: numbered, announced in batches, credited. It has no lock of its own."""

    def __init__(self, enqueue: Callable[[pb.PeerCommand], None]) -> None:
        self.number = 0  # of the next frame
        self.slots = 0  # of the ring; 0 until the welcome
        self.batch = 1  # announcements that may wait for each other
        self._enqueue = enqueue
        self._unsent: list[pb.FrameAnnounce] = []
        self._credited = 0

    @property
    def in_flight(self) -> int:
        return self.number - self._credited

    @property
    def room(self) -> bool:
        return self.in_flight < self.slots

    def announce(self, handoff: HandoffId | None, frame: FrameSpec, digest: bytes = b"") -> None:
        """Let a frame enter the channel. It is announced with the next `flush` at the latest."""
        self._unsent.append(announcement(handoff, self.number, frame, digest))
        self.number += 1
        if len(self._unsent) >= self.batch:
            self.flush()

    def flush(self) -> None:
        frames, self._unsent = self._unsent, []
        if frames:
            self._enqueue(pb.PeerCommand(frame=frames[0], more=frames[1:]))

    def credited(self, sequence: int) -> None:
        """Free the slots of all frames up to `sequence`. Raises ChannelBroken if the credit is impossible."""
        if not self._credited <= sequence < self.number:
            raise ChannelBroken(f"credit for frame {sequence}, but only {self.number} are announced")
        self._credited = sequence + 1


T = TypeVar("T")


class SendQueue:
    """All pushes of one channel. Thread-safe. A broken queue stays broken: all pushes are reported, and waits raise."""

    def __init__(
        self, end: Endpoint, title: str, enqueue: Callable[[pb.PeerCommand], None], keys: KeyRelay, reports: Reports
    ) -> None:
        self.window = FlowControl(enqueue)  # only the channel's thread announces
        self.control_socket: ControlPath | None = None  # set by the channel's thread
        self.one_sided = False  # likewise: the receiver reads the blocks until it sends the credit
        self._unread: deque[tuple[Push, FrameSpec]] = deque()  # announced without a credit, of one-sided channels
        self._end, self._title = end, title
        self._enqueue, self._keys = enqueue, keys
        self._report, self._unfetched = reports.done, reports.unfetched
        self._deadline_s = end.settings.frame_deadline_s
        self._changed = threading.Condition()  # its lock guards the state
        self._listens = False
        self._pushes: dict[HandoffId, Push] = {}
        self._reads: HandoffId | None = None  # the handoff with blocks that are being read
        self._error: HandoffError | None = None
        self._welcome: pb.PeerWelcome | None = None
        self._probed = 0

    @property
    def broken(self) -> str:
        """The reason if the channel is broken, else an empty string."""
        return "" if self._error is None else str(self._error) or type(self._error).__name__

    @property
    def opening(self) -> str:
        """The transport from the welcome until the probe is acknowledged, else an empty string."""
        return self._welcome.transport if self._welcome is not None and self._probed < wire.FRAMES else ""

    @property
    def idle(self) -> bool:
        return not self._pushes and not self.broken

    # From any thread

    def add(self, job: PushJob) -> bool:
        """Add a push, or return False if the channel is broken. Raises ValueError if it is already under way."""
        with self._changed:
            if self.broken:
                return False
            if job.handoff in self._pushes:
                raise ValueError(f"push {job.handoff} is already under way")
            self._pushes[job.handoff] = Push(job, Progress(self._end.kv.layout, job.skip, job.known_tokens))
            self._offer(self._pushes[job.handoff])
            return True

    def computed(self, handoff: HandoffId, blocks: Sequence[int], layers: int, end: int) -> None:
        with self._changed:
            if push := self._pushes.get(handoff):
                push.blocks = blocks
                self._mark(push, layers, end)
                if (exposed := self._end.kv.exposed) is not None:
                    push.generations += [exposed.generations[block] for block in blocks[len(push.generations) :]]
                push.progress.computed(layers, end)
                self._wake()

    def withdraw(self, handoff: HandoffId) -> None:
        with self._changed:
            if push := self._pushes.get(handoff):
                push.progress.withdrawn(frame for of, frame in self._unread if of is push)
                push.blocks, push.generations, push.listed = (), [], 0
                push.withdrawals += 1
                push.marks.clear()
            self._changed.wait_for(lambda: self._reads != handoff)  # also for a push that has ended

    def finish(self, handoff: HandoffId, end: PushEnd) -> None:
        with self._changed:
            if push := self._pushes.get(handoff):
                push.end, push.finished_at = end, time.monotonic()
                self._wake()

    def abort(self, handoff: HandoffId) -> None:
        with self._changed:
            if push := self._pushes.get(handoff):
                self._fail(push, StaleAttempt(f"push {handoff}: aborted"), notify=push.state is not State.WAITING)

    def stop(self, error: HandoffError, *, after_s: float = 0.0) -> None:
        """Break the channel: end all pushes with `error`, or with an earlier one that arrives within `after_s`."""
        error.with_traceback(None)  # a kept traceback would keep staging and thread locals alive
        with self._changed:
            self._changed.wait_for(lambda: self._error, after_s)
            self._error = self._error or error
            for push in self._pushes.values():
                self._close(push, self._error)
            self._pushes.clear()
            self._wake()

    def retire(self) -> None:
        """Break the channel if it is idle; a push that is added later finds it broken."""
        with self._changed:
            if self.idle:
                self.stop(ChannelBroken(f"{self._title}: closed because it was idle"))

    def expire(self) -> None:
        """Break the channel if an answer of the receiver is overdue, whatever the channel's thread does."""
        with self._changed:
            if min((push.deadline for push in self._pushes.values()), default=NEVER) <= time.monotonic():
                self.stop(self._late("answer"))

    def take(self, reply: pb.PeerReply) -> None:
        """Handle a message from the receiver. An invalid message breaks the channel."""
        with self._changed:
            try:
                self._dispatch(reply)
            except BatonError as error:
                self.stop(ChannelBroken(f"{self._title}: {error}"))
            self._wake()

    # From the channel's thread

    def welcome(self) -> tuple[str, Ring, tuple[LeftOut, ...]]:
        """Wait for the welcome. Return its transport and ring, and the receiver's reasons against better transports.
        Raises HandoffError if refused or late.
        """
        welcome = self._wait(lambda: self._welcome, "welcome")
        return welcome.transport, Ring(welcome.credits, welcome.frame_size), convert.left_out_from_pb(welcome.left_out)

    def next(self) -> tuple[Push, FrameSpec | None]:
        """Wait for a frame that can be sent now, or for a push that can be committed (its frame is None)."""
        while True:
            self._wait(self._pick)
            self.wait_credit()
            with self._changed:
                if (found := self._pick()) is not None:
                    return found

    def wait_credit(self) -> None:
        """Wait for a free slot. Raises HandoffError if the channel broke or the deadline passed."""
        self._wait(lambda: self.window.room, "credit")

    def wait_probed(self, frames: int) -> None:
        """Wait until the receiver has acknowledged the probe. Raises HandoffError."""
        self._wait(lambda: self._probed >= frames, "answer to the probe")

    def mark_of(self, push: Push, frame: FrameSpec) -> Mark | None:
        """Return the mark after which the KV of `frame` is written. None on a CPU, or if the push was withdrawn."""
        with self._changed:
            return _mark_of(push, frame)

    @contextmanager
    def reading(
        self, push: Push, frame: FrameSpec, *, sent: bool = False
    ) -> Iterator[tuple[Sequence[int], Mark | None]]:
        """Yield the blocks that may be read for `frame`, none if the push has ended or was withdrawn, and the mark
        after which their KV is written. A withdrawal waits for the end of the block. `sent`: all KV was sent before.
        """
        with self._changed:
            readable = push.progress.complete if sent else push.progress.offers(frame)
            push.reading = push in self._pushes.values() and readable
            blocks = push.blocks if push.reading else ()
            mark = _mark_of(push, frame)
            self._reads = push.job.handoff
        try:
            yield blocks, mark
        finally:
            with self._changed:
                push.reading, self._reads = False, None
                if push.outcome is not None:
                    self._report(push.job.handoff, push.outcome)
                self._wake()

    def announce(
        self, push: Push | None, frame: FrameSpec, digest: bytes = b"", withdrawals: int | None = None
    ) -> bool:
        """Announce `frame`, or return False if the push has ended, or was withdrawn since `withdrawals` was read. For a
        frame of the probe, `push` is None.
        """
        with self._changed:
            if push is None:
                self.window.announce(None, frame)
                return True
            if push not in self._pushes.values() or (self.one_sided and not push.progress.offers(frame)):
                return False
            if withdrawals is not None and push.withdrawals != withdrawals:
                return False
            if self.one_sided:
                self._list_places(push, frame)
            push.progress.took(frame)
            push.nbytes += frame.nbytes
            push.frames += 1
            self.window.announce(push.job.handoff, frame, digest)
            return True

    def _list_places(self, push: Push, frame: FrameSpec) -> None:
        """Send the places of the frame's blocks that the receiver does not have. Until the credit, it may read them."""
        size = self._end.kv.layout.block_size
        first, end = push.listed or push.progress.lowest // size, -(-frame.end // size)
        if first < end:
            self.window.flush()
            for message in places_of(push.job.handoff, first, push.blocks[first:end], push.generations[first:end]):
                self._enqueue(message)
            push.listed = end
        self._unread.append((push, frame))

    def commit(self, push: Push) -> None:
        """Send the commit after the last frame, unless the push has ended or was withdrawn."""
        assert push.end is not None
        if self._hashes_blocks(push) and not self._hash_blocks(push):
            return
        commit = commit_of(push.job.handoff, push.end, push.digests, push.whole.value if push.whole else b"")
        parts = list(state_parts(push.job.handoff, push.end))  # copies, for which others need not wait
        with self._changed:
            if push in self._pushes.values() and push.progress.complete:
                push.state, push.deadline = State.COMMITTED, time.monotonic() + self._deadline_s
                self.window.flush()
                for part in parts:
                    self._enqueue(part)
                self._enqueue(pb.PeerCommand(commit=commit, after=self.window.number))

    def _hash_blocks(self, push: Push) -> bool:
        """Hash the whole KV by layers, so that a withdrawal waits for one only. Return False if the blocks are gone."""
        kv, whole, job = self._end.kv, KVDigest(self._end.kv.layout), push.job
        for frame in whole_layers(kv.layout, job.skip, job.known_tokens):
            with self.reading(push, frame, sent=True) as (blocks, _):
                if not blocks:
                    return False
                whole.add(frame, kv.copied(frame.layers, blocks, frame.begin, frame.end))
        push.whole = whole
        return True

    # Under the lock

    def _hashes_blocks(self, push: Push) -> bool:
        """Whether the digest of the whole KV needs the blocks once more, because no frame passes through staging."""
        return self.one_sided and (self._end.settings.verify_kv or push.job.verify)

    def _mark(self, push: Push, layers: int, end: int) -> None:
        """Add a mark for KV that was computed now, and drop those of KV that was sent."""
        if (mark := self._end.kv.mark()) is not None:
            while push.marks and push.marks[0].end <= push.progress.lowest:
                push.marks.popleft()
            push.marks.append(Written(layers, min(end, push.job.known_tokens), mark))

    def _pick(self) -> tuple[Push, FrameSpec | None] | None:
        """Pick in the order of arrival, so that the oldest push finishes first."""
        if self._welcome is None:
            return None
        for push in self._pushes.values():
            if push.state is not State.ACCEPTED:
                continue
            wanted = 1 if push.end else self._end.settings.coalesce_below
            frame = push.progress.next(self._welcome.frame_size, wanted) if push.blocks else None
            committable = push.end and push.progress.complete and (push.blocks or not self._hashes_blocks(push))
            if frame is not None or committable:
                return push, frame
        return None

    def _dispatch(self, reply: pb.PeerReply) -> None:
        match reply.WhichOneof("reply"):
            case "welcome":
                self._welcomed(reply.welcome)
            case "store_key":
                self._keys.deliver(reply.store_key.key, reply.store_key.value)
            case "offer_accepted":
                self._accepted(convert.handoff_from_pb(reply.offer_accepted.handoff))
            case "refused":
                self._refused(reply.refused)
            case "credit":
                self._credited(reply.credit.sequence)
            case "probed":
                self._probed = reply.probed.frames
                for push in self._pushes.values():
                    self._offer(push)
            case "fetch_refused":
                self._unfetched(convert.handoff_from_pb(reply.fetch_refused.handoff))
            case "commit_ack":
                self._acknowledged(convert.handoff_from_pb(reply.commit_ack.handoff))

    def _credited(self, sequence: int) -> None:
        self.window.credited(sequence)
        while len(self._unread) > self.window.in_flight:
            self._unread.popleft()

    def _welcomed(self, welcome: pb.PeerWelcome) -> None:
        if self._welcome is not None or not welcome.credits:
            raise ChannelBroken("a second welcome, or one that grants no frames")
        if welcome.frame_size < self._end.kv.layout.layer_token_bytes:
            raise ChannelBroken(f"frames of {welcome.frame_size} bytes hold no position of a layer")
        self._welcome, self.window.slots = welcome, welcome.credits

    def _offer(self, push: Push) -> None:
        if self._probed < wire.FRAMES or push.state is not State.WAITING:
            return
        push.state, push.deadline = State.OFFERED, time.monotonic() + self._deadline_s
        push.offered_at = time.monotonic()
        for command in offer_of(push.job, self._end.fingerprint):
            self._enqueue(command)

    def _accepted(self, handoff: HandoffId) -> None:
        if (push := self._pushes.get(handoff)) and push.state is State.OFFERED:
            push.state, push.deadline = State.ACCEPTED, NEVER
            push.round_trip_s = time.monotonic() - push.offered_at

    def _refused(self, refused: pb.HandoffRefused) -> None:
        error = refusal_from_pb(refused)
        if not refused.HasField("handoff"):
            self.stop(error)
        elif push := self._pushes.get(convert.handoff_from_pb(refused.handoff)):
            self._fail(push, error, notify=push.state is not State.OFFERED)  # a refused offer needs no abort

    def _acknowledged(self, handoff: HandoffId) -> None:
        if (push := self._pushes.get(handoff)) and push.state is State.COMMITTED and self._welcome is not None:
            del self._pushes[handoff]
            self._report(handoff, push.result(self._welcome.transport))

    def _fail(self, push: Push, error: HandoffError, *, notify: bool) -> None:
        del self._pushes[push.job.handoff]
        if notify:
            self.window.flush()
            abort = pb.AbortHandoff(handoff=convert.handoff_to_pb(push.job.handoff))
            self._enqueue(pb.PeerCommand(abort=abort, after=self.window.number))
        self._close(push, error)

    def _close(self, push: Push, error: HandoffError) -> None:
        if push.reading:
            push.outcome = error
        else:
            self._report(push.job.handoff, error)

    def _wait(self, ready: Callable[[], T | None], what: str = "") -> T:
        """Wait until `ready` returns a true value: for `what` within the deadline, else until the channel breaks."""
        due = time.monotonic() + self._deadline_s if what else NEVER
        with self._changed:
            while self._error is None:
                if found := ready():
                    return found
                if (left := due - time.monotonic()) <= 0:
                    raise self._late(what)
                self.window.flush()
                packet = self._listen(left if what else None)
                if packet is not None:
                    self.take(pb.PeerReply.FromString(packet))
            raise self._error

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._listens and self.control_socket is not None:
            self.control_socket.wake()

    def _listen(self, timeout_s: float | None) -> bytes | None:
        """Wait, without the lock, for a change, a packet or the timeout. Return the packet, if there is one."""
        if self.control_socket is None:
            self._changed.wait(timeout_s)
            return None
        self._listens = True
        self._changed.release()
        try:
            return self.control_socket.receive(timeout_s)
        finally:
            self._changed.acquire()
            self._listens = False

    def _late(self, what: str) -> ChannelBroken:
        return ChannelBroken(f"{self._title}: no {what} within {self._deadline_s} s")


def _mark_of(push: Push, frame: FrameSpec) -> Mark | None:
    found = (one for one in push.marks if one.layers >= frame.layer_end and one.end >= frame.end)
    return next((one.mark for one in found), None)
