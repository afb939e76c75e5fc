"""The blocking client. What is decided is decided in `_core`; here messages move and time passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from baton.client import _requests
from baton.client._core import Attempts, StreamState
from baton.client._settings import Settings, Tls
from baton.client.types import ClusterStatus, Completion, Delta, Model, Options, Prompt
from baton.errors import BatonError
from baton.rpc.channel import PUBLIC, sync_channel
from baton.rpc.v1 import admin_pb2 as admin_pb
from baton.rpc.v1 import admin_pb2_grpc, inference_pb2_grpc
from baton.rpc.v1 import inference_pb2 as inference

Q = TypeVar("Q")
R = TypeVar("R")


class Client:
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

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls: Tls = None,
        timeout: float | None = None,
        max_retries: int = 2,
        admin: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[], float] | None = None,
    ) -> None:
        self._settings = Settings(target, token, tls, timeout, max_retries, admin, draw)
        self._sleep = sleep
        self._channel = self._connect(target)
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
        return self._stream(_requests.generate_request(prompt, options), timeout)

    def chat(self, messages: _requests.Chat, *, timeout: float | None = None, **options: Unpack[Options]) -> Completion:
        """The next turn of a conversation; a message is a ChatMessage or a mapping of `role` and `content`."""
        with self._stream(_requests.chat_request(messages, options), timeout) as stream:
            return stream.collect()

    def cancel(self, request_id: str) -> bool:
        """End a running request, whoever started it; False: no such request runs on this router."""
        return self._call(self._stub.Cancel, inference.CancelRequest(request_id=request_id)).found

    def tokenize(self, text: str, model: str = "") -> list[int]:
        """Token ids of a text."""
        return list(self._call(self._stub.Tokenize, _requests.tokenize_request(text, model)).ids)

    def detokenize(self, ids: Sequence[int], model: str = "") -> str:
        """The text of token ids."""
        return self._call(self._stub.Detokenize, _requests.detokenize_request(ids, model)).text

    def models(self) -> list[Model]:
        """What is served here."""
        return _requests.models(self._call(self._stub.ListModels, inference.ListModelsRequest()))

    def cluster(self) -> ClusterStatus:
        """The workers and counts of this router. Raises ConfigError if the client was made without `admin`."""
        with self._connect(self._settings.admin_target()) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            return _requests.cluster_status(self._call(stub.Status, admin_pb.StatusRequest()))

    def _connect(self, target: str) -> grpc.Channel:
        settings = self._settings
        return sync_channel(target, link=PUBLIC, credentials=settings.credentials(), proxy=settings.proxy)

    def _stream(self, request: inference.GenerateRequest, timeout: float | None) -> Stream:
        return Stream(self._settings, self._stub, request, self._settings.attempts(timeout), self._sleep)

    def _call(self, method: grpc.UnaryUnaryMultiCallable[Q, R], request: Q) -> R:
        attempts = self._settings.attempts(None)
        while True:
            try:
                return method(request, timeout=attempts.remaining(), metadata=self._settings.metadata)
            except grpc.RpcError as failure:
                wait = attempts.wait_after(self._settings.error(failure))
            self._sleep(wait)


class _Call(Protocol):
    """A running `Generate`."""

    def __next__(self) -> inference.GenerateEvent: ...

    def cancel(self) -> object: ...


class Stream(StreamState):
    """An answer as it comes: iterate over its `Delta`s; leaving the `with` block cancels what is still running.

    >>> with Client(target) as client, client.stream("The color of dog", temperature=0) as stream:
    ...     for delta in stream:
    ...         print(delta.text, end="|")
    ...
     can| vary| widely|
    >>> stream.text, stream.usage.completion_tokens
    (' can vary widely', 3)
    """

    def __init__(
        self,
        settings: Settings,
        stub: inference_pb2_grpc.InferenceStub,
        request: inference.GenerateRequest,
        attempts: Attempts,
        sleep: Callable[[float], None],
    ) -> None:
        super().__init__(attempts)
        self._settings = settings
        self._generate = stub.Generate
        self._request = request
        self._sleep = sleep
        self._call = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request if it still runs. From then on iterating raises Cancelled, unless it had ended."""
        self._closed = True
        self._call.cancel()

    def collect(self) -> Completion:
        """Wait for the rest, and return all of it."""
        for _ in self:
            pass
        return self._fold.completion()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        try:
            while (event := self._read()) is not None:
                if (delta := self._fold.feed(event)) is not None:
                    return delta
            self._fold.completion()  # raises if it is not whole
        except BatonError:
            self._call.cancel()
            raise
        raise StopIteration

    def _open(self) -> _Call:
        return self._generate(self._request, timeout=self._attempts.remaining(), metadata=self._settings.metadata)

    def _read(self) -> inference.GenerateEvent | None:
        while True:
            try:
                return next(self._call, None)
            except grpc.RpcError as failure:
                error = self._settings.error(failure, connected=self._fold.started)
                wait = self._attempts.wait_after(error, started=self._fold.started)
            self._sleep(wait)
            self._call = self._open()
            if self._closed:  # by somebody else, meanwhile
                self._call.cancel()
