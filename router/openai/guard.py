"""Checks of each HTTP request before its path is looked up: headers, framing and, without tokens, its origin.

Without tokens, a page of another site must reach nothing through its visitor's browser. It cannot read answers, except
with a name of its own that resolves to this machine (DNS rebinding). So a loopback listener accepts loopback names and
`router.http_names` only. Other listeners are open to their whole network.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.config.values import is_loopback_host
from baton.limits import MAX_HTTP_HEADER_BYTES
from router.openai.errors import HttpError, http_problem
from router.openai.messages_api.answer import MessagesProblem

_IDS = ("x-request-id", "request-id")
_EXPOSED = ("retry-after", "retry-after-ms", "x-should-retry", *_IDS, "baton-ttft-ms", "baton-itl-ms")
_OWN_SITE = {"same-origin", "none"}


def guarded(
    app: ASGIApp,
    names: Collection[str] | None,
    *,
    loopback: bool,
    origins: Collection[str] = (),
    rejected: Callable[[str], None] = lambda _: None,
) -> ASGIApp:
    """Wrap `app` to reject requests that fail a check, and call `rejected` with the reason. `names` are host names for
    a `loopback` listener, in addition to loopback names; None means that tokens protect the paths. Pages of `origins`
    are not foreign; they get the headers of CORS.
    """
    app = CORSMiddleware(app, origins, ("GET", "POST"), ("*",), expose_headers=_EXPOSED) if origins else app
    known = None if names is None or not loopback else {name.strip("[]").lower() for name in names}

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            _check_headers(scope)
            if names is not None:
                _check_origin(scope, known, origins)
        except HttpError as error:
            problem = http_problem(error)
            rejected(problem.rejection)
            await MessagesProblem.at(scope["path"], problem).response()(scope, receive, send)
        else:
            await app(scope, receive, send)

    return checked


def _check_headers(scope: Scope) -> None:
    """Raise HttpError for long headers, because uvicorn limits only headers that arrive incomplete, and for a body with
    two lengths, which proxies read differently (RFC 9112, 6.1).
    """
    size = sum(len(name) + len(value) for name, value in scope["headers"])
    if size > MAX_HTTP_HEADER_BYTES:
        raise HttpError(431, "headers_too_large", f"headers: must be at most {MAX_HTTP_HEADER_BYTES} bytes, got {size}")
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
        text = "headers: content-length and transfer-encoding must not be in one request"
        raise HttpError(400, "ambiguous_length", text, closes=True)


def _check_origin(scope: Scope, names: Collection[str] | None, origins: Collection[str]) -> None:
    """Raise HttpError for a request of another site's page. Its links to the dashboard may be followed. Browsers always
    send a host name; it is not checked if `names` is None.
    """
    headers = Headers(scope=scope)
    allowed = headers.get("origin") in origins
    followed = headers.get("sec-fetch-mode") == "navigate" and not scope["path"].startswith("/live")
    if headers.get("sec-fetch-site", "none") not in _OWN_SITE and not (followed or allowed):
        raise HttpError(403, "cross_site", "cross-site requests are rejected, because no tokens are set")
    host = _host(headers)
    own = is_loopback_host(host) or host.endswith(".localhost") or (names is not None and host in names)
    if names is not None and "host" in headers and not own:
        text = f"host: {host[:128]!r} is neither a loopback name such as localhost nor one of router.http_names"
        raise HttpError(403, "wrong_host", f"{text}, which is required because no tokens are set")


def _host(headers: Headers) -> str:
    """Return the requested host name, or "" if it is invalid."""
    try:
        return urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""
