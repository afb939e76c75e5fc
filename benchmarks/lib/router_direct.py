"""Client with a router's protocol, directly connected to one prefill and one decode worker.

It uses standing streams, or a new call of the decode worker per request, like a call of a router.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Self

from baton.core import PROTOCOL_VERSION, HandoffId
from baton.rpc import convert
from baton.rpc.channel import aio_channel
from baton.rpc.v1 import admin_pb2, admin_pb2_grpc
from baton.rpc.v1 import worker_pb2 as pb
from baton.rpc.v1.worker_pb2_grpc import WorkerStub

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from baton.core import WorkerInfo
    from baton.rpc.v1 import inference_pb2


class _Stream:
    """A stream to one worker. `until` returns its events of one handoff in order, and drops those of older ones."""

    def __init__(self, call: object, info: WorkerInfo) -> None:
        self.call, self.info = call, info

    async def send(self, **command: object) -> None:
        await self.call.write(pb.RouterMessage(commands=[pb.RouterCommand(**command)]))  # type: ignore[attr-defined,arg-type]

    async def until(self, handoff: HandoffId, *kinds: str) -> pb.WorkerEvent:
        while True:
            message = await self.call.read()  # type: ignore[attr-defined]
            for event in message.events:
                if event.handoff.request_id == handoff.request_id and event.WhichOneof("event") in kinds:
                    return event  # type: ignore[no-any-return]


class Direct:
    """Async context manager of the client. `admin` is the address of a router that lists the workers."""

    def __init__(self, admin: str) -> None:
        self._admin = admin
        self._leaving = AsyncExitStack()
        self._numbers = itertools.count(1)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Self:
        async with aio_channel(self._admin) as channel:
            status = await admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest())
        infos = {info.role.value: info for info in (convert.info_from_pb(w.info) for w in status.workers)}
        self._prefill, self._decode = [await self._open(infos[role]) for role in ("prefill", "decode")]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._leaving.aclose()

    async def _open(self, info: WorkerInfo) -> _Stream:
        self._channels[info.role.value] = await self._leaving.enter_async_context(aio_channel(info.ref.address))
        return await self._leaving.enter_async_context(self._stream(info))

    @asynccontextmanager
    async def _stream(self, info: WorkerInfo) -> AsyncIterator[_Stream]:
        call = WorkerStub(self._channels[info.role.value]).Connect()
        stream = _Stream(call, info)
        incarnation = convert.incarnation_to_pb(info.ref.incarnation)
        hello = pb.RouterHello(router_id="benchmark", protocol_version=PROTOCOL_VERSION, worker=incarnation)
        try:
            await stream.send(hello=hello)
            yield stream
        finally:
            call.cancel()

    async def first_token(self, request: inference_pb2.GenerateRequest) -> float:
        """Return the seconds from the Reserve to the prefill worker's first token, after the last token arrived."""
        return await self._ask(request, self._decode, time.perf_counter())

    async def first_token_of_a_call(self, request: inference_pb2.GenerateRequest) -> float:
        """Return the same for a new call of the decode worker, including the call and its greeting."""
        began = time.perf_counter()
        async with self._stream(self._decode.info) as decode:
            return await self._ask(request, decode, began)

    async def _ask(self, request: inference_pb2.GenerateRequest, decode: _Stream, began: float) -> float:
        handoff = HandoffId(f"direct-{time.time_ns()}-{next(self._numbers)}", 1)
        name = convert.handoff_to_pb(handoff)
        spec = pb.SequenceSpec(prompt=request.token_ids.ids, sampling=request.sampling)
        total = len(spec.prompt) + spec.sampling.max_tokens
        fingerprint = decode.info.fingerprint
        await decode.send(
            reserve=pb.Reserve(handoff=name, fingerprint=fingerprint, known_tokens=len(spec.prompt), max_total=total)
        )
        reserved = await decode.until(handoff, "reserved")
        to, skip = convert.ref_to_pb(decode.info.ref), reserved.reserved.cached_tokens
        await self._prefill.send(prefill=pb.Prefill(handoff=name, spec=spec, to=to, skip=skip))
        await self._prefill.until(handoff, "tokens")
        took = time.perf_counter() - began
        async with asyncio.timeout(10):
            await decode.until(handoff, "finish")
        return took
