"""NIXL: the receiver reads frames from staging of the sender over a network, several at a time.

The sender gathers a frame into its slot, as for any two-sided transport. The receiver reads the slot into its own one.
So no read touches a KV block. Bytes that arrive late, after a deadline, come from staging of the old channel and reach
staging of the old channel. Any KV cache can send.

Only TCP on the interface for KV is used. It is not encrypted. Not yet run with RDMA or on GPUs.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from torch import Tensor

from baton.errors import ConfigError
from kvtransfer.handoff import TransferSettings
from kvtransfer.transports.base import ChannelName, KeyRelay, Ring, RingEnd, Side, local_ring, translate_errors
from kvtransfer.transports.nixl_agent import load, make_agent, register, tcp_on, translated

KEY = "nixl"
_AT = struct.Struct("<Q")  # address of the slots; then the agent's metadata
_RINGS = 4  # staging has addresses for this many times `transfer.staging_memory`
_POLL_S = 0.00005
_ENV = {"PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TMPDIR", "LANG"}
_ENDING_S = 5.0


class Staging:
    """Memory for the slots of senders: `nbytes` of addresses. Each channel takes a part of its own, and no other one
    gets that part later. Other addresses occupy memory only if a peer reads them, until the next take or free.
    """

    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create("baton-kv-staging", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._file).atexit = False  # threads may still use it
        os.ftruncate(self._file, nbytes)
        self._memory, self._nbytes, self._taken = mmap.mmap(self._file, nbytes), nbytes, 0
        self._parts: dict[int, int] = {}  # sizes of the parts in use, by offset, in ascending order

    def fits(self, nbytes: int) -> bool:
        """Whether one more part has addresses."""
        return self._taken + nbytes <= self._nbytes

    def take(self, nbytes: int) -> tuple[int, Tensor]:
        """Return the offset and the memory of a new part: uint8 [nbytes]. Raises OSError."""
        if not self.fits(nbytes):
            raise OSError("staging has no free part of that size")
        at, size = self._taken, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._taken, self._parts[at] = at + size, size
        try:
            os.posix_fallocate(self._file, at, nbytes)  # an error now instead of SIGBUS later
        except OSError:
            self.free(at)
            raise
        self._empty()
        return at, torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=at)

    def free(self, at: int) -> None:
        """Free the memory of the part at this offset. Late readers find zeros."""
        del self._parts[at]
        self._empty()

    def _empty(self) -> None:
        """Free all pages outside of parts: a read of a hole allocates one (mm/shmem.c, `shmem_fault`)."""
        end = 0
        for at, size in (*self._parts.items(), (self._nbytes, 0)):
            if at > end:
                self._memory.madvise(mmap.MADV_REMOVE, end, at - end)
            end = at + size

    @contextmanager
    def readable(self) -> Iterator[int]:
        """Yield a descriptor that cannot write."""
        file = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield file
        finally:
            os.close(file)


class Served(Protocol):
    """Staging that readers can reach."""

    def where(self, deadline_s: float) -> tuple[int, bytes]:
        """Return its address there and the agent's metadata. Raises OSError if nothing answers."""

    @property
    def ended(self) -> bool: ...


Serve = Callable[[Any, Staging, str], Served]


class NixlTransport:
    """Transport between any KV caches. Raises ConfigError if NIXL is not installed or cannot use the interface.
    `library` and `serve` are for tests.
    """

    name = "nixl"
    one_sided, sends = False, True
    reach = "staging"  # version of the exchange that opens a channel

    def __init__(self, settings: TransferSettings, library: Any = None, serve: Serve | None = None) -> None:
        if settings.encrypted:
            raise ConfigError("nixl does not encrypt KV, but security.tls requires encryption")
        try:
            self._library = library or load("nixl._bindings")
            self._config = tcp_on(settings.interface or _interface(settings.bind_host))
            make_agent(self._library, self._config)
        except (ImportError, OSError) as error:
            raise ConfigError(f"NIXL is not installed, or cannot be used here: {error}") from error
        self._lock = threading.Lock()
        self._serve, self._staging_bytes = serve or ServingProcess, _RINGS * settings.staging_memory
        self._served = self._new()

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> RingEnd:
        """See `Transport`."""
        title, build = f"nixl channel {name}", self._sender if side is Side.SENDER else self._receiver
        return translate_errors(f"{title}: not built", lambda: build(title, keys, ring, deadline_s))

    def _new(self) -> tuple[Staging, Served]:
        staging = Staging(self._staging_bytes)
        return staging, self._serve(self._library, staging, self._config)

    def _sender(self, title: str, keys: KeyRelay, ring: Ring, deadline_s: float) -> RingEnd:
        if ring.nbytes > self._staging_bytes:
            raise ConnectionError(
                f"the receiver asks for staging of {ring.nbytes} bytes, {self._staging_bytes} are here"
            )
        with self._lock:
            if self._served[1].ended or not self._served[0].fits(ring.nbytes):
                self._served = self._new()
            staging, served = self._served
            at, memory = staging.take(ring.nbytes)
        end = NixlSender(title, memory.view(ring.slots, ring.size), served, partial(self._free, staging, at))
        try:
            address, metadata = served.where(deadline_s)
            keys.send(KEY, _AT.pack(address + at) + metadata)
        except BaseException:
            end.close()
            raise
        return end

    def _free(self, staging: Staging, at: int) -> None:
        with self._lock:
            staging.free(at)

    def _receiver(self, title: str, keys: KeyRelay, ring: Ring, deadline_s: float) -> RingEnd:
        value = keys.expect(KEY, deadline_s)
        if len(value) <= _AT.size:
            raise ConnectionError("the peer sent no agent")
        reader = Reader(self._library, self._config, value[_AT.size :], deadline_s)
        return NixlReceiver(title, local_ring(ring, torch.device("cpu")), reader, *_AT.unpack_from(value))


