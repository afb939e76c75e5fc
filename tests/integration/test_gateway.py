"""The HTTP gateway in a router process, with the `openai` package as the client and fake workers behind."""

import asyncio
import json
from dataclasses import replace

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from baton.errors import ConfigError
from baton.telemetry.labels import STAGES
from baton.tokenizer import OracleTokenizer
from router.floor import RouterSettings
from router.server import serve
from tests.integration.gateway_support import raw
from tests.support.waiting import until


@pytest.fixture
async def cluster(make):
    return await make(http="127.0.0.1:0")


@pytest.fixture
async def client(cluster):
    async with client_of(cluster) as made:
        yield made


def client_of(cluster):
    return AsyncOpenAI(base_url=f"http://{cluster.router.http}/v1", api_key="k", max_retries=0)


def text_of(count):
    return "".join(f"<{index}>" for index in range(count)) + "!"


async def ask(client, prompt="hello", **options):
    return await client.completions.create(model="oracle", prompt=prompt, **{"max_tokens": 4, **options})


async def stream(client, **options):
    return await ask(client, stream=True, **options)


# --- answers


async def test_completion(client):
    done = await ask(client, prompt=[1, 2, 3], max_tokens=5, temperature=0)
    assert (done.object, done.model) == ("text_completion", "oracle")
    assert done.id.startswith("cmpl-")
    assert done._request_id == done.id.removeprefix("cmpl-")
    assert [(c.index, c.text, c.finish_reason) for c in done.choices] == [(0, text_of(5), "length")]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3, 5, 8)


async def test_where_the_time_went(client):
    whole = await ask(client, prompt=[1, 2, 3], max_tokens=5)
    usage = {"include_usage": True}
    chunks = [c async for c in await ask(client, prompt=[1, 2, 3], max_tokens=5, stream=True, stream_options=usage)]
    for took in (whole.timings, chunks[-1].timings):
        stages = [took[f"{stage}_s"] for stage in STAGES]
        assert len(took) == len(stages) + 2
        assert sum(stages) == pytest.approx(took["e2e_s"])
        assert 0 < took["ttft_s"] < took["e2e_s"]
    assert not any("timings" in chunk.model_dump() for chunk in chunks[:-1])
    bare = [chunk.model_dump() async for chunk in await ask(client, prompt=[1, 2, 3], stream=True)]
    assert not any("timings" in chunk or chunk.get("usage") for chunk in bare)


async def test_sync_client(cluster):
    def all_of_it():
        with OpenAI(base_url=f"http://{cluster.router.http}/v1", api_key="k", max_retries=0) as client:
            whole = client.completions.create(model="oracle", prompt="hello", max_tokens=4)
            pieces = client.completions.create(model="oracle", prompt="hello", max_tokens=4, stream=True)
            return whole.choices[0].text, "".join(chunk.choices[0].text for chunk in pieces)

    assert await asyncio.to_thread(all_of_it) == (text_of(4), text_of(4))


async def test_max_tokens_default(client):
    done = await client.completions.create(model="oracle", prompt="hello")
    assert done.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "reaches"),
    [
        ("hello", [list(b"hello")]),
        (["ab", "c"], [list(b"ab"), list(b"c")]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
    ],
    ids=["string", "strings", "ids", "lists of ids"],
)
async def test_prompt_forms(cluster, client, prompt, reaches):
    done = await ask(client, prompt=prompt)
    assert [(choice.index, choice.text) for choice in done.choices] == [(i, text_of(4)) for i in range(len(reaches))]
    assert sorted(list(spec.prompt) for spec in cluster.prefill[0].specs) == sorted(reaches)
    assert done.usage.prompt_tokens == sum(map(len, reaches))


