"""Streams that break and resume, with both clients, against a server that follows the protocol.

The server holds text back like a real one: the text of token 1 comes with token 2, the last text without a token.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton import core, errors
from baton.errors import BatonError, NoWorker, Overloaded, WorkerLost
from baton.rpc import convert
from baton.rpc.status import abort
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import inference_pb2 as inference
from tests.support.clients import KINDS, Event, Scripted, Wire, World, serving, soon

PIECES = [(11, " can"), (12, ""), (13, " wide"), (14, "ly")]
TAIL = "?!"
TEXT = " can widely?!"
IDS = (11, 12, 13, 14)
EVENTS = len(PIECES) + 4  # Accepted, the tail, Finished, Completed
DIED = "the worker died"


def choice_events(choice: int, done: int) -> list[Event]:
    """Return the events of one choice after its first `done` tokens."""
    logprobs = core.TokenLogprobs(-1.0)
    said = [core.Token(at, token, text, logprobs) for at, (token, text) in enumerate(PIECES)]
    messages = [convert.tokens_to_public_pb([each], choice) for each in said[done:]]
    messages.append(convert.tail_to_public_pb(TAIL, len(PIECES), choice))
    finished = inference.Finished(choice=choice, reason=common.FINISH_REASON_LENGTH)
    return [*(Event(tokens=each) for each in messages), Event(finished=finished)]


def prompt_token(position: int) -> Event:
    part = core.PromptPart(position, (core.PromptToken(position, 1, core.TokenLogprobs(-1.0)),))
    return Event(prompt_logprobs=convert.prompt_part_to_pb(part))


class Resumable(Scripted):
    """Breaks streams after the numbers of events in `cuts`, with the errors in `losses`. Later streams do not break."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts: list[int] = []
        self.losses: list[BatonError] = []
        self.headers: tuple[tuple[str, str], ...] = (("baton-resumable", "1"),)
        self.resumes: list[inference.ResumeRequest] = []
        self.hangs: set[int] = set()  # streams, numbered from 0, that hang at their cut instead of failing
        self.streams = 0
        self.cut = asyncio.Event()

    def _events(self, request: Any, context: Any) -> AsyncIterator[Event]:
        return self._play(request, [0] * max(1, request.n), context)

    async def Resume(self, request: inference.ResumeRequest, context: Any) -> AsyncIterator[Event]:
        self._note(request, context)
        self.resumes.append(request)
        done, scored = [len(each.ids) for each in request.received], request.prompt_logprobs_received
        async for event in self._play(request.request, done, context, scored):
            yield event

    async def _play(self, request: Any, done: list[int], context: Any, scored: int = 0) -> AsyncIterator[Event]:
        await context.send_initial_metadata(self.headers)
        number, self.streams = self.streams, self.streams + 1
        left = self.cuts.pop(0) if self.cuts else 1000
        parts = [choice_events(choice, count) for choice, count in enumerate(done)]
        thoughts = [Event(thought=inference.Thought(chunk=chunk, ids=[7], text="hm")) for chunk in range(2)]
        played = [event for row in itertools.zip_longest(*parts) for event in row if event is not None]
        usage = inference.Usage(prompt_tokens=4, completion_tokens=len(done) * len(PIECES))
        accepted = Event(accepted=inference.Accepted(prompt_tokens=4, system_fingerprint="x"))
        if not request.sampling.HasField("max_tokens"):
            accepted.accepted.defaults.CopyFrom(common.Sampling(temperature=0.5, max_tokens=16))
        completed = Event(completed=inference.Completed(usage=usage))
        scores = [prompt_token(position) for position in range(scored, 3)] if request.prompt_logprobs else []
        played = [accepted, *(thoughts if request.thoughts else []), *scores, *played, completed]
        for seq, event in enumerate(played[:left]):
            event.request_id, event.seq = "r1", seq
            yield event
        if left < 1000:
            await self._break(context, number)

    async def _break(self, context: Any, number: int) -> None:
        if number in self.hangs:
            self.cut.set()
            await asyncio.Event().wait()
        await abort(context, self.losses.pop(0) if self.losses else WorkerLost(DIED))


async def running() -> AsyncIterator[Resumable]:
    async with serving(Resumable()) as made:
        yield made


server, other = (pytest.fixture(running, name=name) for name in ("server", "other"))


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, server: Resumable) -> World:
    return World(request.param, server)


async def read_all(client: Any, **options: Any) -> tuple[Any, list[Any], int]:
    """Return the completion, the deltas, and the number of resumes."""
    async with client.stream("The color of dog", **options) as stream:
        deltas = await soon(all_of(stream))
        return await soon(stream.collect()), deltas, stream.resumed


async def all_of(stream: Any) -> list[Any]:
    return [delta async for delta in stream]


