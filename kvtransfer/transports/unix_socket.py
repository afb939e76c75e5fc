"""A Unix socket between two ends on one host: proof that the peer lives, and a fast path for small messages.

The abstract name leaves no file behind and cannot be guessed, but all users of the host can read it in /proc/net/unix.
So the kernel must confirm the peer's user, and the peer must send a secret.

The control socket (`ControlSocket`) bypasses gRPC and its threads. A 4 MiB frame passes shared memory in well under
1 ms; a gRPC message costs about 0.3 ms at each end (`benchmarks/transfer.py`). It carries the same bytes as the Peer
stream: announcements, credits, commits that are short enough, and their replies.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from baton.errors import ChannelBroken, ConfigError
from baton.hashing import fingerprint
from kvtransfer.transports.base import KeyRelay, translate_errors

MAX_PACKET = 1 << 15


def host_reach(*namespaces: str) -> str:
    """Return a name that this user's processes share on this host, in the same network, user and given namespaces.
    `namespaces` are names as in /proc/self/ns. Raises ConfigError without Linux's /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        inodes = [str(Path(f"/proc/self/ns/{name}").stat().st_ino) for name in ("net", "user", *namespaces)]
    except OSError as error:
        raise ConfigError(f"works only on Linux, with /proc: {error}") from error
    return fingerprint([boot, str(os.geteuid()), *inodes])


class ControlSocket:
    """One end. One thread sends and receives, any thread may `wake` it. Packets arrive whole and in order until the
    peer is gone. `send` blocks if some hundred are unread, more than there can be credits.
    """

    def __init__(self, title: str, connected: socket.socket) -> None:
        self._title = title
        self._socket = connected  # of type SOCK_SEQPACKET
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        self._closed = False
        self._lock = threading.Lock()  # a closed descriptor may be reused immediately

    def takes(self, nbytes: int) -> bool:
        """Whether `send` takes a packet of this size without blocking."""
        return nbytes <= MAX_PACKET and _polled(self._socket, select.POLLOUT)

    def send(self, packet: bytes) -> None:
        """Send a packet. Raises ChannelBroken."""
        translate_errors(self._title, lambda: self._socket.send(packet))

    @property
    def ready(self) -> bool:
        """Whether `receive` returns a packet, or raises, without a wait. A wake alone does not count."""
        return any(file != self._woken for file, _ in self._poll.poll(0))

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Return the next packet, or None after a wake or the timeout. Raises ChannelBroken if the peer is gone."""
        return translate_errors(self._title, lambda: self._receive(timeout_s))

    def check(self) -> None:
        """Raise ChannelBroken if the peer has closed, or will send nothing more."""
        if _polled(self._socket, select.POLLRDHUP):
            raise ChannelBroken(f"{self._title}: {_CLOSED}")

    def wake(self) -> None:
        """Make `receive` return, now or at its next call. No-op if closed."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)  # the peer sees it although a `Watch` holds the connection
                self._socket.close()
                os.close(self._woken)

    def _receive(self, timeout_s: float | None) -> bytes | None:
        ready = [file for file, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1e3)]
        if self._woken in ready:
            os.eventfd_read(self._woken)
        if self._socket.fileno() not in ready:
            return None
        packet = self._socket.recv(MAX_PACKET + 1)
        if len(packet) > MAX_PACKET:
            raise ConnectionError(f"a packet of over {MAX_PACKET} bytes")
        if not packet:
            raise ConnectionError(_CLOSED)
        return packet


class Watch:
    """Whether the peer has closed its end or its process is dead, also after this end was closed."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected.dup()

    def __call__(self) -> bool:
        if self._socket.fileno() >= 0 and _polled(self._socket, 0):
            self._socket.close()
        return self._socket.fileno() < 0


def _polled(connected: socket.socket, events: int) -> bool:
    poll = select.poll()
    poll.register(connected, events)  # POLLHUP and POLLERR are always reported
    return bool(poll.poll(0))


KEY = "unix"
_CLOSED = "closed by the peer"
_PREFIX = b"\0baton-kv-"  # of the name; the zero byte makes it abstract
_SECRET_BYTES = 16
_GREETING_S = 1.0  # seconds for a process of the same user to send the secret after it has connected
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_CONTROL_BYTES = 1 << 18  # for 64 packets of some 100 bytes and a commit: it counts as full when a quarter is used


def accept(keys: KeyRelay, deadline_s: float) -> socket.socket:
    """Listen, send the address, and wait for the peer. Other connections are closed. The connection has the deadline.
    Raises OSError.
    """
    name = _PREFIX + secrets.token_hex(16).encode()
    secret, deadline = secrets.token_bytes(_SECRET_BYTES), time.monotonic() + deadline_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen()
        keys.send(KEY, secret + name)
        while (left := deadline - time.monotonic()) > 0:
            if (connected := _next(listener, secret, left)) is not None:
                return _with_room(connected, deadline_s)
    raise TimeoutError(f"the peer did not connect within {deadline_s} s")


def connect(keys: KeyRelay, deadline_s: float) -> socket.socket:
    """Connect to the address that the peer sent. The connection has the deadline. Raises OSError."""
    value = keys.expect(KEY, deadline_s)
    secret, name = value[:_SECRET_BYTES], value[_SECRET_BYTES:]
    if not name.startswith(_PREFIX):
        raise ConnectionError(f"{name!r} is not the name of a channel")
    with ExitStack() as failing:
        connected = failing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        _with_room(connected, deadline_s).connect(name)
        if credentials(connected)[1] != os.geteuid():
            raise PermissionError("the peer belongs to another user")
        connected.send(secret)
        failing.pop_all()
    return connected


def _with_room(connected: socket.socket, deadline_s: float) -> socket.socket:
    connected.settimeout(deadline_s)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CONTROL_BYTES)
    return connected


def _next(listener: socket.socket, secret: bytes, timeout_s: float) -> socket.socket | None:
    """Accept the next connection, if it is the peer's."""
    listener.settimeout(timeout_s)
    with suppress(TimeoutError):
        connected, _ = listener.accept()
        if _is_peer(connected, secret):
            return connected
        connected.close()
    return None


def _is_peer(connected: socket.socket, secret: bytes) -> bool:
    connected.settimeout(_GREETING_S)
    with suppress(OSError):
        user = credentials(connected)[1]
        return user == os.geteuid() and hmac.compare_digest(connected.recv(_SECRET_BYTES + 1), secret)
    return False


def credentials(connected: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group of the peer when it connected or began to listen."""
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, group = _CREDENTIALS.unpack(packed)
    return pid, user, group
