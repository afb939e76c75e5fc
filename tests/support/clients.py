"""Both clients of the SDK behind one interface, commands, and scripted servers for them over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import pytest

import baton.client
from baton import AsyncClient, Client, core, errors
from baton.errors import NoWorker
from baton.rpc import channel, convert
from baton.rpc.status import abort
from baton.rpc.v1 import admin_pb2 as admin
from baton.rpc.v1 import admin_pb2_grpc, inference_pb2_grpc
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import inference_pb2 as inference
from tests.support.time_factor import scaled

KINDS = ["async", "sync"]
PIECES = [(11, " can"), (12, " vary"), (13, " widely")]
LOAD = core.Load(step=3, blocks=core.BlockCounts(8, free=8), transport="gloo")
REF, LAYOUT = core.WorkerRef("d0", core.Incarnation(1, 2), "127.0.0.1:1"), core.KVLayout(2, 2, 8, 16, "float32")
INFO = core.WorkerInfo(REF, core.Role.DECODE, "f", "m", 64, 8, LAYOUT)
Event = inference.GenerateEvent
Play = Callable[[Any], AsyncIterator[Event]]


async def soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, scaled(20))


# Scripts of the server: each gets the call's context and yields events without numbers.


async def answer(context: Any) -> AsyncIterator[Event]:
    yield Event(accepted=inference.Accepted(prompt_tokens=4))
    for index, (token_id, text) in enumerate(PIECES):
        yield Event(tokens=convert.tokens_to_public_pb([core.Token(index, token_id, text)]))
    yield Event(finished=inference.Finished(reason=common.FINISH_REASON_EOS))
    yield Event(completed=inference.Completed(usage=inference.Usage(prompt_tokens=4, completion_tokens=3)))


async def begin_and_hang(context: Any) -> AsyncIterator[Event]:
    async for event in answer(context):
        yield event
        if event.HasField("tokens"):
            await asyncio.Event().wait()


class QuietAdmin(admin_pb2_grpc.AdminServicer):
    """Rejects all calls that change a cluster or return more than its status."""

    def _reject(self, request, context):
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")

    Scale = Drain = Restart = Watch = Trace = _reject


class Scripted(inference_pb2_grpc.InferenceServicer, QuietAdmin):
    """Plays its scripts in order, repeats the last one, and records the requests."""

    def __init__(self) -> None:
        self.address = ""
        self.scripts: list[Play] = [answer]
        self.requests: list[Any] = []
        self.metadata: dict[str, str] = {}
        self.time_left: list[float] = []
        self.cancelled = asyncio.Event()

    async def Generate(self, request: inference.GenerateRequest, context: Any) -> AsyncIterator[Event]:
        self._note(request, context)
        numbers = itertools.count()
        try:
            async for event in self._events(request, context):
                event.request_id, event.seq = "r1", next(numbers)
                yield event
        except (asyncio.CancelledError, GeneratorExit):  # GeneratorExit: gRPC was sending the yielded event
            self.cancelled.set()
            raise

    def _events(self, request: inference.GenerateRequest, context: Any) -> AsyncIterator[Event]:
        play = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        return play(context)

    async def Resume(self, request: inference.ResumeRequest, context: Any) -> AsyncIterator[Event]:
        await abort(context, errors.Unsupported("Resume"))
        yield Event()

    async def Cancel(self, request: inference.CancelRequest, context: Any) -> inference.CancelReply:
        return inference.CancelReply(found=request.request_id == "r1")

    async def Tokenize(self, request: inference.TokenizeRequest, context: Any) -> inference.TokenizeReply:
        self._note(request, context)
        if len(self.requests) < 3 and request.text == "flaky":
            await abort(context, NoWorker("not yet"))
        return inference.TokenizeReply(ids=request.text.encode())

    async def Detokenize(self, request: inference.DetokenizeRequest, context: Any) -> inference.DetokenizeReply:
        return inference.DetokenizeReply(text=bytes(request.ids).decode())

    async def ListModels(self, request: inference.ListModelsRequest, context: Any) -> inference.ListModelsReply:
        known = inference.Model(id="m", max_model_len=64, vocab_size=256, aliases=["n"])
        known.defaults.top_k = 3
        return inference.ListModelsReply(models=[known])

    async def Status(self, request: admin.StatusRequest, context: Any) -> admin.StatusReply:
        load = convert.load_to_pb(LOAD)
        worker = admin.WorkerStatus(info=convert.info_to_pb(INFO), load=load, state="connected", dispatched=1)
        return admin.StatusReply(name="local", running=2, workers=[worker])

    async def Requests(self, request: admin.RequestsRequest, context: Any) -> admin.RequestsReply:
        return admin.RequestsReply()

    def _note(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        if context.time_remaining() is not None:
            self.time_left.append(context.time_remaining())


S = TypeVar("S", bound=Scripted)


@contextlib.asynccontextmanager
async def serving(servicer: S, credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[S]:
    """Serve `servicer` on its own listener, at its `address`."""
    server = channel.aio_server(link=channel.PUBLIC)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    admin_pb2_grpc.add_AdminServicer_to_server(servicer, server)
    servicer.address = channel.bind(server, "127.0.0.1:0", credentials)
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(None)


# The clients, behind one interface.


class Native:
    """The asyncio client. Methods are called by name."""

    def __init__(self, client: Any) -> None:
        self.client = client

    async def __call__(self, method: str, *args: Any, **more: Any) -> Any:
        return await getattr(self.client, method)(*args, **more)

    def stream(self, *args: Any, **more: Any) -> Any:
        return self.client.stream(*args, **more)


class Threaded(Native):
    """The blocking client in threads, with the interface of the asyncio one."""

    async def __call__(self, method: str, *args: Any, **more: Any) -> Any:
        return await asyncio.to_thread(getattr(self.client, method), *args, **more)

    def stream(self, *args: Any, **more: Any) -> Any:
        return ThreadedStream(self.client.stream(*args, **more))


class ThreadedStream:
    """A blocking stream with the interface of an asyncio one. Attributes are those of the blocking stream."""

    def __init__(self, stream: baton.client.Stream) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    async def __aenter__(self) -> ThreadedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> ThreadedStream:
        return self

    async def __anext__(self) -> baton.client.Delta:
        delta = await asyncio.to_thread(next, self.stream, None)
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def close(self) -> None:
        await asyncio.to_thread(self.stream.close)

    async def collect(self) -> baton.client.Completion:
        return await asyncio.to_thread(self.stream.collect)


class World:
    """A scripted server, clients of one kind, and the retry waits that the clients requested."""

    def __init__(self, kind: str, server: Any) -> None:
        self.kind, self.server, self.address = kind, server, server.address
        self.waits: list[float] = []

    async def _wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    @contextlib.asynccontextmanager
    async def client(self, target: str = "", **more: Any) -> AsyncIterator[Any]:
        target = target or self.address
        threads = self.kind == "sync"
        made = Threaded(Client(target, **more)) if threads else Native(AsyncClient(target, **more))
        made.client._sleep = self.waits.append if threads else self._wait
        made.client._draw = lambda: 0.5
        try:
            yield made
        finally:
            await made("close")

    async def failing(self, kind: type[Exception], match: str | None, *call: Any, **options: Any) -> Exception:
        """Return the error that this call raises, by default `generate`. `options` are the client's."""
        async with self.client(**options) as client:
            with pytest.raises(kind, match=match) as caught:
                await soon(client(*call or ("generate", "x")))
        return caught.value

    def close_in_waits(self, client: Any, stream: Any) -> None:
        """Make the client close the stream during its next retry wait."""

        async def close(_: float) -> None:
            await stream.close()

        client.client._sleep = close if self.kind == "async" else lambda _: stream.stream.close()


