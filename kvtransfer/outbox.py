"""The state of all pushes on one link. No I/O but `say`, which enqueues; no thread of its own.

The life of a push (any state may end in a report; an accepted offer is followed by Commit or Abort on the wire):

    WAITING --welcome--> OFFERED --accepted--> READY --its turn--> SENDING --last frame--> COMMITTED --ack--> reported
    (link not up)        (deadline)            (no deadline)       (deadline per frame)    (deadline)

The link's thread asks for the next push, reads, announces and commits; replies, aborts and the end come from any
thread. Blocks are read only inside `reading`, into staging: so a push that ends outside it is reported at once,
whatever the wire does, and one that ends inside is reported when it is left.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from baton.errors import BatonError, ChannelBroken, HandoffError, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.handoff import PushResult
from kvtransfer.plan import plan_frames
from kvtransfer.push import NEVER, Push, State
from kvtransfer.refusals import refusal_from_pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from baton.core import HandoffId, KVLayout
    from kvtransfer.handoff import PushJob

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wording:
    """What goes into an outbox's messages and reports."""

    link: str
    layout: KVLayout
    fingerprint: str
    transport: str
    deadline_s: float


class Outbox:
    """Thread-safe. Once it is broken it stays so: every push has its report, and waiting raises the reason."""

    def __init__(
        self,
        wording: Wording,
        say: Callable[[pb.PeerCommand], None],
        key_arrived: Callable[[str, bytes], None],
        report: Callable[[HandoffId, PushResult | HandoffError], None],
    ) -> None:
        self._wording = wording
        self._say = say
        self._key_arrived = key_arrived
        self._report = report
        self._changed = threading.Condition()
        self._pushes: dict[HandoffId, Push] = {}
        self._ready: deque[Push] = deque()
        self._error: HandoffError | None = None
        self._welcome: pb.PeerWelcome | None = None
        self._announced = 0
        self._credited = 0

    @property
    def broken(self) -> bool:
        return self._error is not None

    @property
    def idle(self) -> bool:
        return not self._pushes and not self.broken

    # From any thread

    def add(self, job: PushJob) -> bool:
        """Take a push; False: the link is broken. Raises ValueError for a job that is under way already."""
        with self._changed:
            if self.broken:
                return False
            if job.handoff in self._pushes:
                raise ValueError(f"push {job.handoff} is under way already")
            push = self._pushes[job.handoff] = Push(job)
            self._offer(push)
            return True

    def abort(self, handoff: HandoffId) -> None:
        """End a push with StaleAttempt; unknown: no-op."""
        with self._changed:
            if push := self._pushes.get(handoff):
                self._fail(push, StaleAttempt(f"push {handoff}: aborted"), tell=push.state is not State.WAITING)

    def stop(self, error: HandoffError) -> None:
        """The link is broken: end all pushes with `error`. The first call counts."""
        with self._changed:
            self._error = self._error or error
            for push in self._pushes.values():
                self._close(push, self._error)
            self._pushes.clear()
            self._changed.notify_all()

    def take(self, reply: pb.PeerReply) -> None:
        """A message from the receiver. One that makes no sense breaks the link."""
        with self._changed:
            try:
                self._dispatch(reply)
            except BatonError as error:
                self.stop(ChannelBroken(f"{self._wording.link}: {error}"))
            self._changed.notify_all()

    # From the link's thread

    def welcome(self) -> pb.PeerWelcome:
        """Wait for the receiver's consent. Raises HandoffError: refused, or not within the deadline."""
        return self._wait(lambda: self._welcome, "welcome")

    def next(self) -> Push:
        """Wait for the next push whose offer was accepted. Raises HandoffError when the link broke."""
        with self._changed:
            while not self._ready:
                self._check()
                overdue = min((push.deadline for push in self._pushes.values()), default=NEVER)
                if overdue <= time.monotonic():
                    raise self._late("answer")
                self._changed.wait(None if overdue == NEVER else overdue - time.monotonic())
            self._check()
            push = self._ready.popleft()
            push.started = time.monotonic()
            return push

    @contextmanager
    def reading(self, push: Push) -> Iterator[bool]:
        """While inside, blocks may be read; False: the push has ended, they may not."""
        with self._changed:
            push.reading = self._alive(push)
        try:
            yield push.reading
        finally:
            with self._changed:
                push.reading = False
                if push.outcome is not None:
                    self._report(push.job.handoff, push.outcome)

    def announce(self, push: Push, index: int) -> bool:
        """Say that frame `index` enters the channel now; False: the push has ended, nothing was said.

        Waits for a credit. Raises HandoffError when the link broke or none came within the deadline.
        """
        with self._changed:
            self._wait(self._has_credit, "credit")
            if not self._alive(push):
                return False
            push.state = State.SENDING
            self._say(push.frame(index, self._announced))
            self._announced += 1
            return True

    def commit(self, push: Push) -> None:
        """All frames are with the receiver."""
        push.transfer_s = time.monotonic() - push.started
        message = push.commit()
        with self._changed:
            if self._alive(push):
                self._expect_answer(push, State.COMMITTED)
                self._say(message)

    # Under the lock

    def _dispatch(self, reply: pb.PeerReply) -> None:
        match reply.WhichOneof("reply"):
            case "welcome":
                self._welcomed(reply.welcome)
            case "store_key":
                self._key_arrived(reply.store_key.key, reply.store_key.value)
            case "offer_accepted":
                self._accepted(convert.handoff_from_pb(reply.offer_accepted.handoff))
            case "refused":
                self._refused(reply.refused)
            case "credit":
                self._credit(reply.credit.sequence)
            case "commit_ack":
                self._acknowledged(convert.handoff_from_pb(reply.commit_ack.handoff))

    def _welcomed(self, welcome: pb.PeerWelcome) -> None:
        if not (welcome.credits and welcome.frame_size):
            raise ChannelBroken("the receiver's welcome grants no frames")
        self._welcome = welcome
        for push in self._pushes.values():
            self._offer(push)

    def _offer(self, push: Push) -> None:
        if self._welcome is None:
            return
        layout, job = self._wording.layout, push.job
        push.plan = plan_frames(layout, layout.blocks_for(job.known_tokens), self._welcome.frame_size)
        self._expect_answer(push, State.OFFERED)
        self._say(push.offer(self._wording.fingerprint))

    def _accepted(self, handoff: HandoffId) -> None:
        if (push := self._pushes.get(handoff)) and push.state is State.OFFERED:
            push.state, push.deadline = State.READY, NEVER
            self._ready.append(push)

    def _refused(self, refused: pb.HandoffRefused) -> None:
        error = refusal_from_pb(refused)
        if not refused.HasField("handoff"):
            self.stop(error)
        elif push := self._pushes.get(convert.handoff_from_pb(refused.handoff)):
            self._fail(push, error, tell=push.state is not State.OFFERED)  # a refused offer binds nobody

    def _credit(self, sequence: int) -> None:
        if not self._credited <= sequence < self._announced:
            raise ChannelBroken(f"credit for frame {sequence}, with {self._announced} announced")
        self._credited = sequence + 1

    def _acknowledged(self, handoff: HandoffId) -> None:
        if (push := self._pushes.get(handoff)) and push.state is State.COMMITTED:
            del self._pushes[handoff]
            self._report(handoff, PushResult(push.nbytes, push.transfer_s, self._wording.transport))

    def _fail(self, push: Push, error: HandoffError, *, tell: bool) -> None:
        del self._pushes[push.job.handoff]
        if tell:
            self._say(push.abort())
        self._close(push, error)

    def _close(self, push: Push, error: HandoffError) -> None:
        if push.reading:
            push.outcome = error
        else:
            self._report(push.job.handoff, error)

    def _expect_answer(self, push: Push, state: State) -> None:
        push.state, push.deadline = state, time.monotonic() + self._wording.deadline_s
        self._changed.notify_all()  # `next` watches the deadlines

    def _alive(self, push: Push) -> bool:
        return self._pushes.get(push.job.handoff) is push

    def _has_credit(self) -> bool:
        return self._welcome is not None and self._announced - self._credited < self._welcome.credits

    def _wait(self, ready: Callable[[], T | None], what: str) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self.broken or ready(), self._wording.deadline_s)
            self._check()
            if not (found := ready()):
                raise self._late(what)
            return found

    def _late(self, what: str) -> ChannelBroken:
        return ChannelBroken(f"{self._wording.link}: no {what} within {self._wording.deadline_s} s")

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
