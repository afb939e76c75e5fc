"""What hurries between two processes of one host: packets over a unix socket, past gRPC and its threads.

A frame of 4 MiB passes shared memory in well under a millisecond; a message over a gRPC stream costs a third of one, at
each end (`benchmarks/transfer.py`). What is said here is what the Peer stream would carry, in the same bytes:
announcements and credits, commits, if they are not too long, and what they are answered with.
"""

from __future__ import annotations

import os
import select
import socket
import threading

from kvtransfer.transports.end import told

MAX_PACKET = 1 << 15


class Express:
    """One end; `connected` is a SOCK_SEQPACKET socket. One thread sends and receives, any may `wake` it.

    Packets arrive whole, in order, or the other end is seen to be gone. `send` waits if some hundred are unread: more
    than there can be credits.
    """

    def __init__(self, title: str, connected: socket.socket) -> None:
        self._title = title
        self._socket = connected
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        self._outlet = select.poll()
        self._outlet.register(connected, select.POLLOUT)
        self._closed = False
        self._lock = threading.Lock()  # a file that is closed may be another one's at once

    def takes(self, nbytes: int) -> bool:
        """Whether `send` would take a packet of this size without waiting."""
        return nbytes <= MAX_PACKET and bool(self._outlet.poll(0))

    def send(self, packet: bytes) -> None:
        """Raises ChannelBroken."""
        told(self._title, lambda: self._socket.send(packet))

    @property
    def ready(self) -> bool:
        """Whether `receive` would give a packet, or raise. A wake alone does not count."""
        return any(file != self._woken for file, _ in self._poll.poll(0))

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next packet; None: woken instead, or none came in time. Raises ChannelBroken: the other end is gone."""
        return told(self._title, lambda: self._receive(timeout_s))

    def wake(self) -> None:
        """Have `receive` return, now or when it is called next. Closed: no-op."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        """The other end sees it. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._socket.close()
                os.close(self._woken)

    def _receive(self, timeout_s: float | None) -> bytes | None:
        ready = [file for file, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1e3)]
        if self._woken in ready:
            os.eventfd_read(self._woken)
        if self._socket.fileno() not in ready:
            return None
        packet = self._socket.recv(MAX_PACKET + 1)
        if not 0 < len(packet) <= MAX_PACKET:
            raise ConnectionError("closed by the other end" if not packet else f"a packet of over {MAX_PACKET} bytes")
        return packet
