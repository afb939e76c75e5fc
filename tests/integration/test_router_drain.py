"""A router that stops while another one listens on the same port, and the gateway's inner listener during that."""

import asyncio
import contextlib
import stat
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton import AsyncClient
from baton.errors import BatonError, NoWorker
from baton.rpc.channel import aio_channel
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from router import service
from router.openai.server import GatewaySettings, HttpServer
from tests.integration.access_support import ask, bearer, methods_of, token_file
from tests.integration.gateway_support import raw
from tests.support.in_process_router import at
from tests.support.waiting import at_most, until

CALLERS = 8


async def pair(make, **settings):
    """Return two routers on one port, each with its own workers, which show the router of a request."""
    first = await make(share_port=True, **settings)
    return first, await make(share_port=True, grpc=first.router.grpc, **settings)


def inner(cluster):
    return f"unix:{cluster.router._inner._folder.name}/router"


async def test_no_call_fails_while_one_of_two_drains(make):
    both = await pair(make)
    failed: list[BatonError] = []
    over = asyncio.Event()
    async with AsyncClient(both[0].router.grpc) as client:
        await client.generate("which one?", max_tokens=1)
        leaving, staying = both if both[0].prefill[0].specs else both[::-1]
        leaving.decode[0].close("decode")
        stream = client.stream("goes on", max_tokens=8)
        await anext(stream)

        async def calls():
            while not over.is_set() and not failed:
                try:
                    await client.generate("one more", max_tokens=1)
                except BatonError as error:
                    failed.append(error)

        callers = [asyncio.create_task(calls()) for _ in range(CALLERS)]
        await until(lambda: failed or len(leaving.prefill[0].specs) > 2 * CALLERS, "calls are under way")
        stopping = asyncio.create_task(leaving.router.stop(20.0))
        await until(lambda: failed or len(staying.prefill[0].specs) > 5 * CALLERS, "the other one serves")
        assert not stopping.done()
        leaving.decode[0].open("decode")
        assert len((await stream.collect()).tokens) == 8
        await stopping
        over.set()
        await asyncio.gather(*callers)
    assert not failed


async def test_connections_are_told_to_go_before_the_end(cluster):
    await at(cluster, "decoding")
    states: list[grpc.ChannelConnectivity] = []
    stopping = asyncio.create_task(cluster.router.stop(20.0))
    async with at_most(5):
        while grpc.ChannelConnectivity.READY not in states or states[-1] is grpc.ChannelConnectivity.READY:
            states.append(cluster.channel.get_state())
            await asyncio.sleep(0)
    assert not stopping.done()
    assert "503" in await cluster.http("/ready")
    cluster.decode[0].open("decode")
    await stopping


