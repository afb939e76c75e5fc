"""The state of all pushes on one link. No I/O but `say`, which enqueues; no thread of its own.

The life of a push (any state may end in a report; an accepted offer is followed by Commit or Abort on the wire):

    WAITING --welcome--> OFFERED --accepted--> ACCEPTED --its bytes have left--> COMMITTED --ack--> reported
    (link not up)        (deadline)            (queued; a deadline per frame)    (deadline)

The link's thread asks for the next push, reads, announces and commits; replies, aborts and the end come from any
thread, and `expire` from one that nothing holds up. Blocks are read only inside `reading`, into staging: so a push that
ends outside it is reported at once, whatever the wire does, and one that ends inside is reported when it is left.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from baton.core import HandoffId
from baton.errors import BatonError, ChannelBroken, HandoffError, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.handoff import PushJob, PushResult
from kvtransfer.messages import announcement, refusal_from_pb
from kvtransfer.plan import FrameSpec
from kvtransfer.transport import Endpoint, KeyRelay

Report = Callable[[HandoffId, PushResult | HandoffError], None]
T = TypeVar("T")
NEVER = float("inf")


class State(enum.Enum):
    """Of a push; its life is drawn above."""

    WAITING = enum.auto()
    OFFERED = enum.auto()
    ACCEPTED = enum.auto()
    COMMITTED = enum.auto()


@dataclass(slots=True, eq=False)
class Push:
    """One push under way. State under the outbox's lock; `digests` and `started` are the link thread's own."""

    job: PushJob
    state: State = State.WAITING
    deadline: float = NEVER  # of the receiver's answer
    plan: tuple[FrameSpec, ...] = ()
    digests: list[bytes] = field(default_factory=list)
    started: float = 0.0
    reading: bool = False
    outcome: HandoffError | None = None  # decided while `reading`, reported after it


class Outbox:
    """Thread-safe. Once it is broken it stays so: every push has its report, and waiting raises the reason."""

    def __init__(
        self, end: Endpoint, title: str, say: Callable[[pb.PeerCommand], None], keys: KeyRelay, report: Report
    ) -> None:
        self._end = end
        self._title = title
        self._say = say
        self._keys = keys
        self._report = report
        self._deadline_s = end.settings.frame_deadline_s
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
        error.with_traceback(None)  # it is kept: with its frames it would keep the link's staging and threads' locals
        with self._changed:
            self._error = self._error or error
            for push in self._pushes.values():
                self._close(push, self._error)
            self._pushes.clear()
            self._changed.notify_all()

    def retire(self) -> None:
        """Break the link if it is idle; a push that is added from now on finds it broken."""
        with self._changed:
            if self.idle:
                self.stop(ChannelBroken(f"{self._title}: closed, it was idle"))

    def expire(self) -> None:
        """Break the link if the receiver owes an answer for too long, whatever the link's thread is doing."""
        with self._changed:
            if min((push.deadline for push in self._pushes.values()), default=NEVER) <= time.monotonic():
                self.stop(self._late("answer"))

    def take(self, reply: pb.PeerReply) -> None:
        """A message from the receiver. One that makes no sense breaks the link."""
        with self._changed:
            try:
                self._dispatch(reply)
            except BatonError as error:
                self.stop(ChannelBroken(f"{self._title}: {error}"))
            self._changed.notify_all()

    # From the link's thread

    def welcome(self) -> pb.PeerWelcome:
        """Wait for the receiver's consent. Raises HandoffError: refused, or not within the deadline."""
        return self._wait(lambda: self._welcome, "welcome")

    def next(self) -> Push:
        """Wait for the next push whose offer was accepted. Raises HandoffError when the link broke."""
        with self._changed:
            self._wait(lambda: self._ready)
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
        frame = announcement(push.job.handoff, index, self._announced, push.plan[index])
        with self._changed:
            credits = self.welcome().credits
            self._wait(lambda: self._announced - self._credited < credits, "credit")
            if not self._alive(push):
                return False
            self._announced += 1
            self._say(pb.PeerCommand(frame=frame))
            return True

    def commit(self, push: Push) -> None:
        """All its bytes have left."""
        commit = pb.Commit(
            handoff=convert.handoff_to_pb(push.job.handoff),
            spec=convert.spec_to_pb(push.job.spec),
            first=convert.tokens_to_pb(push.job.first),
            digests=push.digests,
        )
        with self._changed:
            if self._alive(push):
                push.state, push.deadline = State.COMMITTED, time.monotonic() + self._deadline_s
                self._say(pb.PeerCommand(commit=commit))

    # Under the lock

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
                self._credit(reply.credit.sequence)
            case "commit_ack":
                self._acknowledged(convert.handoff_from_pb(reply.commit_ack.handoff))

    def _welcomed(self, welcome: pb.PeerWelcome) -> None:
        if self._welcome is not None or not (welcome.credits and welcome.frame_size):
            raise ChannelBroken("a second welcome, or one that grants no frames")
        self._welcome = welcome
        for push in self._pushes.values():
            self._offer(push)

    def _offer(self, push: Push) -> None:
        if self._welcome is None:
            return
        push.plan = self._end.plan(push.job.known_tokens, self._welcome.frame_size)
        push.state, push.deadline = State.OFFERED, time.monotonic() + self._deadline_s
        offer = pb.Offer(
            handoff=convert.handoff_to_pb(push.job.handoff),
            fingerprint=self._end.fingerprint,
            known_tokens=push.job.known_tokens,
            frames=len(push.plan),
        )
        self._say(pb.PeerCommand(offer=offer))

    def _accepted(self, handoff: HandoffId) -> None:
        if (push := self._pushes.get(handoff)) and push.state is State.OFFERED:
            push.state, push.deadline = State.ACCEPTED, NEVER
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
            nbytes = sum(frame.nbytes for frame in push.plan)
            self._report(handoff, PushResult(nbytes, time.monotonic() - push.started, self._end.transport.name))

    def _fail(self, push: Push, error: HandoffError, *, tell: bool) -> None:
        del self._pushes[push.job.handoff]
        if tell:
            self._say(pb.PeerCommand(abort=pb.AbortHandoff(handoff=convert.handoff_to_pb(push.job.handoff))))
        self._close(push, error)

    def _close(self, push: Push, error: HandoffError) -> None:
        if push.reading:
            push.outcome = error
        else:
            self._report(push.job.handoff, error)

    def _alive(self, push: Push) -> bool:
        return self._pushes.get(push.job.handoff) is push

    def _wait(self, ready: Callable[[], T | None], what: str = "") -> T:
        """`what` is due within the deadline; without it, this waits until the link breaks."""
        with self._changed:
            self._changed.wait_for(lambda: self.broken or ready(), self._deadline_s if what else None)
            if self._error is not None:
                raise self._error
            if not (found := ready()):
                raise self._late(what)
            return found

    def _late(self, what: str) -> ChannelBroken:
        return ChannelBroken(f"{self._title}: no {what} within {self._deadline_s} s")
