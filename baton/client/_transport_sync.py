"""Transport of the blocking client: gRPC's blocking API, thread-safe, with the names of `_transport_aio`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias, TypeVar

import grpc

from baton.client._retry import here
from baton.errors import Cancelled
from baton.rpc import channel
from baton.rpc.v1 import inference_pb2 as inference
from baton.rpc.v1 import inference_pb2_grpc

Q = TypeVar("Q")
R = TypeVar("R")
Channel: TypeAlias = "grpc.Channel"
Stub: TypeAlias = "inference_pb2_grpc.InferenceStub"
Unary: TypeAlias = "grpc.UnaryUnaryMultiCallable[Q, R]"
Sleep: TypeAlias = Callable[[float], None]

sleep: Sleep = time.sleep


class Call(Protocol):
    """A running `Generate` or `Resume`."""

    def __next__(self) -> inference.GenerateEvent: ...

    def cancel(self) -> object: ...

    def initial_metadata(self) -> Iterable[tuple[str, str | bytes]]: ...


class Stubs:
    """One channel per router, made on first use by any thread."""

    def __init__(self, credentials: grpc.ChannelCredentials | None, name: str, proxy: bool) -> None:
        self._credentials = credentials
        self._name = name  # in the certificates of a cluster; empty means that of the address
        self._proxy = proxy
        self._closed = False
        self._made: dict[str, tuple[Channel, Stub]] = {}
        self._lock = threading.Lock()

    def connect(self, target: str) -> Channel:
        """Return a new channel; the caller closes it."""
        proxy = self._proxy and not here(target)
        credentials, name = self._credentials, self._name
        return channel.sync_channel(target, link=channel.PUBLIC, credentials=credentials, proxy=proxy, name=name)

    def of(self, target: str) -> Stub:
        with self._lock:
            if self._closed:
                raise Cancelled("the client was closed")
            if target not in self._made:
                made = self.connect(target)
                self._made[target] = made, inference_pb2_grpc.InferenceStub(made)
            return self._made[target][1]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for made, _ in self._made.values():
                made.close()


def begin(method: Callable[..., R], request: object, timeout: float | None, metadata: tuple[tuple[str, str], ...]) -> R:
    """Start a stream, or return a reply. Raises grpc.RpcError, or Cancelled if another thread has closed the client."""
    try:
        return method(request, timeout=timeout, metadata=metadata)
    except ValueError as error:  # of gRPC, for a closed channel
        raise Cancelled("the client was closed") from error


def ask(method: Unary[Q, R], request: Q, timeout: float | None, metadata: tuple[tuple[str, str], ...]) -> R:
    """Return the reply. Raises the errors of `begin`."""
    return begin(method, request, timeout, metadata)


class Reader:
    """Reads the calls of one stream."""

    def read(self, call: Call) -> inference.GenerateEvent | None:
        """Return the next event, None at the end. Raises grpc.RpcError."""
        return next(call, None)
