"""What only the asyncio client does: gRPC's asyncio API, and telling two kinds of being cancelled apart.

`_transport_sync` offers the same names to the blocking client, which is generated from the asyncio one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

import grpc

from baton.client._retry import here
from baton.errors import Cancelled
from baton.rpc import channel
from baton.rpc.v1 import admin_pb2_grpc, inference_pb2_grpc
from baton.rpc.v1 import inference_pb2 as inference

Q = TypeVar("Q")
R = TypeVar("R")
Channel: TypeAlias = "grpc.aio.Channel"
Stub: TypeAlias = "inference_pb2_grpc.InferenceAsyncStub"
AdminStub: TypeAlias = "admin_pb2_grpc.AdminAsyncStub"
Call: TypeAlias = "grpc.aio.UnaryStreamCall[inference.GenerateRequest, inference.GenerateEvent]"
ResumeCall: TypeAlias = "grpc.aio.UnaryStreamCall[inference.ResumeRequest, inference.GenerateEvent]"
Unary: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[Q, R]"
Metadata: TypeAlias = tuple[tuple[str, str], ...]
Sleep: TypeAlias = Callable[[float], Awaitable[None]]

sleep: Sleep = asyncio.sleep


class Stubs:
    """One channel for each router. Made on first use: a channel belongs to the loop in which it was made."""

    def __init__(self, credentials: grpc.ChannelCredentials | None, name: str, proxy: bool) -> None:
        self._credentials = credentials
        self._name = name  # in the certificates of a cluster; "": that of the address
        self._proxy = proxy
        self._closed = False
        self._made: dict[str, tuple[Channel, Stub]] = {}

    def connect(self, target: str) -> Channel:
        """A channel that the caller closes."""
        proxy = self._proxy and not here(target)
        credentials, name = self._credentials, self._name
        return channel.aio_channel(target, link=channel.PUBLIC, credentials=credentials, proxy=proxy, name=name)

    def of(self, target: str) -> Stub:
        """Raises Cancelled once it is closed."""
        if self._closed:
            raise Cancelled("the client was closed")
        if target not in self._made:
            made = self.connect(target)
            self._made[target] = made, inference_pb2_grpc.InferenceStub(made)
        return self._made[target][1]

    async def close(self) -> None:
        """Running calls end with Cancelled."""
        self._closed = True
        for made, _ in self._made.values():
            await made.close()


def admin_stub(made: Channel) -> AdminStub:
    """The service for operators."""
    return admin_pb2_grpc.AdminStub(made)


async def ask(method: Unary[Q, R], request: Q, timeout: float | None, metadata: Metadata) -> R:
    """Raises grpc.RpcError; Cancelled when the client was closed meanwhile."""
    call = method(request, timeout=timeout, metadata=metadata)
    try:
        return await call
    except asyncio.CancelledError:
        _raise_if_ended_here(call.cancelled())
        raise


async def read(call: Call | ResumeCall) -> inference.GenerateEvent | None:
    """The next event, None at the end. Raises grpc.RpcError; Cancelled when the call was ended from here."""
    try:
        event = await call.read()
    except asyncio.CancelledError:
        _raise_if_ended_here(call.cancelled())
        raise
    return event if isinstance(event, inference.GenerateEvent) else None  # EOF


async def headers(call: Call | ResumeCall) -> dict[str, str | bytes]:
    """What the server sent before its first event."""
    return dict(await call.initial_metadata())


def _raise_if_ended_here(cancelled: bool) -> None:
    """A call that was cancelled here looks like a cancelled task; tell them apart."""
    task = asyncio.current_task()
    if cancelled and not (task and task.cancelling()):
        raise Cancelled("the stream or its client was closed") from None
