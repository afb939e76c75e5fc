"""The asyncio client. `sync.py` is generated from this file by tools/gen_sync_client.py, which `make fmt` runs.

What is decided is decided in the modules beside; here messages move and time passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, TypeVar, Unpack

import grpc

from baton.client import _requests
from baton.client import _wire_aio as wire
from baton.client._base import ClientBase
from baton.client._stream_aio import AsyncStream
from baton.client.types import ClusterStatus, Completion, Model, Options, Prompt
from baton.errors import NoWorker
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import admin_pb2 as admin
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

    Any number of requests may be under way at once:

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
        """The whole answer to a text or to token ids. Raises TypeError for an unknown option, naming the nearest."""
        async with self.stream(prompt, timeout=timeout, **options) as stream:
            return await stream.collect()

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> AsyncStream:
        """The answer as it comes; the request is under way when this returns."""
        return AsyncStream(self, _requests.generate_request(prompt, options), timeout)

    async def chat(
        self,
        messages: _requests.Chat,
        *,
        tools: _requests.Tools = (),
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """The next turn of a conversation; a message is a ChatMessage, or a mapping like those of OpenAI's API.

        `tools` are those of OpenAI's API too. A call of one is text in the answer, as the model writes it.
        """
        async with self.stream_chat(messages, tools=tools, timeout=timeout, **options) as stream:
            return await stream.collect()

    def stream_chat(
        self,
        messages: _requests.Chat,
        *,
        tools: _requests.Tools = (),
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """The next turn of a conversation as it comes."""
        return AsyncStream(self, _requests.chat_request(messages, options, tools), timeout)

    async def cancel(self, request_id: str) -> bool:
        """End a running request, whoever started it; False: no such request runs on the routers of this client."""
        unreachable: NoWorker | None = None
        for target in self._targets:
            try:
                if await self._cancel_at(target, request_id):
                    return True
            except NoWorker as error:
                unreachable = error
        if unreachable is not None:
            raise unreachable
        return False

    async def tokenize(self, text: str, model: str = "") -> list[int]:
        """Token ids of a text."""
        request = _requests.tokenize_request(text, model)
        reply = await self._call(lambda target: self._stubs.of(target).Tokenize, request)
        return list(reply.ids)

    async def detokenize(self, ids: _requests.Ids, model: str = "") -> str:
        """The text of token ids."""
        request = _requests.detokenize_request(ids, model)
        reply = await self._call(lambda target: self._stubs.of(target).Detokenize, request)
        return reply.text

    async def models(self) -> list[Model]:
        """What is served here."""
        request = inference.ListModelsRequest()
        reply = await self._call(lambda target: self._stubs.of(target).ListModels, request)
        return _requests.models(reply)

    async def cluster(self) -> ClusterStatus:
        """The workers and counts of this router. Raises ConfigError if the client was made without `admin`."""
        target = self._admin_target()
        async with self._stubs.connect(target) as channel:
            stub = wire.admin_stub(channel)
            reply = await self._call(lambda _: stub.Status, admin.StatusRequest(), target)
            return _requests.cluster_status(reply)

    async def _cancel_at(self, target: str, request_id: str) -> bool:
        request = inference.CancelRequest(request_id=request_id)
        reply = await self._call(lambda target: self._stubs.of(target).Cancel, request, target)
        return reply.found

    async def _call(self, method: Callable[[str], wire.Unary[Q, R]], request: Q, only: str = "") -> R:
        """The reply of the router `only`, else of any one of this client."""
        attempts = self._attempts(None)
        target = only or self._target
        while True:
            try:
                return await wire.ask(method(target), request, attempts.remaining(), self._metadata)
            except grpc.RpcError as failure:
                wait = attempts.wait_after(from_rpc_error(failure, target))
            await self._sleep(wait)
            target = only or self._after(target)
