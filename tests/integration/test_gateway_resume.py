"""Streams over HTTP that outlive their router: ids of events, and `Last-Event-ID` at another router."""

import asyncio
import json
import re
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import openai
import pytest

from baton.client._retry import KEEPS
from baton.core import HandoffId
from baton.errors import ConfigError, LedgerError
from baton.ledger.ownership import OwnershipRecord, RecordState
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.tokenizer import OracleTokenizer
from router.openai import responses
from router.openai.responses import EVENTS
from router.openai.server import GatewaySettings, HttpServer
from router.parsing import chat
from router.request import client_request
from router.server import serve
from tests.integration.access_support import TOKENS, token_file
from tests.integration.gateway_support import HELLO
from tests.support.time_factor import scaled
from tests.support.waiting import until

SENT, HELD = 12, 7
PIECES = [
    "See",
    ":\n",
    '<tool_call>{"name": "now",',
    ' "arguments": {}}',
    "</tool",
    "_call>\n",
    '{"name": ',
    '"now"',
    "}",
    "é",
    "",
    "!",
]
TOOLS = [{"type": "function", "function": {"name": "now"}}]
THOUGHT = list(range(1, 15))  # 3 chunks and 2 more tokens
USAGE = {"include_usage": True, "continuous_usage_stats": True}
FORMS: dict[str, tuple[str, dict[str, Any], int]] = {  # path, body, and events before the worker holds
    "usage": ("completions", {"prompt": [1, 2], "stream_options": USAGE}, 7),
    "logprobs": ("completions", {"prompt": [1, 2], "logprobs": 2}, 7),
    "choices": ("chat/completions", {"messages": HELLO, "n": 3, "logprobs": True}, 3 * 8),
    "tools": ("chat/completions", {"messages": HELLO, "tools": TOOLS}, 3),
    "thinking": ("completions", {"prompt": THOUGHT, "think_while_decoding": True}, 7),
}
UNORDERED: dict[str, tuple[dict[str, Any], int]] = {  # requests with parts whose order the machine decides
    "prompts": ({"prompt": [[1, 2], [3, 4]], "n": 2}, 4 * 7),
    "thoughts": ({"prompt": THOUGHT, "thoughts": True, "think_while_decoding": True}, 5 + 7),
}


class Two:
    """A router with HTTP and, after its loss, another one over the same workers, which accept one router at a time."""

    def __init__(self, cluster):
        self.cluster, self.decode, self.router = cluster, cluster.decode[0], cluster.router
        self.away = False  # the ledger

    async def find(self, stream):
        if self.away:
            raise LedgerError("away")
        name, ref = HandoffId(stream, 1), self.decode.info.ref
        known = name in self.decode.committed
        return OwnershipRecord(name, RecordState.COMMITTED, ref.worker_id, ref.incarnation, "gone") if known else None

    async def lose(self):
        """Stop the first router and start the other one. The workers continue."""
        await self.router.stop(grace_s=0.0)
        settings = replace(self.cluster.settings, name="second", grpc=self.router.grpc)

        async def started():
            with suppress(ConfigError):  # gRPC closes the listener a moment after the first router's stop
                return await serve(settings, self.cluster.source, OracleTokenizer(), streams=self.find)

        self.router = await until(started, "the port is free")
        await until(lambda: sum(link.usable for link in self.router.context.pool.links) == 2, "it reaches the workers")
        self.decode.open("hold")

    async def cut(self, form, **options):
        """Return the events of a stream until its router is lost."""
        path, body, most = FORMS[form] if form in FORMS else ("completions", *UNORDERED[form])
        self.decode.hold(HELD)
        async with streamed(self.router.http, path, body, **options) as answer:
            events = events_of(answer)
            seen = [await anext(events) for _ in range(most)]
            await self.lose()
        return seen


def written(item):
    """Write `PIECES` into an event of a worker."""
    for at in range(len(item.tokens.ids)):
        item.tokens.texts[at] = PIECES[getattr(item.tokens, "from") + at]


