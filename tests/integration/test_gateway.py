"""The HTTP gateway in a router process, with the `openai` package as the client and fake workers."""

import asyncio
import json
from dataclasses import replace

import openai
import pytest

from baton.errors import ConfigError
from baton.metrics.base import STAGES
from baton.tokenizer import OracleTokenizer
from router.context import RouterSettings
from router.server import serve
from tests.integration.gateway_support import USAGE, asking, refused
from tests.support.waiting import until


def cluster_with(**settings):
    """Return a mark that gives the test's cluster these settings."""
    return pytest.mark.parametrize("cluster", [settings], indirect=True, ids=[""])


@pytest.fixture
async def cluster(make, request):
    return await make(http="127.0.0.1:0", **getattr(request, "param", {}))


@pytest.fixture
async def gateway(cluster):
    async with asking(cluster.router.http, max_tokens=4) as made:
        yield made


def text_of(count):
    return "".join(f"<{index}>" for index in range(count)) + "!"


async def test_without_tokens_a_long_credential_has_no_effect(gateway):
    assert (await gateway.raw("GET", "/v1/models", authorization="Bearer " + "k" * 8192))[0] == 200


@pytest.fixture
def held(cluster):
    """An event that lets decode workers send their second token."""
    gate = cluster.decode[0].gates["decode"]
    gate.clear()
    return gate


async def begun(gateway):
    """Start a stream and read its first chunk."""
    found = await gateway.complete(stream=True)
    assert (await anext(found)).choices[0].text == "<0>"
    return found


async def test_completion(gateway):
    done = await gateway.complete([1, 2, 3], max_tokens=5, temperature=0)
    assert (done.object, done.model) == ("text_completion", "oracle")
    assert done.id.startswith("cmpl-")
    assert done._request_id == done.id.removeprefix("cmpl-")
    assert [(c.index, c.text, c.finish_reason) for c in done.choices] == [(0, text_of(5), "length")]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3, 5, 8)


async def test_where_the_time_went(gateway):
    whole = await gateway.complete([1, 2, 3], max_tokens=5)
    *chunks, last = await gateway.streamed("complete", [1, 2, 3], max_tokens=5, **USAGE)
    for took in (whole.timings, last.timings):
        stages = [took[f"{stage}_s"] for stage in STAGES]
        assert len(took) == len(stages) + 2
        assert sum(stages) == pytest.approx(took["e2e_s"])
        assert 0 < took["ttft_s"] < took["e2e_s"]
    assert not any("timings" in chunk.model_dump() for chunk in chunks)
    bare = [chunk.model_dump() for chunk in await gateway.streamed("complete", [1, 2, 3])]
    assert not any("timings" in chunk or chunk.get("usage") for chunk in bare)


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
async def test_prompt_forms(cluster, gateway, prompt, reaches):
    done = await gateway.complete(prompt)
    assert [(choice.index, choice.text) for choice in done.choices] == [(i, text_of(4)) for i in range(len(reaches))]
    assert sorted(list(spec.prompt) for spec in cluster.prefill[0].specs) == sorted(reaches)
    assert done.usage.prompt_tokens == sum(map(len, reaches))


async def test_sampling_fields(cluster, gateway):
    extra = {
        "top_k": 7, "min_p": 0.25, "min_tokens": 2, "ignore_eos": True, "repetition_penalty": 1.5,
        "stop_token_ids": [9, 10], "cache_salt": "tenant", "priority": 3, "deterministic": False,
    }  # fmt: skip
    given = {"temperature": 0.5, "top_p": 0.75, "seed": 11, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    more = {"stop": ["x", "yz"], "logit_bias": {"5": -3}, "user": "me", "n": 1, "best_of": 1}
    await gateway.complete(**given, **more, extra_body=extra)
    spec = cluster.prefill[0].specs[0]
    assert (spec.cache_scope, spec.priority) == ("tenant", 3)
    same = {**given, **{name: extra[name] for name in list(extra)[:5]}, "max_tokens": 4}
    assert {name: getattr(spec.sampling, name) for name in same} == same
    assert list(spec.sampling.stop) == ["x", "yz"]
    assert list(spec.sampling.stop_token_ids) == [9, 10]
    assert dict(spec.sampling.logit_bias) == {5: -3.0}
    await gateway.complete(stop="end", seed=-1, extra_body={"top_k": -1})
    sampling = cluster.prefill[0].specs[1].sampling
    assert (list(sampling.stop), sampling.seed, sampling.top_k) == (["end"], 2**64 - 1, 0)


async def test_stream(gateway):
    chunks = await gateway.streamed("complete")
    assert "".join(chunk.choices[0].text for chunk in chunks) == text_of(4)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)
    *chunks, last = await gateway.streamed("complete", **USAGE)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], 5, 4)


