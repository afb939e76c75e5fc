"""One client request: its name, its deadline and its end. And the running requests of a router."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import blake2b
from itertools import count

from baton.errors import BatonError, Cancelled
from baton.tracing.trace import TraceContext
from router.auth.tokens import Grant
from router.observe.request_observer import RequestObserver, Sinks
from router.request.attempt import StreamRetention
from router.request.thoughts import Asked


class ClientRequest:
    """One request of a client. It ends after `within_s` seconds at the latest. `name` is the client's request id; a
    resumed request keeps the id of its stream. `arrival` is its number in the order of arrival. `task` runs in `scope`,
    and `end` makes it leave with `reason`. `trace_context` is the trace that the request belongs to.
    """

    def __init__(
        self,
        sinks: Sinks,
        arrival: int,
        task: asyncio.Task[None],
        within_s: float,
        name: str = "",
        grant: Grant | None = None,
        trace_context: TraceContext | None = None,
    ) -> None:
        self._own = secrets.token_hex(16)  # hex, because it must be neither a command-line option nor special in a URL
        self.name = name or self._own
        self.resumes = bool(name)  # another router began it
        self.grant = grant  # of its caller; None if no tokens are configured
        self.task = task
        self.within_s = within_s
        self.arrival = arrival
        self.observer = RequestObserver(sinks, self.name, trace_context, resumes=self.resumes)
        self.deadline = self.observer.arrived[0] + within_s  # counts from before a long prompt is parsed
        self.scope = asyncio.timeout(within_s)
        self.reason: BatonError | None = None
        self.resumable_s = 0.0  # how long it continues without a router
        self.handing_over = False  # set when another router is to continue it
        self.prompt_tokens = 0  # set by `serve_request`, like `deterministic`
        self.deterministic = False
        self.traced = False  # whether the client wants all spans
        self.asked = Asked()
        self.determinism = ""  # determinism fingerprint of a deterministic request, from its first attempt on

    def life_id(self, choice: int) -> str:
        """Return a choice's id on workers. A resumed name is never used: workers may have attempts of it."""
        return f"{self._own}.{choice}" if choice else self._own

    def stream(self, choice: int) -> str:
        """Return the client's name for a choice. It is the same on every router."""
        return f"{self.name}.{choice}" if choice else self.name

    def lasting(self, choice: int) -> StreamRetention:
        """Return how long workers retain the stream of a choice."""
        if not self.resumable_s:
            return StreamRetention()
        return StreamRetention(self.resumable_s, self.stream(choice), lambda: self.handing_over)

    def end(self, reason: BatonError) -> None:
        """End the request with `reason` and release its workers. Only the first reason counts."""
        if self.reason is None and not self.scope.expired():
            self.reason = reason
            self.scope.reschedule(asyncio.get_running_loop().time())

    @property
    def tenant(self) -> str:
        return self.grant.tenant if self.grant is not None else ""

    @property
    def accepted(self) -> bool:
        return self.observer.is_accepted


class RunningRequests:
    """The running requests of a router. `accepting` is False while it stops. `arrivals` numbers the requests."""

    def __init__(self) -> None:
        self.accepting = True
        self.arrivals = count()
        self._running: set[ClientRequest] = set()
        self._named: dict[tuple[str, str], ClientRequest] = {}  # by tenant, and request id or idempotency key

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[ClientRequest]:
        return iter(self._running)

    @asynccontextmanager
    async def registered(self, call: ClientRequest, key: str) -> AsyncIterator[None]:
        """Register `call` by name and key until it ends. A call of its tenant that has one of them is cancelled."""
        names = [(call.tenant, call.name), (call.tenant, f"key {key}")][: 1 + bool(key)]
        for name in names:
            if name in self._named:
                self._named[name].end(Cancelled("another call has taken over this request"))
        self._running.add(call)
        self._named |= dict.fromkeys(names, call)
        try:
            yield
        finally:
            self._running.remove(call)
            for name in names:
                if self._named.get(name) is call:  # not if another call has taken over
                    del self._named[name]


def seed_of(text: str) -> int:
    """Return 63 bits that depend only on `text`, so that a request resumed or sent again with its key has the same."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1
