"""Streams that break and go on, with both clients, against a server that resumes as the protocol says.

The server holds text back as the real one does: the text of token 1 comes with token 2, and the end without a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton import core, errors
from baton.clock import FakeClock
from baton.errors import BatonError, NoWorker, WorkerLost
from baton.rpc import channel, convert
from baton.rpc.status import abort
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import inference_pb2 as inference
from baton.rpc.v1 import inference_pb2_grpc
from tests.integration.test_sdk import Event, Scripted, Wire, World, soon

PIECES = [(11, " can"), (12, ""), (13, " wide"), (14, "ly")]
TAIL = "?!"
TEXT = " can widely?!"
IDS = (11, 12, 13, 14)
EVENTS = len(PIECES) + 4  # Accepted, the tail, Finished, Completed


def choice_events(choice: int, done: int) -> list[Event]:
    """What is still to be said of one choice, of which `done` tokens are known."""
    logprobs = core.TokenLogprobs(-1.0)
    said = [core.Token(at, token, text, logprobs) for at, (token, text) in enumerate(PIECES)]
    messages = [convert.tokens_to_public_pb([each], choice) for each in said[done:]]
    messages.append(convert.tail_to_public_pb(TAIL, len(PIECES), choice))
    finished = inference.Finished(choice=choice, reason=common.FINISH_REASON_LENGTH)
    return [*(Event(tokens=each) for each in messages), Event(finished=finished)]


class Resumable(Scripted):
    """Breaks each stream after so many events as `cuts` says, the later ones never; what breaks it is in `losses`."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts: list[int] = []
        self.losses: list[BatonError] = []
        self.headers = (("baton-resumable", "1"),)
        self.resumes: list[inference.ResumeRequest] = []
        self.hangs: set[int] = set()  # streams, numbered from 0, that hang at their cut instead of an error
        self.streams = 0
        self.cut = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Event]:
        self._note(request, context)
        async for event in self._play(request, [0] * max(1, request.n), context):
            yield event

    async def Resume(self, request: inference.ResumeRequest, context: Any) -> AsyncIterator[Event]:
        self._note(request, context)
        self.resumes.append(request)
        async for event in self._play(request.request, [len(each.ids) for each in request.received], context):
            yield event

    async def _play(self, request: Any, done: list[int], context: Any) -> AsyncIterator[Event]:
        await context.send_initial_metadata(self.headers)
        number, self.streams = self.streams, self.streams + 1
        left = self.cuts.pop(0) if self.cuts else 1000
        parts = [choice_events(choice, count) for choice, count in enumerate(done)]
        thoughts = [Event(thought=inference.Thought(chunk=chunk, ids=[7], text="hm")) for chunk in range(2)]
        played = [event for row in itertools.zip_longest(*parts) for event in row if event is not None]
        usage = inference.Usage(prompt_tokens=4, completion_tokens=len(done) * len(PIECES))
        accepted, completed = inference.Accepted(prompt_tokens=4), inference.Completed(usage=usage)
        accepted.system_fingerprint = "x"
        played = [Event(accepted=accepted), *(thoughts if request.thoughts else []), *played]
        for seq, event in enumerate([*played, Event(completed=completed)][:left]):
            numbered = Event(request_id="r1", seq=seq)
            numbered.MergeFrom(event)
            yield numbered
        if left < 1000:
            await self._break(context, number)

    async def _break(self, context: Any, number: int) -> None:
        if number in self.hangs:
            self.cut.set()
            await asyncio.Event().wait()
        await abort(context, self.losses.pop(0) if self.losses else WorkerLost("the worker died"))


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Resumable, str]]:
    servicer, server = Resumable(), channel.aio_server(link=channel.PUBLIC)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    address = channel.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield servicer, address
    finally:
        await server.stop(None)


