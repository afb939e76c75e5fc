"""The translation between `baton.errors` and gRPC statuses with google.rpc details, in both directions.

Every status carries ErrorInfo(reason=class name, domain="baton"). Internal errors are replaced: a failed handoff
becomes WorkerLost, an unreachable ledger NoWorker, everything else EngineFault without its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeVar, cast, runtime_checkable

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from baton import errors
from baton.errors import BatonError, InvalidRequest, Overloaded, PromiseRefused, Violation
from baton.limits import MAX_STATUS_MESSAGE_BYTES, MAX_STATUS_VIOLATIONS, MAX_VIOLATION_BYTES

DOMAIN = "baton"

CODES: Mapping[type[BatonError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownModel: grpc.StatusCode.NOT_FOUND,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.RateLimited: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.PromiseRefused: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.NoWorker: grpc.StatusCode.UNAVAILABLE,
    errors.WorkerLost: grpc.StatusCode.UNAVAILABLE,
    errors.EngineFault: grpc.StatusCode.INTERNAL,
}
_BY_NAME = {kind.__name__: kind for kind in CODES}
# For statuses without Baton's details: from gRPC itself, a proxy or another server. Other codes become EngineFault.
_BY_CODE: Mapping[grpc.StatusCode, type[BatonError]] = {
    **{code: kind for kind, code in CODES.items() if kind is not errors.WorkerLost},
    grpc.StatusCode.FAILED_PRECONDITION: errors.InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: errors.InvalidRequest,
    grpc.StatusCode.ABORTED: errors.WorkerLost,
}

D = TypeVar("D", bound=Message)


@runtime_checkable
class RpcFailure(Protocol):
    """The methods of a failed call, sync or aio. `grpc.RpcError` itself guarantees none."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...


def to_rpc_status(error: BaseException, request_id: str = "") -> Status:
    """Return the status that a client gets for `error`. Every exception has one."""
    shown = _shown(error)
    status = Status(code=CODES[type(shown)].value[0], message=_clip(str(shown), MAX_STATUS_MESSAGE_BYTES))
    facts = {"retryable": "true" if shown.retryable else "false"}
    if isinstance(shown, PromiseRefused):
        facts |= {name: f"{limit:.6g}" for name, limit in _offers(shown).items()}
    details: list[Message] = [ErrorInfo(reason=type(shown).__name__, domain=DOMAIN, metadata=facts)]
    if isinstance(shown, InvalidRequest):
        details.append(_bad_request(shown))
    if isinstance(shown, Overloaded):
        details.append(RetryInfo(retry_delay=timedelta(seconds=shown.retry_after_s)))
    if request_id:
        details.append(RequestInfo(request_id=request_id))
    for detail in details:
        status.details.add().Pack(detail)
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException, request_id: str = "") -> NoReturn:
    """End the call of an aio servicer with the status of `error`."""
    await context.abort_with_status(rpc_status.to_status(to_rpc_status(error, request_id)))
    raise AssertionError("abort_with_status raises")


def from_rpc_error(error: grpc.RpcError, address: str = "", *, connected: bool = False) -> BatonError:
    """Return the error behind a failed call; `address` of the peer is for messages. Never raises. A peer that is
    unreachable or shutting down is NoWorker, or WorkerLost if it had already answered (`connected`).
    """
    if not isinstance(error, RpcFailure):
        return errors.EngineFault(f"the call failed without a status: {error!r}")
    text = error.details() or error.code().name
    status = _details(error)
    info = _unpack(status, ErrorInfo)
    if info is not None and info.domain == DOMAIN and info.reason in _BY_NAME:
        return _build(_BY_NAME[info.reason], text, status)
    # gRPC cancels, without a handler, a call that reached a server during its shutdown.
    shut_down = error.code() is grpc.StatusCode.CANCELLED and text == "CANCELLED"
    if error.code() is grpc.StatusCode.UNAVAILABLE or shut_down:
        peer = address or "the server"
        lost = errors.WorkerLost(f"the connection to {peer} was lost: {text}")
        return lost if connected else errors.NoWorker(f"cannot reach {peer}: {text}")
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:
        return InvalidRequest.of("request", f"too large: {text}")  # text of gRPC; a retry cannot succeed
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "metadata size exceeds" in text:
        return InvalidRequest.of("metadata", f"too large: {text}")
    return _build(_BY_CODE.get(error.code(), errors.EngineFault), text, status)


def request_id_of(error: grpc.RpcError) -> str:
    """Return the id of the failed request, or "". Read from the status, because grpc.aio may lose headers."""
    info = _unpack(_details(error), RequestInfo) if isinstance(error, RpcFailure) else None
    return info.request_id if info is not None else ""


def _build(kind: type[BatonError], text: str, status: Status | None) -> BatonError:
    if kind is InvalidRequest:
        bad = _unpack(status, BadRequest)
        found = [Violation(item.field, item.description) for item in bad.field_violations] if bad else []
        return InvalidRequest(*(found or [Violation("request", text)]))
    retry = _unpack(status, RetryInfo)
    if issubclass(kind, Overloaded) and retry is not None:
        error = kind(text, max(0.0, retry.retry_delay.ToTimedelta().total_seconds()))
        info = _unpack(status, ErrorInfo)
        if isinstance(error, PromiseRefused) and info is not None:
            error.ttft_ms, error.itl_ms = (_number(info.metadata.get(name, "0")) for name in ("ttft_ms", "itl_ms"))
        return error
    return kind(text)


def _offers(error: PromiseRefused) -> dict[str, float]:
    return {name: limit for name, limit in (("ttft_ms", error.ttft_ms), ("itl_ms", error.itl_ms)) if limit}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # another version's
        return 0.0


def _shown(error: BaseException) -> BatonError:
    if isinstance(error, BatonError) and type(error) in CODES:
        return error
    if isinstance(error, errors.HandoffError):
        return errors.WorkerLost("the workers failed to hand the request over")
    if isinstance(error, errors.LedgerError):
        return errors.NoWorker("the cluster cannot reach its ledger now")
    known = errors.for_client(error) if isinstance(error, Exception) else None
    return known if known and type(known) in CODES else errors.EngineFault("internal error; see the server's log")


def _bad_request(error: InvalidRequest) -> BadRequest:
    shown = error.violations[:MAX_STATUS_VIOLATIONS]
    pairs = [(_clip(v.field, MAX_VIOLATION_BYTES), _clip(v.description, MAX_VIOLATION_BYTES)) for v in shown]
    return BadRequest(
        field_violations=[BadRequest.FieldViolation(field=name, description=text) for name, text in pairs]
    )


def _clip(text: str, limit: int) -> str:
    """Cut to `limit` bytes of UTF-8. Lone surrogates become `?`."""
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= limit else data[: limit - 3].decode("utf-8", "ignore") + "..."


def _details(error: RpcFailure) -> Status | None:
    try:
        return rpc_status.from_call(cast(grpc.Call, error))
    except (ValueError, DecodeError):  # inconsistent or missing details: use the plain status
        return None


def _unpack(status: Status | None, kind: type[D]) -> D | None:
    found = kind()
    for detail in status.details if status else ():
        with suppress(DecodeError):
            if detail.Unpack(found):
                return found
    return None
