"""Channel options, errors for listeners that cannot start, and the channels of both clients."""

import asyncio
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

import baton
import baton.client
from baton.client import _transport_aio, _transport_sync
from baton.errors import Cancelled, ConfigError, NoWorker
from baton.rpc import channel, message_timeout
from baton.rpc.status import from_rpc_error
from tests.support.time_factor import scaled


def test_keepalive_notices_a_frozen_peer_and_a_server_bears_the_pings_of_our_clients():
    link = channel.Link(receive_bytes=1, keepalive_s=1.5, ping_timeout_s=0.5)
    told = {"keepalive_time_ms": 1500, "http2.ping_timeout_ms": 500, "max_receive_message_length": 1}
    for options in (channel.channel_options(link), channel.server_options(link)):
        assert {name: dict(options)[f"grpc.{name}"] for name in told} == told
    least = dict(channel.server_options(channel.PUBLIC))["grpc.http2.min_ping_interval_without_data_ms"]
    assert least <= dict(channel.channel_options(channel.PUBLIC))["grpc.keepalive_time_ms"]


def test_a_listener_that_does_not_answer_fails_a_call_before_its_deadline():
    """Otherwise retries at routers that do not answer take as long as a request has."""
    link = replace(channel.PUBLIC, connect_s=0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with channel.sync_channel(address, link=link) as client, pytest.raises(grpc.RpcError) as failed:
            cast("Any", health_pb2_grpc.HealthStub(client)).Check(health_pb2.HealthCheckRequest(), timeout=scaled(15))
    assert isinstance(from_rpc_error(failed.value), NoWorker)
    assert channel.PUBLIC.connect_s == channel.INTERNAL.connect_s == 5


@pytest.mark.parametrize(
    ("bound", "called"),
    [
        ("0.0.0.0:5", "127.0.0.1:5"),
        ("[::]:5", "[::1]:5"),
        (":::5", "[::1]:5"),
        ("10.0.0.1:5", "10.0.0.1:5"),
        ("localhost:5", "localhost:5"),
    ],
)
def test_a_listener_on_all_addresses_is_called_by_the_loopback(bound, called):
    assert channel.from_here(bound) == called


async def test_a_port_in_use_is_an_error_that_names_it():
    first = channel.aio_server()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        others, ours = f"127.0.0.1:{taken.getsockname()[1]}", channel.bind(first, "127.0.0.1:0")
        assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", ours), "the bound address"
        for address in (others, ours):
            with pytest.raises(ConfigError, match=rf"{address}.*in use"):
                channel.bind(channel.aio_server(), address)
    await first.stop(None)


async def health_server():
    """Return a running server and its address."""
    server = channel.aio_server()
    health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), server)
    address = channel.bind(server, "127.0.0.1:0")
    await server.start()
    return server, address


async def test_silent_connections_are_limited_and_those_beyond_are_closed_at_once(monkeypatch):
    monkeypatch.setattr(channel, "MAX_GRPC_CONNECTIONS", 2)
    server, address = await health_server()
    silent = []
    for begins in (True, True, False):
        reader, writer = await asyncio.open_connection(*address.split(":"))
        assert bool(await reader.read(1)) is begins  # the server's settings, or its end
        silent.append(writer)
    for writer in silent:
        writer.close()
    async with channel.aio_channel(address) as client:
        stub: Any = health_pb2_grpc.HealthStub(client)
        await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
    await server.stop(None)


