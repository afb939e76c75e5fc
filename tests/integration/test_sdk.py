"""Both clients against a real gRPC server that plays a script. Each scenario runs once per client.

The blocking client runs in threads, behind the interface of the other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import baton.client.aio
import baton.client.sync
from baton import AsyncClient, Client, core, errors, load
from baton.errors import BatonError, InvalidRequest, NoWorker, Overloaded, Violation, WorkerLost
from baton.limits import PUBLIC_RECEIVE_BYTES
from baton.rpc import channel, convert, reports
from baton.rpc.status import abort
from baton.rpc.v1 import admin_pb2 as admin
from baton.rpc.v1 import admin_pb2_grpc, inference_pb2_grpc
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import inference_pb2 as inference
from tests.quiet_admin import QuietAdmin
from tests.support.time_factor import scaled

PATIENCE_S = 20
PIECES = [(11, " can"), (12, " vary"), (13, " widely")]
Event = inference.GenerateEvent
Play = Callable[[Any], AsyncIterator[Event]]


async def soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, scaled(PATIENCE_S))


# what the server plays: each script gets the call's context and yields events without numbers


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


async def hang(context: Any) -> AsyncIterator[Event]:
    await asyncio.Event().wait()
    yield Event()


async def stop_early(context: Any) -> AsyncIterator[Event]:
    yield Event(tokens=convert.tokens_to_public_pb([core.Token(0, 11, " can")]))


async def repeat_a_token(context: Any) -> AsyncIterator[Event]:
    async for event in answer(context):
        yield event
        if event.HasField("tokens"):
            yield event
            await asyncio.Event().wait()


def fail(error: BaseException, after: int = 0, delay_s: float = 0) -> Play:
    async def play(context: Any) -> AsyncIterator[Event]:
        await asyncio.sleep(delay_s)
        played = answer(context)
        for _ in range(after):
            yield await anext(played)
        await abort(context, error)

    return play


class Scripted(inference_pb2_grpc.InferenceServicer, QuietAdmin):
    """Plays its scripts one after the other, the last one again and again, and notes what it saw."""

    def __init__(self) -> None:
        self.scripts: list[Play] = [answer]
        self.requests: list[Any] = []
        self.metadata: dict[str, str] = {}
        self.time_left: list[float] = []
        self.cancelled = asyncio.Event()

    async def Generate(self, request: inference.GenerateRequest, context: Any) -> AsyncIterator[Event]:
        play = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self._note(request, context)
        seq = 0
        try:
            async for event in play(context):
                numbered = Event(request_id="r1", seq=seq)
                numbered.MergeFrom(event)
                yield numbered
                seq += 1
        except (asyncio.CancelledError, GeneratorExit):  # the latter where gRPC was just sending what was yielded
            self.cancelled.set()
            raise

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
        return inference.ListModelsReply(models=[inference.Model(id="m", max_model_len=64, vocab_size=256)])

    async def Status(self, request: admin.StatusRequest, context: Any) -> admin.StatusReply:
        load = reports.load_to_pb(LOAD)
        worker = admin.WorkerStatus(info=convert.info_to_pb(INFO), load=load, state="connected", dispatched=1)
        return admin.StatusReply(name="local", running=2, workers=[worker])

    async def Requests(self, request: admin.RequestsRequest, context: Any) -> admin.RequestsReply:
        return admin.RequestsReply()

    def _note(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        if context.time_remaining() is not None:
            self.time_left.append(context.time_remaining())


LOAD = load.Load(step=3, blocks=load.BlockCounts(8, free=8), transport="gloo")
INFO = core.WorkerInfo(
    core.WorkerRef("d0", core.Incarnation(1, 2), "127.0.0.1:1"),
    core.Role.DECODE,
    "f",
    "m",
    64,
    8,
    core.KVLayout(2, 2, 8, 16, "float32"),
)


# the clients, behind one interface


class Threaded:
    """A blocking client as if it were an asyncio one."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def __call__(self, method: str, *args: Any, **more: Any) -> Any:
        return await asyncio.to_thread(vars(Client)[method], self.client, *args, **more)

    def stream(self, *args: Any, **more: Any) -> ThreadedStream:
        return ThreadedStream(self.client.stream(*args, **more))

    async def aclose(self) -> None:
        await asyncio.to_thread(self.client.close)


