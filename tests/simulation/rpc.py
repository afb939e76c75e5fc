"""gRPC over the streams of a `World`: Worker and Peer streams, and a client's call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc
from google.protobuf.message import Message
from grpc import aio

from baton.errors import BatonError
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1 import peer_pb2, worker_pb2
from tests.simulation.world import END, PROCESS, Handler, Stream, World, connect

_DUPLICATES = 0.03  # of Fence and Release, which are idempotent


class Aborted(Exception):
    """A servicer ended its call with a status."""


def copied(message: Message) -> Message:
    """Return the message as the other end would parse it."""
    return type(message).FromString(message.SerializeToString())


class SimStub:
    """`WorkerStub` over an address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def Connect(self) -> SimCall:
        process = PROCESS.get()
        return SimCall(connect(process.world, process, self._address, "worker"))


@asynccontextmanager
async def sim_channel(address: str, **_: object) -> AsyncIterator[str]:
    """Replace `aio_channel`. The stub above needs only the address."""
    await PROCESS.get().turn()
    yield address


class SimCall:
    """A router's end of a stream to a worker."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._process = PROCESS.get()

    async def write(self, message: worker_pb2.RouterMessage) -> None:
        if self._stream is None:
            raise asyncio.InvalidStateError("no connection")
        kinds = [command.WhichOneof("command") or "" for command in message.commands]
        self._process.world.note("R>W", self._stream.name, *map(shown, message.commands, kinds))
        again = [c for c, k in zip(message.commands, kinds, strict=True) if k in {"fence", "release"}]
        self._stream.up.send(copied(message))
        if again and self._stream.up.rng.random() < _DUPLICATES:
            self._stream.up.send(worker_pb2.RouterMessage(commands=again))

    async def read(self) -> object:
        if self._stream is None:
            return aio.EOF
        message = await self._stream.down.receive()
        if message is END:
            return aio.EOF
        for event in message.events:
            self._process.world.note("W>R", self._stream.name, shown(event, event.WhichOneof("event")))
        return message

    def cancel(self) -> None:
        if self._stream is not None:
            self._stream.leave(self._process)

    async def code(self) -> grpc.StatusCode:
        ended = self._stream is not None and self._stream.returned
        return grpc.StatusCode.OK if ended else grpc.StatusCode.UNAVAILABLE

    async def details(self) -> str:
        return "simulated"


def shown(message: Any, kind: str | None) -> str:
    """Format a command or an event for the trace."""
    body = getattr(message, kind) if kind and kind != "hello" else None
    handoff = getattr(body, "handoff", None) or getattr(message, "handoff", None)
    name = f"({handoff.request_id}/{handoff.attempt})" if handoff is not None and handoff.request_id else ""
    return f"{kind}{name}"


class SimContext:
    """A servicer's side of a call."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def write(self, message: Message) -> None:
        self._stream.down.send(copied(message))

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(f"{code}: {details}")


def serving(call: Callable[[AsyncIterator[Any], Any, Stream], Coroutine[Any, Any, None]]) -> Handler:
    """Return a handler that runs `call` and cancels it when the client disconnects, as grpc.aio does."""

    async def handle(stream: Stream) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await call(_requests(stream, task), SimContext(stream), stream)
            stream.returned = stream.open  # a cut stream never brings the status
        except Aborted as error:
            stream.server.world.note("ABORT", stream.name, error)
        finally:
            stream.down.send(END)
            stream.up.drop()

    return handle


async def _requests(stream: Stream, handler: asyncio.Task[Any]) -> AsyncIterator[Any]:
    while (message := await stream.up.receive()) is not END:
        yield message
    handler.cancel()


class SimPeerStream:
    """`kvtransfer.sender.PeerStream`, with callbacks for replies."""

    def __init__(
        self, address: str, on_reply: Callable[[peer_pb2.PeerReply], None], on_end: Callable[[str], None]
    ) -> None:
        self._process = PROCESS.get()
        self._on_reply, self._on_end = on_reply, on_end
        self._stream = connect(self._process.world, self._process, address, "peer")
        self._reader = self._process.spawn(self._read(), "peer replies")

    def send(self, command: peer_pb2.PeerCommand) -> None:
        if self._stream is not None:
            kind = command.WhichOneof("command")
            self._process.world.note("P>D", self._stream.name, shown(command, kind))
            self._stream.up.send(copied(command))

    def close(self) -> None:
        if self._stream is not None:
            self._stream.leave(self._process)
        self._reader.cancel()

    async def _read(self) -> None:
        await self._process.turn()
        while self._stream is not None and (reply := await self._stream.down.receive()) is not END:
            kind = reply.WhichOneof("reply")
            self._process.world.note("D>P", self._stream.name, shown(reply, kind))
            self._on_reply(reply)
        self._on_end("the stream ended")


class ClientCall:
    """The context of a client's Generate call, with all events written to it."""

    def __init__(self, world: World, name: str, stall: float) -> None:
        self.events: list[pb.GenerateEvent] = []
        self.status: Any = None
        self._world, self._name = world, name
        self._rng, self._stall = world.random_for(name), stall

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def send_initial_metadata(self, _: object) -> None:
        await asyncio.sleep(self._world.delay(self._rng))

    async def write(self, event: pb.GenerateEvent) -> None:
        self._world.note("client", self._name, event.WhichOneof("event"))
        self.events.append(pb.GenerateEvent.FromString(event.SerializeToString()))
        if self._rng.random() < self._stall:
            await asyncio.sleep(self._rng.random())

    async def abort_with_status(self, status: Any) -> None:
        self.status = status
        raise Aborted(status.details)

    def error(self) -> BatonError:
        """Return the error of the status, as the SDK reads it."""
        code, details, trailing = self.status
        failed = SimpleNamespace(code=lambda: code, details=lambda: details, trailing_metadata=lambda: trailing)
        return from_rpc_error(cast("grpc.RpcError", failed))
