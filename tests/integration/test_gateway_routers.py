"""A gateway in front of several routers: readiness, routers that stop, and streams that lose them more than once."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.errors import BatonError, InvalidRequest, NoWorker, UnknownModel, WorkerLost
from baton.rpc import channel
from baton.rpc.status import abort
from baton.rpc.v1 import common_pb2, inference_pb2_grpc
from baton.rpc.v1 import inference_pb2 as pb
from router.openai.responses import EVENTS
from router.openai.server import GatewaySettings, HttpServer
from router.openai.upstream import Upstream
from tests.integration.gateway_support import USAGE, FakeInference, completed, finished, raw, tokens
from tests.support.clients import Event, serving
from tests.support.waiting import until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
ONE, TWO = tokens(0, 0, [1], "dog"), tokens(0, 1, [2], " cat")
LOST = WorkerLost("gone")


class Losing(FakeInference):
    """Plays the next script for each Generate or Resume, and adds the defaults that the request left out. An error as
    script refuses the call.
    """

    def __init__(self, *scripts):
        super().__init__()
        self.left, self.resumes = list(scripts), []

    def _events(self, request, context):
        return self._play(request, context)

    async def Resume(self, request, context):
        self.resumes.append(request)
        async for event in self._play(request.request, context):
            event.request_id = "r1"
            yield event

    async def _play(self, request, context):
        script = self.left.pop(0)
        if isinstance(script, BatonError):
            await abort(context, script, "r1")
        await context.send_initial_metadata((("baton-request-id", "r1"), ("baton-resumable", "1")))
        accepted = pb.Accepted(prompt_tokens=3)
        if not request.sampling.HasField("temperature"):
            accepted.defaults.CopyFrom(common_pb2.Sampling(temperature=0.5, max_tokens=9))
        yield Event(accepted=accepted)
        for step in script:
            if isinstance(step, BatonError):
                await abort(context, step, "r1")
            yield Event(**step)


@asynccontextmanager
async def gateway(*targets):
    http = HttpServer("127.0.0.1:0", GatewaySettings())
    await http.start(",".join(targets))
    try:
        yield http.address
    finally:
        await http.stop(0)


async def ask(address, *, stream=False, **headers):
    """Return the status of a completion, and its answer or the data of its events."""
    body = {"prompt": "x", "stream": stream} | (USAGE if stream else {})
    status, _, data = await raw(address, "POST", "/v1/completions", json.dumps(body).encode(), **headers)
    if not stream:
        return status, json.loads(data)
    return status, [json.loads(each.split(b"\n\n")[0]) for each in data.split(b"data: ")[1:] if b"[DONE]" not in each]


def text_of(events):
    return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))


class Healthy(FakeInference):
    """A router with this health."""

    def __init__(self, status):
        super().__init__()
        self.health, self.status = health.aio.HealthServicer(), status

    @asynccontextmanager
    async def serving(self):
        server = channel.aio_server(link=channel.PUBLIC)
        inference_pb2_grpc.add_InferenceServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        self.address = channel.bind(server, "127.0.0.1:0", None)
        await self.becomes(self.status)
        await server.start()
        yield self
        await server.stop(None)

    async def becomes(self, status):
        await self.health.set("baton.v1.Inference", status)


async def test_a_gateway_is_ready_if_one_of_its_routers_is():
    async with Healthy(NOT_SERVING).serving() as first, Healthy(SERVING).serving() as second:
        upstream = Upstream(["127.0.0.1:1", first.address, second.address])
        for found, other in ((second, first), (first, second)):
            assert await upstream.ready()
            await upstream.models(())
            assert (found.listed, other.listed) == (1, 0), "calls go there"
            first.listed = second.listed = 0
            await found.becomes(NOT_SERVING)
            await other.becomes(SERVING)
        await first.becomes(NOT_SERVING)
        await second.becomes(NOT_SERVING)
        assert not await upstream.ready()
        await upstream.close()


@pytest.mark.parametrize("queued", [False, True], ids=["new", "queued"])
async def test_a_call_that_a_stopping_router_refuses_goes_to_the_next_one(make, queued):
    first, second = await make(), await make()
    running = first.router.context.running
    if queued:
        first.prefill[0].hold("prefill")
    async with gateway(first.router.grpc, second.router.grpc) as address:
        if queued:
            asking = asyncio.create_task(ask(address))
            await until(lambda: len(running) == 1, "it waits for its first event")
            running.stop()
            running.hand_over(NoWorker("this router is stopping"))
        else:
            running.stop()
            asking = asyncio.create_task(ask(address))
        status, answer = await asking
    assert (status, len(second.prefill[0].specs)) == (200, 1), answer


async def test_a_call_whose_time_in_the_queue_is_over_is_not_repeated():
    async with serving(FakeInference()) as first, serving(FakeInference()) as second:

        async def script(request):
            yield NoWorker("no pair of workers became free within 30 s")

        first.script = script
        async with gateway(first.address, second.address) as address:
            status, answer = await ask(address)
    assert (status, answer["error"]["code"], len(first.requests), second.requests) == (503, "no_worker", 1, [])


async def test_a_stream_that_loses_two_routers_keeps_the_defaults_of_the_first():
    router = Losing([ONE, LOST], [TWO, LOST], [tokens(0, 2, [3], "!"), finished(), completed()])
    async with serving(router), gateway(router.address) as address:
        status, events = await ask(address, stream=True)
    assert (status, text_of(events)) == (200, "dog cat!")
    for resume in router.resumes:
        assert (resume.request.sampling.temperature, resume.request.sampling.max_tokens) == (0.5, 9)
    assert [list(resume.received[0].ids) for resume in router.resumes] == [[1], [1, 2]]


async def test_a_router_that_dies_after_the_last_event_has_given_the_whole_answer():
    router = Losing([ONE, finished(), completed(), LOST], [finished(), completed()])
    async with serving(router), gateway(router.address) as address:
        status, events = await ask(address, stream=True)
    assert (status, text_of(events), router.resumes) == (200, "dog", [])
    assert events[-1]["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("refusal", [InvalidRequest.of("received[0]", "too long"), UnknownModel("not served")])
async def test_a_stream_that_all_routers_refuse_to_continue_ends_with_its_loss(refusal):
    router, other = Losing([ONE, LOST], refusal), Losing(refusal)
    async with serving(router), serving(other), gateway(router.address, other.address) as address:
        status, events = await ask(address, stream=True)
    assert (status, text_of(events)) == (200, "dog")
    assert (events[-1]["error"]["code"], events[-1]["error"]["message"]) == ("worker_lost", "gone")
    assert (len(router.resumes), len(other.resumes)) == (1, 1), "each router is asked once"


async def test_a_stream_that_one_router_refuses_to_continue_goes_on_at_the_next():
    """Refusals count anew after each token."""
    refusal = UnknownModel("not served")
    router, other = Losing([ONE, LOST], [TWO, LOST], [finished(), completed()]), Losing(refusal, refusal)
    async with serving(router), serving(other), gateway(router.address, other.address) as address:
        status, events = await ask(address, stream=True)
    assert (status, text_of(events), len(other.resumes), "usage" in events[-1]) == (200, "dog cat", 2, True)


class Repeating(FakeInference):
    """Repeats two streams. The second one begins after `held`."""

    def __init__(self):
        super().__init__()
        self.held = asyncio.Event()

    async def Resume(self, request, context):
        if request.request_id == "b":
            await self.held.wait()
        await context.send_initial_metadata((("baton-request-id", request.request_id),))
        for step in ({"accepted": pb.Accepted(prompt_tokens=3)}, ONE, TWO, finished(), completed()):
            event = Event(request_id=request.request_id, **step)
            if event.HasField("tokens"):
                event.tokens.recorded = True
            yield event


async def test_the_ids_of_a_resumed_stream_name_prompts_whose_streams_are_still_to_come():
    body = {"prompt": ["x", "y"], "stream": True}
    async with serving(Repeating()) as router, gateway(router.address) as address:
        data = json.dumps(body).encode()
        headers = {"last-event-id": "a+a+b:1.1.0", "accept": EVENTS}
        reader, writer = await asyncio.open_connection(*address.split(":"))
        lines = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + data)
        await reader.readuntil(b"id: a+a+")
        assert (await reader.readline()).strip() == b"b:2.1.0"
        router.held.set()
        await reader.readuntil(b"[DONE]")
        writer.close()
