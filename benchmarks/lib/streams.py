"""Load on a router: permanent streams, each checked event by event. See `lib/http2.py`."""

from __future__ import annotations

import selectors
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.rpc.v1 import inference_pb2 as pb
from benchmarks.lib.http2 import Connection, LoadFailed

if TYPE_CHECKING:
    from collections.abc import Callable

METHOD = "/baton.v1.Inference/Generate"
SILENCE_S = 30.0  # longest time without a byte


@dataclass(frozen=True, slots=True)
class Passed:
    """Tokens, events with tokens, and requests received in `seconds`, and the processor time of reading them."""

    seconds: float
    tokens: int
    events: int
    requests: int
    cpu_s: float

    @property
    def tokens_per_event(self) -> float:
        return self.tokens / self.events


@dataclass(slots=True)
class _Stream:
    heard: int = 0  # events
    tokens: int = 0
    completed: bool = False


class _Caller:
    """The streams of one connection. After the correct end of a stream, `again` decides whether to start another."""

    def __init__(self, address: str, request: Callable[[], bytes], answer: int, again: Callable[[], bool]) -> None:
        self.requests = self.events = 0  # ended requests, and events with tokens
        self._request, self._answer, self._again = request, answer, again
        self.streams: dict[int, _Stream] = {}  # active
        self.connection = Connection(address, METHOD, self)

    def begin(self) -> None:
        self.streams[self.connection.call(self._request())] = _Stream()

    def received(self, stream: int, message: bytes) -> None:
        event, known = pb.GenerateEvent.FromString(message), self.streams[stream]
        if event.seq != known.heard or known.completed:
            raise LoadFailed(f"event {event.seq} of stream {stream}, instead of {known.heard} of them")
        known.heard += 1
        kind = event.WhichOneof("event")
        if kind == "tokens":
            self._count(event.tokens, known)
        elif kind == "completed":
            known.completed = True

    def _count(self, tokens: pb.Tokens, known: _Stream) -> None:
        first: int = getattr(tokens, "from")  # a keyword in Python
        if first != known.tokens:
            raise LoadFailed(f"token {first}, instead of {known.tokens}")
        known.tokens += len(tokens.ids)
        self.events += 1

    def ended(self, stream: int, status: int) -> None:
        known = self.streams.pop(stream)
        if status or not known.completed or known.tokens != self._answer:
            raise LoadFailed(f"stream {stream} ended with status {status} and {known.tokens} of {self._answer} tokens")
        self.requests += 1
        if self._again():
            self.begin()


def drive(
    address: str, request: Callable[[], bytes], *, answer: int, streams: int, connections: int, seconds: float
) -> Passed:
    """Keep `streams` streams of `answer` tokens active for `seconds`, and wait for the last ones. `request` builds each
    request. Raises LoadFailed if a stream is not complete and in order.
    """
    began, cpu = time.monotonic(), time.process_time()
    go_on = partial(_before, began + seconds)
    with ExitStack() as leaving:
        selector = leaving.enter_context(closing(selectors.DefaultSelector()))
        callers = [_Caller(address, request, answer, go_on) for _ in range(connections)]
        for caller in callers:
            leaving.callback(caller.connection.close)
            selector.register(caller.connection.socket, selectors.EVENT_READ, caller)
        for number in range(streams):
            callers[number % connections].begin()
        while any(caller.streams for caller in callers):
            _read(selector)
    requests = sum(caller.requests for caller in callers)
    events = sum(caller.events for caller in callers)
    return Passed(time.monotonic() - began, requests * answer, events, requests, time.process_time() - cpu)


def _before(end: float) -> bool:
    return time.monotonic() < end


def _read(selector: selectors.BaseSelector) -> None:
    ready = selector.select(SILENCE_S)
    if not ready:
        raise LoadFailed(f"nothing came for {SILENCE_S:g} s")
    for key, _ in ready:
        key.data.connection.receive()
