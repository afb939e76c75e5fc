"""Maps each typed error to an HTTP status, OpenAI's error body, and the retry headers that its clients obey."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson
from starlette.responses import Response

from baton import errors
from baton.errors import TOO_LONG, BatonError, InvalidRequest, Overloaded, PromiseRefused, Violation

JSON = "application/json"
Json: TypeAlias = dict[str, Any]
RETRY_SOON = {"retry-after": "1", "retry-after-ms": "1000"}
UNKNOWN, UNSUPPORTED = "unknown field", "not supported"

# class: status, type, code
ANSWERS: Mapping[type[BatonError], tuple[int, str, str]] = {
    errors.InvalidRequest: (400, "invalid_request_error", "invalid_value"),
    errors.UnknownModel: (404, "invalid_request_error", "model_not_found"),
    errors.Unauthenticated: (401, "authentication_error", "invalid_api_key"),
    errors.PermissionDenied: (403, "permission_error", "permission_denied"),
    errors.Unsupported: (501, "invalid_request_error", "unsupported"),
    errors.PromiseRefused: (429, "rate_limit_error", "promise_refused"),
    errors.RateLimited: (429, "rate_limit_error", "rate_limit_exceeded"),
    errors.Overloaded: (503, "overloaded_error", "overloaded"),
    errors.NoWorker: (503, "server_error", "no_worker"),
    errors.WorkerLost: (503, "server_error", "worker_lost"),
    errors.DeadlineExceeded: (504, "timeout_error", "deadline_exceeded"),
    errors.Cancelled: (499, "server_error", "cancelled"),
    errors.EngineFault: (500, "server_error", "engine_fault"),
}


class HttpError(Exception):
    """An error of HTTP itself, before a request is parsed: path, method, size or content type. `headers` are added to
    the response. `closes` ends the connection after it, because what follows on it is uncertain.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers, self.closes = headers or {}, closes or status in {408, 413, 431}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error in the format of OpenAI's API."""

    status: int
    kind: str
    code: str
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """Return the error body; in a stream it is the data of an error event."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    @property
    def rejection(self) -> str:
        """The reason for an event: status, code and field of the body, without values or names from the client."""
        field = "" if self.code == "unknown_parameter" else re.split(r"[.[]", self.param or "")[0]
        return f"HTTP {self.status} {self.code}" + (f": {field}" if field else "")

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, JSON)


def problem_of(error: BatonError) -> Problem:
    """Map any BatonError; a type missing from the table becomes an engine fault without the original text."""
    if type(error) not in ANSWERS:
        error = errors.EngineFault("internal error; see the server's log")
    status, kind, code = ANSWERS[type(error)]
    headers = {"x-should-retry": "true" if error.retryable else "false"} | _headers(error)
    if not isinstance(error, InvalidRequest):
        return Problem(status, kind, code, str(error), "model" if status == 404 else None, headers)
    first = error.violations[0] if error.violations else Violation("request", str(error))
    return Problem(status, kind, _code(first), str(error), first.field, headers)


def http_problem(error: HttpError) -> Problem:
    """Map an HttpError. If the body was not read completely, the connection is closed because it cannot be reused."""
    headers = dict(error.headers) | ({"connection": "close"} if error.closes else {})
    return Problem(error.status, "invalid_request_error", error.code, str(error), error.param, headers)


def _headers(error: BatonError) -> dict[str, str]:
    if isinstance(error, Overloaded):
        wait_s = max(0.0, error.retry_after_s)
        return _offers(error) | {
            "retry-after": str(max(1, math.ceil(wait_s))),
            "retry-after-ms": str(math.ceil(wait_s * 1000)),
        }
    if isinstance(error, errors.NoWorker | errors.WorkerLost):
        return RETRY_SOON
    return {"www-authenticate": "Bearer"} if isinstance(error, errors.Unauthenticated) else {}


def _offers(error: Overloaded) -> dict[str, str]:
    """Return the limits that could be promised now."""
    if not isinstance(error, PromiseRefused):
        return {}
    limits = {"baton-ttft-ms": error.ttft_ms, "baton-itl-ms": error.itl_ms}
    return {name: f"{limit:.6g}" for name, limit in limits.items() if limit}


def _code(violation: Violation) -> str:
    if TOO_LONG in violation.description:
        return "context_length_exceeded"
    if violation.description.startswith(UNKNOWN):
        return "unknown_parameter"
    return "unsupported_parameter" if violation.description.startswith(UNSUPPORTED) else "invalid_value"
