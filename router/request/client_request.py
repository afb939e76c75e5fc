"""A client's call, its parsed request, and the running calls of a router."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count

from baton.errors import BatonError, Cancelled
from baton.limits import MAX_KEPT_CALLS
from baton.tracing.trace import TraceContext
from router.auth.tokens import Grant
from router.parsing.generate_request import ParsedRequest
from router.request.attempt import StreamRetention
from router.request.observer import RequestObserver, Sinks


class ClientCall:
    """One Generate or Resume call. It ends after `within_s` seconds at the latest. `name` is the client's request id; a
    Resume keeps the id of its stream. `arrival` is its number in the order of arrival. `task` runs in `scope`, and
    `end` makes it leave with `reason`. `trace_context` is the trace that the call belongs to.
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
        # Hex, because it must be neither a command-line option nor special in a URL. The first 8 digits are the time.
        self._own = f"{int(time.time()):08x}{secrets.token_hex(12)}"
        self.name = name or self._own
        self.resumes = bool(name)  # another router began it
        self.grant = grant  # of its caller; None if no tokens are configured
        self.tenant = grant.tenant if grant is not None else ""
        self.task, self.within_s, self.arrival = task, within_s, arrival
        self.observer = RequestObserver(sinks, self.name, trace_context, resumes=self.resumes)
        self.deadline = self.observer.arrived[0] + within_s  # counts from before a long prompt is parsed
        self.scope = asyncio.timeout(within_s)
        self.reason: BatonError | None = None
        self.handing_over = False  # set when another router is to continue it
        self.releases: list[Callable[[], None]] = []  # of ended choices, whose streams decode workers keep

    def worker_name(self, choice: int) -> str:
        """Return a choice's id on workers. A resumed name is never used: workers may have attempts of it."""
        return f"{self._own}.{choice}" if choice else self._own

    def stream(self, choice: int) -> str:
        """Return the client's name for a choice. It is the same on every router."""
        return f"{self.name}.{choice}" if choice else self.name

    def release(self) -> None:
        """Let decode workers forget the call's streams, unless another router is to continue it. Called at its end."""
        if not self.handing_over:
            for release in self.releases:
                release()

    def end(self, reason: BatonError) -> None:
        """End the call with `reason` and release its workers. Only the first reason counts."""
        if self.reason is None and not self.scope.expired():
            self.reason = reason
            self.scope.reschedule(asyncio.get_running_loop().time())


class ClientRequest:
    """The parsed request of a call, which all its choices share."""

    def __init__(self, call: ClientCall, parsed: ParsedRequest) -> None:
        self.call, self.parsed = call, parsed
        self.determinism = parsed.determinism  # system fingerprint, also set by the first attempt if deterministic

    def retention(self, choice: int) -> StreamRetention:
        if not self.parsed.resumable_s:
            return StreamRetention()
        call = self.call
        name, parks = call.stream(choice), lambda: call.handing_over
        return StreamRetention(self.parsed.resumable_s, name, parks, call.releases.append)


class RunningRequests:
    """The running calls of a router. `accepting` is False while it stops. `arrivals` numbers the calls."""

    def __init__(self) -> None:
        self.accepting = True
        self.arrivals = count()
        self._kept, self._stopping = 0, asyncio.Event()
        self._running: set[ClientCall] = set()
        self._named: dict[tuple[str, str], ClientCall] = {}  # by tenant, and request id or idempotency key

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[ClientCall]:
        return iter(self._running)

    async def keep(self, call: ClientCall) -> None:
        """Keep a complete call, and so its streams at decode workers, until its client cancels it or this router stops.
        Returns immediately if too many are kept.
        """
        if self._kept < MAX_KEPT_CALLS:
            self._kept += 1
            with suppress(asyncio.CancelledError, TimeoutError):  # the task ends after this
                await asyncio.wait_for(self._stopping.wait(), call.within_s)
            self._kept -= 1
        call.handing_over = not self.accepting

    def stop(self) -> None:
        """Accept no call from now on, and keep no complete one."""
        self.accepting = False
        self._stopping.set()

    def hand_over(self, reason: BatonError) -> None:
        """End all calls with `reason`, and let another router continue them."""
        for call in self._running:
            call.handing_over = True
            call.end(reason)

    @asynccontextmanager
    async def registered(self, call: ClientCall, key: str) -> AsyncIterator[None]:
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
