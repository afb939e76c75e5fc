"""The sender's end of a Peer stream, as a small interface, and over gRPC.

A blocking gRPC stream, not asyncio: the sender's thread blocks in the data plane anyway, and a reply reaches it without
passing an event loop that serves others.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import grpc
import structlog

from baton.rpc.channel import sync_channel
from baton.rpc.v1 import peer_pb2 as pb
from baton.rpc.v1.peer_pb2_grpc import PeerStub

log = structlog.get_logger()

OnReply = Callable[[pb.PeerReply], None]
OnEnd = Callable[[str], None]


class PeerStream(Protocol):
    """Commands out; replies come by callback, in order, from a thread of the stream's."""

    def send(self, command: pb.PeerCommand) -> None:
        """Never blocks; what is sent after the end goes nowhere. Thread-safe, order is kept."""

    def close(self) -> None:
        """Idempotent. Returns when no callback will come any more; not to be called from a callback."""


# Opens a stream to an address. OnEnd is called once, with the reason, after the last reply.
Connect = Callable[[str, OnReply, OnEnd], PeerStream]


class GrpcPeerStream:
    """A connection and a stream of its own, so that closing it leaves nothing behind. `dial` makes the connection."""

    def __init__(
        self, address: str, on_reply: OnReply, on_end: OnEnd, dial: Callable[[str], grpc.Channel] = sync_channel
    ) -> None:
        self._on_reply = on_reply
        self._on_end = on_end
        self._commands: queue.SimpleQueue[pb.PeerCommand | None] = queue.SimpleQueue()
        self._channel = dial(address)
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
        except Exception as error:  # the boundary of this thread: nobody may wait for a stream that is deaf
            reason = f"a reply could not be taken: {type(error).__name__}"
            log.exception("channel_stream_failed")
        self._on_end(reason)