@pytest.mark.parametrize("world", ["async"], indirect=True)
async def test_a_wait_that_ends_early_before_a_resume_costs_no_retry(world: World, server: Resumable):
    go = asyncio.Event()
    server.cuts = [3]
    async with world.client(max_retries=1) as client, client.stream("x", max_tokens=4, resumable_s=30) as stream:
        client.client._sleep = lambda _: go.wait()
        text = (await soon(anext(stream))).text + (await soon(anext(stream))).text
        for _ in range(4):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.05)
        go.set()
        text += "".join(delta.text for delta in await soon(all_of(stream)))
    assert (text, len(server.resumes)) == (TEXT, 1)


async def test_a_stream_that_is_cut_anywhere_and_again_is_one_stream(world: World, server: Resumable):
    async with world.client(max_retries=3) as client:
        for cuts in [*([first] for first in range(1, EVENTS + 1)), *itertools.product(range(1, EVENTS), range(4))]:
            server.cuts, server.resumes = list(cuts), []
            done, deltas, resumed = await read_all(client, max_tokens=4, resumable_s=30)
            assert (done.text, done.tokens, len(done.logprobs)) == (TEXT, IDS, 4), cuts
            assert "".join(delta.text for delta in deltas) == TEXT, cuts
            assert [delta.start for delta in deltas if delta.tokens] == [0, 1, 2, 3], cuts
            assert done.usage.completion_tokens == 4
            wanted = 0 if cuts[0] >= EVENTS else len([cut for cut in cuts[1:] if cut]) + 1
            assert resumed == wanted, cuts
            assert {each.system_fingerprint for each in server.resumes} == ({"x"} if resumed else set()), cuts


async def test_log_probabilities_of_the_prompt_are_resumed_at_their_own_place(world: World, server: Resumable):
    async with world.client() as client:
        for cut in range(1, EVENTS + 4):
            server.cuts, server.resumes = [cut], []
            done, _, resumed = await read_all(client, prompt_logprobs=1)
            assert [token.token_id for token in done.prompt_logprobs] == [0, 1, 2], cut
            had = [min(max(cut - 1, 0), 3)] * resumed
            assert [each.prompt_logprobs_received for each in server.resumes] == had, cut


async def test_a_thought_is_no_progress(world: World, server: Resumable):
    """Each resumed stream has one more thought than the one before, and no token."""
    server.cuts = [2, 3, 3]
    async with world.client(max_retries=1) as client, client.stream("x", thoughts=True) as stream:
        with pytest.raises(WorkerLost, match=DIED):
            await soon(all_of(stream))
        assert [thought.chunk for thought in stream.thoughts] == [0, 1]
    assert len(server.resumes) == 1


