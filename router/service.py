"""The public gRPC service `baton.v1.Inference`. It parses a call, runs its request, and ends it with one outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import structlog
from google.protobuf.message import Message

from baton import errors
from baton.client._retry import KEEPS
from baton.errors import BatonError, Cancelled
from baton.rpc.status import abort
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceServicer
from baton.tokenizer import Tokenizer
from baton.tracing.trace import TRACEPARENT, TraceContext
from router.auth.interceptor import current_grant
from router.auth.tokens import Concurrency, limited, may_cancel
from router.context import RouterContext
from router.parsing.generate_request import RequestParser, check_resumes, needs_thread, resumed_name
from router.parsing.model_defaults import sampling_defaults
from router.parsing.receipts import with_implied
from router.parsing.token_pieces import token_pieces
from router.request.client_request import ClientCall, ClientRequest
from router.request.delivery import Context, EventStream, StallTimeout
from router.request.lifecycle import serve_request

log = structlog.get_logger(__name__)
_EARLY_S = 0.1  # of clients that cancel at a deadline, which they count from before the call arrived


class Inference(InferenceServicer):
    """Servicer of `baton.v1.Inference`. It registers each request in `running`."""

    def __init__(self, context: RouterContext, tokenizer: Tokenizer) -> None:
        settings = self._settings = context.settings
        self._dispatch, self._running, self._sinks = context.dispatch, context.running, context.sinks
        self._parser = RequestParser(
            tokenizer,
            settings.model,
            think_while_decoding=settings.think_while_decoding,
            resumable_s=settings.resumable_s,
            aliases=settings.aliases,
            defaults=sampling_defaults(tokenizer) if settings.generation_defaults else None,
            tool_parser=settings.tool_parser,
            reasoning_parser=settings.reasoning_parser,
            issuer=context.issuer,
        )
        self._concurrency, self._texts = Concurrency(), Concurrency()
        self._stall = StallTimeout(settings.client_stall_s)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Serve a new request. It ends with its last event, or with the gRPC status of one typed error."""
        await self._serve(pb.ResumeRequest(request=request), context)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> None:  # type: ignore[override]
        """Continue a request after the tokens that the client has, whichever router served it before."""
        await self._serve(request, context, resumes=True)

    async def _serve(self, message: pb.ResumeRequest, context: Context, *, resumes: bool = False) -> None:
        request = with_implied(message.request) if message.request.receipt else message.request
        left_s = cast("float | None", context.time_remaining())  # None: no deadline; the stubs lack it
        most_s = self._settings.max_request_s
        task = cast("asyncio.Task[None]", asyncio.current_task())
        within_s = most_s if left_s is None else min(left_s, most_s)
        caller = resumed_name(message), current_grant(), _trace_of(context)
        call = ClientCall(self._sinks, next(self._running.arrivals), task, within_s, *caller)
        try:
            if resumes:
                check_resumes(message)
            completed = await self._answer(message, call, context)
        except asyncio.CancelledError:
            left_s = cast("float | None", context.time_remaining())
            late = left_s is not None and left_s <= _EARLY_S
            ended = (
                errors.DeadlineExceeded("the call's deadline passed")
                if late
                else Cancelled("the client cancelled the call")
            )
            call.observer.ended(request, ended)
            raise
        except BatonError as error:
            call.observer.ended(request, error)
            # Without a name, a gateway sends a call that has no event to another router.
            await abort(context, error, call.name if self._running.accepting else "")
        except Exception as error:  # a bug met by one request must not end the next one
            log.exception("request_broke", request_id=call.name)
            call.observer.ended(request, errors.for_client(error))
            await abort(context, error, call.name)
        else:
            completed.ClearField("spans")  # the client has received them, and only it gets a receipt
            completed.ClearField("receipt")
            call.observer.ended(request, None, **_facts(completed))
            if any(key == KEEPS for key, _ in context.invocation_metadata() or ()):
                await self._running.keep(call)
        finally:
            call.release()

    async def _answer(self, message: pb.ResumeRequest, call: ClientCall, context: Context) -> pb.Completed:
        request = message.request
        if not self._running.accepting:
            raise errors.NoWorker("this router is stopping")
        client = EventStream(context, call.name, self._stall, call.end)
        try:
            async with call.scope, self._running.registered(call, request.idempotency_key):
                # Sent early, so that a client can name its request while it is queued.
                client.open(("baton-request-id", call.name), ("baton-resumable", "1"))
                with self._concurrency.one_more(call.grant, lambda: call.reason is not None):
                    within_limits = partial(limited, message=request, grant=call.grant)
                    limits = self._settings.queue_max_wait_s, self._settings.queue_max_requests
                    most = await self._dispatch.pool.length_for(request, *limits)
                    parsed = ClientRequest(call, await self._parser.parse(message, call.name, most, within_limits))
                    return await serve_request(self._dispatch, parsed, client)
        except TimeoutError:
            raise call.reason or errors.DeadlineExceeded(f"not finished within {call.within_s:.3g} s") from None
        finally:
            await client.close()

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelReply:
        asking, named = current_grant(), [call for call in self._running if call.name == request.request_id]
        found = [call for call in named if may_cancel(asking, call.grant)]
        for call in found:
            call.end(Cancelled("a Cancel call ended the request"))
        return pb.CancelReply(found=bool(found))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeReply:
        try:
            self._parser.check_tokenize(request)
            with self._text_call(request):
                special = request.add_special_tokens if request.HasField("add_special_tokens") else None
                ids = await self._parser.encode(request.chat if request.HasField("chat") else request.text, special)
        except BatonError as error:
            await abort(context, error)
        return pb.TokenizeReply(ids=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeReply:
        try:
            self._parser.check_detokenize(request)
            with self._text_call(request):
                if request.pieces:
                    return pb.DetokenizeReply(pieces=await token_pieces(self._parser.tokenizer, request.ids))
                return pb.DetokenizeReply(text=await self._parser.decode(request.ids))
        except BatonError as error:
            await abort(context, error)

    @contextmanager
    def _text_call(self, request: pb.TokenizeRequest | pb.DetokenizeRequest) -> Iterator[None]:
        """Count a call that needs a thread against its token's `max_concurrent`, but apart from Generate calls, because
        the gateway makes text calls during an answer. Raises Overloaded.
        """
        if not needs_thread(request, request.ByteSize()):
            yield
            return
        try:
            with self._texts.one_more(current_grant()), self._parser.limiter.one_more(request):
                yield
        except errors.Overloaded as error:
            self._sinks.metrics.refused(error)
            raise

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsReply:
        pool, parser = self._dispatch.pool, self._parser
        model = pb.Model(
            id=self._settings.model,
            max_model_len=pool.max_model_len() or 0,
            vocab_size=parser.tokenizer.vocab_size,
            tool_form=parser.tool_form,
            reasoning_form=parser.reasoning_form,
            thinking_chunk=pool.thinking_chunk() or 0,
            aliases=self._settings.aliases,
            defaults=parser.defaults if parser.defaults.ListFields() else None,
        )
        return pb.ListModelsReply(models=[model])


def _facts(message: Message) -> dict[str, object]:
    """Return the fields that are set, by name. Counts of 64 bits stay numbers, unlike in protobuf's JSON."""
    fields = {field.name: value for field, value in message.ListFields()}
    return {name: _facts(value) if isinstance(value, Message) else value for name, value in fields.items()}


def _trace_of(context: Context) -> TraceContext | None:
    """Return the caller's trace context, or None if it sent none or an invalid one."""
    found = [value for key, value in context.invocation_metadata() or () if key == TRACEPARENT]
    return TraceContext.parse(str(found[0])) if len(found) == 1 else None
