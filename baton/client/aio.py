"""The asyncio client: `Client` with `await`. What is decided is decided in the modules beside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar, Unpack

import grpc

from baton.client import _requests
from baton.client._base import ClientBase
from baton.client._fold import Fold
from baton.client.types import ClusterStatus, Completion, Delta, Model, Options, Prompt
from baton.errors import BatonError, Cancelled
from baton.rpc.channel import PUBLIC, aio_channel
from baton.rpc.v1 import admin_pb2 as admin_pb
from baton.rpc.v1 import admin_pb2_grpc, inference_pb2_grpc
from baton.rpc.v1 import inference_pb2 as inference

Q = TypeVar("Q")
R = TypeVar("R")


class AsyncClient(ClientBase):
    """A connection to a router, for any number of tasks of one event loop. Arguments are those of `Client`.

    >>> import asyncio
    >>> from baton import AsyncClient
    >>> async def ask() -> str:
    ...     async with AsyncClient(target) as client:
    ...         return (await client.generate("The color of dog", temperature=0)).text
    >>> asyncio.run(ask())
    ' can vary widely'

    All methods raise the errors of `baton.errors`.
    """

    _sleep: Callable[[float], Awaitable[None]] = staticmethod(asyncio.sleep)

    def _opened(self) -> None:
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls end with Cancelled."""
        if self._channel is not None:
            await self._channel.close()

    async def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """The whole answer to a text or to token ids. Raises TypeError for an unknown option, naming the nearest."""
        async with self.stream(prompt, timeout=timeout, **options) as stream:
            return await stream.collect()

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> AsyncStream:
        """The answer as it comes; the request is under way when this returns."""
        return AsyncStream(self, _requests.generate_request(prompt, options), timeout)

    async def chat(
        self, messages: _requests.Chat, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """The next turn of a conversation; a message is a ChatMessage or a mapping of `role` and `content`."""
        async with AsyncStream(self, _requests.chat_request(messages, options), timeout) as stream:
            return await stream.collect()

    async def cancel(self, request_id: str) -> bool:
        """End a running request, whoever started it; False: no such request runs on this router."""
        return (await self._call(self._stub().Cancel, inference.CancelRequest(request_id=request_id))).found

    async def tokenize(self, text: str, model: str = "") -> list[int]:
        """Token ids of a text."""
        return list((await self._call(self._stub().Tokenize, _requests.tokenize_request(text, model))).ids)

    async def models(self) -> list[Model]:
        """What is served here."""
        return _requests.models(await self._call(self._stub().ListModels, inference.ListModelsRequest()))

    async def cluster(self) -> ClusterStatus:
        """The workers and counts of this router. Raises ConfigError if the client was made without `admin`."""
        target = self._admin_target()
        async with self._connect(target) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            return _requests.cluster_status(await self._call(stub.Status, admin_pb.StatusRequest(), target))

    def _connect(self, target: str) -> grpc.aio.Channel:
        return aio_channel(target, link=PUBLIC, credentials=self._credentials, proxy=self._proxy)

    def _stub(self) -> inference_pb2_grpc.InferenceAsyncStub:
        if self._channel is None:  # not before: a channel belongs to the loop in which it was made
            self._channel = self._connect(self._target)
        return inference_pb2_grpc.InferenceStub(self._channel)

    async def _call(self, method: grpc.aio.UnaryUnaryMultiCallable[Q, R], request: Q, target: str = "") -> R:
        attempts = self._attempts(None)
        while True:
            try:
                return await method(request, timeout=attempts.remaining(), metadata=self._metadata)
            except grpc.RpcError as failure:
                wait = self._wait_after(failure, attempts, target or self._target)
            await self._sleep(wait)


class AsyncStream(Fold):
    """An answer as it comes: `async for` over its `Delta`s; leaving the `async with` block cancels what still runs."""

    def __init__(self, client: AsyncClient, request: inference.GenerateRequest, timeout: float | None) -> None:
        super().__init__()
        self._client = client
        self._request = request
        self._attempts = client._attempts(timeout)
        self._closed = False
        self._call = self._send()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the request if it still runs. From then on iterating raises Cancelled, unless it had ended."""
        self._closed = True
        self._call.cancel()

    async def collect(self) -> Completion:
        """Wait for the rest, and return all of it."""
        async for _ in self:
            pass
        return self._completion()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        try:
            while (event := await self._read()) is not None:
                if (delta := self._feed(event)) is not None:
                    return delta
            self._completion()  # raises if it is not whole
        except BatonError:
            self._call.cancel()
            raise
        raise StopAsyncIteration

    def _send(self) -> grpc.aio.UnaryStreamCall[inference.GenerateRequest, inference.GenerateEvent]:
        client, left = self._client, self._attempts.remaining()
        return client._stub().Generate(self._request, timeout=left, metadata=client._metadata)

    async def _read(self) -> inference.GenerateEvent | None:
        client = self._client
        while True:
            try:
                event = await self._call.read()
                return event if isinstance(event, inference.GenerateEvent) else None  # EOF
            except grpc.RpcError as failure:
                wait = client._wait_after(failure, self._attempts, client._target, started=self._started)
            except asyncio.CancelledError:
                self._raise_if_closed()
                raise
            await client._sleep(wait)
            if self._closed:  # by somebody else, meanwhile: then it must not be sent again
                raise Cancelled("the stream was closed")
            self._call = self._send()

    def _raise_if_closed(self) -> None:
        """A call that was cancelled here looks like a cancelled task; tell them apart."""
        task = asyncio.current_task()
        if self._closed and not (task and task.cancelling()):
            raise Cancelled("the stream was closed") from None
