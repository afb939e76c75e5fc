"""One attempt at a request, that is one handoff: reserve at D, prefill at P, listen to both, release both.

                      NO_ROOM                                       P lost or failed, no commit heard
    reserving ------------------> (left)          prefilling -----------------------------> fencing -- FENCED --> error
        | Reserved                                    | P's first token      |                 |
        v                                             v                      | finish of P     | Committed: no failure
    reserved -- Prefill sent --> prefilling       handing over               v                 v
                                                      | D's first message  finished         decoding
                                                      v
                                                  decoding -- finish of D --> finished, or Preempted --> next attempt

D lost or failed is an error in every state. Leaving the attempt, for whatever reason, sends Release to both workers,
unless D itself said that it is through: then neither holds anything (P frees with D's ack).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TypeVar

from baton.core import Finish, HandoffId, Role, SequenceSpec, Token
from baton.errors import BatonError, DeadlineExceeded, EngineFault, InvalidRequest, NoWorker, WorkerLost
from baton.rpc import convert
from baton.rpc.v1 import worker_pb2 as pb
from baton.telemetry import Metrics, StageClock
from router.link import Mailbox
from router.workers import Claim

_ANSWER_S = 15.0  # for a Reserve or a Fence, which a live worker answers between two steps
_SPARE_EVENTS = 16  # events of one handoff that carry no token
_FAILURES: dict[str, type[BatonError]] = {"EngineFault": EngineFault, "DeadlineExceeded": DeadlineExceeded}
_MAY_FIT_LATER = (pb.REFUSAL_REASON_NO_ROOM, pb.REFUSAL_REASON_DRAINING)

M = TypeVar("M")
T = TypeVar("T")


def _read(convert_from: Callable[[M], T], message: M) -> T:
    """What a worker said; when that cannot be read, it is the worker's fault and not the client's."""
    try:
        return convert_from(message)
    except InvalidRequest as error:
        raise EngineFault(f"a worker sent what cannot be read: {error}") from error


class Attempt:
    """Use as an async context manager; see the drawing above for the order of its methods."""

    def __init__(
        self, handoff: HandoffId, claim: Claim, spec: SequenceSpec, stages: StageClock, metrics: Metrics
    ) -> None:
        self.handoff = handoff
        self.claim = claim
        self.cached_tokens: int | None = None  # at D; None: not reserved yet
        self.committed: pb.Committed | None = None
        self.finish: Finish | None = None
        self.handed_back = ""  # why another attempt is needed, though nothing failed
        self._spec = spec
        self._stages = stages
        self._metrics = metrics
        self._mailbox = Mailbox(spec.sampling.max_tokens + _SPARE_EVENTS)
        self._tokens: list[Token] = []  # heard, not handed on yet
        self._decoding = False
        self._through = False  # D said that it holds nothing of this any more
        self._fencing: BatonError | None = None  # what happened to P

    async def __aenter__(self) -> Attempt:
        for link in (self.claim.prefill, self.claim.decode):
            link.open(self.handoff, self._mailbox)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in (self.claim.prefill, self.claim.decode):
            if not self._through:
                link.send(pb.RouterCommand(release=pb.Release(handoff=convert.handoff_to_pb(self.handoff))))
            link.close(self.handoff)
        self.claim.release()

    async def reserve(self, deadline_s: float) -> bool:
        """Ask D for room; False: none now. `deadline_s` from now, 0: none. Raises what ended the attempt."""
        tokens, sampling = len(self._spec), self._spec.sampling
        command = pb.Reserve(
            handoff=convert.handoff_to_pb(self.handoff),
            fingerprint=self.claim.decode.info.fingerprint,
            known_tokens=tokens,
            max_total=len(self._spec.prompt) + sampling.max_tokens,
            deadline_s=deadline_s,
        )
        self.claim.decode.send(pb.RouterCommand(reserve=command))
        while self.cached_tokens is None and not self.handed_back:
            for source, item in await self._heard(_ANSWER_S):
                if isinstance(item, BatonError):
                    raise item  # of P too: nothing is computed yet that would be worth a fence
                self._take(source, item)
        self.claim.reserved()
        return not self.handed_back

    def prefill(self, deadline_s: float) -> None:
        """Let P compute what is known, say the first token and hand over to D. `deadline_s` from now, 0: none."""
        command = pb.Prefill(
            handoff=convert.handoff_to_pb(self.handoff),
            spec=convert.spec_to_pb(self._spec),
            to=convert.ref_to_pb(self.claim.decode.info.ref),
            skip=self.cached_tokens or 0,
            deadline_s=deadline_s,
        )
        self.claim.prefill.send(pb.RouterCommand(prefill=command))

    async def outputs(self) -> AsyncIterator[list[Token]]:
        """Tokens as they come, of both witnesses, until `finish` or `handed_back` is set. Raises what ended it."""
        while self.finish is None and not self.handed_back:
            for source, item in await self._heard(_ANSWER_S if self._fencing else None):
                self._take(source, item)
            tokens, self._tokens = self._tokens, []
            if tokens:
                yield tokens

    async def _heard(self, timeout_s: float | None) -> list[tuple[Role, pb.WorkerEvent | BatonError]]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._mailbox.drain()
        except TimeoutError:
            worker = self.claim.decode.info.ref.worker_id
            raise WorkerLost(f"the decode worker {worker} did not answer within {timeout_s:g} s") from None

    def _take(self, source: Role, item: pb.WorkerEvent | BatonError) -> None:
        if isinstance(item, BatonError):
            self._failed(source, item)
            return
        match item.WhichOneof("event"):
            case "reserved":
                self.cached_tokens = item.reserved.cached_tokens
            case "tokens":
                self._on_tokens(source, _read(convert.tokens_from_pb, item.tokens))
            case "finish":
                self._on_finish(source, _read(convert.finish_from_pb, item.finish))
            case "committed":
                self._on_committed(item.committed)
            case "preempted":
                self.handed_back, self._through = "preempted", True
            case "refused":
                self._on_refused(source, item.refused)
            case "failed":
                self._failed(source, self._failure(source, item.failed))
            case "fenced":
                self._metrics.fenced()
                raise self._fencing or WorkerLost("the decode worker fenced the attempt")
            case _:
                pass  # pushed, and what later versions add

    def _on_tokens(self, source: Role, tokens: list[Token]) -> None:
        self._tokens += tokens
        if source is Role.PREFILL and not self._decoding:
            self.claim.computed()
            self._stages.first_token()
        elif source is Role.DECODE and not self._decoding:
            self._decoding = True
            self.claim.prefill_done()
            self._stages.handed_over(self.committed.commit_s if self.committed else 0.0)

    def _on_finish(self, source: Role, finish: Finish) -> None:
        self.finish = finish
        self._through = source is Role.DECODE
        if source is Role.PREFILL:
            self._stages.ended_at_first_token()

    def _on_committed(self, committed: pb.Committed) -> None:
        self.committed, self._fencing = committed, None  # P's death, if it died, was no failure
        self._metrics.handed_over(committed.transfer_s, committed.kv_bytes, committed.transport)

    def _on_refused(self, source: Role, refused: pb.Refused) -> None:
        worker = self._worker(source)
        if refused.reason in _MAY_FIT_LATER:
            self.handed_back = "no_room"
        elif refused.reason == pb.REFUSAL_REASON_TOO_LONG:
            raise InvalidRequest.of("prompt", f"does not fit on {worker}: {refused.detail}")
        elif refused.reason == pb.REFUSAL_REASON_FINGERPRINT:
            raise NoWorker(f"{worker} serves another model now: {refused.detail}")
        elif refused.reason == pb.REFUSAL_REASON_STALE:
            raise WorkerLost(f"{worker} refused the attempt as stale: {refused.detail}")
        else:
            raise EngineFault(f"{worker} refused the request: {refused.detail}")

    def _failure(self, source: Role, failed: pb.Failed) -> BatonError:
        if failed.kind == "DigestMismatch":
            self._metrics.digest_mismatch()
        kind = _FAILURES.get(failed.kind, WorkerLost)
        return kind(f"{self._worker(source)}: {failed.kind}: {failed.message}")

    def _failed(self, source: Role, error: BatonError) -> None:
        """First failure ends both legs. Whether P's is one at all, D knows: it accepted the commit or never will."""
        if source is Role.DECODE:
            raise error
        if self.committed is None and self._fencing is None and self.finish is None:
            self._fencing = error
            self.claim.decode.send(pb.RouterCommand(fence=pb.Fence(handoff=convert.handoff_to_pb(self.handoff))))

    def _worker(self, source: Role) -> str:
        link = self.claim.prefill if source is Role.PREFILL else self.claim.decode
        return f"{source} worker {link.info.ref.worker_id}"
