"""One attempt at a request, which is one handoff: reserve on D, prefill on P, merge their events, release both.
P is the prefill worker, D the decode worker.

                      NO_ROOM                                    P lost or failed before Committed
    reserving ------------------> (left)          prefilling -----------------------------> fencing -- FENCED --> lost
        | Reserved                                    | P's first token      |                 |
        v                                             v                      | finish of P     | Committed: no failure
    reserved -- Prefill sent --> prefilling       handing over               v                 v
                (or Repush)                           | D's first message  finished         decoding
                                                      v
                                                  decoding -- finish of D --> finished, or Preempted --> next attempt

A D that leaves may hold the KV of a preempted sequence. It then has the part of P in the next attempt, and may decode
more tokens before the handoff. If D is lost or fails at any time, the attempt is lost too. P retransfers held KV to the
next attempt's D, unless the client has tokens beyond it. An error that a retry would repeat is raised. Leaving the
attempt sends Release to each worker that has not reported its own end, unless its KV is kept for the next attempt.
Without P, an attempt goes from reserved to decoding: D gets the prompt with the Reserve and computes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial

from baton.core import Finish, HandoffId, Role, SequenceSpec, Thought, Token, WorkerInfo
from baton.engine.prefix_cache import block_hashes_of
from baton.errors import BatonError, Cancelled, DeadlineExceeded, EngineFault, InvalidRequest, NoWorker, WorkerLost
from baton.limits import MAX_RECORD_BYTES
from baton.metrics import Metrics
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2 as pb
from baton.stages import Stage
from router.request.prompt_logprobs import PromptScores
from router.request.traces import Track
from router.workers.placement import Placement
from router.workers.stream import EventMailbox, Item, WorkerLeft, WorkerStream

# Errors for the client by a worker's failure or refusal. Defaults: WorkerLost for failures, EngineFault for refusals.
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
    """How a decode worker keeps a stream without its router: for `seconds`, under the client's name `stream`. `parks`
    returns whether this router is leaving and the stream is to continue without it. `at_end` takes the release of an
    ended stream, to be called when the whole answer has ended: until then a client may lose the router and come back.
    """

    seconds: float = 0.0
    stream: str = ""
    parks: Callable[[], bool] = lambda: False
    at_end: Callable[[Callable[[], None]], None] = lambda release: release()


_ANSWER_S = 15.0  # for a Reserve or a Fence, which a live worker answers between two steps
_SPARE_EVENTS = 16  # most events of one handoff without a token


class Attempt:
    """A context manager for one attempt; see the diagram above. `deadline_s` is in seconds from now, 0 means none."""

    def __init__(
        self,
        handoff: HandoffId,
        placement: Placement,
        spec: SequenceSpec,
        track: Track,
        metrics: Metrics,
        retention: StreamRetention | None = None,
        known_tokens: int = 0,
        scores: PromptScores | None = None,
    ) -> None:
        self.known_tokens = max(known_tokens, len(spec))  # whose KV comes to D; after a preemption, that D can move
        self.cached_tokens: int | None = None  # on D; None until reserved
        self.prefill_cached = 0  # tokens that P did not have to compute
        self.committed: pb.Committed | None = None
        self.finish: Finish | None = None
        self.retry_reason = ""  # the reason if another attempt is needed
        self.lost: BatonError | None = None
        self.kept = False  # whether P, or D if it `moves`, keeps its KV for the next attempt
        self.moves = False  # D leaves and holds the KV of all tokens but the last, or decodes on until it has more
        self.died = False  # whether a worker process that computed this request was lost
        self.handoff, self._name = handoff, convert.handoff_to_pb(handoff)
        self._placement, self.spec = placement, spec
        self._spec: pb.SequenceSpec | None = None
        self._track, self._stages = track, track.stages
        self._metrics, self._retention = metrics, retention or StreamRetention()
        self._scores = scores or PromptScores(replace(spec, prompt_logprobs=None))
        events = spec.sampling.max_tokens + most_events(spec, placement.decode.info) + self._scores.most_events
        self._mailbox = EventMailbox(events + _SPARE_EVENTS)
        self.thoughts: list[Thought] = []  # received, not yet passed on
        self._tokens: list[Token] = []
        self._decoding = False
        self._room = MAX_RECORD_BYTES if self._retention.seconds and not spec.known else 0  # of D's record
        self.alone = False  # D computes the prompt, too
        self._holds = False  # P has KV of this, or has the command to compute it, and has not reported its end
        self._decode_ended = False  # D has reported that it holds nothing of this handoff
        self.fencing: BatonError | None = None  # P's failure while D is asked for a fence
        self._computed = self._retransfers = False  # P sent the first token; P retransfers held KV

    @property
    def workers(self) -> tuple[str, str]:
        """The worker ids of P and D. Without P, D's id is in both places."""
        prefill = self._placement.prefill or self._placement.decode
        return prefill.info.ref.worker_id, self._placement.decode.info.ref.worker_id

    @property
    def recorded(self) -> bool:
        """Whether D can repeat the stream from its first token."""
        return self._decoding and self._room > 0

    @property
    def determinism(self) -> str:
        """The determinism fingerprint of both workers, or "" if they differ."""
        return self._placement.determinism

    @property
    def prefill_link(self) -> WorkerStream:
        assert self._placement.prefill is not None
        return self._placement.prefill

    @property
    def held(self) -> bool:
        """Whether the attempt ended while P, or a D that `moves`, has the KV that the next one needs."""
        return self.moves or (self.lost is not None and self._holds and not self._decoding)

    @property
    def _from_decode(self) -> bool:
        """Whether a decode worker that leaves has the part of P."""
        return self._placement.prefill is not None and self._placement.prefill.info.role is Role.DECODE

    @property
    def holder(self) -> WorkerStream:
        """The worker with the KV of a `held` attempt."""
        return self._placement.decode if self.moves else self.prefill_link

    async def __aenter__(self) -> Attempt:
        if self._placement.prefill is not None:
            self._placement.prefill.open(self.handoff, self._mailbox, Role.PREFILL)
        self._placement.decode.open(self.handoff, self._mailbox, Role.DECODE)
        return self

    async def __aexit__(self, *_: object) -> None:
        prefill, decode = self._placement.prefill, self._placement.decode
        for source, event in self._mailbox.left():  # these came while the last tokens were passed on
            self._note(source, event)
        parked = self._retention.parks() and self._decoding  # D continues when this router's stream ends
        moves = self.moves and self.kept
        if not (parked or moves) and (self.moves or not self._decode_ended or self._retention.seconds):
            # D keeps a resumable one after its end.
            release = partial(decode.send, release=pb.Release(handoff=self._name))
            if self.finish is not None and self._decode_ended:
                self._retention.at_end(release)
            else:
                release()
        if prefill is not None and not self.kept and (self._holds or not self._decode_ended):
            prefill.send(release=pb.Release(handoff=self._name))
        for link in self._links:
            reports = link is prefill and self._decode_ended and self._holds and not self.kept  # the result of its push
            link.close(self.handoff, self._track.expect_report() if reports else None)
        self._placement.release()

    @property
    def _links(self) -> list[WorkerStream]:
        return [link for link in (self._placement.prefill, self._placement.decode) if link is not None]

    async def reserve(self, deadline_s: float) -> bool:
        """Reserve capacity on D. Return False if D is full. Raises the error that ended the attempt."""
        decode, info = self._placement.decode, self._placement.decode.info
        thinks = info.thinking_chunk > 0
        message = pb.Reserve(
            handoff=self._name,
            fingerprint=info.fingerprint,
            known_tokens=self.known_tokens,
            max_total=len(self.spec.prompt) + self.spec.sampling.max_tokens,
            deadline_s=deadline_s,
            prefix=block_hashes_of(self.spec, info.fingerprint, info.layout.block_size, thinks=thinks),
            resumable_s=self._retention.seconds,
            stream=self._retention.stream,
            determinism=self.determinism,
        )
        decode.send(reserve=message)
        await asyncio.sleep(0)  # sends the Reserve; the rest is done while D answers
        self._spec = convert.spec_to_pb(self.spec)
        if self._placement.prefill is None:  # a Prefill sent after the answer would wait for one more step
            self.alone = True
            decode.send(prefill=pb.Prefill(handoff=self._name, spec=self._spec, deadline_s=deadline_s))
        return await self._granted()

    async def _granted(self) -> bool:
        while self.cached_tokens is None and not self.retry_reason:
            for source, item in await self._received(_ANSWER_S):
                if isinstance(item, BatonError):  # from P too: nothing is computed yet, so no fence is needed
                    lost = self._placement.decode.state != "connected" and not isinstance(item, WorkerLeft)
                    self.died = self.alone and lost  # D may compute already
                    self._lose(source, item)
                else:
                    self._take(source, item)
        self._placement.reserved()
        return not self.retry_reason

    def prefill(self, deadline_s: float) -> None:
        """Have P compute the known tokens, send the first token and hand over to D."""
        if self.alone:
            return  # D got the prompt with the Reserve
        message = pb.Prefill(handoff=self._name, spec=self._spec, deadline_s=deadline_s)
        message.to.CopyFrom(convert.ref_to_pb(self._placement.decode.info.ref))
        message.skip, self._holds = self.cached_tokens or 0, True
        self.prefill_link.send(prefill=message)

    def retransfer(self, held: HandoffId, deadline_s: float) -> None:
        """Have P retransfer to D the KV that it holds of the lost attempt `held`."""
        to = convert.ref_to_pb(self._placement.decode.info.ref)
        message = pb.Repush(held=convert.handoff_to_pb(held), handoff=self._name, to=to, deadline_s=deadline_s)
        message.skip, self._holds, self._retransfers = self.cached_tokens or 0, True, True
        self.prefill_link.send(repush=message)

    async def outputs(self) -> AsyncIterator[list[Token]]:
        """Yield new tokens, or [] for new `thoughts`, until `finish` or `retry_reason` is set. Raises a failure."""
        while True:
            tokens, self._tokens = ([], self._tokens) if self._scores.missing else (self._tokens, [])
            if tokens or self.thoughts or self._scores.fresh:
                yield tokens
            if (self.finish is not None and not self._scores.missing) or self.retry_reason:
                return
            items = await self._received(_ANSWER_S if self.fencing else None)
            self._track.received(self._mailbox.lag_s)
            for source, item in items:
                if self._tokens and isinstance(item, pb.WorkerEvent) and item.HasField("thoughts"):
                    tokens, self._tokens = self._tokens, []
                    yield tokens  # before the thoughts about them
                self._take(source, item)

    async def _received(self, timeout_s: float | None) -> list[tuple[Role, Item]]:
        """Return received items. D counts as lost if none arrives within `timeout_s`."""
        if timeout_s is None:
            return await self._mailbox.drain()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._mailbox.drain()
        except TimeoutError:
            return [(Role.DECODE, WorkerLost(f"{self._worker(Role.DECODE)} did not answer within {timeout_s:g} s"))]

    def _take(self, source: Role, item: Item) -> None:
        """Apply one item. Unknown events of later protocol versions are ignored."""
        if isinstance(item, BatonError):
            dies = self.finish is None and not isinstance(item, WorkerLeft)
            self.died = self.died or (dies and self._computing(source))
            self._failed(source, item)
            return
        match self._note(source, item):
            case "reserved":
                self.cached_tokens = item.reserved.cached_tokens
                self._stages.enter(Stage.PREFILL)  # now, because tokens of a lone D may come in the same message
            case "tokens" | "finish" | "thoughts" | "prompt_logprobs":
                self._on_output(source, item)
            case "committed":
                self._on_committed(item.committed)
            case "preempted":
                self.retry_reason, self._decode_ended, self.moves = "preempted", True, item.preempted.held
                self.known_tokens = item.preempted.known_tokens
            case "refused":
                self._on_refused(source, item.refused)
            case "failed":
                self._on_failed(source, item.failed)
            case "fenced" if self.committed is None:  # a late one is ignored: D committed, ended, and dropped it
                self._metrics.fenced()
                self._lose(Role.PREFILL, self.fencing or WorkerLost("the decode worker fenced the attempt"))

    def _note(self, source: Role, event: pb.WorkerEvent) -> str | None:
        if (kind := event.WhichOneof("event")) != "tokens":
            self._track.add(source, self.workers[source is Role.DECODE], event)
            self._holds = self._holds and kind != "pushed"
        return kind

    def _computing(self, source: Role) -> bool:
        if source is Role.DECODE:
            return self._decoding or self.alone
        return self._holds and not (self._computed or self._retransfers)

    def _on_output(self, source: Role, item: pb.WorkerEvent) -> None:
        if source is Role.PREFILL or (self.alone and not self._decoding):
            self.prefill_cached = item.cached_tokens
        try:
            if item.HasField("tokens"):
                self._room -= item.ByteSize() if source is Role.DECODE else 0
                self._on_tokens(source, convert.tokens_from_pb(item.tokens))
            elif item.HasField("thoughts"):
                self.thoughts += convert.thoughts_from_pb(item.thoughts)
            elif item.HasField("prompt_logprobs"):
                self._scores.add(convert.prompt_part_from_pb(item.prompt_logprobs))
            else:
                self._on_finish(source, convert.finish_from_pb(item.finish))
        except InvalidRequest as error:  # the worker's fault, not the client's
            raise EngineFault(f"{self._worker(source)} sent an invalid message: {error}") from error

    def _on_finish(self, source: Role, finish: Finish) -> None:
        unscored = self.retry_reason and self._scores.missing  # P was lost: the next attempt ends the answer
        self.finish, self._decode_ended = None if unscored else finish, source is Role.DECODE
        if source is Role.PREFILL and not self._from_decode:
            self._stages.ended_at_first_token()

    def _on_tokens(self, source: Role, tokens: list[Token]) -> None:
        self._tokens += tokens
        self._computed = True
        if self._decoding:
            return
        if source is Role.PREFILL:
            self._placement.computed()
            if self._from_decode:
                self._stages.enter(Stage.DECODE)
            else:
                self._stages.first_token()
        else:
            self._decoding = True
            self._placement.prefill_done()
            self._stages.handed_over(self.committed.commit_s if self.committed else 0.0)

    def _on_committed(self, committed: pb.Committed) -> None:
        self.fencing = None  # the handoff is complete, so losing P was no failure
        if self.committed is None:  # the answer to a late Fence repeats it
            self.committed = committed
            self._metrics.handed_over(committed.transfer_s, committed.kv_bytes, committed.transport)

    def _on_refused(self, source: Role, refused: pb.Refused) -> None:
        self._holds = self._holds and source is Role.DECODE
        if self.retry_reason:
            return  # a lone D refuses the Prefill too, after it refused the Reserve
        text = f"{self._worker(source)} refused the request: {refused.detail}"
        if refused.reason in RETRY_LATER:
            self.retry_reason = "no_room"
        elif refused.reason == pb.REFUSAL_REASON_TOO_LONG:
            fits = self.known_tokens < self._placement.decode.info.max_model_len
            raise InvalidRequest.of("sampling.max_tokens" if fits else "prompt", text)
        elif self._retransfers and source is Role.PREFILL and refused.reason == pb.REFUSAL_REASON_STALE:
            self.retry_reason = "kv_dropped"  # P freed the KV for other prompts: not a failure, it is computed again
        else:
            self._lose(source, REFUSALS.get(refused.reason, EngineFault)(text))

    def _on_failed(self, source: Role, failed: pb.Failed) -> None:
        if failed.kind == "DigestMismatch":
            self._metrics.digest_mismatch()
        if failed.kind == "Cancelled":  # another router has attached and must keep the stream
            self._decode_ended, self._retention = True, StreamRetention()
        kind = FAILURES.get(failed.kind, WorkerLost)
        self._failed(source, kind(f"{self._worker(source)}: {failed.kind}: {failed.message}"), holds=failed.held)

    def _failed(self, source: Role, error: BatonError, *, holds: bool = False) -> None:
        """Apply a failure. If P fails before Committed, D gets a Fence: only D can report whether it accepted."""
        self._holds = holds if source is Role.PREFILL else self._holds
        if self._scores.missing:  # a decode worker that has the KV cannot report them
            self.finish = None
            self._lose(source, error)
        elif self.finish is None and source is Role.DECODE:
            self._lose(source, error)
        elif self.finish is None and self.committed is None and self.fencing is None:
            self.fencing = error
            self._placement.decode.send(fence=pb.Fence(handoff=self._name))

    def _lose(self, source: Role, error: BatonError) -> None:
        """End the attempt for a retry. Raises `error` if a retry would repeat it."""
        if not isinstance(error, RETRYABLE):
            raise error
        self.lost, self.retry_reason = error, f"{source}_lost"
        if isinstance(error, WorkerLeft):
            self.lost, self.retry_reason = None, "no_room"  # like a refusal of a worker that drains
        elif source is Role.PREFILL and self._from_decode:
            self.lost, self.retry_reason = None, "kv_dropped"  # the move failed: computed again, as without a move

    def _worker(self, source: Role) -> str:
        return f"the {source} worker {self.workers[source is Role.DECODE]}"