class Wire:
    """A TCP relay in front of a server. Tests cut or freeze it. It terminates TLS if it has `tls`."""

    def __init__(self, target: str, tls: ssl.SSLContext | None = None) -> None:
        self._target, self._tls = target.split(":"), tls
        self._writers: list[asyncio.StreamWriter] = []
        self._open = asyncio.Event()
        self._open.set()

    @contextlib.asynccontextmanager
    async def laid(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            host, port = server.sockets[0].getsockname()
            try:
                yield f"{host}:{port}"
            finally:
                server.close()
                self._open.set()
                self.cut()

    def leads_to(self, target: str) -> None:
        """Relay new connections to another server. Open ones stay."""
        self._target = target.split(":")

    def cut(self) -> None:
        for writer in self._writers:
            writer.close()

    def freeze(self) -> None:
        self._open.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, far_writer]
        self._tasks.create_task(self._pump(reader, far_writer))
        self._tasks.create_task(self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await self._open.wait()
                writer.write(data)
        writer.close()


class Talking(Scripted):
    """Answers with the number of messages and the last one. "hang" never ends; "fail" fails."""

    def __init__(self) -> None:
        super().__init__()
        self.hanging = asyncio.Event()
        self.running = self.most = 0
        self.failing = False
        self.together, self.met = 0, asyncio.Event()  # requests wait until so many have arrived

    async def _events(self, request: inference.GenerateRequest, context: Any) -> AsyncIterator[Event]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.running >= self.together:
                self.met.set()
            await soon(self.met.wait())
            async for event in self._talk(request, context):
                yield event
        finally:
            self.running -= 1

    async def _talk(self, request: inference.GenerateRequest, context: Any) -> AsyncIterator[Event]:
        said = request.chat.messages[-1].content if request.chat.messages else request.text
        if self.failing or said == "fail":
            await abort(context, errors.Overloaded("full", retry_after_s=0.01))
        choices = range(max(1, request.n))
        pieces = [f"{len(request.chat.messages)}:", said, "!"]
        for index, piece in enumerate(pieces):
            for choice in choices:
                yield Event(tokens=convert.tokens_to_public_pb([core.Token(index, 11 + index, piece)], choice))
                if said == "hang":
                    self.hanging.set()
                    await asyncio.Event().wait()
        for choice in choices:
            yield Event(finished=inference.Finished(choice=choice, reason=common.FINISH_REASON_EOS))
        made = len(pieces) * len(choices)
        usage = inference.Usage(prompt_tokens=len(request.token_ids.ids), completion_tokens=made)
        yield Event(completed=inference.Completed(usage=usage))


async def run(*args: object, text: str | bytes = "") -> Any:
    """Run `baton ARGS` in this process, with `text` on standard input."""
    from typer.testing import CliRunner

    from baton.cli.app import app  # most users of this module need no commands

    return await asyncio.to_thread(CliRunner().invoke, app, [str(arg) for arg in args], input=text)
