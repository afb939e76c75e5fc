"""Interceptor that rejects calls without the token that their method requires. A method without a rule is rejected."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc
import structlog

from baton.errors import BatonError, PermissionDenied
from baton.rpc.status import abort
from router.auth.tokens import Grant, Right, TokenFile


class Need(enum.Enum):
    """The token that a method requires if tokens are configured."""

    NOTHING = "nothing"
    TOKEN = "any token"
    ADMIN = "an admin's token"
    NEVER = "no token suffices"


_REFLECTION = "ServerReflection/ServerReflectionInfo"
RULES: Mapping[str, Need] = {
    "/baton.v1.Inference/Generate": Need.TOKEN,
    "/baton.v1.Inference/Resume": Need.TOKEN,
    "/baton.v1.Inference/Cancel": Need.TOKEN,  # only of the same tenant's requests
    "/baton.v1.Inference/Tokenize": Need.TOKEN,
    "/baton.v1.Inference/Detokenize": Need.TOKEN,
    "/baton.v1.Inference/ListModels": Need.TOKEN,
    "/baton.v1.Admin/Status": Need.ADMIN,
    "/baton.v1.Admin/Requests": Need.ADMIN,
    "/baton.v1.Admin/Scale": Need.ADMIN,
    "/baton.v1.Admin/Drain": Need.ADMIN,
    "/baton.v1.Admin/Restart": Need.ADMIN,
    "/baton.v1.Admin/Watch": Need.ADMIN,
    "/baton.v1.Admin/Trace": Need.ADMIN,
    "/grpc.health.v1.Health/Check": Need.NOTHING,  # load balancers have no token
    "/grpc.health.v1.Health/Watch": Need.NOTHING,
    "/grpc.health.v1.Health/List": Need.NEVER,  # the library does not have this method yet, and logs a traceback
    f"/grpc.reflection.v1alpha.{_REFLECTION}": Need.TOKEN,
}


def check(method: str, grant: Grant) -> None:
    """Raise PermissionDenied if `grant` does not allow `method`."""
    need = RULES.get(method, Need.NEVER)
    if need is Need.NEVER:
        raise PermissionDenied(f"{method}: this method is disabled")
    if need is Need.ADMIN and grant.right is not Right.ADMIN:
        raise PermissionDenied(f"{method}: requires a token with role admin")


_GRANT: ContextVar[Grant | None] = ContextVar("grant", default=None)  # of the call that this task serves
_Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]]"


def current_grant() -> Grant | None:
    """Return the grant of the current call, or None if no tokens are configured or the call needs none."""
    return _GRANT.get()


class Guard(grpc.aio.ServerInterceptor):
    """Authenticates and authorizes each call. The service and its log lines have the grant and the tenant."""

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
            if handler is not None:  # gRPC rejects an unknown method itself
                check(method, grant)
        except BatonError as error:
            return _refusal(error)
        _GRANT.set(grant)
        structlog.contextvars.bind_contextvars(tenant=grant.tenant)
        return handler


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    """Return the header, or None if it is missing or ambiguous because there are several."""
    found = [value for key, value in details.invocation_metadata or () if key == "authorization"]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else None


def _refusal(error: BatonError) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler for any kind of call. It reads no message, so that the rejection does not wait for one."""

    async def refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