class Reader:
    """An agent that reads from one peer. Methods raise OSError."""

    def __init__(self, library: Any, config: str, metadata: bytes, deadline_s: float) -> None:
        self._library, self._deadline_s = library, deadline_s
        self._agent = make_agent(library, config)
        with translated(library):
            self._peer = self._agent.loadRemoteMD(metadata)
        self._under_way: set[int] = set()

    def register(self, address: int, nbytes: int) -> None:
        register(self._library, self._agent, address, nbytes)

    def start(self, here: int, there: int, nbytes: int) -> int:
        """Begin to read `nbytes` from address `there` to address `here`. Return a handle."""
        library = self._library
        ours, theirs = (
            library.nixlXferDList(library.DRAM_SEG, np.array([[at, nbytes, 0]], dtype=np.uint64))
            for at in (here, there)
        )
        with translated(library):
            handle: int = self._agent.createXferReq(library.NIXL_READ, ours, theirs, self._peer, b"", [])
            self._under_way.add(handle)
            self._agent.postXferReq(handle, b"")
        return handle

    def wait(self, handle: int) -> None:
        """Wait for the end of a read, at most for the deadline."""
        deadline = time.monotonic() + self._deadline_s
        with translated(self._library):
            while self._agent.getXferStatus(handle) == self._library.NIXL_IN_PROG:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no progress within {self._deadline_s} s")
                time.sleep(_POLL_S)
            self._under_way.remove(handle)
            self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """Cancel reads under way, and end the agent. Then nothing writes into registered memory."""
        for handle in self._under_way:
            with suppress(ConnectionError), translated(self._library):
                self._agent.releaseXferReq(handle)
        with suppress(ConnectionError), translated(self._library):
            self._agent.invalidateRemoteMD(self._peer)
        del self._agent


class NixlSender(RingEnd):
    """The sending end: a part of the staging that `served` lets readers see. `free` frees its memory."""

    def __init__(self, title: str, staging: Tensor, served: Served, free: Callable[[], None]) -> None:
        super().__init__(title, staging)
        self._served, self._free = served, free

    def _start(self, number: int, nbytes: int) -> None:
        if self._served.ended:
            raise ConnectionError("the process that serves the staging has ended")

    def _finish(self, number: int) -> None:
        """Do nothing: a frame has left when its credit comes."""

    def _release(self) -> None:
        self._free()


class NixlReceiver(RingEnd):
    """The receiving end. It reads from the sender's slots, which begin at address `there`."""

    def __init__(self, title: str, staging: Tensor, reader: Reader, there: int) -> None:
        super().__init__(title, staging)
        self._memory, self._reader, self._there = staging, reader, there  # memory lives until the reader is closed
        reader.register(staging.data_ptr(), staging.numel())
        self._begun: dict[int, int] = {}  # handle of each frame under way

    def _start(self, number: int, nbytes: int) -> None:
        here = self.slot(number).data_ptr()
        self._begun[number] = self._reader.start(here, self._there + here - self._memory.data_ptr(), nbytes)

    def _finish(self, number: int) -> None:
        self._reader.wait(self._begun.pop(number))

    def _release(self) -> None:
        self._reader.close()
        del self._memory


class ServingProcess:
    """The process that answers reads of staging (`nixl_agent`). It ends with this object, and with this process."""

    def __init__(self, library: Any, staging: Staging, config: str) -> None:
        # It answers for any address, so it must not hold the worker's secrets. Ctrl-C reaches the worker alone.
        env = {name: value for name, value in os.environ.items() if name in _ENV or name.startswith(("UCX_", "NIXL_"))}
        with staging.readable() as file:
            words = ["-m", "kvtransfer.transports.nixl_agent", library.__name__, file, config]
            self._process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(file,),
                env=env,
                process_group=0,
            )
        self._lock = threading.Lock()  # channels open in threads of their own
        weakref.finalize(self, _end, self._process)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def where(self, deadline_s: float) -> tuple[int, bytes]:
        """See `Served`. The process is asked each time. One that does not answer is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            os.write(self._process.stdin.fileno(), b"\n")
            if not select.select([self._process.stdout], [], [], deadline_s)[0]:
                self._process.kill()
                raise TimeoutError(f"the process that serves the staging did not answer within {deadline_s} s")
            address, _, metadata = self._process.stdout.readline().decode().partition(" ")
        if not metadata:
            raise ConnectionError("the process that serves the staging has ended; see its messages")
        return int(address), bytes.fromhex(metadata)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate(timeout=_ENDING_S)


def _interface(host: str) -> str:
    """Return the network interface with this address. Raises ConnectionError."""
    wanted = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] in wanted for one in addresses):
            return name
    raise ConnectionError(f"no network interface here has the address {host}")
