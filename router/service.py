"""The public gRPC service `baton.v1.Inference`. It parses a call, runs its request, and ends it with one outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import cast

import structlog
from google.protobuf.json_format import MessageToDict

from baton import errors
from baton.errors import BatonError, Cancelled, InvalidRequest, Violation
from baton.limits import MAX_DETOKENIZE_IDS
from baton.rpc.status import abort
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceServicer
from baton.structured_output import Grammars
from baton.tokenizer import Tokenizer
from baton.tracing.trace import TRACEPARENT, TraceContext
from router.auth.interceptor import current_grant
from router.auth.limits import Concurrency, limited, may_cancel
from router.context import RouterSettings
from router.observe.request_observer import Sinks
from router.parsing.chat import Chats
from router.parsing.generate_request import (
    ParseLimiter,
    check_model,
    check_received,
    check_resumes,
    check_text,
    decode,
    encode,
    encode_chat,
    needs_thread,
    outside,
    parse,
    received_of,
    resumed_name,
)
from router.request.client_request import ClientRequest, RunningRequests, seed_of
from router.request.delivery import Context, EventStream, StallTimeout
from router.request.lifecycle import Dispatch, serve_request
from router.request.thoughts import Asked

log = structlog.get_logger(__name__)


class Inference(InferenceServicer):
    """Servicer of `baton.v1.Inference`. It registers each request in `running`."""

    def __init__(
        self,
        settings: RouterSettings,
        sinks: Sinks,
        dispatch: Dispatch,
        running: RunningRequests,
        tokenizer: Tokenizer,
    ) -> None:
        self._settings = settings
        self._dispatch = dispatch
        self._running = running
        self._sinks = sinks
        self._tokenizer = tokenizer
        self._chats = Chats.of(tokenizer)
        self._concurrency, self._texts = Concurrency(), Concurrency()
        self._reading = ParseLimiter()
        self._grammars = Grammars(tokenizer)
        self._patience = StallTimeout(settings.client_stall_s)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Serve a new request. It ends with its last event, or with the gRPC status of one typed error."""
        await self._serve(pb.ResumeRequest(request=request), context)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> None:  # type: ignore[override]
        """Continue a request after the tokens that the client has, whichever router served it before."""
        await self._serve(request, context, resumes=True)

    async def _serve(self, message: pb.ResumeRequest, context: Context, *, resumes: bool = False) -> None:
        request = message.request
        left_s = cast("float | None", context.time_remaining())  # None: no deadline; the stubs lack it
        most_s = self._settings.max_request_s
        task = cast("asyncio.Task[None]", asyncio.current_task())
        within_s = most_s if left_s is None else min(left_s, most_s)
        who = resumed_name(message), current_grant(), _trace_of(context)
        call = ClientRequest(self._sinks, next(self._running.arrivals), task, within_s, *who)
        try:
            if resumes:
                check_resumes(message)
            completed = await self._answer(message, call, context)
        except asyncio.CancelledError:
            late = context.time_remaining() == 0
            ended = errors.DeadlineExceeded("of the caller") if late else Cancelled("by the caller")
            call.observer.ended(request, ended)
            raise
        except BatonError as error:
            call.observer.ended(request, error)
            await abort(context, error, call.name)
        except Exception as error:  # a bug met by one request must not end the next one
            log.exception("request_broke", request_id=call.name)
            call.observer.ended(request, errors.EngineFault(type(error).__name__))
            await abort(context, error, call.name)
        else:
            completed.ClearField("spans")  # the client has received them
            call.observer.ended(request, None, **MessageToDict(completed, preserving_proto_field_name=True))

    async def _answer(self, message: pb.ResumeRequest, call: ClientRequest, context: Context) -> pb.Completed:
        request = message.request
        if not self._running.accepting:
            raise errors.NoWorker("this router is stopping")
        client = EventStream(context, call.name, self._patience, call.end)
        try:
            async with call.scope, self._running.registered(call, request.idempotency_key):
                # Sent early, so that a client can name its request while it is queued.
                client.open(("baton-request-id", call.name), ("baton-resumable", "1"))
                with self._concurrency.one_more(call.grant, lambda: call.reason is not None):
                    return await self._answers(message, call, client)
        except TimeoutError:
            raise call.reason or errors.DeadlineExceeded(f"not finished within {call.within_s:.3g} s") from None
        finally:
            await client.close()

    async def _answers(self, message: pb.ResumeRequest, call: ClientRequest, client: EventStream) -> pb.Completed:
        request, settings = message.request, self._settings
        model, length = settings.model, self._dispatch.pool.max_model_len()
        seed = seed_of(request.idempotency_key or call.name)
        with self._reading.one_more(message):
            rest = (self._tokenizer, model, length, self._chats, self._grammars)
            thinks = settings.think_while_decoding
            spec = await parse(request, *rest, seed=seed, while_decoding=thinks)
            spec = limited(spec, request, call.grant)
            received = received_of(message, spec, self._tokenizer.vocab_size)
            await check_received(self._grammars, spec, received)
        call.asked, call.traced = Asked.of(request, self._tokenizer), request.trace
        call.determinism = message.system_fingerprint if spec.deterministic else ""
        call.resumable_s = request.resumable_s if request.HasField("resumable_s") else settings.resumable_s
        return await serve_request(self._dispatch, call, spec, received, client)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelReply:
        asking, named = current_grant(), [call for call in self._running if call.name == request.request_id]
        found = [call for call in named if may_cancel(asking, call.grant)]
        for call in found:
            call.end(Cancelled("by a Cancel call"))
        return pb.CancelReply(found=bool(found))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeReply:
        try:
            check_model(request.model, self._settings.model)
            check_text(request.text)
            with self._text_call(request):
                if request.HasField("chat"):
                    ids = await encode_chat(self._tokenizer, self._chats, request.chat)
                else:
                    ids = await encode(self._tokenizer, request.text)
        except BatonError as error:
            await abort(context, error)
        return pb.TokenizeReply(ids=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeReply:
        try:
            check_model(request.model, self._settings.model)
            _check_ids(request.ids, self._tokenizer.vocab_size)
            with self._text_call(request):
                text = await decode(self._tokenizer, request.ids)
        except BatonError as error:
            await abort(context, error)
        return pb.DetokenizeReply(text=text)

    @contextmanager
    def _text_call(self, request: pb.TokenizeRequest | pb.DetokenizeRequest) -> Iterator[None]:
        """Count a call that needs a thread against `max_concurrent` of its token. Raises Overloaded. Generate calls are
        counted separately, because the gateway makes text calls for its caller during an answer.
        """
        if not needs_thread(request, request.ByteSize()):
            yield
            return
        try:
            with self._texts.one_more(current_grant()), self._reading.one_more(request):
                yield
        except errors.Overloaded as error:
            self._sinks.metrics.refused(error)
            raise

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsReply:
        model, length = self._settings.model, self._dispatch.pool.max_model_len() or 0
        vocabulary, form = self._tokenizer.vocab_size, self._chats.tool_form
        thinks = self._dispatch.pool.thinking_chunk() or 0
        served = pb.Model(id=model, max_model_len=length, vocab_size=vocabulary, tool_form=form, thinking_chunk=thinks)
        return pb.ListModelsReply(models=[served])


def _trace_of(context: Context) -> TraceContext | None:
    """Return the caller's trace context, or None if it sent none or an invalid one."""
    said = [value for key, value in context.invocation_metadata() or () if key == TRACEPARENT]
    return TraceContext.parse(str(said[0])) if len(said) == 1 else None


def _check_ids(ids: Collection[int], vocab_size: int) -> None:
    violations = outside("ids", ids, vocab_size)
    if len(ids) > MAX_DETOKENIZE_IDS:
        violations.append(Violation("ids", f"at most {MAX_DETOKENIZE_IDS} tokens, got {len(ids)}"))
    if violations:
        raise InvalidRequest(*violations)
