"""Time limit for the request message of a call. gRPC has none: it calls a handler only after the message has arrived.
So a client that sends no message, or one byte now and then, would hold its call open.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from baton.errors import DeadlineExceeded
from baton.limits import MAX_MESSAGE_SECONDS
from baton.rpc.status import abort

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class MessageTimeout(grpc.aio.ServerInterceptor):
    """Ends calls whose only request message is late. It makes the handler one of a request stream, and reads the
    message from it. Methods with a request stream are unchanged: their clients may be silent.
    """

    async def intercept_service(self, continuation: _Continuation, details: grpc.HandlerCallDetails) -> _Handler | None:
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        found: Any = handler  # the stubs have no asyncio handlers
        codecs = found.request_deserializer, found.response_serializer
        if found.response_streaming:
            return grpc.stream_stream_rpc_method_handler(_timely(found.unary_stream), *codecs)
        return grpc.stream_unary_rpc_method_handler(_timely(found.unary_unary), *codecs)


def _timely(method: Callable[[Any, _Context], Any]) -> Any:
    """Return an asyncio `method` for a stream of one message."""

    async def awaited(messages: AsyncIterator[Any], context: _Context) -> Any:
        return await method(await _message(messages, context), context)

    async def generated(messages: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
        message = await _message(messages, context)
        async with aclosing(method(message, context)) as answers:
            async for answer in answers:
                yield answer

    return generated if inspect.isasyncgenfunction(method) else awaited


async def _message(messages: AsyncIterator[Any], context: _Context) -> Any:
    try:
        async with asyncio.timeout(MAX_MESSAGE_SECONDS):
            return await anext(messages)
    except (TimeoutError, StopAsyncIteration):
        await abort(context, DeadlineExceeded(f"the request message must arrive within {MAX_MESSAGE_SECONDS} s"))
