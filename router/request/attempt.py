"""One attempt at a request, that is one handoff: reserve at D, prefill at P, listen to both, release both.

                      NO_ROOM                                       P lost or failed, no commit heard
    reserving ------------------> (left)          prefilling -----------------------------> fencing -- FENCED --> lost
        | Reserved                                    | P's first token      |                 |
        v                                             v                      | finish of P     | Committed: no failure
    reserved -- Prefill sent --> prefilling       handing over               v                 v
                (or Repush)                           | D's first message  finished         decoding
                                                      v
                                                  decoding -- finish of D --> finished, or Preempted --> next attempt

D lost or failed, at any time: lost, too. A lost attempt is followed by the next, to which P pushes what it still holds
if the client has no more than that; what would fail again is an error. Leaving the attempt, for whatever reason, sends
Release to each worker that did not say itself that it is through, unless P's KV goes to the next attempt.
An attempt without P goes from reserved to decoding: D computes the prompt itself, and is told so with the Reserve.

What workers are told of a stream, and what their words mean to an attempt.

An attempt that another router began, and this one takes over: the decode worker goes on with it all the while.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from baton.core import Finish, HandoffId, Role, SequenceSpec, Thought, Token
from baton.engine.prefix_cache import block_hashes_of
from baton.errors import BatonError, Cancelled, DeadlineExceeded, EngineFault, InvalidRequest, NoWorker, WorkerLost
from baton.metrics import Metrics
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2 as pb
from baton.stages import Stage
from router.request.thoughts import most_events
from router.request.traces import Track
from router.workers.placement import Placement
from router.workers.stream import EventMailbox, Item, WorkerStream

# What a worker's words mean to the client; what is not listed: WorkerLost for a failure, EngineFault for a refusal.
FAILURES: dict[str, type[BatonError]] = {
    "EngineFault": EngineFault,
    "DeadlineExceeded": DeadlineExceeded,
    "Cancelled": Cancelled,
}
REFUSALS: dict[int, type[BatonError]] = {
    pb.REFUSAL_REASON_FINGERPRINT: NoWorker,  # it serves another model now
    pb.REFUSAL_REASON_STALE: WorkerLost,
}
RETRYABLE = (WorkerLost, NoWorker)
RETRY_LATER = (pb.REFUSAL_REASON_NO_ROOM, pb.REFUSAL_REASON_DRAINING)


@dataclass(frozen=True, slots=True)
class StreamRetention:
    """A stream that outlives its router: for so many `seconds`, under its client's name for it. `parks`: it is to go on
    without this one, which is leaving.
    """

    seconds: float = 0.0
    stream: str = ""
    parks: Callable[[], bool] = lambda: False


_ANSWER_S = 15.0  # for a Reserve or a Fence, which a live worker answers between two steps
_SPARE_EVENTS = 16  # events of one handoff that carry no token


class Attempt:
    """Use as an async context manager; see the drawing above for the order of its methods."""

    def __init__(
        self,
        handoff: HandoffId,
        placement: Placement,
        spec: SequenceSpec,
        track: Track,
        metrics: Metrics,
        lasting: StreamRetention | None = None,
    ) -> None:
        self.cached_tokens: int | None = None  # at D; None: not reserved yet
        self.prefill_cached = 0  # tokens that P did not have to compute
        self.committed: pb.Committed | None = None
        self.finish: Finish | None = None
        self.handed_back = ""  # why another attempt is needed
        self.lost: BatonError | None = None  # the failure, if that is why
        self.kept = False  # P's KV is for the next attempt
        self.died = False  # a worker's process was lost, with this request among what it computed
        self.handoff, self._name = handoff, convert.handoff_to_pb(handoff)
        self._placement, self.spec = placement, spec
        self._spec: pb.SequenceSpec | None = None  # as workers are told of it
        self._track, self._stages = track, track.stages
        self._metrics, self._lasting = metrics, lasting or StreamRetention()
        self._mailbox = EventMailbox(
            spec.sampling.max_tokens + most_events(spec, placement.decode.info) + _SPARE_EVENTS
        )
        self.thoughts: list[Thought] = []  # heard, not handed on yet
        self._tokens: list[Token] = []  # heard, not handed on yet
        self._decoding = False
        self.alone = False  # D computes the prompt as well
        self._holds = False  # P has KV of this, or is about to: it was told, and has not said that it is through
        self._through = False  # D said that it holds nothing of this any more
        self.fencing: BatonError | None = None  # what happened to P
        self._computed = self._repushes = False  # P: has said the first token; was asked for what it holds

    @property
    def workers(self) -> tuple[str, str]:
        """The ids of P and D."""
        return (
            self._placement.prefill or self._placement.decode
        ).info.ref.worker_id, self._placement.decode.info.ref.worker_id

    @property
    def determinism(self) -> str:
        """What the workers say of their bits, if they say the same; else empty."""
        return self._placement.determinism

    @property
    def prefill_link(self) -> WorkerStream:
        assert self._placement.prefill is not None
        return self._placement.prefill

    @property
    def held(self) -> bool:
        """Whether the attempt was lost, and P has what the next one needs."""
        return self.lost is not None and self._holds and not self._decoding

    async def __aenter__(self) -> Attempt:
        for link in self._links:
            link.open(self.handoff, self._mailbox)
        return self

    async def __aexit__(self, *_: object) -> None:
        prefill, decode = self._placement.prefill, self._placement.decode
        for source, event in self._mailbox.left():  # it came while the last tokens were handed on
            self._note(source, event)
        parked = self._lasting.parks() and self._decoding  # D goes on with it when this router's stream ends
        if not parked and (not self._through or self._lasting.seconds):  # it remembers what was said, too
            decode.send(release=pb.Release(handoff=self._name))
        if prefill is not None and not self.kept and (self._holds or not self._through):
            prefill.send(release=pb.Release(handoff=self._name))
        for link in self._links:
            speaks = link is prefill and self._through and self._holds and not self.kept  # of its push
            link.close(self.handoff, self._track.owe() if speaks else None)
        self._placement.release()

    @property
    def _links(self) -> list[WorkerStream]:
        return [link for link in (self._placement.prefill, self._placement.decode) if link is not None]

    async def reserve(self, deadline_s: float) -> bool:
        """Ask D for room; False: none now. `deadline_s` from now, 0: none. Raises what ended the attempt."""
        info = self._placement.decode.info
        self._placement.decode.send(
            reserve=pb.Reserve(
                handoff=self._name,
                fingerprint=info.fingerprint,
                known_tokens=len(self.spec),
                max_total=len(self.spec.prompt) + self.spec.sampling.max_tokens,
                deadline_s=deadline_s,
                prefix=block_hashes_of(
                    self.spec, info.fingerprint, info.layout.block_size, thinks=info.thinking_chunk > 0
                ),
                resumable_s=self._lasting.seconds,
                stream=self._lasting.stream,
            )
        )
        await asyncio.sleep(0)  # it is told at once, and what follows is done while it answers
        self._spec = convert.spec_to_pb(self.spec)
        if self._placement.prefill is None:  # now: a prompt that is told of after the answer waits for one more step
            self.alone = True
            self._placement.decode.send(prefill=pb.Prefill(handoff=self._name, spec=self._spec, deadline_s=deadline_s))
        return await self._granted()

    async def _granted(self) -> bool:
        while self.cached_tokens is None and not self.handed_back:
            for source, item in await self._heard(_ANSWER_S):
                if isinstance(item, BatonError):  # of P too: nothing is computed yet that would be worth a fence
                    self.died = (
                        self.alone and self._placement.decode.state != "connected"
                    )  # it may compute since it heard
                    self._lose(source, item)
                else:
                    self._take(source, item)
        self._placement.reserved()
        return not self.handed_back

    def prefill(self, deadline_s: float) -> None:
        """Let P compute what is known, say the first token and hand over to D. `deadline_s` from now, 0: none."""
        if self.alone:
            return  # D was told with the Reserve
        message = pb.Prefill(handoff=self._name, spec=self._spec, deadline_s=deadline_s)
        message.to.CopyFrom(convert.ref_to_pb(self._placement.decode.info.ref))
        message.skip, self._holds = self.cached_tokens or 0, True
        self.prefill_link.send(prefill=message)

    def repush(self, held: HandoffId, deadline_s: float) -> None:
        """Let P hand over to D what it holds of an attempt that was lost. `deadline_s` from now, 0: none."""
        to = convert.ref_to_pb(self._placement.decode.info.ref)
        message = pb.Repush(held=convert.handoff_to_pb(held), handoff=self._name, to=to, deadline_s=deadline_s)
        message.skip, self._holds, self._repushes = self.cached_tokens or 0, True, True
        self.prefill_link.send(repush=message)

    async def outputs(self) -> AsyncIterator[list[Token]]:
        """Tokens of both witnesses as they come, and `thoughts`, until `finish` or `handed_back`. Raises a failure."""
        while True:
            tokens, self._tokens = self._tokens, []
            if tokens or self.thoughts:
                yield tokens
            if self.finish is not None or self.handed_back:
                return
            for source, item in await self._heard(_ANSWER_S if self.fencing else None):
                if self._tokens and isinstance(item, pb.WorkerEvent) and item.HasField("thoughts"):
                    tokens, self._tokens = self._tokens, []
                    yield tokens  # it is about them
                self._take(source, item)

    async def _heard(self, timeout_s: float | None) -> list[tuple[Role, Item]]:
        """What was said; a D that says nothing in time is lost."""
        if timeout_s is None:
            return await self._mailbox.drain()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._mailbox.drain()
        except TimeoutError:
            return [(Role.DECODE, WorkerLost(f"{self._worker(Role.DECODE)} did not answer within {timeout_s:g} s"))]

    def _take(self, source: Role, item: Item) -> None:
        """What later versions add needs nothing done."""
        if isinstance(item, BatonError):
            self.died = self.died or (self._computing(source) and self.finish is None)
            self._failed(source, item)
            return
        match self._note(source, item):
            case "reserved":
                self.cached_tokens = item.reserved.cached_tokens
                self._stages.enter(Stage.PREFILL)  # what D alone has computed may come with it
            case "tokens" | "finish" | "thoughts":
                self._on_output(source, item)
            case "committed":
                self._on_committed(item.committed)
            case "preempted":
                self.handed_back, self._through = "preempted", True
            case "refused":
                self._on_refused(source, item.refused)
            case "failed":
                self._on_failed(source, item.failed)
            case "fenced" if self.committed is None:  # else it comes late: D committed, ended, and forgot the attempt
                self._metrics.fenced()
                self._lose(Role.PREFILL, self.fencing or WorkerLost("the decode worker fenced the attempt"))

    def _note(self, source: Role, event: pb.WorkerEvent) -> str | None:
        if (kind := event.WhichOneof("event")) != "tokens":
            self._track.heard(source, self.workers[source is Role.DECODE], event)
            self._holds = self._holds and kind != "pushed"
        return kind

    def _computing(self, source: Role) -> bool:
        alone = self._decoding or self.alone
        return alone if source is Role.DECODE else self._holds and not (self._computed or self._repushes)

    def _on_output(self, source: Role, item: pb.WorkerEvent) -> None:
        if source is Role.PREFILL or (self.alone and not self._decoding):
            self.prefill_cached = item.cached_tokens
        try:
            if item.HasField("tokens"):
                self._on_tokens(source, convert.tokens_from_pb(item.tokens))
            elif item.HasField("thoughts"):
                self.thoughts += convert.thoughts_from_pb(item.thoughts)
            else:
                self._on_finish(source, convert.finish_from_pb(item.finish))
        except InvalidRequest as error:  # its fault, and not the client's
            raise EngineFault(f"{self._worker(source)} sent what cannot be read: {error}") from error

    def _on_finish(self, source: Role, finish: Finish) -> None:
        self.finish, self._through = finish, source is Role.DECODE
        if source is Role.PREFILL:
            self._stages.ended_at_first_token()

    def _on_tokens(self, source: Role, tokens: list[Token]) -> None:
        self._tokens += tokens
        self._computed = True
        if self._decoding:
            return
        if source is Role.PREFILL:
            self._placement.computed()
            self._stages.first_token()
        else:
            self._decoding = True
            self._placement.prefill_done()
            self._stages.handed_over(self.committed.commit_s if self.committed else 0.0)

    def _on_committed(self, committed: pb.Committed) -> None:
        self.fencing = None  # P's death, if it died, was no failure
        if self.committed is None:  # the answer to a late Fence says it again
            self.committed = committed
            self._metrics.handed_over(committed.transfer_s, committed.kv_bytes, committed.transport)

    def _on_refused(self, source: Role, refused: pb.Refused) -> None:
        self._holds = self._holds and source is Role.DECODE
        if self.handed_back:
            return  # D alone has nothing reserved to compute the prompt in: it was refused just before
        text = f"{self._worker(source)} refused the request: {refused.detail}"
        if refused.reason in RETRY_LATER:
            self.handed_back = "no_room"
        elif refused.reason == pb.REFUSAL_REASON_TOO_LONG:
            raise InvalidRequest.of("prompt", text)
        elif self._repushes and source is Role.PREFILL and refused.reason == pb.REFUSAL_REASON_STALE:
            self.handed_back = "kv_dropped"  # P needed the room for others: no failure, the prompt is computed again
        else:
            self._lose(source, REFUSALS.get(refused.reason, EngineFault)(text))

    def _on_failed(self, source: Role, failed: pb.Failed) -> None:
        if failed.kind == "DigestMismatch":
            self._metrics.digest_mismatch()
        if failed.kind == "Cancelled":  # another router has it: it is not for this one to release
            self._through, self._lasting = True, StreamRetention()
        kind = FAILURES.get(failed.kind, WorkerLost)
        self._failed(source, kind(f"{self._worker(source)}: {failed.kind}: {failed.message}"), holds=failed.held)

    def _failed(self, source: Role, error: BatonError, *, holds: bool = False) -> None:
        """First failure ends both legs. Whether P's is one at all, D knows: it accepted the commit or never will."""
        self._holds = holds if source is Role.PREFILL else self._holds
        if self.finish is None and source is Role.DECODE:
            self._lose(source, error)
        elif self.finish is None and self.committed is None and self.fencing is None:
            self.fencing = error
            self._placement.decode.send(fence=pb.Fence(handoff=self._name))

    def _lose(self, source: Role, error: BatonError) -> None:
        """The attempt is over. Raises what the next one would meet again."""
        if not isinstance(error, RETRYABLE):
            raise error
        self.lost, self.handed_back = error, f"{source}_lost"

    def _worker(self, source: Role) -> str:
        return f"the {source} worker {self.workers[source is Role.DECODE]}"


class TakeoverAttempt(Attempt):
    """Reserving is attaching, and there is no prompt to compute. Its claim has no prefill worker."""

    @property
    def workers(self) -> tuple[str, str]:
        """No prefill worker, and D."""
        return "", self._placement.decode.info.ref.worker_id

    async def reserve(self, deadline_s: float) -> bool:
        """Ask D for what comes after the known tokens; False: it has nothing of the kind. Raises what ended it."""
        self.alone = True
        self._placement.decode.send(attach=pb.Attach(handoff=self._name, spec=convert.spec_to_pb(self.spec)))
        return await self._granted()

    def prefill(self, deadline_s: float) -> None:
        """Long done."""
        self._stages.handed_over(0.0)

    def _take(self, source: Role, item: Item) -> None:
        if isinstance(item, pb.WorkerEvent) and item.HasField("attached"):
            self.cached_tokens, self._decoding = len(self.spec), True
            self._placement.prefill_done()
        elif isinstance(item, pb.WorkerEvent) and item.HasField("refused"):
            self.handed_back, self._through = "not_there", True
        else:
            super()._take(source, item)