async def test_stream_on_the_wire(gateway):
    body = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode()
    status, headers, data = await gateway.raw("POST", "/v1/completions", body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["x-request-id"] in data.decode()
    assert data.count(b"data: [DONE]\n\n") == 1
    assert b'"model":"oracle"' in data  # the served model, because the request names none


@pytest.mark.parametrize("streamed", [True, False])
async def test_leaving_cancels(cluster, gateway, held, streamed):
    if streamed:
        await (await begun(gateway)).close()
    else:
        asking = asyncio.create_task(gateway.complete())
        await until(lambda: cluster.handed_over, "it decodes")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await cluster.nothing_is_left()
    assert cluster.router.context.sinks.outcomes["cancelled"] == 1


@pytest.mark.parametrize(
    ("wrong", "param", "says"),
    [
        ({"max_tokens": 3000}, "max_tokens", "maximum context length is 2048"),
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
        ({"extra_body": {"thoughts": True}}, "thoughts", "does not think"),
        ({"extra_body": {"think_while_decoding": True}}, "think_while_decoding", "does not think"),
        ({"temperature": -1, "top_p": 2}, "temperature", "temperature: .*top_p: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
async def test_refusals_name_the_http_field(gateway, wrong, param, says):
    found = await refused(openai.BadRequestError, gateway.complete(**wrong), says)
    assert (found.param, found.type) == (param, "invalid_request_error")
    assert "sampling." not in found.message


async def test_models(gateway):
    models = gateway.client.models
    (model,) = [model async for model in models.list()]
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("oracle", "model", "baton", 2048)
    assert (await models.retrieve("oracle")).id == "oracle"
    await refused(openai.NotFoundError, models.retrieve("org/other"), "oracle")
    assert await gateway.raw("GET", "/v1/models/") == await gateway.raw("GET", "/v1/models")


async def test_tokens_of_a_text_or_a_chat_and_back(gateway):
    async def post(path, **body):
        status, _, answer = await gateway.raw("POST", path, json.dumps(body).encode())
        return status, json.loads(answer)

    ids = OracleTokenizer().encode("hello")
    known = {"max_model_len": 2048, "token_strs": None}
    assert await post("/tokenize", prompt="hello") == (200, {"count": len(ids), "tokens": ids, **known})
    assert await post("/detokenize", tokens=ids) == (200, {"prompt": "hello"})
    status, found = await post("/tokenize", messages=[{"role": "user", "content": "hello"}])
    assert (status, bytes(found["tokens"])) == (200, b"user: hello\nassistant:")
    status, found = await post("/detokenize", tokens=[70_000])
    assert (status, found["error"]["param"]) == (400, "tokens")
    assert (await post("/tokenize", prompt="x", model="other"))[0] == 404


@cluster_with(http_origins=("https://there.example",))
async def test_pages_of_listed_sites_may_ask(gateway):
    page = {"origin": "https://there.example", "sec_fetch_site": "cross-site"}
    asks = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    status, headers, _ = await gateway.raw("OPTIONS", "/v1/completions", **page, **asks)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://there.example")
    assert "authorization" in headers["access-control-allow-headers"]
    status, headers, _ = await gateway.raw("GET", "/v1/models", **page)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://there.example")
    exposed = set(headers["access-control-expose-headers"].split(", "))
    assert {"retry-after", "baton-ttft-ms", "baton-itl-ms", "x-request-id"} <= exposed
    status, headers, _ = await gateway.raw("GET", "/v1/models", **page | {"origin": "https://other.example"})
    assert (status, "access-control-allow-origin" in headers) == (403, False)


async def test_rejections_of_the_gateway_are_events_without_what_was_sent(cluster, gateway):
    sinks = cluster.router.context.sinks
    asked = [
        ("POST", "/v1/completions", b'{"prompt": 5, "secret": 1}', {}, 400, "HTTP 400 invalid_value: prompt"),
        (
            "POST",
            "/v1/messages",
            b'{"secret": "x", "messages": []}',
            {},
            400,
            "HTTP 400 invalid_value: messages",
        ),
        ("POST", "/v1/completions", b'{"prompt": "x", "secret": 1}', {}, 400, "HTTP 400 unknown_parameter"),
        (
            "POST",
            "/v1/completions",
            b"{}",
            {"content_type": "text/plain"},
            415,
            "HTTP 415 unsupported_media_type: content-type",
        ),
        ("GET", "/secret", b"", {}, 404, "HTTP 404 not_found"),
        ("GET", "/v1/completions", b"", {}, 405, "HTTP 405 method_not_allowed"),
        ("GET", "/health", b"", {"host": "secret.example"}, 403, "HTTP 403 wrong_host"),
        ("GET", "/health", b"", {}, 200, ""),
    ]
    for method, path, body, headers, status, _ in asked:
        assert (await gateway.raw(method, path, body, **headers))[0] == status
    sinks.activity.happenings.settle()
    found = [one.text for one in sinks.activity.happenings.since(0) if one.kind == "refused"]
    assert found == [text for *_, text in asked if text]
    assert (sinks.outcomes["refused"], sinks.activity.recent.window().refused) == (7, 7)


@cluster_with(version="1.2.3")
async def test_operations(cluster, gateway):
    async def get(path):
        status, _, body = await gateway.raw("GET", path)
        return status, body.decode()

    async def ready(wanted):
        return await get("/ready") == wanted

    assert await get("/health") == await get("/ping") == (200, "ok\n")
    assert await get("/version") == (200, '{"version":"1.2.3"}')
    assert 'baton_build_info{cluster="test"' in (await get("/metrics"))[1]
    await until(lambda: ready((200, "ready\n")), "it is ready")
    await cluster.decode[0].kill()
    await until(lambda: ready((503, "not ready\n")), "it is not")


@cluster_with(client_stall_s=7.0)
async def test_a_slow_reader_has_the_time_that_the_router_gives(cluster):
    assert cluster.router._gateway._settings.stall_s == 7.0


async def test_stop_lets_a_stream_finish(cluster, gateway, held):
    found = await begun(gateway)
    stopping = asyncio.create_task(cluster.router.stop(grace_s=20.0))
    await until(lambda: not cluster.router.context.running.accepting, "it stops")
    held.set()
    rest = [chunk.choices[0].text async for chunk in found]
    assert "<0>" + "".join(rest) == text_of(4)
    await stopping
    await refused(openai.APIConnectionError, gateway.complete())


async def test_stop_ends_what_does_not_finish(cluster, gateway, held):
    found = await begun(gateway)
    await cluster.router.stop(grace_s=0.0)
    await refused(openai.APIError, anext(found), "stopping")


async def test_a_port_in_use_is_named(cluster):
    settings = RouterSettings("second", "oracle", "", "127.0.0.1:0", metrics="127.0.0.1:0", http=cluster.router.http)
    with pytest.raises(ConfigError, match=cluster.router.http):
        await serve(settings, cluster.source, OracleTokenizer())
    again = await serve(replace(settings, http="127.0.0.1:0"), cluster.source, OracleTokenizer())
    await again.stop(0.0)
