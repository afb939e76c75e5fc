"""Transport of the asyncio client: gRPC's asyncio API. `_transport_sync` has the same names for the blocking API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc

from baton.client._retry import here
from baton.errors import Cancelled
from baton.rpc import channel
from baton.rpc.v1 import inference_pb2 as inference
from baton.rpc.v1 import inference_pb2_grpc

Q = TypeVar("Q")
R = TypeVar("R")
Channel: TypeAlias = "grpc.aio.Channel"
Stub: TypeAlias = "inference_pb2_grpc.InferenceAsyncStub"
Call: TypeAlias = "grpc.aio.UnaryStreamCall[Any, inference.GenerateEvent]"  # of `Generate` or `Resume`
Unary: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[Q, R]"
Sleep: TypeAlias = Callable[[float], Awaitable[None]]

sleep: Sleep = asyncio.sleep


class Stubs:
    """One channel per router, made on first use because a channel belongs to the loop in which it was made."""

    def __init__(self, credentials: grpc.ChannelCredentials | None, name: str, proxy: bool) -> None:
        self._credentials = credentials
        self._name = name  # in the certificates of a cluster; empty means that of the address
        self._proxy = proxy
        self._closed = False
        self._made: dict[str, tuple[Channel, Stub]] = {}

    def connect(self, target: str) -> Channel:
        """Return a new channel; the caller closes it."""
        proxy = self._proxy and not here(target)
        credentials, name = self._credentials, self._name
        return channel.aio_channel(target, link=channel.PUBLIC, credentials=credentials, proxy=proxy, name=name)

    def of(self, target: str) -> Stub:
        if self._closed:
            raise Cancelled("the client was closed")
        if target not in self._made:
            made = self.connect(target)
            self._made[target] = made, inference_pb2_grpc.InferenceStub(made)
        return self._made[target][1]

    async def close(self) -> None:
        self._closed = True
        for made, _ in self._made.values():
            await made.close()


def begin(
    method: Callable[..., Call], request: object, timeout: float | None, metadata: tuple[tuple[str, str], ...]
) -> Call:
    """Start a stream."""
    return method(request, timeout=timeout, metadata=metadata)


async def ask(method: Unary[Q, R], request: Q, timeout: float | None, metadata: tuple[tuple[str, str], ...]) -> R:
    """Return the reply. Raises grpc.RpcError, or Cancelled if the client was closed during the call."""
    call = method(request, timeout=timeout, metadata=metadata)
    try:
        return await call
    except asyncio.CancelledError:
        _raise_if_ended_here(call.cancelled())
        raise


class Reader:
    """Reads the calls of one stream. If a reading task is cancelled, as by `asyncio.wait_for`, its read goes on for the
    next one: gRPC would cancel the call.
    """

    def __init__(self) -> None:
        self._reading: asyncio.Task[Any] | None = None
        self._awaited = False

    async def read(self, call: Call) -> inference.GenerateEvent | None:
        """Return the next event, None at the end. Raises grpc.RpcError, Cancelled if the call was cancelled here, and
        RuntimeError if another task waits for an event.
        """
        if self._awaited:
            raise RuntimeError("another task reads this stream")
        done = self._reading = self._reading or asyncio.create_task(call.read())
        self._awaited = True
        try:
            await asyncio.wait((done,))
        finally:
            self._awaited = False
        self._reading = None
        _raise_if_ended_here(done.cancelled())
        event = done.result()
        return event if isinstance(event, inference.GenerateEvent) else None  # EOF

    def __del__(self) -> None:
        if self._reading is not None and not self._reading.get_loop().is_closed():
            self._reading.cancel()  # asyncio then does not log its error either


def _raise_if_ended_here(cancelled: bool) -> None:
    """Raise Cancelled if the call, and not the current task, was cancelled: gRPC raises CancelledError for both."""
    task = asyncio.current_task()
    if cancelled and not (task and task.cancelling()):
        raise Cancelled("the stream or its client was closed") from None
