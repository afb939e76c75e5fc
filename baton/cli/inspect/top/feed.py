"""The live messages of a cluster's routers, with reconnects to the same or another router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from baton import errors
from baton.cli.target import Admins
from baton.errors import BatonError, NoWorker
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import admin_pb2
from baton.rpc.v1.admin_pb2_grpc import AdminStub

DENIED = (errors.PermissionDenied, errors.Unauthenticated)
PERMANENT = (errors.ConfigError, errors.InvalidRequest, errors.Unsupported, *DENIED)  # a retry would fail again
RETRY_S = 1.0
SILENT_S = 5.0  # beyond the interval; a frozen router sends nothing, but keeps its connection
TRACE_S = 5.0


class Feed:
    """A stream of views. `find` returns the routers, and is called again whenever one is lost."""

    def __init__(self, find: Callable[[], Admins], interval_s: float) -> None:
        self._find = find
        self._interval_s = interval_s
        self._admin = ""  # the router of the last message

    async def views(self) -> AsyncIterator[admin_pb2.Live | BatonError]:
        """Yield views endlessly, or the error if no router sends any. Raises errors that a retry would meet again."""
        while True:
            async for message in self._round():
                yield message
            await asyncio.sleep(RETRY_S)

    async def trace(self, request_id: str) -> admin_pb2.TraceReply:
        if not self._admin:
            raise NoWorker("no router has answered yet")
        admins = await asyncio.to_thread(self._find)
        request = admin_pb2.TraceRequest(request_id=request_id)
        async with admins.credentials.wire.aio(self._admin) as channel:
            try:
                reply: admin_pb2.TraceReply = await AdminStub(channel).Trace(
                    request, timeout=TRACE_S, metadata=admins.credentials.metadata
                )
            except grpc.RpcError as error:
                raise from_rpc_error(error, self._admin) from None
        return reply

    async def _round(self) -> AsyncIterator[admin_pb2.Live | BatonError]:
        """Yield views of each router in turn, for as long as it sends."""
        try:
            admins = await asyncio.to_thread(self._find)
            started = admins.started
        except NoWorker as error:  # the cluster is gone, or still starting
            yield error
            return
        for admin in started:
            try:
                async for live in self._watch(admins, admin):
                    yield live
            except PERMANENT:
                raise
            except BatonError as error:
                yield error

    async def _watch(self, admins: Admins, admin: str) -> AsyncIterator[admin_pb2.Live]:
        request = admin_pb2.WatchRequest(interval_s=self._interval_s)
        async with admins.credentials.wire.aio(admin) as channel:
            messages = aiter(AdminStub(channel).Watch(request, metadata=admins.credentials.metadata))
            while True:
                yield await self._next(messages, admin)
                self._admin = admin

    async def _next(self, messages: AsyncIterator[admin_pb2.Live], admin: str) -> admin_pb2.Live:
        try:
            async with asyncio.timeout(self._interval_s + SILENT_S):
                return await anext(messages)
        except StopAsyncIteration:
            raise NoWorker(f"the router at {admin} ended the stream") from None
        except TimeoutError:
            raise NoWorker(f"the router at {admin} sends nothing") from None
        except grpc.RpcError as error:
            raise from_rpc_error(error, admin) from None
