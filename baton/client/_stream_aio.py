"""An answer as it comes, also after its connection was lost. `_stream_sync.py` is generated from this file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import grpc

from baton.client import _wire_aio as wire
from baton.client._fold import Fold
from baton.client._resume import RESUMABLE, RESUMABLE_S, Recovery
from baton.client.types import Completion, Delta
from baton.errors import BatonError, Cancelled
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    from baton.client.aio import AsyncClient


class AsyncStream(Fold):
    """An answer as it comes: `async for` over its `Delta`s; leaving the `async with` block cancels what still runs.

    >>> import asyncio
    >>> from baton import AsyncClient
    >>> async def show() -> None:
    ...     async with AsyncClient(target) as client, client.stream("The color of dog", temperature=0) as stream:
    ...         async for delta in stream:
    ...             print(delta.text, end="|")
    >>> asyncio.run(show())
     can| vary| widely|

    When the connection is lost, a request that the server can resume (`resumable_s`) goes on where it was, there or at
    the next router of the client: nothing is said twice and nothing is missing. `resumed` counts how often.
    """

    def __init__(self, client: AsyncClient, request: inference.GenerateRequest, timeout: float | None) -> None:
        super().__init__()
        self._client = client
        self._request = request
        if not request.HasField("resumable_s"):
            request.resumable_s = RESUMABLE_S
        self._attempts = client._attempts(timeout)
        self._recovery = Recovery(len(client._targets))
        self._closed = False
        self._target = client._target
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
                    self._progressed(delta)
                    return delta
            self._completion()  # raises if it is not whole
        except BatonError:
            self._call.cancel()
            raise
        raise StopAsyncIteration

    def _progressed(self, delta: Delta) -> None:
        if delta.tokens or delta.text:  # by a thought the answer gets no further
            self._attempts.progressed()
            self._recovery.progressed()

    def _send(self) -> wire.Call | wire.ResumeCall:
        """Begin, or go on with what has begun."""
        client, left = self._client, self._attempts.remaining()
        stub = client._stubs.of(self._target)
        if not self._started:
            return stub.Generate(self._request, timeout=left, metadata=client._metadata)
        received = self._received(self._request.n)
        request = inference.ResumeRequest(
            request_id=self.request_id,
            request=self._request,
            received=received,
            system_fingerprint=self.system_fingerprint,
        )
        self._rewind()
        return stub.Resume(request, timeout=left, metadata=client._metadata)

    async def _read(self) -> inference.GenerateEvent | None:
        while True:
            try:
                return await wire.read(self._call)
            except grpc.RpcError as failure:
                error = from_rpc_error(failure, self._target, connected=self._started)
            if await self._is_resumable() and self.usage is not None:
                return None  # nothing is missing
            await self._client._sleep(self._wait_after(error))
            self._raise_if_closed()  # by somebody else, meanwhile: then it must not be sent again
            self._target = self._client._after(self._target)
            self._call = self._send()
            if self._closed:
                self._call.cancel()

    def _wait_after(self, error: BatonError) -> float:
        """Seconds to wait before the next try, or raises what ends the stream."""
        self._raise_if_closed()
        if not self._started:
            return self._attempts.wait_after(error)
        return self._recovery.wait_after(error, self._attempts, answered=self._events > 0)

    async def _is_resumable(self) -> bool:
        """The server says so before its first event."""
        if self._started and not self._recovery.resumable:
            headers = await wire.headers(self._call)
            self._recovery.resumable = headers.get(RESUMABLE) == "1"
        return self._recovery.resumable

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Cancelled("the stream was closed")
