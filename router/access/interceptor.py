"""The guard of a listener: no call reaches a service without the token that its method asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc
import structlog

from baton.errors import BatonError
from baton.rpc.status import abort
from router.access.rules import RULES, Need, check
from router.access.tokens import Grant
from router.access.watch import TokenFile

_GRANT: ContextVar[Grant | None] = ContextVar("grant", default=None)  # of the call that this task serves
if TYPE_CHECKING:
    _Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]]


def current_grant() -> Grant | None:
    """Of the caller that this task serves; None: no tokens are configured, or this call needs none."""
    return _GRANT.get()


class Guard(grpc.aio.ServerInterceptor):
    """Once per call: who is it, and may it? What it finds is there for the service, and in every line of its log."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens

    async def intercept_service(  # type: ignore[override]
        self, continuation: _Continuation, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any]:
        method = str(details.method)
        if RULES.get(method) is Need.NOTHING:
            return await continuation(details)
        try:
            grant = self._tokens.grant(_authorization(details))
            handler = await continuation(details)
            if handler is not None:  # else nothing of that name is served here, as gRPC says itself
                check(method, grant)
        except BatonError as error:
            return _refusal(error)
        _GRANT.set(grant)
        structlog.contextvars.bind_contextvars(tenant=grant.tenant)
        return handler


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    """None too if there are several: whose would count?"""
    found = [value for key, value in details.invocation_metadata or () if key == "authorization"]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else None


def _refusal(error: BatonError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of any kind of call: it asks for no message, so that nobody waits for one."""

    async def refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
