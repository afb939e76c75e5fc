"""A sender driven stage by stage by the test, over memory, with the guarantees of `kvtransfer.sender.Sender`.

It checks that its user frees no block before withdrawing it, and that every block it reads has an owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from baton.errors import ChannelBroken, HandoffError, StaleAttempt
from kvtransfer.frames import Progress
from kvtransfer.handoff import CommitState, Offer, PushEnd, PushJob, PushResult
from tests.support.sessions import P

FRAME = 1 << 16
CUT = ChannelBroken("cut")


def done_of(nbytes=64):
    return PushResult(nbytes=nbytes, frames=1, exposed_s=0.1, round_trip_s=0.01, filling_s=0.0, transport="memory")


def commit_of(spec, first, thinking=None):
    return CommitState(spec, first, 0.1, 0.1, 64, "memory", thinking)


@dataclass
class Push:
    """A push in progress: the sender's state and the receiver's progress."""

    job: PushJob
    progress: Progress
    stage: str = "queued"  # queued | offered | written | committed
    blocks: Sequence[int] = ()
    end: PushEnd | None = None
    aborted: bool = False
    told: list[tuple[int, int]] = field(default_factory=list)  # (layers, end) of each `computed`
    frames: list[tuple[range, int, int]] = field(default_factory=list)


class FakePusher:
    """A sender attached to a worker's engine. It reports to `ended`."""

    def __init__(self, engine, ended):
        self.engine, self.ended = engine, ended
        self.pushes = {}
        self.reports = []
        self.log = []  # (method, handoff) of all calls but `computed`
        self.refuse = None  # raised by begin
        self._let_go, engine.pool._let_go = engine.pool._let_go, self._checked

    # --- called by the role

    def begin(self, job):
        self.log.append(("begin", job.handoff))
        if self.refuse is not None:
            raise self.refuse
        if job.handoff in self.pushes:
            raise ValueError(f"push {job.handoff} is under way already")
        self.pushes[job.handoff] = Push(job, Progress(self.engine.layout, job.skip, job.known_tokens))

    def computed(self, handoff, blocks, layers, end):
        if (push := self._live(handoff)) is not None:
            assert len(blocks) * self.engine.layout.block_size >= min(end, push.job.known_tokens)
            push.blocks = blocks
            push.progress.computed(layers, end)
            push.told.append((layers, end))

    def withdraw(self, handoff):
        """Wait for a read in progress. Afterwards nothing reads these blocks, whatever the push's outcome."""
        self.log.append(("withdraw", handoff))
        if (push := self.pushes.get(handoff)) is not None:
            push.progress.withdrawn()
            push.blocks = ()

    def finish(self, handoff, end):
        if (push := self._live(handoff)) is not None:
            assert end.spec is None or len(end.spec) == push.job.known_tokens + 1
            push.end = end

    def abort(self, handoff):
        """Abort the push. A read in progress continues until `withdraw`."""
        self.log.append(("abort", handoff))
        if (push := self.pushes.get(handoff)) is not None:
            push.aborted = True

    def _live(self, handoff):
        push = self.pushes.get(handoff)
        return None if push is None or push.aborted else push

    def _checked(self, allocation):
        readers = [
            push.job.handoff for push in self.pushes.values() if push.blocks and push.blocks is allocation.blocks
        ]
        assert not readers, f"blocks are let go that {readers} may still read"
        self._let_go(allocation)

    # --- called by the test

    def done(self, handoff, outcome):
        """Report the outcome of a push, its only report."""
        del self.pushes[handoff]
        self.reports.append(handoff)
        self.ended(handoff, outcome)

    def advance(self, handoff, decode):
        """Advance one stage towards `decode`'s table, or as far as KV is computed."""
        push, table = self.pushes[handoff], decode.role.reservations
        try:
            if push.aborted:
                raise StaleAttempt("aborted")
            self._stage(push, table, decode.engine.kv)
        except HandoffError as error:
            table.aborted(handoff, P)
            self.done(handoff, error)

    def break_channel(self, decode):
        """Fail every push and report the lost sender to the table."""
        for handoff in list(self.pushes):
            self.done(handoff, CUT)
        decode.role.reservations.lost(P)

    def _stage(self, push, table, kv):
        job, handoff = push.job, push.job.handoff
        if push.stage == "queued":
            table.offer(handoff, P, Offer(self.engine.backend.fingerprint, job.known_tokens, job.skip))
            push.stage = "offered"
        elif push.stage == "offered":
            while push.blocks and (frame := push.progress.next(FRAME)) is not None:
                self._send(push, frame, table, kv)
            if push.progress.complete and push.end is not None:
                push.stage = "written"
        elif push.stage == "written":
            table.commit(handoff, P, commit_of(push.end.spec, push.end.first, push.end.state))
            push.stage = "committed"
        else:
            self.done(handoff, done_of())

    def _send(self, push, frame, table, kv):
        used = push.blocks[: self.engine.layout.blocks_for(frame.end)]
        assert all(self.engine.pool._references[block] for block in used), "reads blocks without an owner"
        data = torch.empty(frame.nbytes, dtype=torch.uint8)
        self.engine.kv.gather(frame.layers, used, frame.begin, frame.end, data)
        with table.writing(push.job.handoff, P) as blocks:
            kv.scatter(frame.layers, blocks, frame.begin, frame.end, data)
        push.progress.took(frame)
        push.frames.append((frame.layers, frame.begin, frame.end))