async def test_sampling_fields(cluster, client):
    extra = {
        "top_k": 7, "min_p": 0.25, "min_tokens": 2, "ignore_eos": True, "repetition_penalty": 1.5,
        "stop_token_ids": [9, 10], "cache_salt": "tenant", "priority": 3, "deterministic": False,
    }  # fmt: skip
    given = {"temperature": 0.5, "top_p": 0.75, "seed": 11, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    await ask(client, **given, stop=["x", "yz"], logit_bias={"5": -3}, user="me", n=1, best_of=1, extra_body=extra)
    spec = cluster.prefill[0].specs[0]
    assert (spec.cache_scope, spec.priority) == ("tenant", 3)
    same = {**given, **{name: extra[name] for name in list(extra)[:5]}, "max_tokens": 4}
    assert {name: getattr(spec.sampling, name) for name in same} == same
    assert list(spec.sampling.stop) == ["x", "yz"]
    assert list(spec.sampling.stop_token_ids) == [9, 10]
    assert dict(spec.sampling.logit_bias) == {5: -3.0}


async def test_thoughts_of_a_model_that_does_not_think(client):
    for field in ("thoughts", "think_while_decoding"):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(client, extra_body={field: True})
        assert (caught.value.param, "does not think" in caught.value.message) == (field, True)
    await ask(client, extra_body={"thoughts": False, "think_while_decoding": False})


async def test_stop_as_one_string_and_a_negative_seed(cluster, client):
    await ask(client, stop="end", seed=-1, extra_body={"top_k": -1})
    sampling = cluster.prefill[0].specs[0].sampling
    assert (list(sampling.stop), sampling.seed, sampling.top_k) == (["end"], 2**64 - 1, 0)


# --- streams


async def test_stream(client):
    chunks = [chunk async for chunk in await stream(client)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text_of(4)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


async def test_stream_usage(client):
    chunks = [chunk async for chunk in await stream(client, stream_options={"include_usage": True})]
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, 4)


async def test_stream_of_many_prompts(client):
    texts: dict[int, str] = {}
    async for chunk in await stream(client, prompt=["a", "b", "c"]):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {index: text_of(4) for index in range(3)}


async def test_stream_on_the_wire(cluster):
    body = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode()
    status, headers, data = await raw(cluster.router.http, "POST", "/v1/completions", body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["x-request-id"] in data.decode()
    assert data.count(b"data: [DONE]\n\n") == 1
    assert b'"model":"oracle"' in data  # the served one, since none was named


async def test_deltas_come_as_they_are_made(cluster, client):
    cluster.decode[0].gates["decode"].clear()
    found = await stream(client)
    assert (await anext(found)).choices[0].text == "<0>"
    assert cluster.router.floor.running
    cluster.decode[0].gates["decode"].set()
    assert "".join([chunk.choices[0].text async for chunk in found]) == text_of(4).removeprefix("<0>")


@pytest.mark.parametrize("streamed", [True, False])
async def test_leaving_cancels(cluster, client, streamed):
    cluster.decode[0].gates["decode"].clear()
    if streamed:
        found = await stream(client)
        await anext(found)
        await found.close()
    else:
        asking = asyncio.create_task(ask(client))
        await until(lambda: cluster.handed_over, "it decodes")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await cluster.nothing_is_left()
    assert cluster.router.floor.outcomes["cancelled"] == 1


async def test_error_within_a_stream(cluster, client):
    """Nobody is left to go on with it."""
    cluster.decode[0].gates["decode"].clear()
    cluster.router.floor.admission._max_wait_s = 0.1
    found = await stream(client)
    await anext(found)
    await cluster.decode[0].kill()
    with pytest.raises(openai.APIError, match="no decode worker is connected") as failed:
        await anext(found)
    assert failed.value.code == "no_worker"


# --- refusals


@pytest.mark.parametrize(
    ("wrong", "param", "says"),
    [
        ({"temperature": -1}, "temperature", "must be"),
        ({"max_tokens": 3000}, "max_tokens", "length of 2048"),
        ({"max_tokens": 0}, "max_tokens", "must be"),
        ({"max_tokens": 2**40}, "max_tokens", "less than"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"user": "x" * 200}, "user", "at most 128"),
        ({"logprobs": 10_000}, "logprobs", "must be"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "vocabulary"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
        ({"prompt": [[1], [70_000]]}, "prompt[1]", "vocabulary"),
        ({"extra_body": {"cache_salt": "x" * 300}}, "cache_salt", "at most 256"),
        ({"extra_body": {"priority": 101}}, "priority", "between"),
        ({"extra_body": {"min_tokens": 9}}, "min_tokens", "at most max_tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
async def test_refusals_name_the_http_field(client, wrong, param, says):
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        await ask(client, **wrong)
    assert (refused.value.param, refused.value.type) == (param, "invalid_request_error")
    assert "sampling." not in refused.value.message


async def test_all_mistakes_at_once(client):
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(client, temperature=-1, top_p=2)
    assert "temperature: " in refused.value.message
    assert "top_p: " in refused.value.message


async def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError, match="'oracle' is") as refused:
        await client.completions.create(model="gpt-5", prompt="x")
    assert refused.value.code == "model_not_found"


async def test_overload(make):
    cluster = await make(http="127.0.0.1:0", queue_max_requests=1, blocks=1)
    cluster.decode[0].gates["decode"].clear()
    async with client_of(cluster) as client:
        running = await stream(client)
        await anext(running)
        waiting = asyncio.create_task(ask(client))
        await until(lambda: cluster.waits(1), "one waits")
        with pytest.raises(openai.InternalServerError) as refused:
            await ask(client)
        assert (refused.value.status_code, refused.value.code) == (503, "overloaded")
        headers = refused.value.response.headers
        assert int(headers["retry-after"]) >= 1
        assert (float(headers["retry-after-ms"]) > 0, headers["x-should-retry"]) == (True, "true")
        cluster.decode[0].gates["decode"].set()
        assert (await waiting).choices[0].text == text_of(4)
        await running.close()


# --- the rest


async def test_models(client):
    (model,) = [model async for model in client.models.list()]
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("oracle", "model", "baton", 2048)
    assert (await client.models.retrieve("oracle")).id == "oracle"
    with pytest.raises(openai.NotFoundError, match="oracle"):
        await client.models.retrieve("org/other")


async def test_operations(make):
    cluster = await make(http="127.0.0.1:0", version="1.2.3")

    async def get(path):
        status, _, body = await raw(cluster.router.http, "GET", path)
        return status, body.decode()

    async def ready(wanted):
        return await get("/ready") == wanted

    assert await get("/health") == (200, "ok\n")
    assert await get("/version") == (200, '{"version":"1.2.3"}')
    assert 'baton_build_info{cluster="test"' in (await get("/metrics"))[1]
    await until(lambda: ready((200, "ready\n")), "it is ready")
    await cluster.decode[0].kill()
    await until(lambda: ready((503, "not ready\n")), "it is not")


async def test_a_slow_reader_has_the_time_that_the_router_gives(make):
    cluster = await make(http="127.0.0.1:0", client_stall_s=7.0)
    assert cluster.router._gateway._settings.patience.stall_s == 7.0


async def test_stop_lets_a_stream_finish(cluster, client):
    decode = cluster.decode[0]
    decode.gates["decode"].clear()
    found = await stream(client)
    first = await anext(found)
    stopping = asyncio.create_task(cluster.router.stop(grace_s=20.0))
    await until(lambda: not cluster.router.floor.accepting, "it stops")
    decode.gates["decode"].set()
    rest = [chunk.choices[0].text async for chunk in found]
    assert first.choices[0].text + "".join(rest) == text_of(4)
    await stopping
    with pytest.raises(openai.APIConnectionError):
        await ask(client)


async def test_stop_ends_what_does_not_finish(cluster, client):
    cluster.decode[0].gates["decode"].clear()
    found = await stream(client)
    await anext(found)
    await cluster.router.stop(grace_s=0.0)
    with pytest.raises(openai.APIError, match="stopping"):
        await anext(found)


async def test_a_port_in_use_is_named(cluster):
    settings = RouterSettings("second", "oracle", "", "127.0.0.1:0", metrics="127.0.0.1:0", http=cluster.router.http)
    with pytest.raises(ConfigError, match=cluster.router.http):
        await serve(settings, cluster.source, OracleTokenizer())
    again = await serve(replace(settings, http="127.0.0.1:0"), cluster.source, OracleTokenizer())
    await again.stop(0.0)
