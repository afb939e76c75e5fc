"""Both clients against a real gRPC server that plays a script. Each scenario runs once per client.

The blocking client runs in threads, behind the interface of the asyncio one.
"""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import baton.client
from baton import core, errors
from baton.errors import BatonError, InvalidRequest, NoWorker, Overloaded, Violation, WorkerLost
from baton.limits import PUBLIC_RECEIVE_BYTES
from baton.rpc import channel
from baton.rpc.status import abort
from baton.rpc.v1 import inference_pb2 as inference
from baton.rpc.v1 import inference_pb2_grpc
from tests.support import clients
from tests.support.clients import KINDS, Event, Play, Scripted, Wire, World, answer, begin_and_hang, serving, soon
from tests.support.time_factor import scaled
from tests.support.waiting import until


async def end_early(context: Any) -> AsyncIterator[Event]:
    async for event in answer(context):
        if not event.HasField("completed"):
            yield event


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


@pytest.fixture(params=KINDS)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with serving(Scripted()) as scripted:
        yield World(request.param, scripted)


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
        assert seen == [(0, " can"), (1, " vary"), (2, " widely")]
        assert (stream.text, stream.tokens, stream.request_id) == (" can vary widely", (11, 12, 13), "r1")
        assert stream.finish_reason is core.FinishReason.EOS
        assert None not in (stream.usage, stream.timings, stream.placement)
        assert (await soon(stream.collect())).text == " can vary widely"
    assert not world.server.cancelled.is_set()


async def read_one(stream: Any, error: Exception | None) -> None:
    async with stream:
        assert (await soon(anext(stream))).text == " can"
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [None, ZeroDivisionError()], ids=["at its end", "by an exception"])
async def test_leaving_the_block_cancels(world: World, error: Exception | None):
    world.server.scripts = [begin_and_hang]
    async with world.client() as client:
        (found,) = await asyncio.gather(read_one(client.stream("x"), error), return_exceptions=True)
        assert found is error
        await soon(world.server.cancelled.wait())


@pytest.mark.parametrize("world", ["async"], indirect=True)  # threads have no tasks
async def test_a_cancelled_task_stays_cancelled_and_the_server_learns_of_it(world: World):
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


def until_told(go: asyncio.Event, error: BaseException | None = None) -> Play:
    """Return a script that sends its first token, and the rest, or an error, after `go`."""

    async def play(context: Any) -> AsyncIterator[Event]:
        async for event in answer(context):
            yield event
            if event.HasField("tokens") and not go.is_set():
                await go.wait()
                if error is not None:
                    await abort(context, error)

    return play


@pytest.mark.parametrize("world", ["async"], indirect=True)
async def test_a_wait_for_the_next_delta_may_end_early(world: World):
    go = asyncio.Event()
    world.server.scripts = [until_told(go)]
    async with world.client() as client, client.stream("x") as stream:
        seen = [(await soon(anext(stream))).text]
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
        go.set()
        seen += [delta.text async for delta in stream]
        assert (seen, stream.text) == ([" can", " vary", " widely"], " can vary widely")
    assert (len(world.server.requests), world.server.cancelled.is_set()) == (1, False)