async def test_who_watches_the_health_holds_nothing_up(cluster):
    stub: Any = health_pb2_grpc.HealthStub(cluster.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    seen = [await watch.read()]
    async with at_most(10):
        await cluster.router.stop(60.0)
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            while isinstance(found := await watch.read(), health_pb2.HealthCheckResponse):
                seen.append(found)
    assert seen[-1].status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_gateway_asks_its_own_router(make):
    both = await pair(make, http="127.0.0.1:0")
    for cluster in both:
        status, _, _ = await raw(cluster.router.http, "POST", "/v1/completions", b'{"prompt": "x", "max_tokens": 1}')
        assert status == 200
    assert [len(cluster.prefill[0].specs) for cluster in both] == [1, 1]


async def test_a_gateway_reads_tokens_while_its_router_drains(make):
    cluster = await make(http="127.0.0.1:0")
    await at(cluster, "decoding")
    async with aio_channel(inner(cluster)) as channel:
        stopping = asyncio.create_task(cluster.router.stop(20.0))
        await until(lambda: not cluster.router.context.running.accepting, "stopping")
        reply = await InferenceStub(channel).Detokenize(pb.DetokenizeRequest(ids=[104, 105]))
        assert reply.text == "hi"
        with pytest.raises(NoWorker, match="this router is stopping"):
            await cluster.answer(InferenceStub(channel).Generate(pb.GenerateRequest(text="x")))
    cluster.decode[0].open("decode")
    await stopping


async def test_the_inner_listener_asks_for_tokens_as_the_public_one(make, tmp_path):
    cluster = await make(tokens=token_file(tmp_path / "tokens"), http="127.0.0.1:0")

    def compare():
        with grpc.insecure_channel(inner(cluster)) as inside, grpc.insecure_channel(cluster.router.grpc) as outside:
            for method in (name for name in methods_of("public") if "eflection" not in name):
                for who in (None, "wrong", "alice", "admin"):
                    assert ask(inside, method, bearer(who)) == ask(outside, method, bearer(who)), (method, who)

    await asyncio.to_thread(compare)


async def test_nobody_else_gets_at_the_inner_listener_and_nothing_is_left_of_it(make):
    cluster = await make(http="127.0.0.1:0")
    folder = Path(inner(cluster).removeprefix("unix:")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    await cluster.router.stop(0.0)
    assert not folder.exists()


@pytest.mark.parametrize("client", ["SDK", "HTTP"])
async def test_a_router_with_other_defaults_continues_with_those_of_the_first_one(make, monkeypatch, client):
    """The request leaves sampling to the model's generation_config.json, which the second router does not have."""
    added = common_pb2.Sampling(temperature=0.25, top_k=3)
    with monkeypatch.context() as patched:
        patched.setattr(service, "sampling_defaults", lambda _: added)
        first = await make()
    second = await make()
    targets = f"{first.router.grpc},{second.router.grpc}"
    first.decode[0].hold(3)
    async with AsyncExitStack() as stack:
        if client == "SDK":
            stream: Any
            sdk = await stack.enter_async_context(AsyncClient(targets))
            stream = sdk.stream("go on", max_tokens=8, top_k=7)
        else:
            gateway = HttpServer("127.0.0.1:0", GatewaySettings())
            await gateway.start(targets)
            stack.push_async_callback(gateway.stop, 0.0)
            http = await stack.enter_async_context(
                openai.AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="x", max_retries=0)
            )
            stream = await http.completions.create(
                model="oracle", prompt="go on", max_tokens=8, stream=True, extra_body={"top_k": 7}
            )
        await anext(aiter(stream))
        await first.router.stop(0.0)
        async for _ in stream:
            pass
    begun, continued = (cluster.prefill[0].specs[-1].sampling for cluster in (first, second))
    assert (begun.temperature, begun.top_k) == (0.25, 7)
    assert continued == begun


async def test_all_names_and_the_defaults_of_the_model_are_listed(make, monkeypatch):
    monkeypatch.setattr(service, "sampling_defaults", lambda _: common_pb2.Sampling(temperature=0.25))
    cluster = await make(aliases=("gpt-4",), http="127.0.0.1:0")
    [model] = (await cluster.stub.ListModels(pb.ListModelsRequest())).models
    assert (model.id, list(model.aliases), model.defaults.temperature) == ("oracle", ["gpt-4"], 0.25)
    async with openai.AsyncOpenAI(base_url=f"http://{cluster.router.http}/v1", api_key="x", max_retries=0) as http:
        found = await http.models.retrieve("gpt-4")
        assert (found.id, found.to_dict()["generation_defaults"]) == ("gpt-4", {"temperature": 0.25})
        assert [each.id async for each in http.models.list()] == ["oracle", "gpt-4"]
        with pytest.raises(openai.NotFoundError, match="'other' is not served; served: oracle, gpt-4"):
            await http.models.retrieve("other")
        assert (await http.completions.create(model="gpt-4", prompt="x", max_tokens=1)).model == "gpt-4"
    off = await make(generation_defaults=False)
    assert not (await off.stub.ListModels(pb.ListModelsRequest())).models[0].HasField("defaults")
