"""The public service: calls come in, are parsed, live their life, and end once."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import asdict
from typing import Any, cast

import structlog

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    NoWorker,
    Overloaded,
    UnknownModel,
    Unsupported,
    Violation,
)
from baton.rpc.status import abort
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceServicer
from baton.tokenizer import Tokenizer
from router.events import Context, EventStream
from router.lifecycle import Floor, Life, Summary, run
from router.parse import Limits, check_model, check_text, encode, parse
from router.requests import Identity, RequestTable, Running
from router.workers import WorkerPool

log = structlog.get_logger(__name__)

_MAX_DETOKENIZE = 1_000_000
_REFUSALS = (InvalidRequest, UnknownModel, Overloaded, NoWorker, Unsupported)


class Inference(InferenceServicer):
    """`baton.v1.Inference` over the parts that all requests share."""

    def __init__(
        self,
        floor: Floor,
        pool: WorkerPool,
        tokenizer: Tokenizer,
        identity: Identity,
        *,
        max_request_s: float,
        client_stall_s: float,
    ) -> None:
        self.requests = RequestTable()
        self._floor = floor
        self._pool = pool
        self._tokenizer = tokenizer
        self.identity = identity
        self._max_request_s = max_request_s
        self._client_stall_s = client_stall_s

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Ends once: finished, or with the status of one typed error. Cancellation is gRPC's own ending."""
        request_id = secrets.token_urlsafe(16)
        left_s = cast("float | None", context.time_remaining())  # None: no deadline; the stubs do not know
        within_s = self._max_request_s if left_s is None else min(left_s, self._max_request_s)
        life = Life(request_id, self._floor, self._floor.clock.monotonic() + within_s)
        try:
            summary = await self._generate(request, life, context, within_s)
        except asyncio.CancelledError:
            late = context.time_remaining() == 0
            self._note(life, DeadlineExceeded("of the caller") if late else Cancelled("by the caller"), request)
            raise
        except BatonError as error:
            self._note(life, error, request)
            await abort(context, error)
        except Exception as error:  # the task's boundary: one request's bug is not the next one's
            log.exception("request_broke", request_id=request_id)
            self._note(life, EngineFault(type(error).__name__), request)
            await abort(context, error)
        else:
            self._note_finished(life, summary, request)

    async def _generate(self, message: pb.GenerateRequest, life: Life, context: Context, within_s: float) -> Summary:
        if not self.requests.accepting:
            raise NoWorker("this router is stopping")
        running = Running(asyncio.timeout(within_s), life)
        try:
            with self.requests.entry(life.request_id, running):
                async with running.scope:
                    # At once, so that a client can name its request while it is queued.
                    await context.send_initial_metadata((("baton-request-id", life.request_id),))
                    request = await parse(message, self._tokenizer, self._limits())
                    return await run(request, life, EventStream(context, life.request_id, self._client_stall_s))
        except TimeoutError:
            raise running.reason or DeadlineExceeded(f"not finished within {within_s:.3g} s") from None

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> None:  # type: ignore[override]
        await abort(context, Unsupported("Resume is not supported by this version: send the request again"))

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelReply:
        found = self.requests.running.get(request.request_id)
        if found is not None:
            found.end(Cancelled("by a Cancel call"))
        return pb.CancelReply(found=found is not None)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeReply:
        try:
            check_model(request.model, self.identity.model)
            check_text(request.text)
        except BatonError as error:
            await abort(context, error)
        return pb.TokenizeReply(ids=await encode(self._tokenizer, request.text))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeReply:
        try:
            check_model(request.model, self.identity.model)
            _check_ids(request.ids, self._tokenizer.vocab_size)
        except BatonError as error:
            await abort(context, error)
        return pb.DetokenizeReply(text=await asyncio.to_thread(self._tokenizer.decode, list(request.ids)))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsReply:
        limits = self._limits()
        model = pb.Model(
            id=limits.model, max_model_len=limits.max_model_len or 0, vocab_size=self._tokenizer.vocab_size
        )
        return pb.ListModelsReply(models=[model])

    def _limits(self) -> Limits:
        lengths = [n for n in (self.identity.max_model_len, self._pool.max_model_len()) if n is not None]
        return Limits(self.identity.model, min(lengths, default=None))

    def _note(self, life: Life, error: BatonError, message: pb.GenerateRequest) -> None:
        refused = isinstance(error, _REFUSALS) and not life.accepted
        outcome = "refused" if refused else "cancelled" if isinstance(error, Cancelled) else "failed"
        self.requests.outcomes[outcome] += 1
        self.requests.outcomes["accepted"] += life.accepted
        self._floor.metrics.ended(outcome)
        if refused:
            self._floor.metrics.refused(error)
        log.info(
            f"request_{outcome}",
            request_id=life.request_id,
            client_tag=message.client_tag[:128],
            stage=life.stages.stage.value,
            error=type(error).__name__,
            reason=str(error),
            completion_tokens=len(life.delivery.ids),
            attempts=life.attempts,
        )

    def _note_finished(self, life: Life, summary: Summary, message: pb.GenerateRequest) -> None:
        self.requests.outcomes["finished"] += 1
        self.requests.outcomes["accepted"] += 1
        self._floor.metrics.ended("finished", summary.timings)
        timings = {name: round(value, 6) for name, value in asdict(summary.timings).items()}
        counts = {name: value for name, value in asdict(summary).items() if name != "timings"}
        log.info("request_finished", request_id=life.request_id, client_tag=message.client_tag, **counts, **timings)


def _check_ids(ids: Any, vocab_size: int) -> None:
    violations = []
    if len(ids) > _MAX_DETOKENIZE:
        violations.append(Violation("ids", f"at most {_MAX_DETOKENIZE} tokens, got {len(ids)}"))
    if max(ids, default=0) >= vocab_size:
        violations.append(Violation("ids", f"token id {max(ids)} is outside the vocabulary of {vocab_size}"))
    if violations:
        raise InvalidRequest(*violations)
