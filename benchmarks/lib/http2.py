"""gRPC calls over a plain socket: the part of HTTP/2 that a load generator needs, at a few microseconds per message.

The load generator must not limit the measurement. A grpc.aio client spends more time per message than a router needs to
produce it, `h2` is no cheaper, and compiled load generators are not always available. Only the request in sent frames
varies. Received frames are parsed, and flow control, PING and SETTINGS are answered. Frames that gRPC never sends
(padding, pushes, unrequested compression) are errors. Headers are never decoded: the server may not use a dynamic
table, so gRPC writes its status as plain bytes. A missing status is an error.
"""

from __future__ import annotations

import re
import socket
import struct
from collections import deque
from typing import Protocol

_FRAME = struct.Struct(">HBBBI")  # length in two parts, type, flags, stream
_PREFIX = struct.Struct(">BI")  # of a message: compressed flag, length
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_PRIORITY, _PUSH = 2, 5
_ACK = _END_STREAM = 0x1
_END_HEADERS, _PADDED, _PRIORITISED = 0x4, 0x8, 0x20
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_TABLE, _NO_PUSH, _STREAM_WINDOW = 1, 2, 4  # settings
_FIRST_WINDOW, _LARGEST_WINDOW, _LARGEST_FRAME = 65535, 2**31 - 1, 16384
_RENEW = 2**24  # bytes read before the connection's window is renewed
_STATUS = re.compile(rb"\x0bgrpc-status[\x01\x02](\d{1,2})")
_READ = 2**18


class LoadFailed(RuntimeError):
    """The server's answer is not the expected one."""


class Calls(Protocol):
    """Receiver of a connection's messages."""

    def received(self, stream: int, message: bytes) -> None:
        """Handle one whole message."""

    def ended(self, stream: int, status: int) -> None:
        """Handle the end of a stream. `status` is the gRPC status, and 0 is success."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return an encoded frame."""
    size = len(payload)
    return _FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


class Connection:
    """Calls of one method (`/package.Service/Method`) to `host:port`, each with one request and streamed answers."""

    def __init__(self, address: str, method: str, calls: Calls) -> None:
        self._calls = calls
        self._headers = _request_headers(method.encode(), address.encode())
        self._next = 1
        self._room = _FIRST_WINDOW  # send window in bytes
        self._stream_room = _FIRST_WINDOW
        self._waiting: deque[tuple[int, bytes]] = deque()  # requests beyond the send window
        self._read = 0  # bytes since the last window renewal
        self._rest = b""  # beginning of an incomplete frame
        self._partial: dict[int, bytes] = {}  # beginning of an incomplete message, by stream
        self._block, self._ends = b"", False  # headers that continue in another frame
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = struct.pack(">HIHIHI", _TABLE, 0, _NO_PUSH, 0, _STREAM_WINDOW, _LARGEST_WINDOW)
        widened = struct.pack(">I", _LARGEST_WINDOW - _FIRST_WINDOW)
        self.socket.sendall(_PREFACE + frame(_SETTINGS, 0, 0, mine) + frame(_WINDOW, 0, 0, widened))

    def close(self) -> None:
        self.socket.close()

    def call(self, request: bytes) -> int:
        """Start a call and return its stream number. The request is sent when the server's window allows it."""
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
        """Read the available bytes, at least one, and deliver messages to `calls`. Raises LoadFailed."""
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
        if flags:  # gRPC does not pad, and ends a stream with trailers
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
    """Return headers from the static table, and literals outside of the dynamic table."""
    post_over_http = b"\x83\x86"
    path, host = bytes([4, len(method)]) + method, bytes([1, len(authority)]) + authority
    own = ((b"content-type", b"application/grpc"), (b"te", b"trailers"))
    return post_over_http + path + host + b"".join(b"\0%c%b%c%b" % (len(n), n, len(v), v) for n, v in own)
