"""Connections to the HTTP gateway that read no answer, or end no TLS handshake."""

import asyncio
import ssl
from contextlib import suppress

import pytest
import uvloop
from starlette.responses import Response

from router.openai import server
from router.openai.connections import BoundedProtocol
from tests.integration.access_support import tls_of
from tests.integration.gateway_support import alone, opened
from tests.support.time_factor import scaled
from tests.support.waiting import until


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
