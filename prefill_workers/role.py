"""What a prefill worker does: compute the prompt and the first token, push the KV, forget.

Every method runs on the engine thread, but `push_ended`, which the sender calls from a transfer thread.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from baton.core import HandoffId, SequenceSpec, Token, WorkerInfo, WorkerRef
from baton.errors import ChannelBroken, DeadlineExceeded, HandoffError, InvalidRequest, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2
from baton.worker import events
from baton.worker.attempts import Attempts
from baton.worker.commands import deadline_after
from kvtransfer.handoff import PushJob, PushResult

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.engine.engine import Engine
    from baton.engine.outcome import Output, StepResult
    from baton.worker.loop import EngineLoop
    from baton.worker.session import Session

log = structlog.get_logger(__name__)


class Pusher(Protocol):
    """The part of `kvtransfer.sender.Sender` that the role uses."""

    def warm(self, to: WorkerRef) -> None: ...

    def push(self, job: PushJob) -> None: ...

    def abort(self, handoff: HandoffId) -> None: ...


@dataclass(slots=True)
class Work:
    """One handoff here. Once `pushing`, its blocks are freed by the end of the push and by nothing else."""

    session: Session
    spec: SequenceSpec
    to: WorkerRef
    deadline: float | None
    pushing: bool = False


class PrefillRole:
    """Prompts come as commands, leave as KV; `attach` gives it the sender it pushes with."""

    def __init__(self, info: WorkerInfo, engine: Engine, loop: EngineLoop, clock: Clock) -> None:
        self._info = info
        self._engine = engine
        self._loop = loop
        self._clock = clock
        self._work: dict[HandoffId, Work] = {}
        self._attempts = Attempts()
        self._pusher: Pusher | None = None
        self.transfer_bytes = 0
        self.transport = ""

    def attach(self, pusher: Pusher) -> None:
        self._pusher = pusher

    # --- commands ------------------------------------------------------------------------------------------------

    def command(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        """See `RoleBehaviour.command`."""
        match command.WhichOneof("command"):
            case "prefill":
                self._prefill(session, command.prefill)
            case "release":
                self._release(session, convert.handoff_from_pb(command.release.handoff))
            case kind:
                raise InvalidRequest.of("command", f"a prefill worker takes prefill and release, not {kind}")

    def _prefill(self, session: Session, message: worker_pb2.Prefill) -> None:
        handoff = convert.handoff_from_pb(message.handoff)
        spec, to = convert.spec_from_pb(message.spec), convert.ref_from_pb(message.to, "to")
        deadline = deadline_after(message.deadline_s, self._clock)
        try:
            self._attempts.check_new(handoff)
        except StaleAttempt as error:
            session.emit([events.refused(handoff, worker_pb2.REFUSAL_REASON_STALE, str(error))])
            return
        if handoff in self._work:  # for so long that it was forgotten
            raise InvalidRequest.of("handoff", f"{handoff} is already here")
        self._engine.submit(handoff, spec, hold=True)
        self._attempts.saw(handoff)
        self._work[handoff] = Work(session, spec, to, deadline)
        session.handoffs.add(handoff)
        if self._pusher is not None:
            with suppress(ChannelBroken):  # closing down: the push will say so
                self._pusher.warm(to)  # the channel is built while the prompt is computed

    def _release(self, session: Session, handoff: HandoffId) -> None:
        work = self._work.get(handoff)
        self._drop(handoff)
        if work is not None and work.session is not session and not work.pushing:  # a push reports its own end
            text = f"released by router {session.router_id}"
            work.session.emit([events.failed(handoff, StaleAttempt(text))])

    def gone(self, session: Session) -> None:
        for handoff in list(session.handoffs):
            self._drop(handoff)

    def _drop(self, handoff: HandoffId) -> None:
        """Give a handoff up. Blocks that are being read stay until the sender says that it is done with them."""
        work = self._work.get(handoff)
        if work is None:
            return
        if work.pushing and self._pusher is not None:
            self._pusher.abort(handoff)
        else:
            self._forget(handoff)

    def _forget(self, handoff: HandoffId) -> None:
        self._engine.release(handoff)
        work = self._work.pop(handoff, None)
        if work is not None:
            work.session.handoffs.discard(handoff)

    # --- steps ---------------------------------------------------------------------------------------------------

    def stepped(self, result: StepResult) -> None:
        batches: dict[Session, list[worker_pb2.WorkerEvent]] = defaultdict(list)
        for item in result.outputs:
            if (work := self._work.get(item.key)) is not None:
                batches[work.session] += events.output(item)
        for key, error in result.failed:
            if (work := self._work.get(key)) is not None:
                batches[work.session].append(events.failed(key, error))
                self._forget(key)
        for session, batch in batches.items():
            session.emit(batch)  # the first token leaves before its KV does
        for item in result.outputs:
            self._hand_over(item)

    def _hand_over(self, item: Output) -> None:
        work = self._work.get(item.key)
        if work is None or self._pusher is None:
            return
        if item.finish is not None:
            self._forget(item.key)  # the first token ended it: there is nothing to commit
            return
        work.pushing = True
        try:
            self._pusher.push(self._job(item.key, work, item.tokens))
        except (HandoffError, ValueError) as error:  # it was not taken, so nothing else reports its end
            log.warning("push_refused", handoff=str(item.key), error=str(error))
            self._pushed(item.key, error if isinstance(error, HandoffError) else HandoffError(str(error)))

    def _job(self, handoff: HandoffId, work: Work, first: list[Token]) -> PushJob:
        spec = replace(work.spec, known=(*work.spec.known, *(token.token_id for token in first)))
        blocks = self._engine.held(handoff).blocks[: self._info.layout.blocks_for(len(work.spec))]
        return PushJob(handoff=handoff, to=work.to, blocks=blocks, known_tokens=len(work.spec), spec=spec, first=first)

    def push_ended(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        """The sender will not read this handoff's blocks any more. From a transfer thread, once per push."""
        self._loop.submit(partial(self._pushed, handoff, outcome))

    def _pushed(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        work = self._work.get(handoff)
        self._forget(handoff)
        if isinstance(outcome, PushResult):
            self.transfer_bytes += outcome.nbytes
            self.transport = outcome.transport
            event = events.pushed(handoff, outcome.nbytes)
        else:
            event = events.failed(handoff, outcome)
        if work is not None:
            work.session.emit([event])

    def tick(self) -> None:
        """Give up prompts whose deadline passed before they were computed."""
        now = self._clock.monotonic()
        late = [h for h, w in self._work.items() if w.deadline is not None and w.deadline <= now and not w.pushing]
        for handoff in late:
            session = self._work[handoff].session
            self._drop(handoff)
            session.emit([events.failed(handoff, DeadlineExceeded("the prompt was not computed in time"))])
