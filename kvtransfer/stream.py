"""The sender's end of a Peer stream, as a small interface, and over gRPC.

A blocking gRPC stream, not asyncio: the sender's thread blocks in the data plane anyway, and a reply reaches it without
passing an event loop that serves others.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Protocol

import grpc

from baton.rpc.channel import sync_channel
from baton.rpc.v1.peer_pb2_grpc import PeerStub

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.rpc.v1 import peer_pb2 as pb


class PeerStream(Protocol):
    """Commands out; replies come by callback, in order, from a thread of the stream's."""

    def send(self, command: pb.PeerCommand) -> None:
        """Never blocks; what is sent after the end goes nowhere. Thread-safe, order is kept."""

    def close(self) -> None:
        """Idempotent. Returns when no callback will come any more; not to be called from a callback."""


class Connect(Protocol):
    """Opens a stream to `address`. `on_end` is called once, with the reason, after the last reply."""

    def __call__(
        self, address: str, on_reply: Callable[[pb.PeerReply], None], on_end: Callable[[str], None]
    ) -> PeerStream: ...


class GrpcPeerStream:
    """A connection and a stream of its own, so that closing it leaves nothing behind."""

    def __init__(self, address: str, on_reply: Callable[[pb.PeerReply], None], on_end: Callable[[str], None]) -> None:
        self._on_reply = on_reply
        self._on_end = on_end
        self._commands: queue.SimpleQueue[pb.PeerCommand | None] = queue.SimpleQueue()
        self._channel = sync_channel(address)
        self._call = PeerStub(self._channel).Connect(iter(self._commands.get, None))
        self._reader = threading.Thread(target=self._read, name=f"kv-replies-{address}", daemon=True)
        self._reader.start()

    def send(self, command: pb.PeerCommand) -> None:
        self._commands.put(command)

    def close(self) -> None:
        self._commands.put(None)  # ends gRPC's writer thread
        self._call.cancel()
        self._channel.close()
        self._reader.join()

    def _read(self) -> None:
        reason = "the receiver ended the stream"
        try:
            for reply in self._call:
                self._on_reply(reply)
        except grpc.RpcError:
            reason = f"stream failed: {self._call.code()}: {self._call.details()}"
        self._on_end(reason)