def most_events(spec: SequenceSpec, info: WorkerInfo) -> int:
    """Return the most messages with thoughts in one attempt. Both workers may send each chunk separately."""
    if not info.thinking_chunk:
        return 0
    return 2 * ((len(spec.prompt) + spec.sampling.max_tokens) // info.thinking_chunk)


class TakeoverAttempt(Attempt):
    """An attempt that attaches to a stream which another router began and its decode worker continues. It has no P."""

    _determinism = ""

    @property
    def determinism(self) -> str:
        """The fingerprint with which the stream began."""
        return self._determinism

    @property
    def workers(self) -> tuple[str, str]:
        return "", self._placement.decode.info.ref.worker_id

    async def reserve(self, deadline_s: float) -> bool:
        """Attach to the stream after the known tokens. Return False if D does not have it. Raises as `reserve` does."""
        self.alone = True
        self._placement.decode.send(attach=pb.Attach(handoff=self._name, spec=convert.spec_to_pb(self.spec)))
        return await self._granted()

    def prefill(self, deadline_s: float) -> None:
        """Enter the decode stage, because the prompt was computed before."""
        self._stages.handed_over(0.0)

    def _take(self, source: Role, item: Item) -> None:
        if isinstance(item, pb.WorkerEvent) and item.HasField("attached"):
            self.cached_tokens, self._decoding = len(self.spec), True
            self._room, self._determinism = item.attached.room, item.attached.determinism
            self._placement.prefill_done()
        elif isinstance(item, pb.WorkerEvent) and item.HasField("refused"):
            self.retry_reason, self._decode_ended, self._retention = "not_there", True, StreamRetention()
        else:
            super()._take(source, item)