async def test_a_connection_without_calls_ends_and_the_next_call_has_a_new_one(monkeypatch):
    monkeypatch.setattr(channel, "MAX_IDLE_SECONDS", 0.3)
    server, address = await health_server()
    other = channel.aio_channel(address, link=channel.PUBLIC)  # equal channels would share a connection
    async with channel.aio_channel(address) as busy, other as idle:
        stubs: list[Any] = [health_pb2_grpc.HealthStub(one) for one in (busy, idle)]
        watch = stubs[0].Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status
        assert (await stubs[1].Check(health_pb2.HealthCheckRequest())).status
        while (state := idle.get_state()) is grpc.ChannelConnectivity.READY:
            await asyncio.wait_for(idle.wait_for_state_change(state), scaled(20))
        assert busy.get_state() is grpc.ChannelConnectivity.READY
        assert not watch.done()
        assert (await stubs[1].Check(health_pb2.HealthCheckRequest())).status
    await server.stop(None)


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_call_whose_message_does_not_arrive_is_ended(monkeypatch, method):
    """Other calls of the connection go on, with whole messages, and so do calls whose message was in time."""
    monkeypatch.setattr(message_timeout, "MAX_MESSAGE_SECONDS", 0.1)
    server, address = await health_server()
    async with channel.aio_channel(address) as client:
        stub: Any = health_pb2_grpc.HealthStub(client)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status
        silent: Any = client.stream_stream(f"/grpc.health.v1.Health/{method}")()
        with pytest.raises(grpc.aio.AioRpcError, match="message must arrive within"):
            await asyncio.wait_for(silent.read(), scaled(20))
        assert await silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status
        assert not watch.done()
    await server.stop(None)


@pytest.mark.slow
async def test_no_call_of_a_burst_is_cancelled_while_the_event_loop_is_busy():
    """Without the option, gRPC cancels a call while 1,000 others are pending."""

    server, sent = channel.aio_server(), threading.Event()
    health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), server)
    address = channel.bind(server, "127.0.0.1:0")
    await server.start()

    def burst():
        with channel.sync_channel(address) as client:
            stub: Any = health_pb2_grpc.HealthStub(client)
            calls = [stub.Check.future(health_pb2.HealthCheckRequest()) for _ in range(3500)]
            sent.set()
            return {type(call.exception()) for call in calls}

    ended = asyncio.get_running_loop().run_in_executor(None, burst)
    sent.wait()  # blocks the loop
    assert await ended == {type(None)}
    await server.stop(None)


NO_ADDRESSES = ("", "localhost", ":50051", "127.0.0.1:http", "127.0.0.1:", "127.0.0.1:99999")
ELSEWHERE = ("192.0.2.1:0", r"192\.0\.2\.1:0.*[Cc]annot assign")


@pytest.mark.parametrize(("address", "says"), [*((wrong, "host:port") for wrong in NO_ADDRESSES), ELSEWHERE])
async def test_an_address_must_be_host_and_port_of_this_machine(address: str, says: str):
    with pytest.raises(ConfigError, match=says):
        channel.bind(channel.aio_server(), address)


THREADS = 8


def test_threads_that_come_first_together_share_a_channel(monkeypatch: pytest.MonkeyPatch):
    real, start = channel.sync_channel, threading.Barrier(THREADS)

    def slowly(target: str, **more: object):
        threading.Event().wait(0.2)  # time for a second channel, if there were no lock
        return real(target)

    connect = Mock(side_effect=slowly)
    monkeypatch.setattr(channel, "sync_channel", connect)
    stubs = _transport_sync.Stubs(None, "", proxy=False)

    def use(number: int) -> object:
        start.wait()
        return stubs.of("127.0.0.1:1")

    with ThreadPoolExecutor(THREADS) as threads:
        found = set(threads.map(use, range(THREADS)))
    assert (len(found), connect.call_count) == (1, 1)
    stubs.close()


async def test_a_closed_client_makes_no_channel():
    blocking, asynchronous = _transport_sync.Stubs(None, "", proxy=False), _transport_aio.Stubs(None, "", proxy=False)
    blocking.close()
    await asynchronous.close()
    for stubs in (blocking, asynchronous):
        with pytest.raises(Cancelled, match="the client was closed"):
            stubs.of("127.0.0.1:1")


def test_the_package_exports_the_clients():
    assert (baton.Client, baton.AsyncClient) == (baton.client.Client, baton.client.AsyncClient)
    with pytest.raises(AttributeError, match="Clinet"):
        _ = baton.Clinet  # type: ignore[attr-defined]


@pytest.mark.parametrize(("target", "proxy"), [("127.0.0.1:1", False), ("router.example:1", True)])
def test_of_several_routers_only_those_elsewhere_are_behind_a_proxy(
    monkeypatch: pytest.MonkeyPatch, target: str, proxy: bool
):
    monkeypatch.setattr(channel, "sync_channel", connect := Mock())
    _transport_sync.Stubs(None, "", proxy=True).connect(target)
    assert connect.call_args.kwargs["proxy"] is proxy
