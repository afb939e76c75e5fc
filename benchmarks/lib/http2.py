"""Calls of gRPC over a plain socket: as much of HTTP/2 as a load generator needs, at a few microseconds a message.

A load generator must not be what a benchmark measures, and grpc.aio costs a client more for each message of a stream
than a router needs to produce it; `h2` is no cheaper, and compiled load generators are not there on every machine. So
frames are read by hand here. What is sent is constant but for the request; what comes is taken apart, flow control,
PING and SETTINGS are answered, and what gRPC never sends (padding, pushes, compression that nobody asked for) is an
error. Headers are never decoded: without a dynamic table, which is forbidden to the server, gRPC writes its status as
plain bytes, and one that is not found is an error as well.
"""

from __future__ import annotations

import re
import socket
import struct
from collections import deque
from typing import Protocol

_FRAME = struct.Struct(">HBBBI")  # its length in two parts, type, flags, stream
_PREFIX = struct.Struct(">BI")  # of a message: compressed, its length
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_PRIORITY, _PUSH = 2, 5
_ACK = _END_STREAM = 0x1
_END_HEADERS, _PADDED, _PRIORITISED = 0x4, 0x8, 0x20
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_TABLE, _NO_PUSH, _STREAM_WINDOW = 1, 2, 4  # settings
_FIRST_WINDOW, _LARGEST_WINDOW, _LARGEST_FRAME = 65535, 2**31 - 1, 16384
_RENEW = 2**24  # bytes read until the connection's window is opened again
_STATUS = re.compile(rb"\x0bgrpc-status[\x01\x02](\d{1,2})")
_READ = 2**18


class LoadFailed(RuntimeError):
    """What came is not what was asked for."""


class Calls(Protocol):
    """Who made the calls of a connection."""

    def received(self, stream: int, message: bytes) -> None:
        """One whole message."""

    def ended(self, stream: int, status: int) -> None:
        """Nothing more comes; `status` is gRPC's, 0 is success."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame as it is sent."""
    size = len(payload)
    return _FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


class Connection:
    """Calls of one method, each with one request and a stream of answers; `calls` hears of them during `receive`.

    `address` is `host:port`, `method` as in `/package.Service/Method`. Close it with `close`.
    """

    def __init__(self, address: str, method: str, calls: Calls) -> None:
        self._calls = calls
        self._headers = _request_headers(method.encode(), address.encode())
        self._next = 1
        self._room = _FIRST_WINDOW  # bytes that the server lets this side send
        self._stream_room = _FIRST_WINDOW
        self._waiting: deque[tuple[int, bytes]] = deque()  # requests for which there is no room yet
        self._read = 0  # bytes since the connection's window was opened
        self._rest = b""  # of what was read: the beginning of a frame
        self._partial: dict[int, bytes] = {}  # by stream: the beginning of a message
        self._block, self._ends = b"", False  # headers that go on in another frame
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = struct.pack(">HIHIHI", _TABLE, 0, _NO_PUSH, 0, _STREAM_WINDOW, _LARGEST_WINDOW)
        widened = struct.pack(">I", _LARGEST_WINDOW - _FIRST_WINDOW)
        self.socket.sendall(_PREFACE + frame(_SETTINGS, 0, 0, mine) + frame(_WINDOW, 0, 0, widened))

    def close(self) -> None:
        self.socket.close()

    def call(self, request: bytes) -> int:
        """Begin a call; its stream's number. It is sent as soon as the server's window has room for it."""
        body = _PREFIX.pack(0, len(request)) + request
        if len(body) > min(self._stream_room, _LARGEST_FRAME):
            raise LoadFailed(f"a request of {len(request)} bytes does not fit into one frame")
        stream, self._next = self._next, self._next + 2
        self._waiting.append((stream, body))
        self._send_waiting()
        return stream

    def _send_waiting(self) -> None:
        while self._waiting and len(self._waiting[0][1]) <= self._room:
            stream, body = self._waiting.popleft()
            self._room -= len(body)
            head = frame(_HEADERS, _END_HEADERS, stream, self._headers)
            self.socket.sendall(head + frame(_DATA, _END_STREAM, stream, body))

    def receive(self) -> None:
        """Read what is there, at least something. Raises LoadFailed."""
        new = self.socket.recv(_READ)
        if not new:
            raise LoadFailed("the server closed the connection")
        data, at = self._rest + new, 0
        while len(data) - at >= _FRAME.size:
            high, low, kind, flags, stream = _FRAME.unpack_from(data, at)
            begin = at + _FRAME.size
            end = begin + (high << 8 | low)
            if end > len(data):
                break
            self._take(kind, flags, stream, data[begin:end])
            at = end
        self._rest = data[at:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._on_data(flags, stream, payload)
        elif kind in {_HEADERS, _CONTINUATION}:
            self._on_headers(kind, flags, stream, payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self._on_settings(payload)
        elif kind == _PING and not flags & _ACK:
            self.socket.sendall(frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW and stream == 0:
            self._room += int.from_bytes(payload)
            self._send_waiting()
        elif kind in {_RESET, _GOAWAY, _PUSH}:
            raise LoadFailed(f"the server gave up stream {stream}: frame of type {kind}, {payload!r}")

    def _on_data(self, flags: int, stream: int, payload: bytes) -> None:
        if flags:  # gRPC pads nothing, and ends a stream with trailers
            raise LoadFailed(f"stream {stream}: data with the flags {flags}")
        self._read += len(payload)
        if self._read >= _RENEW:
            self.socket.sendall(frame(_WINDOW, 0, 0, struct.pack(">I", self._read)))
            self._read = 0
        data, at = self._partial.pop(stream, b"") + payload, 0
        while len(data) - at >= _PREFIX.size:
            compressed, size = _PREFIX.unpack_from(data, at)
            begin = at + _PREFIX.size
            if compressed:
                raise LoadFailed(f"stream {stream}: a compressed message")
            if begin + size > len(data):
                break
            at = begin + size
            self._calls.received(stream, data[begin:at])
        if at < len(data):
            self._partial[stream] = data[at:]

    def _on_headers(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if flags & (_PADDED | _PRIORITISED):
            raise LoadFailed(f"stream {stream}: headers with the flags {flags}")
        if kind == _HEADERS:
            self._block, self._ends = b"", bool(flags & _END_STREAM)
        self._block += payload
        if not flags & _END_HEADERS or not self._ends:
            return
        status = _STATUS.search(self._block)
        if status is None or stream in self._partial:
            raise LoadFailed(f"stream {stream} ended in the middle, or without a status: {self._block!r}")
        self._calls.ended(stream, int(status[1]))

    def _on_settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == _STREAM_WINDOW:
                self._stream_room = value
        self.socket.sendall(frame(_SETTINGS, _ACK, 0, b""))


def _request_headers(method: bytes, authority: bytes) -> bytes:
    """Names of the static table, and literals that are not to be remembered."""
    post_over_http = b"\x83\x86"
    path, host = bytes([4, len(method)]) + method, bytes([1, len(authority)]) + authority
    own = ((b"content-type", b"application/grpc"), (b"te", b"trailers"))
    return post_over_http + path + host + b"".join(b"\0%c%b%c%b" % (len(n), n, len(v), v) for n, v in own)