@pytest.fixture(params=["async", "sync"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with serving() as (servicer, address):
        yield World(request.param, servicer, address)


def inner(world: World, stream: Any) -> Any:
    """The client's own stream behind the common interface."""
    return stream.stream if world.kind == "sync" else stream


async def read_all(world: World, client: Any, **options: Any) -> tuple[Any, list[Any], int]:
    """The completion, the deltas, and how often the stream was resumed."""
    async with client.stream("The color of dog", **options) as stream:
        deltas = await soon(all_of(stream))
        return await soon(stream.collect()), deltas, inner(world, stream).resumed


async def all_of(stream: Any) -> list[Any]:
    return [delta async for delta in stream]


def server_of(world: World) -> Any:
    return world.server


async def test_a_stream_that_is_cut_anywhere_and_again_is_one_stream(world: World):
    server = server_of(world)
    async with world.client(max_retries=3) as client:
        for cuts in [*([first] for first in range(1, EVENTS + 1)), *itertools.product(range(1, EVENTS), range(4))]:
            server.cuts, server.resumes = list(cuts), []
            done, deltas, resumed = await read_all(world, client, max_tokens=4, resumable_s=30)
            assert (done.text, done.tokens, len(done.logprobs)) == (TEXT, IDS, 4), cuts
            assert "".join(delta.text for delta in deltas) == TEXT, cuts
            assert [delta.start for delta in deltas if delta.tokens] == [0, 1, 2, 3], cuts
            assert done.usage.completion_tokens == 4
            wanted = 0 if cuts[0] >= EVENTS else len([cut for cut in cuts[1:] if cut]) + 1
            assert resumed == wanted, cuts
            assert {each.system_fingerprint for each in server.resumes} == ({"x"} if resumed else set()), cuts


async def test_thoughts_that_come_again_are_shown_once(world: World):
    server = server_of(world)
    async with world.client(max_retries=3) as client:
        for cuts in itertools.product(range(1, EVENTS + 2), range(4)):
            server.cuts = list(cuts)
            done, deltas, _ = await read_all(world, client, thoughts=True)
            assert (done.text, done.tokens) == (TEXT, IDS), cuts
            assert [thought.chunk for thought in done.thoughts] == [0, 1], cuts
            assert [thought for delta in deltas for thought in delta.thoughts] == list(done.thoughts), cuts


async def test_a_thought_is_no_progress(world: World):
    """Each stream says one more than the one before, and no token."""
    server = server_of(world)
    server.cuts = [2, 3, 3]
    async with world.client(max_retries=1) as client, client.stream("x", thoughts=True) as stream:
        with pytest.raises(WorkerLost, match="the worker died"):
            await soon(all_of(stream))
        assert [thought.chunk for thought in inner(world, stream).thoughts] == [0, 1]
    assert len(server.resumes) == 1


async def test_choices_are_resumed_each_at_its_own_place(world: World):
    server = server_of(world)
    async with world.client() as client:
        for cut in range(1, 2 * (EVENTS - 2) + 2):
            server.cuts, server.resumes = [cut], []
            done, _, resumed = await read_all(world, client, n=2)
            assert [(choice.text, choice.tokens) for choice in done.choices] == [(TEXT, IDS)] * 2, cut
            assert resumed == 1
            said = [min(4, max(0, (cut - choice) // 2)) for choice in (0, 1)]
            assert [list(each.ids) for each in server.resumes[0].received] == [list(IDS[:count]) for count in said], cut


async def test_the_request_goes_along_as_it_was(world: World):
    server = server_of(world)
    server.cuts = [3]
    async with world.client(token="secret", timeout=60) as client:
        await read_all(world, client, max_tokens=4, seed=7, resumable_s=30)
    resume = server.resumes[0]
    assert (resume.request_id, resume.request) == ("r1", server.requests[0])
    assert resume.request.sampling.seed == 7
    assert server.metadata["authorization"] == "Bearer secret"
    assert len(server.time_left) == 2
    assert all(0 < left <= 61 for left in server.time_left)  # gRPC rounds it


async def test_a_stream_that_is_not_resumable_ends_as_before(world: World):
    server = server_of(world)
    server.headers, server.cuts = (), [3]
    async with world.client() as client:
        with pytest.raises(WorkerLost, match="the worker died"):
            await read_all(world, client)
    assert (server.resumes, world.waits) == ([], [])


@pytest.mark.parametrize("error", [errors.EngineFault("x"), errors.DeadlineExceeded("x"), errors.Overloaded("x")])
async def test_only_a_loss_is_resumed(world: World, error: BatonError):
    server = server_of(world)
    server.cuts, server.losses = [3], [error]
    async with world.client() as client:
        with pytest.raises(type(error)):
            await read_all(world, client)
    assert server.resumes == []


@pytest.mark.parametrize("refusal", [errors.Unsupported("no Resume here"), errors.UnknownModel("no such request")])
async def test_a_server_that_refuses_leaves_the_loss(world: World, refusal: BatonError):
    server = server_of(world)
    server.cuts, server.losses = [3, 0], [WorkerLost("the worker died"), refusal]
    async with world.client() as client, client.stream("x") as stream:
        for _ in range(2):
            with pytest.raises(WorkerLost, match="the worker died") as caught:
                await soon(all_of(stream))
            assert str(caught.value.__cause__) == str(refusal)
    assert len(server.resumes) == 1


async def test_a_failure_of_the_resumed_stream_is_the_answer(world: World):
    server = server_of(world)
    server.cuts, server.losses = [3, 0], [WorkerLost("the worker died"), errors.EngineFault("it failed")]
    async with world.client() as client:
        with pytest.raises(errors.EngineFault, match="it failed"):
            await read_all(world, client)


async def test_an_overload_is_waited_for(world: World):
    server = server_of(world)
    server.cuts, server.losses = [3, 0], [WorkerLost("the worker died"), errors.Overloaded("full", 2.0)]
    async with world.client() as client:
        assert (await read_all(world, client))[0].text == TEXT
    assert world.waits == [0.125, 2.25]


async def test_retries_are_counted_anew_after_progress(world: World):
    server = server_of(world)
    server.cuts = [2, 2, 2, 0, 2]
    async with world.client(max_retries=2) as client:
        done, _, resumed = await read_all(world, client)
    assert (done.text, resumed) == (TEXT, 4)
    assert world.waits == [0.125, 0.125, 0.125, 0.25, 0.125]


@pytest.mark.parametrize("cut", [0, 1])
async def test_retries_without_progress_run_out(world: World, cut: int):
    """A server that only says Accepted each time has not gone on."""
    server = server_of(world)
    server.cuts = [3] + [cut] * 5
    async with world.client(max_retries=2) as client:
        with pytest.raises(WorkerLost, match="the worker died"):
            await read_all(world, client)
    assert len(server.resumes) == 2


async def test_without_retries_nothing_is_resumed(world: World):
    server = server_of(world)
    server.cuts = [3]
    async with world.client(max_retries=0) as client:
        with pytest.raises(WorkerLost):
            await read_all(world, client)
    assert server.resumes == []


async def test_there_is_no_resume_beyond_the_deadline(world: World):
    server, clock = server_of(world), FakeClock()
    server.cuts = [3]
    async with world.client(timeout=5.0) as client:
        client.client._clock = clock
        async with client.stream("x") as stream:
            await soon(anext(stream))
            clock.advance(4.9)
            with pytest.raises(WorkerLost):
                await soon(all_of(stream))
    assert server.resumes == []


async def test_the_deadline_ends_a_resumed_stream(world: World):
    server = server_of(world)
    server.cuts, server.hangs = [3, 2], {1}
    async with world.client() as client, client.stream("x", timeout=0.5) as stream:
        with pytest.raises(errors.DeadlineExceeded):
            await soon(all_of(stream))
        assert inner(world, stream).resumed == 1


async def test_closing_before_a_resume_is_the_end(world: World):
    server = server_of(world)
    server.cuts = [3]
    async with world.client() as client, client.stream("x") as stream:

        async def close(seconds: float) -> None:
            await stream.close()

        client.client._sleep = close if world.kind == "async" else lambda seconds: stream.stream.close()
        with pytest.raises(errors.Cancelled):
            await soon(all_of(stream))
    assert server.resumes == []


async def test_closing_during_a_resume_cancels_it(world: World):
    server = server_of(world)
    server.cuts, server.hangs = [3, 0], {1}
    async with world.client() as client, client.stream("x") as stream:
        reading = asyncio.create_task(all_of(stream))
        await soon(server.cut.wait())
        await stream.close()
        with pytest.raises(errors.Cancelled):
            await soon(reading)


async def test_closing_the_client_ends_its_streams(world: World):
    server = server_of(world)
    server.cuts, server.hangs = [3], {0}
    async with world.client() as client, client.stream("x") as stream:
        reading = asyncio.create_task(all_of(stream))
        await soon(server.cut.wait())
        await client.aclose()
        with pytest.raises(errors.Cancelled):
            await soon(reading)
        with pytest.raises(errors.Cancelled, match="the client was closed"):
            await soon(client("generate", "x"))


async def test_a_lost_connection_is_resumed(world: World):
    server = server_of(world)
    server.cuts, server.hangs = [4], {0}
    wire = Wire(world.address)
    async with wire.laid() as address, world.client(address) as client, client.stream("x") as stream:
        seen = [await soon(anext(stream)) for _ in range(2)]
        await soon(server.cut.wait())
        wire.cut()
        seen += await soon(all_of(stream))
        assert "".join(delta.text for delta in seen) == TEXT
        assert inner(world, stream).resumed == 1


async def test_the_next_router_goes_on(world: World):
    server = server_of(world)
    server.cuts, server.hangs = [4], {0}
    wire = Wire(world.address)
    async with serving() as (other, second), wire.laid() as first, world.client(f"{first}, {second}") as client:
        async with client.stream("x") as stream:
            await soon(anext(stream))
            await soon(server.cut.wait())
            wire.cut()
            assert (await soon(stream.collect())).text == TEXT
        assert (len(server.resumes), len(other.resumes)) == (0, 1)
        assert (await soon(client("generate", "y"))).text == TEXT  # and there calls to come begin
        assert [request.text for request in other.requests[1:]] == ["y"]


async def test_a_router_that_refuses_is_not_the_last_one(world: World):
    server = server_of(world)
    server.cuts, server.losses = [3, 0], [WorkerLost("the worker died")]
    async with serving() as (other, second), world.client(f"{world.address},{second}") as client:
        other.cuts, other.losses = [0], [errors.UnknownModel("no such request")]
        server.cuts = [3]
        done, _, resumed = await read_all(world, client)
    assert (done.text, resumed) == (TEXT, 1)
    assert (len(server.resumes), len(other.resumes)) == (1, 1)


async def test_refusals_are_counted_anew_after_progress(world: World):
    server = server_of(world)
    async with serving() as (other, second), world.client(f"{world.address},{second}") as client:
        server.cuts, other.cuts, other.losses = [2, 2], [0, 0], [errors.UnknownModel("no such request")] * 2
        done, _, resumed = await read_all(world, client)
    assert (done.text, resumed) == (TEXT, 2)
    assert (len(server.resumes), len(other.resumes)) == (2, 2)


async def test_when_all_refuse_the_loss_is_raised(world: World):
    server = server_of(world)
    server.cuts, server.losses = [3, 0], [WorkerLost("the worker died"), errors.Unsupported("b")]
    async with serving() as (other, second), world.client(f"{world.address},{second}", max_retries=9) as client:
        other.cuts, other.losses = [0], [errors.Unsupported("a")]
        with pytest.raises(WorkerLost, match="the worker died"):
            await read_all(world, client)
    assert (len(server.resumes), len(other.resumes)) == (1, 1)


async def test_calls_go_to_the_next_router_too(world: World):
    async with world.client(f"127.0.0.1:1,{world.address}") as client:
        assert await soon(client("tokenize", "ab")) == [97, 98]
        assert await soon(client("detokenize", [97, 98])) == "ab"
        assert (await soon(client("generate", "x"))).text == TEXT
        assert await soon(client("cancel", "r1")) is True
        with pytest.raises(NoWorker, match=r"127\.0\.0\.1:1"):
            await soon(client("cancel", "r2"))
    assert world.waits[:1] == [0.125]
