"""The asyncio client, from which `tools/gen_sync_client.py` generates `sync.py`. It only sends messages and waits."""

from __future__ import annotations

from collections.abc import Callable
from secrets import token_hex
from typing import Self, TypeVar, Unpack

import grpc

from baton.client import _messages
from baton.client import _transport_aio as wire
from baton.client._accumulator import Fold
from baton.client._messages import Chat, Tools
from baton.client._retry import RESUMABLE, RESUMABLE_S, ClientBase, Recovery
from baton.client.types import ClusterStatus, Completion, Delta, Model, Options, Prompt
from baton.errors import BatonError, Cancelled, ConfigError, DeadlineExceeded, NoWorker, Overloaded, WorkerLost
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import admin_pb2 as admin
from baton.rpc.v1 import inference_pb2 as inference
from baton.rpc.v1.admin_pb2_grpc import AdminStub


class AsyncStream(Fold):
    """An answer in progress: `async for` over its `Delta`s. Leaving the `async with` block cancels it.

    >>> import asyncio
    >>> from baton import AsyncClient
    >>> async def show() -> None:
    ...     async with AsyncClient(target) as client, client.stream("The color of dog", temperature=0) as stream:
    ...         async for delta in stream:
    ...             print(delta.text, end="|")
    >>> asyncio.run(show())
     can| vary| widely|

    If the connection is lost, a resumable request (`resumable_s`) continues there or at the client's next router. No
    text is repeated or lost. `resumed` counts these breaks.
    """

    def __init__(
        self, client: AsyncClient, request: inference.GenerateRequest, timeout: float | None, fingerprint: str = ""
    ) -> None:
        super().__init__()
        # A Resume without tokens is a new request that only workers with this fingerprint compute.
        self.system_fingerprint, self.request_id = fingerprint, token_hex(16) if fingerprint else ""
        self._client = client
        self._request = request
        if not request.HasField("resumable_s"):
            request.resumable_s = RESUMABLE_S
        self._attempts = client._attempts(timeout)
        self._recovery = Recovery(len(client._targets))
        self._closed, self._reader = False, wire.Reader()
        self._again_at: float | None = None  # when a failed call is sent again
        self._target = client._target
        self._call = self._send()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the request if it still runs. Later iteration raises Cancelled, unless the stream had ended."""
        self._closed = True
        self._call.cancel()

    async def collect(self) -> Completion:
        """Wait for the rest and return the whole answer. If this is interrupted, the request is cancelled."""
        try:
            async for _ in self:
                pass
        finally:
            self._call.cancel()
        return self._completion()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        try:
            while (event := await self._read()) is not None:
                if (delta := self._feed(event)) is not None:
                    self._progressed(delta)
                    return delta
            self._completion()  # raises if it is incomplete
        except BatonError:
            self._call.cancel()
            raise
        raise StopAsyncIteration

    def _progressed(self, delta: Delta) -> None:
        if delta.tokens or delta.text:  # a thought does not advance the answer
            self._attempts.progressed()
            self._recovery.progressed()

    def _send(self) -> wire.Call:
        client, left = self._client, self._attempts.remaining()
        stub = client._stubs.of(self._target)
        if not self.request_id:
            return wire.begin(stub.Generate, self._request, left, client._metadata)
        request = inference.ResumeRequest(request_id=self.request_id, request=self._request)
        request.received.extend(self._received(self._request.n))
        request.request.sampling.MergeFrom(self._defaults)
        request.system_fingerprint = self.system_fingerprint
        request.prompt_logprobs_received = len(self._prompt)
        self._rewind()
        return wire.begin(stub.Resume, request, left, client._metadata)

    async def _read(self) -> inference.GenerateEvent | None:
        if self._again_at is not None:  # a wait was interrupted
            await self._send_again(self._again_at - self._client._clock.monotonic())
        while True:
            try:
                return await self._reader.read(self._call)
            except grpc.RpcError as failure:
                error = from_rpc_error(failure, self._target, connected=self._started)
            if self._started and not self._recovery.resumable:
                headers = dict(await self._call.initial_metadata())
                self._recovery.resumable = headers.get(RESUMABLE) == "1"
            if self._recovery.resumable and self.usage is not None:
                return None  # the answer is complete
            self._raise_if_closed()
            if self._started:
                wait = self._recovery.wait_after(error, self._attempts, answered=self._events > 0)
            else:
                wait = self._attempts.wait_after(error)
            self._again_at = self._client._clock.monotonic() + wait
            await self._send_again(wait)

    async def _send_again(self, wait_s: float) -> None:
        """Send a failed call again after a wait. If that is interrupted, the next read waits for the rest."""
        await self._client._sleep(max(0.0, wait_s))
        if self._again_at is None:
            return  # another task sent it during the wait
        self._raise_if_closed()  # another task or thread may have closed the stream during the wait
        self._again_at = None
        self._target = self._client._after(self._target)
        self._call = self._send()
        if self._closed:
            self._call.cancel()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Cancelled("the stream was closed")


Q = TypeVar("Q")
R = TypeVar("R")


class AsyncClient(ClientBase):
    """A connection to a router, for any number of concurrent tasks of one event loop. Arguments are those of `Client`.

    >>> import asyncio
    >>> from baton import AsyncClient
    >>> async def ask_all(*prompts: str) -> list[str]:
    ...     async with AsyncClient(target) as client:
    ...         answers = await asyncio.gather(*(client.generate(prompt, max_tokens=8) for prompt in prompts))
    ...         return [answer.text for answer in answers]
    >>> asyncio.run(ask_all("The color of dog", "The color of cat"))
    [' can vary widely', ' can vary widely']

    All methods raise the errors of `baton.errors`.
    """

    _sleep: wire.Sleep = staticmethod(wire.sleep)

    def _opened(self) -> None:
        self._stubs = wire.Stubs(self._credentials, self._name, self._proxy)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls end with Cancelled."""
        await self._stubs.close()

    async def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """Return the whole answer to text or token ids. Raises TypeError for an unknown option, naming the nearest."""
        async with self.stream(prompt, timeout=timeout, **options) as stream:
            return await stream.collect()

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, system_fingerprint: str = "", **options: Unpack[Options]
    ) -> AsyncStream:
        """Send a request and return its stream. Only workers with `system_fingerprint`, unless it is empty, compute a
        deterministic request.
        """
        return AsyncStream(self, _messages.generate_request(prompt, options), timeout, system_fingerprint)

    async def chat(
        self, messages: Chat, *, tools: Tools = (), timeout: float | None = None, **options: Unpack[Options]
    ) -> Completion:
        """Return the next turn. Messages and `tools` are as in OpenAI's API; tool calls stay text in the answer."""
        async with self.stream_chat(messages, tools=tools, timeout=timeout, **options) as stream:
            return await stream.collect()

    def stream_chat(
        self, messages: Chat, *, tools: Tools = (), timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """Send the request for the next turn of a conversation and return its stream."""
        return AsyncStream(self, _messages.chat_request(messages, options, tools), timeout)

    async def cancel(self, request_id: str) -> bool:
        """Cancel a running request of any client; return False if none of this client's routers runs it."""
        request = _messages.build_message(inference.CancelRequest, "request_id", request_id=request_id)
        failed: BatonError | None = None
        for target in self._targets:
            try:
                reply = await self._call(lambda target: self._stubs.of(target).Cancel, request, target)
                if reply.found:
                    return True
            except (NoWorker, WorkerLost, DeadlineExceeded, Overloaded) as error:  # another router may run it
                failed = error
        if failed is not None:
            raise failed
        return False

    async def tokenize(self, text: str, model: str = "") -> list[int]:
        request = _messages.build_message(inference.TokenizeRequest, "text", text=text, model=model)
        reply = await self._call(lambda target: self._stubs.of(target).Tokenize, request)
        return list(reply.ids)

    async def detokenize(self, ids: _messages.Ids, model: str = "") -> str:
        request = _messages.build_message(inference.DetokenizeRequest, "ids", ids=ids, model=model)
        reply = await self._call(lambda target: self._stubs.of(target).Detokenize, request)
        return reply.text

    async def models(self) -> list[Model]:
        reply = await self._call(lambda target: self._stubs.of(target).ListModels, inference.ListModelsRequest())
        return [_messages.model(each) for each in reply.models]

    async def cluster(self) -> ClusterStatus:
        """Return the workers and counts of this router. Raises ConfigError if the client was made without `admin`."""
        if (target := self._admin) is None:
            raise ConfigError("admin: not set; create the client with admin='host:port' to see the cluster")
        async with self._stubs.connect(target) as channel:
            stub = AdminStub(channel)
            return _messages.cluster_status(await self._call(lambda _: stub.Status, admin.StatusRequest(), target))

    async def _call(self, method: Callable[[str], wire.Unary[Q, R]], request: Q, only: str = "") -> R:
        """Return the reply of the router `only`, or else of any router of this client."""
        attempts = self._attempts(None, only)
        target = only or self._target
        while True:
            try:
                return await wire.ask(method(target), request, attempts.remaining(), self._metadata)
            except grpc.RpcError as failure:
                wait = attempts.wait_after(from_rpc_error(failure, target))
            await self._sleep(wait)
            target = only or self._after(target)