class ThreadedStream:
    def __init__(self, stream: baton.client.Stream) -> None:
        self.stream = stream

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


class Native:
    """The asyncio client."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client

    async def __call__(self, method: str, *args: Any, **more: Any) -> Any:
        return await vars(AsyncClient)[method](self.client, *args, **more)

    def stream(self, *args: Any, **more: Any) -> baton.client.AsyncStream:
        return self.client.stream(*args, **more)

    async def aclose(self) -> None:
        await self.client.close()


class World:
    """A scripted server, clients of one kind, and the waits that they would have made."""

    def __init__(self, kind: str, server: Scripted, address: str) -> None:
        self.kind, self.server, self.address = kind, server, address
        self.waits: list[float] = []

    async def _wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    @contextlib.asynccontextmanager
    async def client(self, target: str = "", **more: Any) -> AsyncIterator[Any]:
        target = target or self.address
        made: Native | Threaded
        if self.kind == "async":
            made = Native(AsyncClient(target, **more))
            made.client._sleep = self._wait
        else:
            made = Threaded(Client(target, **more))
            made.client._sleep = self.waits.append
        made.client._draw = lambda: 0.5
        try:
            yield made
        finally:
            await made.aclose()


@contextlib.asynccontextmanager
async def serving(credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[tuple[Scripted, str]]:
    scripted, server = Scripted(), channel.aio_server(link=channel.PUBLIC)
    inference_pb2_grpc.add_InferenceServicer_to_server(scripted, server)
    admin_pb2_grpc.add_AdminServicer_to_server(scripted, server)
    address = channel.bind(server, "127.0.0.1:0", credentials)
    await server.start()
    try:
        yield scripted, address
    finally:
        await server.stop(None)


@pytest.fixture(params=["async", "sync"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with serving() as (scripted, address):
        yield World(request.param, scripted, address)


class Wire:
    """A TCP relay in front of a server, to be cut or frozen."""

    def __init__(self, target: str) -> None:
        self._host, port = target.split(":")
        self._port = int(port)
        self._writers: list[asyncio.StreamWriter] = []
        self._open = asyncio.Event()
        self._open.set()

    @contextlib.asynccontextmanager
    async def laid(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            host, port = server.sockets[0].getsockname()
            try:
                yield f"{host}:{port}"
            finally:
                server.close()
                self._open.set()
                self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.close()

    def freeze(self) -> None:
        self._open.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, far_writer]
        self._tasks.create_task(self._pump(reader, far_writer))
        self._tasks.create_task(self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await self._open.wait()
                writer.write(data)
        writer.close()


# streams


async def test_a_whole_answer(world: World):
    async with world.client(token="secret") as client:
        done = await soon(client("generate", "The color of dog", max_tokens=8, temperature=0))
    assert (done.text, done.tokens, done.request_id) == (" can vary widely", (11, 12, 13), "r1")
    assert done.finish_reason is core.FinishReason.EOS
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (4, 3)
    assert world.server.requests[0].sampling.max_tokens == 8
    assert world.server.metadata["authorization"] == "Bearer secret"


async def test_a_stream_shows_what_it_has(world: World):
    async with world.client() as client, client.stream([1, 2, 3]) as stream:
        seen = [(delta.start, delta.text) async for delta in stream]
        state = stream.stream if world.kind == "sync" else stream
        assert seen == [(0, " can"), (1, " vary"), (2, " widely")]
        assert (state.text, state.tokens, state.request_id) == (" can vary widely", (11, 12, 13), "r1")
        assert state.finish_reason is core.FinishReason.EOS
        assert state.usage is not None
        assert state.timings is not None
        assert state.placement is not None
        assert (await soon(stream.collect())).text == " can vary widely"
    assert not world.server.cancelled.is_set()


async def test_leaving_the_block_cancels(world: World):
    world.server.scripts = [begin_and_hang]
    async with world.client() as client:
        async with client.stream("x") as stream:
            assert (await soon(anext(stream))).text == " can"
        await soon(world.server.cancelled.wait())


async def read_one_and_fail(stream: Any) -> None:
    async with stream:
        await soon(anext(stream))
        raise ZeroDivisionError


async def test_an_exception_in_the_block_cancels_too(world: World):
    world.server.scripts = [begin_and_hang]
    async with world.client() as client:
        with pytest.raises(ZeroDivisionError):
            await read_one_and_fail(client.stream("x"))
        await soon(world.server.cancelled.wait())


async def test_closing_wakes_the_reader_with_cancelled(world: World):
    world.server.scripts = [begin_and_hang]
    async with world.client() as client, client.stream("x") as stream:
        await soon(anext(stream))
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await stream.close()
        with pytest.raises(errors.Cancelled):
            await soon(reading)
        with pytest.raises(errors.Cancelled):
            await soon(anext(stream))


async def test_a_cancelled_task_stays_cancelled_and_the_server_learns_of_it(world: World):
    if world.kind == "sync":
        pytest.skip("threads have no tasks")
    world.server.scripts = [begin_and_hang]
    async with world.client() as client:
        stream = client.stream("x")
        await soon(anext(stream))
        reading = asyncio.create_task(stream.collect())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(reading)
        await soon(world.server.cancelled.wait())


async def test_a_stream_that_ends_early_is_a_fault(world: World):
    world.server.scripts = [stop_early]
    async with world.client() as client:
        with pytest.raises(errors.EngineFault, match="without Completed"):
            await soon(client("generate", "x"))


async def test_a_token_seen_twice_is_a_fault_and_cancels(world: World):
    world.server.scripts = [repeat_a_token]
    async with world.client() as client:
        stream = client.stream("x")
        with pytest.raises(errors.EngineFault, match="token 0 of choice 0 came where 1 was due"):
            await soon(stream.collect())
        await soon(world.server.cancelled.wait())


# errors


ERRORS: list[BatonError] = [
    InvalidRequest(Violation("sampling.top_p", "must be above 0"), Violation("n", "not supported yet")),
    errors.UnknownModel("x"),
    errors.Unauthenticated("x"),
    errors.PermissionDenied("x"),
    errors.Unsupported("x"),
    Overloaded("x", retry_after_s=7.5),
    errors.DeadlineExceeded("x"),
    errors.Cancelled("x"),
    NoWorker("x"),
    WorkerLost("x"),
    errors.EngineFault("x"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("after", [0, 2])
async def test_an_error_arrives_as_it_was_raised(world: World, error: BatonError, after: int):
    world.server.scripts = [fail(error, after)]
    async with world.client(max_retries=0) as client:
        with pytest.raises(type(error)) as caught:
            await soon(client("generate", "x"))
    assert (str(caught.value), vars(caught.value)) == (str(error), vars(error))


async def test_what_is_not_ours_does_not_leak(world: World):
    world.server.scripts = [fail(KeyError("/secret/path"))]
    async with world.client() as client:
        with pytest.raises(errors.EngineFault) as caught:
            await soon(client("generate", "x"))
    assert "secret" not in str(caught.value)


async def test_a_prompt_that_is_too_large_is_refused_once(world: World):
    async with world.client() as client:
        with pytest.raises(InvalidRequest, match="too large"):
            await soon(client("generate", "x" * (PUBLIC_RECEIVE_BYTES + 1)))
    assert world.waits == []


async def test_an_unreachable_server_is_named(world: World):
    async with world.client("127.0.0.1:1") as client:
        with pytest.raises(NoWorker, match=r"cannot reach 127\.0\.0\.1:1"):
            await soon(client("generate", "x"))
        with pytest.raises(NoWorker, match=r"cannot reach 127\.0\.0\.1:1"):
            await soon(client("models"))
    assert world.waits == [0.125, 0.25] * 2


async def test_a_cut_connection_in_mid_stream_is_worker_lost(world: World):
    world.server.scripts = [begin_and_hang]
    wire = Wire(world.address)
    async with wire.laid() as address, world.client(address) as client, client.stream("x") as stream:
        await soon(anext(stream))
        wire.cut()
        with pytest.raises(WorkerLost, match=r"connection to 127\.0\.0\.1"):
            await soon(anext(stream))
    assert len(world.server.requests) == 1


async def test_a_frozen_peer_is_noticed():
    link = channel.Link(PUBLIC_RECEIVE_BYTES, keepalive_s=1, ping_timeout_s=0.5)
    async with serving() as (scripted, address):
        scripted.scripts = [begin_and_hang]
        wire = Wire(address)
        async with wire.laid() as relay, channel.aio_channel(relay, link=link) as frozen:
            call = inference_pb2_grpc.InferenceStub(frozen).Generate(inference.GenerateRequest(text="x"))
            await soon(call.read())  # Accepted
            await soon(call.read())  # and one token
            wire.freeze()
            with pytest.raises(grpc.aio.AioRpcError, match="ping timeout"):
                await soon(call.read())


@pytest.mark.slow
async def test_a_silent_peer_that_lives_is_left_alone():
    """Pings must not be too many for our own server: it would end the connection after the third."""
    link = channel.Link(PUBLIC_RECEIVE_BYTES, keepalive_s=1, ping_timeout_s=5)  # the least that gRPC does
    async with serving() as (scripted, address), channel.aio_channel(address, link=link) as idle:
        scripted.scripts = [begin_and_hang]
        call = inference_pb2_grpc.InferenceStub(idle).Generate(inference.GenerateRequest(text="x"))
        await soon(call.read())  # Accepted
        await soon(call.read())  # and one token
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.read(), 4.5)


# retries and deadlines


async def test_retries_wait_as_the_server_asked(world: World):
    world.server.scripts = [fail(Overloaded("full", 3.0)), fail(NoWorker("none")), answer]
    async with world.client() as client:
        assert (await soon(client("generate", "x"))).text == " can vary widely"
    assert world.waits == [3.125, 0.25]
    assert len(world.server.requests) == 3
    assert world.server.requests[0] == world.server.requests[2]


async def test_a_stream_that_is_closed_between_two_tries_is_not_sent_again(world: World):
    world.server.scripts = [fail(NoWorker("none")), answer]
    async with world.client() as client, client.stream("x") as stream:

        async def close(seconds: float) -> None:
            await stream.close()

        client.client._sleep = close if world.kind == "async" else lambda seconds: stream.stream.close()
        with pytest.raises(errors.Cancelled):
            await soon(anext(stream))
    assert len(world.server.requests) == 1


async def test_retries_run_out(world: World):
    world.server.scripts = [fail(NoWorker("none"))]
    async with world.client(max_retries=1) as client:
        with pytest.raises(NoWorker, match="none"):
            await soon(client("generate", "x"))
    assert len(world.server.requests) == 2


async def test_nothing_is_retried_after_the_first_event(world: World):
    world.server.scripts = [fail(NoWorker("none"), after=1), answer]
    async with world.client() as client:
        with pytest.raises(NoWorker):
            await soon(client("generate", "x"))
    assert (len(world.server.requests), world.waits) == (1, [])


async def test_the_deadline_ends_a_stream(world: World):
    world.server.scripts = [begin_and_hang]
    async with world.client(timeout=60) as client:
        with pytest.raises(errors.DeadlineExceeded):
            await soon(client("generate", "x", timeout=0.3))
    assert world.server.time_left[0] < 1
    await soon(world.server.cancelled.wait())


async def test_the_deadline_spans_retries(world: World):
    world.server.scripts = [fail(NoWorker("none"), delay_s=0.2), fail(Overloaded("full", 30.0)), answer]
    async with world.client(timeout=5.0) as client:
        with pytest.raises(Overloaded):  # waiting 30 s would be pointless
            await soon(client("generate", "x"))
    first, second = world.server.time_left
    assert second < first - 0.1


# the other methods


async def test_unary_methods(world: World):
    async with world.client() as client:
        assert await soon(client("tokenize", "ab")) == [97, 98]
        assert await soon(client("models")) == [baton.client.Model("m", 64, 256)]
        assert await soon(client("cancel", "r1")) is True
        assert await soon(client("cancel", "r2")) is False


async def test_unary_methods_retry_too(world: World):
    async with world.client() as client:
        assert await soon(client("tokenize", "flaky")) == list(b"flaky")
    assert world.waits == [0.125, 0.25]


async def test_chat_sends_the_conversation(world: World):
    async with world.client() as client:
        done = await soon(client("chat", [{"role": "user", "content": "hi"}], tools=[{"x": 1}], max_tokens=4))
    assert done.text == " can vary widely"
    assert world.server.requests[0].chat.messages[0].content == "hi"
    assert world.server.requests[0].chat.tools == '[{"x": 1}]'


async def test_cluster_needs_the_admin_address(world: World):
    async with world.client() as client:
        with pytest.raises(errors.ConfigError, match="admin"):
            await soon(client("cluster"))
    async with world.client(admin="127.0.0.1:1", max_retries=0) as client:
        with pytest.raises(NoWorker, match=r"cannot reach 127\.0\.0\.1:1"):
            await soon(client("cluster"))
    async with world.client(admin=world.address) as client:
        status = await soon(client("cluster"))
    assert (status.name, status.running, status.queued) == ("local", 2, 0)
    assert status.workers == (baton.client.WorkerStatus(INFO, LOAD, "connected", 1),)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A key and a self-signed certificate for 127.0.0.1."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl program to make a certificate")
    key, cert = (tmp_path_factory.mktemp("tls") / name for name in ("key.pem", "cert.pem"))
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=baton"
    extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([openssl, *words.split(), *extra], check=True, capture_output=True)
    return key, cert


@pytest.fixture(params=["async", "sync"])
async def tls_world(request: pytest.FixtureRequest, certificate: tuple[Path, Path]) -> AsyncIterator[World]:
    key, cert = certificate
    pair = (key.read_bytes(), cert.read_bytes())
    async with serving(grpc.ssl_server_credentials([pair])) as (scripted, address):
        yield World(request.param, scripted, address)


@pytest.mark.parametrize("form", [Path, str, Path.read_bytes])
async def test_tls_with_the_right_authority(tls_world: World, certificate: tuple[Path, Path], form: Any):
    async with tls_world.client(tls=form(certificate[1])) as client:
        assert await soon(client("tokenize", "a")) == [97]


@pytest.mark.parametrize("tls", [None, True])
async def test_tls_without_it(tls_world: World, tls: bool | None):
    async with tls_world.client(tls=tls, max_retries=0) as client:
        with pytest.raises(NoWorker, match="cannot reach"):
            await soon(client("tokenize", "a"))


@pytest.mark.parametrize("module", [baton.client.sync, baton.client.aio], ids=lambda module: module.__name__)
async def test_the_examples_in_the_documentation_run(module: Any):
    async with serving() as (_, address):
        names = vars(baton) | {"target": address, "Client": Client}
        tests = [test for test in doctest.DocTestFinder().find(module, globs=names) if test.examples]
        assert tests
        for test in tests:
            result = await asyncio.to_thread(doctest.DocTestRunner().run, test)
            assert result.failed == 0, test.name