@pytest.fixture
async def two(make, request, monkeypatch):
    monkeypatch.setattr(chat, "_PLAIN", "{{ messages[0].content }}{% if tools %}<tool_call>{% endif %}")
    two = Two(await make(http="127.0.0.1:0", thinks=4, **getattr(request, "param", {})))
    for worker in two.cluster.workers:
        worker.scored, worker.before_emit = True, written
    yield two
    await two.router.stop(grace_s=0.0)


@asynccontextmanager
async def streamed(address, path, body, after="", key=""):
    headers = {"last-event-id": after} if after else {"accept": EVENTS}
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    body = {"stream": True, "max_tokens": SENT, **body}
    async with (
        openai.DefaultAsyncHttpxClient(verify=False, timeout=60) as client,
        client.stream("POST", f"http://{address}/v1/{path}", json=body, headers=headers) as answer,
    ):
        yield answer


async def events_of(answer):
    rest = b""
    async for data in answer.aiter_bytes():
        *whole, rest = (rest + data).split(b"\n\n")
        for event in whole:
            yield event


async def all_events(*args, **options):
    async with streamed(*args, **options) as answer:
        assert answer.status_code == 200, await answer.aread()
        return [event async for event in events_of(answer)]


async def refusal(*args, **options):
    async with streamed(*args, **options) as answer:
        error = json.loads(await answer.aread())["error"]
        return answer.status_code, error["param"], error["message"]


def id_of(event):
    return event.split(b"\n")[0].removeprefix(b"id: ").decode()


def untimed(events):
    return [re.sub(rb'"timings":{[^}]*}', b"", event) for event in events]


def anonymous(events):
    """Return events without what differs between two requests: ids, and the times at the end."""
    name = id_of(events[0]).split(":")[0].encode()
    return [re.sub(rb'"created":\d+|call_[0-9a-f]{24}', b"", event.replace(name, b"R")) for event in untimed(events)]


@pytest.mark.parametrize("form", FORMS)
async def test_a_stream_goes_on_after_each_of_its_events(two, form, monkeypatch):
    """The events of a lost router, and all that follow each of them, are those of a router that lives."""
    path, body, _ = FORMS[form]
    whole = await all_events(two.router.http, path, body)
    assert whole[-1].endswith(b"data: [DONE]")
    assert len({id_of(event) for event in whole}) == len(whole)
    seen = await two.cut(form)
    monkeypatch.setattr(responses, "time", SimpleNamespace(time=lambda: time.time() + 100))
    everything = seen[:1] + await all_events(two.router.http, path, body, after=id_of(seen[0]))
    assert everything[: len(seen)] == seen
    assert anonymous(everything) == anonymous(whole)
    for at, event in enumerate(everything[:-1], 1):
        rest = await all_events(two.router.http, path, body, after=id_of(event))
        assert untimed(rest) == untimed(everything[at:])
    last = id_of(everything[-1])
    for beyond in (last, re.sub(r"\d+$", "999", last)):
        assert await all_events(two.router.http, path, body, after=beyond) == [b"data: [DONE]"]
    assert two.cluster.prefill[0].count("prefill") == 2 * body.get("n", 1), "nothing is computed again"


@pytest.mark.parametrize("two", [{"reasoning_parser": "think"}], indirect=True)
async def test_a_thought_that_the_prompt_opened_goes_on(two, monkeypatch):
    body = {"messages": [{"role": "user", "content": "<think>"}]}
    monkeypatch.setitem(FORMS, "reasoning", ("chat/completions", body, 4))
    whole = await all_events(two.router.http, "chat/completions", body)
    assert sum(b'"reasoning_content"' in event for event in whole) > 4
    seen = await two.cut("reasoning")
    rest = await all_events(two.router.http, "chat/completions", body, after=id_of(seen[-1]))
    assert anonymous(seen + rest) == anonymous(whole)


async def without_and_with_a_loss(two, path, body, most):
    """Return the events of a request through a gateway, and those of the same one whose router is lost after `most`."""
    gateway = HttpServer("127.0.0.1:0", GatewaySettings())
    await gateway.start(f"127.0.0.1:1,{two.router.grpc}")
    try:
        whole = await all_events(gateway.address, path, body)
        two.decode.hold(HELD)
        async with streamed(gateway.address, path, body) as answer:
            events = events_of(answer)
            seen = [await anext(events) for _ in range(most)]
            await two.lose()
            seen += [event async for event in events]
    finally:
        await gateway.stop(0)
    return whole, seen


