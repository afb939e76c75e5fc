"""A network to the decode workers that can fail: everything that is sent to a decode worker passes here.

Decode workers listen on one loopback address and advertise another one. As soon as the ledger has a worker, this proxy
listens there on the same port. The router's connections pass here too; processes tell the links apart.
"""

import asyncio
import json
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import redis

from tests.support.time_factor import scaled

HERE, THERE = "127.0.0.2", "127.0.0.1"
POLL_S = 0.05
PIECE = 2**16


@dataclass(eq=False)
class Pipe:
    """A connection from the local port `source` to the decode worker that listens on `port`."""

    source: int
    port: int
    near: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    far: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    flows: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self):
        """Copy data until one of the two ends closes."""
        pumps = [asyncio.create_task(self._pump(self.near[0], self.far[1]))]
        pumps.append(asyncio.create_task(self._pump(self.far[0], self.near[1])))
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for _, writer in (self.near, self.far):
                writer.close()

    async def _pump(self, reader, writer):
        with suppress(OSError):
            while data := await reader.read(PIECE):
                await self.flows.wait()
                writer.write(data)
                await writer.drain()
        await self.flows.wait()  # the end is held back too

    def reset(self):
        """Send both ends a reset, like a network that has lost the connection."""
        for _, writer in (self.near, self.far):
            with suppress(OSError):
                plug = writer.get_extra_info("socket")
                plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self.flows.set()


class Proxy:
    """Runs during the block. `url`: the Redis of the cluster `cluster`. Links are `failures_strikes.Links`."""

    def __init__(self, url, cluster="no-ray"):
        self._ledger: Any = redis.Redis.from_url(url, decode_responses=True)
        self._keys = f"baton:{cluster}"
        self._pipes = set()
        self._servers = {}
        self._silent = None  # links
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        self._following = asyncio.run_coroutine_threadsafe(self._follow(), self._loop)
        return self

    def __exit__(self, *_):
        self._following.cancel()
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(scaled(30))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._ledger.close()

    def strike(self, links, *, silent):
        """Reset these links, or, with `silent`, hold all data on them, also new ones, until `go_on`. Return their
        number.
        """

        async def run():
            self._silent = links if silent else None
            found = [pipe for pipe in self._pipes if _belongs(pipe, links)]
            for pipe in found:
                pipe.flows.clear() if silent else pipe.reset()
            return len(found)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(scaled(30))

    def go_on(self):
        async def run():
            self._silent = None
            for pipe in self._pipes:
                pipe.flows.set()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(scaled(30))

    async def _follow(self):
        while True:
            with suppress(redis.RedisError):
                for port in await asyncio.to_thread(self._ports) - self._servers.keys():
                    self._servers[port] = await asyncio.start_server(self._serve, HERE, port)
            await asyncio.sleep(POLL_S)

    def _ports(self):
        names = [name for name in self._ledger.smembers(f"{self._keys}:workers") if name.startswith("decode")]
        infos = [self._ledger.hget(f"{self._keys}:worker:{name}", "info") for name in names]
        return {int(json.loads(info)["address"].rpartition(":")[2]) for info in infos if info}

    async def _serve(self, reader, writer):
        port = writer.get_extra_info("sockname")[1]
        try:
            far = await asyncio.open_connection(THERE, port)
        except OSError:
            writer.transport.abort()  # as a refusal there
            return
        pipe = Pipe(writer.get_extra_info("peername")[1], port, (reader, writer), far)
        if self._silent is None or not _belongs(pipe, self._silent):
            pipe.flows.set()
        self._pipes.add(pipe)
        try:
            await pipe.run()
        finally:
            self._pipes.discard(pipe)

    async def _close(self):
        for server in self._servers.values():
            server.close()
        for pipe in self._pipes:
            pipe.reset()


def _belongs(pipe, links):
    if pipe.port not in links.ports:
        return False
    plugs = [p for p in psutil.net_connections("tcp") if p.pid in links.pids and p.raddr]
    return any(p.laddr.port == pipe.source and p.raddr.ip.endswith(HERE) for p in plugs)  # type: ignore[union-attr]
