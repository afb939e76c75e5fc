"""The blocking client. What is decided is decided in the modules beside; here messages move and time passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from baton.client import _requests
from baton.client._base import ClientBase
from baton.client._fold import Fold
from baton.client.types import ClusterStatus, Completion, Delta, Model, Options, Prompt
from baton.errors import BatonError, Cancelled
from baton.rpc.channel import PUBLIC, sync_channel
from baton.rpc.v1 import admin_pb2 as admin_pb
from baton.rpc.v1 import admin_pb2_grpc, inference_pb2_grpc
from baton.rpc.v1 import inference_pb2 as inference

Q = TypeVar("Q")
R = TypeVar("R")


class Client(ClientBase):
    """A connection to a router, for any number of threads.

    >>> from baton import Client
    >>> with Client(target) as client:
    ...     answer = client.generate("The color of dog", max_tokens=8, temperature=0)
    >>> answer.text, answer.finish_reason.value
    (' can vary widely', 'eos')

    `target` is the router's `host:port`. `token` is sent as bearer token. `tls` is a CA file or its bytes. `timeout`
    bounds each call in seconds, retries included. A call is tried `max_retries` times more when that can help, after
    the delay that the server asks for and a random one. `admin` is the address for `cluster`. Raises ConfigError.
    All methods raise the errors of `baton.errors`.
    """

    _sleep: Callable[[float], None] = staticmethod(time.sleep)

    def _opened(self) -> None:
        self._channel = self._connect(self._target)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls end with Cancelled."""
        self._channel.close()

    def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """The whole answer to a text or to token ids. Raises TypeError for an unknown option, naming the nearest."""
        with self.stream(prompt, timeout=timeout, **options) as stream:
            return stream.collect()

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Stream:
        """The answer as it comes; the request is under way when this returns."""
        return Stream(self, _requests.generate_request(prompt, options), timeout)

    def chat(self, messages: _requests.Chat, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """The next turn of a conversation; a message is a ChatMessage or a mapping of `role` and `content`."""
        with Stream(self, _requests.chat_request(messages, options), timeout) as stream:
            return stream.collect()

    def cancel(self, request_id: str) -> bool:
        """End a running request, whoever started it; False: no such request runs on this router."""
        return self._call(self._stub.Cancel, inference.CancelRequest(request_id=request_id)).found

    def tokenize(self, text: str, model: str = "") -> list[int]:
        """Token ids of a text."""
        return list(self._call(self._stub.Tokenize, _requests.tokenize_request(text, model)).ids)

    def models(self) -> list[Model]:
        """What is served here."""
        return _requests.models(self._call(self._stub.ListModels, inference.ListModelsRequest()))

    def cluster(self) -> ClusterStatus:
        """The workers and counts of this router. Raises ConfigError if the client was made without `admin`."""
        target = self._admin_target()
        with self._connect(target) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            return _requests.cluster_status(self._call(stub.Status, admin_pb.StatusRequest(), target))

    def _connect(self, target: str) -> grpc.Channel:
        return sync_channel(target, link=PUBLIC, credentials=self._credentials, proxy=self._proxy)

    def _call(self, method: grpc.UnaryUnaryMultiCallable[Q, R], request: Q, target: str = "") -> R:
        attempts = self._attempts(None)
        while True:
            try:
                return method(request, timeout=attempts.remaining(), metadata=self._metadata)
            except grpc.RpcError as failure:
                wait = self._wait_after(failure, attempts, target or self._target)
            self._sleep(wait)


class _Call(Protocol):
    """A running `Generate`."""

    def __next__(self) -> inference.GenerateEvent: ...

    def cancel(self) -> object: ...


class Stream(Fold):
    """An answer as it comes: iterate over its `Delta`s; leaving the `with` block cancels what is still running.

    >>> with Client(target) as client, client.stream("The color of dog", temperature=0) as stream:
    ...     for delta in stream:
    ...         print(delta.text, end="|")
    ...
     can| vary| widely|
    >>> stream.text, stream.usage.completion_tokens
    (' can vary widely', 3)
    """

    def __init__(self, client: Client, request: inference.GenerateRequest, timeout: float | None) -> None:
        super().__init__()
        self._client = client
        self._request = request
        self._attempts = client._attempts(timeout)
        self._closed = False
        self._call = self._send()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request if it still runs. From then on iterating raises Cancelled, unless it had ended."""
        self._closed = True
        self._call.cancel()

    def collect(self) -> Completion:
        """Wait for the rest, and return all of it."""
        for _ in self:
            pass
        return self._completion()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        try:
            while (event := self._read()) is not None:
                if (delta := self._feed(event)) is not None:
                    return delta
            self._completion()  # raises if it is not whole
        except BatonError:
            self._call.cancel()
            raise
        raise StopIteration

    def _send(self) -> _Call:
        client, left = self._client, self._attempts.remaining()
        return client._stub.Generate(self._request, timeout=left, metadata=client._metadata)

    def _read(self) -> inference.GenerateEvent | None:
        client = self._client
        while True:
            try:
                return next(self._call, None)
            except grpc.RpcError as failure:
                wait = client._wait_after(failure, self._attempts, client._target, started=self._started)
            client._sleep(wait)
            if self._closed:  # by somebody else, meanwhile: then it must not be sent again
                raise Cancelled("the stream was closed")
            self._call = self._send()
            if self._closed:
                self._call.cancel()