@pytest.mark.parametrize("form", FORMS)
async def test_a_gateway_goes_on_by_itself(two, form):
    """Its clients see the events of a router that lives. The first of its routers cannot be reached."""
    path, body, most = FORMS[form]
    whole, seen = await without_and_with_a_loss(two, path, body, most)
    assert anonymous(seen) == anonymous(whole)
    assert two.cluster.prefill[0].count("prefill") == 2 * body.get("n", 1), "nothing is computed again"


def choices_of(events):
    """Return the choices of these events by their index, first tokens and then thoughts, which have no common order."""
    chunks = [json.loads(event.split(b"data: ")[1]) for event in events if not event.endswith(b"[DONE]")]
    assert len({chunk["id"] for chunk in chunks}) <= 1
    return sorted((chunk["choices"][0] for chunk in chunks), key=lambda found: (found["index"], "thoughts" in found))


@pytest.mark.parametrize("form", UNORDERED)
async def test_a_gateway_goes_on_by_itself_also_where_the_order_is_open(two, form):
    body, most = UNORDERED[form]
    whole, seen = await without_and_with_a_loss(two, "completions", body, most)
    assert choices_of(seen) == choices_of(whole)


def missing(event):
    """Return how many prompts had no event so far."""
    return id_of(event).split(":")[0].split("+").count("")


@pytest.mark.parametrize("form", UNORDERED)
async def test_each_choice_goes_on_after_each_event_where_the_order_is_open(two, form):
    path, body = "completions", UNORDERED[form][0]
    whole = await all_events(two.router.http, path, body)
    seen = await two.cut(form)
    computed = two.cluster.prefill[0].count("prefill")
    everything = seen + await all_events(two.router.http, path, body, after=id_of(seen[-1]))
    assert choices_of(everything) == choices_of(whole)
    assert len({id_of(event) for event in everything}) == len(everything) == len(whole)
    assert not any(missing(event) for event in everything[len(seen) :]), "each prompt has begun"
    for at, event in enumerate(everything[:-1], 1):
        rest = await all_events(two.router.http, path, body, after=id_of(event))
        assert choices_of(everything[:at] + rest) == choices_of(whole)
        computed += missing(event) * body.get("n", 1)
        assert two.cluster.prefill[0].count("prefill") == computed, "only prompts without an event are computed"


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({"prompt": [1, 2], "n": 2}, 2 * HELD),
        ({"prompt": [[1, 2], [3, 4]]}, SENT + 1 + HELD),
        ({"prompt": [[1]] * 17}, SENT + 1 + 16 * HELD),
    ],
)
async def test_choices_that_ended_before_the_loss_are_repeated(two, body, most):
    """Workers keep the streams of ended choices until the whole answer has been sent."""
    path, answers = "completions", most // HELD
    whole = await all_events(two.router.http, path, body)
    await until(lambda: two.decode.count("release") == answers, "none is kept after the answer")
    two.decode.forgets = True
    two.decode.hold(HELD, spares=1)
    async with streamed(two.router.http, path, body) as answer:
        events = events_of(answer)
        seen = [await anext(events) for _ in range(most)]
        # The end of the first choice comes from the worker before this answer.
        await all_events(two.router.http, path, {"prompt": [9], "max_tokens": 2})
        await two.lose()
    computed = two.cluster.prefill[0].count("prefill")
    rest = await all_events(two.router.http, path, body, after=id_of(seen[-1]))
    assert choices_of(seen + rest) == choices_of(whole)
    assert two.cluster.prefill[0].count("prefill") == computed, "nothing is computed again"


