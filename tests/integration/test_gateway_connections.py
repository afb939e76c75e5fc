"""Connections to the HTTP gateway that read no answer, end no TLS handshake, send their request too slowly, or wait."""

import asyncio
import json
import socket
import ssl
import struct
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import uvloop
from starlette.responses import Response

from baton.errors import EngineFault
from router.openai import parsing, server
from router.openai.connections import BoundedProtocol
from tests.integration.access_support import tls_of
from tests.integration.gateway_support import alone, opened, tokens
from tests.support.time_factor import scaled
from tests.support.waiting import at_most, until


def open_connections(gateway):
    return gateway.http._server.server_state.connections


def listeners(gateway):
    return gateway.http._server.servers


async def test_an_answer_that_is_not_read_ends_its_connection(monkeypatch):
    size = 32 * 2**20  # more than the system's buffers take
    monkeypatch.setattr(server, "_json", lambda value: Response(bytes(size)))
    monkeypatch.setattr(server, "_STALL_MARGIN_S", 0.1)
    async with alone(stall_s=0.0) as gateway:
        reader, writer = await opened(gateway.address, "GET", "/version", limit=1)
        await reader.readexactly(8)
        await until(lambda: not open_connections(gateway), "it is given up")
        got = 0
        with suppress(ConnectionResetError):
            while more := await reader.read(2**20):
                got += len(more)
        assert got < size
        writer.close()


def test_a_slow_reader_keeps_its_connection_and_one_that_reads_nothing_does_not():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        own, timers = listener.accept()[0], []
        http = BoundedProtocol.__new__(BoundedProtocol)
        http.flow, http.transport = Mock(), Mock(get_extra_info=lambda name: own)
        http.loop = Mock()
        http.loop.call_later.side_effect = lambda _, run, *args: timers.append(partial(run, *args))
        http.pause_writing()
        for _ in range(3):
            own.sendall(b"part")
            client.sendall(client.recv(4))
            own.recv(4)  # has the acknowledgement of the part
            timers.pop()()
            assert not http.transport.abort.called
        timers.pop()()
        assert (http.transport.abort.call_count, timers) == (1, [])
        own.close()


async def test_a_reset_connection_leaves_no_timer_that_asks_its_closed_socket(monkeypatch):
    lost, end = [], BoundedProtocol.connection_lost

    def connection_lost(self, exc):
        end(self, exc)
        lost.append((type(exc), self.timeout_keep_alive_task))

    monkeypatch.setattr(BoundedProtocol, "connection_lost", connection_lost)
    async with alone() as gateway:
        reader, writer = await opened(gateway.address, "GET", "/version")
        await reader.readuntil(b"}")
        own = writer.transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with a reset
        writer.transport.abort()
        await until(lambda: lost, "the reset arrives")
    assert lost[0] == (ConnectionResetError, None)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_tls_handshakes_count_as_open_connections_and_have_the_time_of_headers(folder, monkeypatch, loop):
    monkeypatch.setattr(BoundedProtocol, "most", 2)

    async def check():
        async with alone(tls=tls_of(folder)) as gateway:
            address, (listener,) = gateway.address.split(":"), listeners(gateway)
            trusting = ssl.create_default_context(cafile=folder / "ca.pem")
            silent = [await asyncio.open_connection(*address) for _ in range(2)]
            await until(lambda: len(listener.handshakes) == 2, "both are accepted")
            with pytest.raises(OSError):
                await asyncio.open_connection(*address, ssl=trusting)
            silent[0][1].close()
            await until(lambda: len(listener.handshakes) == 1, "one has left")
            reader, writer = await asyncio.open_connection(*address, ssl=trusting)
            writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            silent[1][1].close()
            await until(lambda: not listener.handshakes, "only the answered one is left")
            monkeypatch.setattr(BoundedProtocol, "headers_s", 0.1)
            late, its = await asyncio.open_connection(*address)
            with suppress(ConnectionResetError):
                async with asyncio.timeout(scaled(20)):  # asyncio's own limit is 60 s
                    assert await late.read() == b""
            for one in (writer, its):
                one.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(check())