async def test_choices_are_resumed_each_at_its_own_place(world: World, server: Resumable):
    async with world.client() as client:
        for cut in range(1, 2 * (EVENTS - 2) + 2):
            server.cuts, server.resumes = [cut], []
            done, _, resumed = await read_all(client, n=2)
            assert [(choice.text, choice.tokens) for choice in done.choices] == [(TEXT, IDS)] * 2, cut
            assert resumed == 1
            said = [min(4, max(0, (cut - choice) // 2)) for choice in (0, 1)]
            assert [list(each.ids) for each in server.resumes[0].received] == [list(IDS[:count]) for count in said], cut


async def test_the_request_goes_along_as_it_was(world: World, server: Resumable):
    server.cuts = [3]
    async with world.client(token="secret", timeout=60) as client:
        await read_all(client, max_tokens=4, seed=7, resumable_s=30)
    resume = server.resumes[0]
    assert (resume.request_id, resume.request) == ("r1", server.requests[0])
    assert resume.request.sampling.seed == 7
    assert server.metadata["authorization"] == "Bearer secret"
    assert len(server.time_left) == 2
    assert all(0 < left <= 61 for left in server.time_left)  # gRPC rounds it


async def test_the_defaults_of_the_first_router_go_along_after_each_loss(world: World, server: Resumable):
    server.cuts = [3, 2, 2]
    async with world.client(max_retries=3) as client:
        await read_all(client)
    sent = [each.request.sampling for each in server.resumes]
    assert sent == [common.Sampling(temperature=0.5, max_tokens=16)] * 3


@pytest.mark.parametrize("cut", [1, 3])
async def test_a_stream_that_is_not_resumable_is_not_sent_again(world: World, server: Resumable, cut: int):
    server.headers, server.cuts = (), [cut]
    await world.failing(WorkerLost, DIED)
    assert (len(server.requests), server.resumes, world.waits) == (1, [], [])


@pytest.mark.parametrize("refusal", [errors.Unsupported("no Resume here"), errors.UnknownModel("no such request")])
async def test_a_server_that_refuses_leaves_the_loss(world: World, server: Resumable, refusal: BatonError):
    server.cuts, server.losses = [3, 0], [WorkerLost(DIED), refusal]
    async with world.client() as client, client.stream("x") as stream:
        for _ in range(2):
            with pytest.raises(WorkerLost, match=DIED) as caught:
                await soon(all_of(stream))
            assert str(caught.value.__cause__) == str(refusal)
    assert len(server.resumes) == 1


async def test_retries_are_counted_anew_after_progress(world: World, server: Resumable):
    server.cuts = [2, 2, 2, 0, 2]
    async with world.client(max_retries=2) as client:
        done, _, resumed = await read_all(client)
    assert (done.text, resumed) == (TEXT, 4)
    assert world.waits == [0.125, 0.125, 0.125, 0.25, 0.125]


@pytest.mark.parametrize(("retries", "cut"), [(2, 0), (2, 1), (0, 0)])
async def test_retries_without_progress_run_out(world: World, server: Resumable, retries: int, cut: int):
    """A server that sends only Accepted each time makes no progress."""
    server.cuts = [3] + [cut] * 5
    await world.failing(WorkerLost, DIED, max_retries=retries)
    assert len(server.resumes) == retries


@pytest.mark.parametrize(
    ("what", "cuts", "hangs"),
    [("the stream", [3], {0}), ("the stream", [3, 0], {1}), ("the client", [3], {0})],
    ids=["the stream", "the stream, in a resume", "the client"],
)
async def test_closing_ends_a_stream(world: World, server: Resumable, what: str, cuts: list[int], hangs: set[int]):
    server.cuts, server.hangs = [*cuts], {*hangs}
    async with world.client() as client, client.stream("x") as stream:
        reading = asyncio.create_task(all_of(stream))
        await soon(server.cut.wait())
        await (client("close") if what == "the client" else stream.close())
        for reader in (reading, anext(stream)):
            with pytest.raises(errors.Cancelled):
                await soon(reader)
        if what == "the client":
            with pytest.raises(errors.Cancelled, match="the client was closed"):
                await soon(client("generate", "x"))


async def test_the_next_router_goes_on(world: World, server: Resumable, other: Resumable):
    server.cuts, server.hangs = [4], {0}
    wire = Wire(world.address)
    async with wire.laid() as first, world.client(f"{first}, {other.address}") as client:
        async with client.stream("x") as stream:
            await soon(anext(stream))
            await soon(server.cut.wait())
            wire.cut()
            assert (await soon(stream.collect())).text == TEXT
        assert (len(server.resumes), len(other.resumes)) == (0, 1)
        assert (await soon(client("generate", "y"))).text == TEXT  # later calls begin at that router
        assert [request.text for request in other.requests[1:]] == ["y"]


async def test_refusals_are_counted_anew_after_progress(world: World, server: Resumable, other: Resumable):
    server.cuts, other.cuts = [2, 2], [0, 0]
    other.losses = [errors.UnknownModel("no such request")] * 2
    async with world.client(f"{world.address},{other.address}") as client:
        done, _, resumed = await read_all(client)
    assert (done.text, resumed) == (TEXT, 2)
    assert (len(server.resumes), len(other.resumes)) == (2, 2)


@pytest.mark.parametrize("retries", [0, 2])
async def test_calls_go_to_the_next_router_too(world: World, retries: int):
    dead = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
    async with world.client(",".join([*dead, world.address]), max_retries=retries) as client:
        assert await soon(client("tokenize", "ab")) == [97, 98]
        assert await soon(client("detokenize", [97, 98])) == "ab"
        assert (await soon(client("generate", "x"))).text == TEXT
        assert await soon(client("cancel", "r1")) is True
        with pytest.raises(NoWorker, match=r"127\.0\.0\.1:3"):
            await soon(client("cancel", "r2"))
    assert world.waits == [0.0] * len(dead) + [0.125, 0.25][:retries] * (2 * len(dead)), "cancel asks each router"


async def test_each_other_router_is_asked_once_without_a_retry(world: World):
    await world.failing(NoWorker, r"cannot reach 127\.0\.0\.1:2", target="127.0.0.1:1,127.0.0.1:2", max_retries=0)
    assert world.waits == [0.0]


@pytest.mark.parametrize("error", [NoWorker("x"), WorkerLost("x"), errors.DeadlineExceeded("x"), Overloaded("x")])
async def test_cancel_asks_all_routers(world: World, error: BatonError):
    class Failing(Scripted):
        async def Cancel(self, request: Any, context: Any) -> Any:
            await abort(context, error)

    async with serving(Failing()) as bad, world.client(f"{bad.address},{world.address}", max_retries=0) as client:
        assert await soon(client("cancel", "r1")) is True
        with pytest.raises(type(error)):
            await soon(client("cancel", "r2"))