async def test_a_choice_whose_last_bytes_are_still_to_be_sent_is_repeated(two, monkeypatch):
    """Its router is lost after the call is complete, and before the client has the end of the answer."""
    path, body, _ = FORMS["usage"]
    whole = await all_events(two.router.http, path, body)
    await until(lambda: two.decode.count("release") == 1, "none is kept after the answer")
    two.decode.forgets = True
    reached, sent, write = asyncio.Event(), asyncio.Event(), responses.EventWriter.write

    async def held(self, data, *, more=True):
        if b'"finish_reason":"length"' in data and not reached.is_set():
            reached.set()
            await sent.wait()
        await write(self, data, more=more)

    monkeypatch.setattr(responses.EventWriter, "write", held)
    running = two.router.context.running
    async with streamed(two.router.http, path, body) as answer:
        events = events_of(answer)
        seen = [await anext(events) for _ in range(SENT)]
        await reached.wait()
        await until(lambda: not running, "the call is complete")
        # The worker has had its release, if any, before the end of this answer.
        await all_events(two.router.http, path, {"prompt": [9], "max_tokens": 2})
        losing = asyncio.create_task(two.lose())
        await until(lambda: not running.accepting, "it stops")
        sent.set()
        await losing
    rest = await all_events(two.router.http, path, body, after=id_of(seen[-1]))
    assert anonymous(seen + rest) == anonymous(whole)


async def complete_call(cluster):
    """Return a call of which all events have come, and whose caller wants its stream to be kept."""
    sampling = common_pb2.Sampling(max_tokens=2)
    request = pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[1, 2]), sampling=sampling, resumable_s=30.0)
    call = cluster.stub.Generate(request, metadata=((KEEPS, "1"),))
    async for event in call:
        if event.WhichOneof("event") == "completed":
            return call


async def test_a_router_that_stops_does_not_wait_for_complete_calls(two):
    call = await complete_call(two.cluster)
    assert two.decode.count("release") == 0, "its stream is kept"
    async with asyncio.timeout(scaled(20)):  # less than the time for running requests
        await two.router.stop(grace_s=scaled(600))
    assert two.decode.count("release") == 0, "another router may continue it"
    assert await call.code() is grpc.StatusCode.OK


async def test_so_many_complete_calls_are_kept(two, monkeypatch):
    monkeypatch.setattr(client_request, "MAX_KEPT_CALLS", 1)
    kept, beyond = await complete_call(two.cluster), await complete_call(two.cluster)
    assert await beyond.code() is grpc.StatusCode.OK
    await until(lambda: two.decode.count("release") == 1, "no worker keeps its stream")
    assert not kept.done()
    kept.cancel()
    await until(lambda: two.decode.count("release") == 2, "the other one is released, too")
    last = await complete_call(two.cluster)
    assert (last.done(), two.decode.count("release")) == (False, 2), "there is room again"


async def test_a_prompt_without_an_event_begins_with_the_resumed_stream(two):
    """Its request is new, and the answer keeps its id."""
    path, body = "completions", {"prompt": [[1, 2], [3, 4]]}
    whole = await all_events(two.router.http, path, body)
    answer = id_of(whole[0]).split("+")[0]
    two.decode.hold(HELD)
    async with streamed(two.router.http, path, {"prompt": body["prompt"][:1]}) as alone:
        events = events_of(alone)
        seen = [await anext(events) for _ in range(3)]
        await two.lose()
    begun = id_of(seen[-1]).split(":")[0]
    rest = await all_events(two.router.http, path, body, after=f"{answer}+{begun}+:3.0.0")
    assert choices_of(rest) == choices_of(whole)[3:]
    assert id_of(rest[0]).startswith(f"{answer}+{begun}+")


STRANGE = "0" * 32 + ":1.0"
TWO = {"prompt": ["a", "b"]}
PLAIN = {"prompt": [1, 2]}