async def ok(reader, writer):
    """Return whether a request over this connection is answered, and keep the connection."""
    writer.write(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
    return (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")


async def test_a_flood_over_tls_keeps_out_only_new_connections(folder, monkeypatch):
    """Two of its connections end no handshake, two send no request."""
    monkeypatch.setattr(BoundedProtocol, "most", 5)
    async with alone(tls=tls_of(folder)) as gateway:
        address, (listener,) = gateway.address.split(":"), listeners(gateway)
        trusting = ssl.create_default_context(cafile=folder / "ca.pem")
        known = await asyncio.open_connection(*address, ssl=trusting)
        flood = [await asyncio.open_connection(*address, ssl=tls) for tls in (None, None, trusting, trusting)]
        await until(lambda: len(listener.handshakes) + len(open_connections(gateway)) == 5, "all are accepted")
        for _ in range(20):
            with pytest.raises(OSError):
                await asyncio.open_connection(*address, ssl=trusting)
        assert await ok(*known)
        for _, writer in flood:
            writer.close()
        await until(lambda: len(listener.handshakes) + len(open_connections(gateway)) == 1, "they are gone")
        fresh = await asyncio.open_connection(*address, ssl=trusting)
        assert await ok(*fresh)
        monkeypatch.setattr(BoundedProtocol, "headers_s", 0.1)
        late = await asyncio.open_connection(*address, ssl=trusting)
        assert (await late[0].readline()).startswith(b"HTTP/1.1 408 ")
        for _, writer in (known, fresh, late):
            writer.close()


@pytest.mark.parametrize("end", [b"x: ", b"content-length: 1000000\r\n\r\n"], ids=["headers", "body"])
async def test_a_request_that_arrives_byte_by_byte_is_cut(gateway, monkeypatch, end):
    monkeypatch.setattr(BoundedProtocol, "headers_s", 0.2)
    monkeypatch.setattr(parsing, "MAX_HTTP_BODY_SECONDS", 0.2)
    reader, writer = await asyncio.open_connection(*gateway.address.split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + end)
    status = asyncio.create_task(reader.readline())
    while not (await asyncio.wait({status}, timeout=0.01))[0]:
        writer.write(b" ")
    assert (await status).startswith(b"HTTP/1.1 408 ")
    async with at_most(20):
        with suppress(ConnectionResetError):
            await reader.read()
    writer.close()
    await until(lambda: not open_connections(gateway), "it is closed")


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * 20_000, 431, "headers_too_large"),
        (b"\x00\r\n\r\n", 400, "invalid_http"),
        (b"GET /health\r\n\r\n", 400, "invalid_http"),
        (b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n", 400, "invalid_http"),
    ],
    ids=["headers without an end", "a zero", "HTTP 0.9", "a length"],
)
async def test_a_request_that_is_no_http_has_the_error_body_of_others(gateway, sent, status, code):
    reader, writer = await asyncio.open_connection(*gateway.address.split(":"))
    writer.write(sent)
    async with at_most(20):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"content-type: application/json" in head
    assert json.loads(body)["error"]["code"] == code
    writer.close()
    assert (await gateway.raw("GET", "/health"))[0] == 200


async def test_requests_that_the_router_has_not_accepted_are_limited():
    """A running request does not count, nor one that has failed."""
    steps, asked = asyncio.Queue[Any](), ("POST", "/v1/completions", b'{"prompt": "x", "stream": true}')

    async def script(request):
        while True:
            yield await steps.get()

    refused = list[Exception]()
    async with alone(waiting=1, refused=refused.append) as gateway:
        gateway.fake.script, sent = script, gateway.fake.requests
        for count, step, shown in ((1, EngineFault("x"), b"}}"), (2, tokens(0, 0, [1], "x"), b"data: ")):
            reader, writer = await opened(gateway.address, *asked)
            await until(partial(lambda most: len(sent) == most, count), "it waits for the router")
            status, headers, _ = await gateway.raw(*asked)
            assert (status, headers["retry-after"]) == (503, "1")
            steps.put_nowait(step)
            await reader.readuntil(shown)
        _, last = await opened(gateway.address, *asked)
        await until(lambda: len(sent) == 3, "it is sent to the router while the second one runs")
        assert len(refused) == 2
        writer.close()
        last.close()


async def test_a_request_that_waits_for_the_name_of_the_model_counts():
    """A request with half a body does not."""
    asked = ("POST", "/v1/completions", b'{"prompt": "x", "stream": true}')
    async with alone(waiting=1) as gateway:
        gateway.fake.naming.clear()
        _, slow = await asyncio.open_connection(*gateway.address.split(":"))
        slow.write(b"POST /v1/completions HTTP/1.1\r\nhost: x.localhost\r\ncontent-length: 90\r\n\r\n{")
        _, writer = await opened(gateway.address, *asked)
        await until(lambda: gateway.fake.listed == 1, "the router is asked for its model")
        assert (await gateway.raw(*asked))[0] == 503
        gateway.fake.naming.set()
        await until(lambda: len(gateway.fake.requests) == 1, "the request reaches the router")
        slow.close()
        writer.close()