async def early(stream: Any) -> None:
    """Give up waiting for the next delta."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)


@pytest.mark.parametrize("world", ["async"], indirect=True)
@pytest.mark.parametrize("how", ["closed", "dropped"])
async def test_a_stream_that_nobody_reads_any_more_is_cancelled(world: World, how: str):
    world.server.scripts = [begin_and_hang]
    async with world.client() as client:
        stream = client.stream("x")
        await soon(anext(stream))
        await early(stream)
        assert not world.server.cancelled.is_set()
        if how == "closed":
            await stream.close()
        else:
            del stream
        await soon(world.server.cancelled.wait())


@pytest.mark.parametrize("world", ["async"], indirect=True)
async def test_an_error_that_nobody_waits_for_is_not_reported_as_a_mistake(world: World):
    go, reports = asyncio.Event(), list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
    world.server.scripts = [until_told(go, errors.EngineFault("broken"))]
    async with world.client() as client, client.stream("x") as stream:
        await soon(anext(stream))
        await early(stream)
        go.set()
        await until(stream._reader._reading.done, "the read has failed")
    del stream
    gc.collect()
    assert not reports


@pytest.mark.parametrize("world", ["async"], indirect=True)
async def test_only_one_task_reads_a_stream(world: World):
    go = asyncio.Event()
    world.server.scripts = [until_told(go)]
    async with world.client() as client, client.stream("x") as stream:
        await soon(anext(stream))
        other = asyncio.create_task(anext(stream))
        await until(lambda: stream._reader._awaited, "it waits")
        with pytest.raises(RuntimeError, match="another task reads this stream"):
            await anext(stream)
        go.set()
        assert (await soon(other)).text == " vary"
        assert [delta.text async for delta in stream] == [" widely"]


async def test_iterating_over_a_stream_that_ends_early_raises(world: World):
    async def iterate(stream: Any) -> None:
        while True:
            await anext(stream)

    world.server.scripts = [end_early]
    async with world.client() as client:
        with pytest.raises(errors.EngineFault, match="without Completed"):
            await soon(iterate(client.stream("x")))


async def test_a_token_seen_twice_is_a_fault_and_cancels(world: World):
    world.server.scripts = [repeat_a_token]
    await world.failing(errors.EngineFault, "received token 0 of choice 0, expected 1")
    await soon(world.server.cancelled.wait())


ERRORS: list[BatonError] = [  # tests/unit/rpc/test_status.py tests each class
    InvalidRequest(Violation("sampling.top_p", "must be above 0"), Violation("n", "not supported yet")),
    Overloaded("x", retry_after_s=7.5),
    errors.Cancelled("x"),
    WorkerLost("x"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("after", [0, 2])
async def test_an_error_arrives_as_it_was_raised(world: World, error: BatonError, after: int):
    world.server.scripts = [fail(error, after)]
    found = await world.failing(type(error), None, max_retries=0)
    assert (str(found), vars(found)) == (str(error), vars(error))


async def test_a_prompt_that_is_too_large_is_refused_once(world: World):
    await world.failing(InvalidRequest, "too large", "generate", "x" * (PUBLIC_RECEIVE_BYTES + 1))
    assert world.waits == []


async def test_an_unreachable_server_is_named(world: World):
    for call in (("generate", "x"), ("models",)):
        await world.failing(NoWorker, r"cannot reach 127\.0\.0\.1:1", *call, target="127.0.0.1:1")
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


async def begun(channel: grpc.aio.Channel) -> Any:
    """Start a call that hangs after its first token."""
    call = inference_pb2_grpc.InferenceStub(channel).Generate(inference.GenerateRequest(text="x"))
    for kind in ("accepted", "tokens"):
        assert (await soon(call.read())).WhichOneof("event") == kind
    return call


async def test_a_frozen_peer_is_noticed():
    link = channel.Link(PUBLIC_RECEIVE_BYTES, keepalive_s=1, ping_timeout_s=0.5)
    async with serving(Scripted()) as scripted:
        scripted.scripts = [begin_and_hang]
        wire = Wire(scripted.address)
        async with wire.laid() as relay, channel.aio_channel(relay, link=link) as frozen:
            call = await begun(frozen)
            wire.freeze()
            with pytest.raises(grpc.aio.AioRpcError, match="ping timeout"):
                await soon(call.read())


@pytest.mark.slow
async def test_a_silent_peer_that_lives_is_left_alone():
    """A silent connection survives, because our own server ends a connection after the third ping too many."""
    link = channel.Link(PUBLIC_RECEIVE_BYTES, keepalive_s=1, ping_timeout_s=5)  # gRPC's minimum
    async with serving(Scripted()) as scripted, channel.aio_channel(scripted.address, link=link) as idle:
        scripted.scripts = [begin_and_hang]
        call = await begun(idle)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.read(), 4.5)


async def test_retries_wait_as_the_server_asked(world: World):
    world.server.scripts = [fail(Overloaded("full", 3.0)), fail(NoWorker("none")), answer]
    async with world.client() as client:
        assert (await soon(client("generate", "x"))).text == " can vary widely"
    assert world.waits == [3.125, 0.25]
    first, *_, third = world.server.requests
    assert (len(world.server.requests), first) == (3, third)


async def test_a_stream_that_is_closed_between_two_tries_is_not_sent_again(world: World):
    world.server.scripts = [fail(NoWorker("none")), answer]
    async with world.client() as client, client.stream("x") as stream:
        world.close_in_waits(client, stream)
        with pytest.raises(errors.Cancelled):
            await soon(anext(stream))
    assert len(world.server.requests) == 1


@pytest.mark.parametrize("world", ["async"], indirect=True)
async def test_a_second_reader_during_a_wait_sends_nothing(world: World):
    world.server.scripts = [fail(NoWorker("none")), answer]
    go, waits = asyncio.Event(), list[float]()

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        await go.wait()

    async with world.client() as client, client.stream("x") as stream:
        client.client._sleep = wait
        readers = [asyncio.create_task(anext(stream))]
        await until(lambda: len(waits) == 1, "it waits")
        readers.append(asyncio.create_task(anext(stream)))
        await until(lambda: len(waits) == 2, "both wait")
        go.set()
        first, second = await soon(asyncio.gather(*readers, return_exceptions=True))
        assert (first.text, type(second)) == (" can", RuntimeError)
    assert len(world.server.requests) == 2


@pytest.mark.parametrize("world", ["sync"], indirect=True)
async def test_a_client_that_another_thread_closes_ends_calls_with_cancelled(world: World):
    async with world.client() as client:
        stubs, given = client.client._stubs, client.client._stubs.of

        def of(target: str) -> Any:
            stub = given(target)
            stubs.close()  # as another thread, right before the call
            return stub

        stubs.of = of
        for call in (("generate", "x"), ("tokenize", "x")):
            stubs._closed, stubs._made = False, {}
            with pytest.raises(errors.Cancelled, match="the client was closed"):
                await soon(client(*call))


async def test_the_longest_timeout_ends_no_call(world: World):
    async with world.client(timeout=1e9) as client:
        assert (await soon(client("generate", "x", timeout=float("inf")))).text == " can vary widely"
        assert await soon(client("tokenize", "a")) == [97]


async def test_the_deadline_ends_a_stream(world: World):
    world.server.scripts = [begin_and_hang]
    async with world.client(timeout=60) as client:
        with pytest.raises(errors.DeadlineExceeded):
            await soon(client("generate", "x", timeout=scaled(1.0)))
    assert world.server.time_left[0] < scaled(2.0)
    await soon(world.server.cancelled.wait())


async def test_the_deadline_spans_retries(world: World):
    world.server.scripts = [fail(NoWorker("none"), delay_s=0.2), fail(Overloaded("full", 30.0)), answer]
    await world.failing(Overloaded, None, timeout=scaled(2.5))  # waiting 30 s would be pointless
    first, second = world.server.time_left
    assert second < first - 0.1


async def test_unary_methods_and_that_they_retry_too(world: World):
    async with world.client() as client:
        assert await soon(client("models")) == [baton.client.Model("m", 64, 256, aliases=("n",), defaults={"top_k": 3})]
        assert await soon(client("cancel", "r1")) is True
        assert await soon(client("cancel", "r2")) is False
        with pytest.raises(InvalidRequest, match="request_id"):
            await soon(client("cancel", 5))
        assert await soon(client("tokenize", "flaky")) == list(b"flaky")
    assert world.waits == [0.125, 0.25]


async def test_chat_sends_the_conversation(world: World):
    async with world.client() as client:
        done = await soon(client("chat", [{"role": "user", "content": "hi"}], tools=[{"x": 1}], max_tokens=4))
    assert done.text == " can vary widely"
    assert world.server.requests[0].chat.messages[0].content == "hi"
    assert world.server.requests[0].chat.tools == '[{"x": 1}]'


async def test_cluster_needs_the_admin_address(world: World):
    await world.failing(errors.ConfigError, "admin", "cluster")
    await world.failing(NoWorker, r"cannot reach 127\.0\.0\.1:1", "cluster", admin="127.0.0.1:1", max_retries=0)
    async with world.client(admin=world.address) as client:
        status = await soon(client("cluster"))
    assert (status.name, status.running, status.queued) == ("local", 2, 0)
    assert status.workers == (baton.client.WorkerStatus(clients.INFO, clients.LOAD, "connected", 1),)


@pytest.mark.parametrize("kind", KINDS)
async def test_tls_needs_the_right_authority(kind: str, folder: Path):
    ca = folder / "ca.pem"
    async with serving(Scripted(), channel.Wire.of_path(folder).public) as scripted:
        world = World(kind, scripted)
        for right in (ca, str(ca), ca.read_bytes()):
            async with world.client(tls=right) as client:
                assert await soon(client("tokenize", "a")) == [97]
        for wrong in (None, True):
            await world.failing(NoWorker, "cannot reach", "tokenize", "a", tls=wrong, max_retries=0)