@pytest.mark.parametrize(
    ("value", "body", "says"),
    [
        ("x", PLAIN, "REQUEST, a colon, and 2 counts"),
        ("x" * 1000, PLAIN, "REQUEST, a colon"),
        ("a b:0.1", PLAIN, "REQUEST, a colon"),
        ("r:1", PLAIN, "2 counts"),
        ("r:1.0", {**PLAIN, "n": 2}, "3 counts"),
        ("r:1.0", {**PLAIN, "thoughts": True}, "3 counts"),
        (STRANGE, {**PLAIN, "stream": False}, "only allowed with stream: true"),
        (STRANGE, {"prompt": ["a"] * 128, "n": 8}, "for at most 1023 choices"),
        (STRANGE, {"prompt": ["a"] * 128, "n": 4, "thoughts": True}, "for at most 511 choices"),
        ("r:1.0.0", TWO, "2 times \\+REQUEST, a colon, and 3 counts"),
        ("r+r:1.0.0", TWO, "2 times .REQUEST"),
        ("r+r+:1.1.0", TWO, "2 times .REQUEST"),
        (STRANGE, PLAIN, "no worker keeps this stream; allowed is .* in the last 30 s, with the same body and API key"),
    ],
)
async def test_a_wrong_id_is_named(two, value, body, says):
    status, param, message = await refusal(two.router.http, "completions", body, after=value)
    assert (status, param) == (400, "last-event-id")
    assert re.search(f"got '{re.escape(value[:128])}', but .*{says}", message)
    assert two.cluster.prefill[0].count("prefill") == 0


async def test_only_its_tenant_goes_on_with_a_stream(make, tmp_path):
    two = Two(await make(http="127.0.0.1:0", tokens=token_file(tmp_path / "tokens")))
    path, body, _ = FORMS["usage"]
    seen = await two.cut("usage", key=TOKENS["alice"])
    ask = {"after": id_of(seen[-1]), "key": TOKENS["alice"]}
    for wrong in ({"key": TOKENS["bob"]}, {"key": TOKENS["admin"]}, {"body": {**body, "prompt": [1, 3]}}):
        status, param, _ = await refusal(
            two.router.http, path, wrong.get("body", body), **(ask | {"key": wrong.get("key", ask["key"])})
        )
        assert (status, param) == (400, "last-event-id")
    rest = await all_events(two.router.http, path, body, **ask)
    assert b"".join(seen + rest).count(b'"text"') == SENT + 2  # the held text and the reason, too
    assert two.cluster.prefill[0].count("prefill") == 1
    two.away = True
    status, _, message = await refusal(two.router.http, path, body, **ask)
    assert (status, message) == (503, "the cluster cannot look the stream up now"), "it may be there later"
    await two.router.stop(grace_s=0.0)


async def test_a_stranger_with_the_id_of_a_running_stream_does_not_disturb_it(make, tmp_path):
    two = Two(await make(http="127.0.0.1:0", tokens=token_file(tmp_path / "tokens")))
    await two.lose()
    two.decode.hold(HELD)
    path, body, _ = FORMS["usage"]
    async with streamed(two.router.http, path, body, key=TOKENS["alice"]) as answer:
        events = events_of(answer)
        seen = [await anext(events) for _ in range(HELD)]
        ask = {"after": id_of(seen[-1]), "key": TOKENS["bob"]}
        for other in (body, {**body, "prompt": [1, 3]}):
            assert (await refusal(two.router.http, path, other, **ask))[:2] == (400, "last-event-id")
        two.decode.open("hold")
        async with asyncio.timeout(scaled(20)):
            rest = [event async for event in events]
    assert b"".join(seen + rest).count(b'"text"') == SENT + 2  # the held text and the reason, too
    await two.router.stop(grace_s=0.0)


async def test_ids_end_where_a_stream_cannot_be_repeated(make):
    """Another decode worker has only the rest of the stream. An empty id withdraws the last one."""
    cluster = await make(http="127.0.0.1:0", decode=2)
    cluster.decode[0].hold(HELD)
    cluster.decode[1].hold(HELD)
    async with streamed(cluster.router.http, "completions", PLAIN) as answer:
        events = events_of(answer)
        seen = [await anext(events) for _ in range(HELD)]
        (busy,) = (worker for worker in cluster.decode if worker.committed)
        cluster.decode[1 - cluster.decode.index(busy)].open("hold")
        await busy.kill()
        rest = [event async for event in events]
    assert [event.startswith(b"id: ") for event in seen] == [True] * HELD
    assert rest[0].startswith(b"id:\n")
    assert not any(event.startswith(b"id:") for event in rest[1:])
