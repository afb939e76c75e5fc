"""NIXL: the receiver reads the sender's KV pool over a network, several frames at a time.

A frame arrives in staging. After it has arrived, the generations of its blocks are read, too; if they are still those
that were announced, the frame is whole and is copied into blocks. So bytes that arrive late, after a deadline, never
reach a block, and no block is held while bytes are on their way. Two agents per channel: the generations would wait
behind frames in the connection of the first.

Only TCP on the interface for KV is used. It is not encrypted. Not yet run with RDMA or on GPUs.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from torch import Tensor

from baton.core import KVLayout
from baton.engine.kv_cache import KVCache
from baton.engine.memory.exposed import PROBE_BYTES, ExposedMemory, Shape
from baton.errors import ChannelBroken, ConfigError
from kvtransfer.frames import FrameSpec
from kvtransfer.handoff import TransferSettings
from kvtransfer.transports.base import ChannelName, KeyRelay, Places, Ring, Side, local_ring, translate_errors
from kvtransfer.transports.host_pool import layout_of
from kvtransfer.transports.nixl_agent import load, make_agent, register, tcp_on, translated

KEY = "nixl"
_POOL = struct.Struct("<QQQQ")  # address, blocks, bytes of KV, positions per block; then the agent's metadata
_POLL_S = 0.00005
_GAP = 512  # blocks between two generations that are read together: fewer bytes than a request costs
_WORD = 8
_ENV = {"PATH", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TMPDIR", "LANG"}
_ENDING_S = 5.0


class Exposed(Protocol):
    """A pool that readers can reach."""

    def where(self, deadline_s: float) -> tuple[int, bytes]:
        """Return its address there and the agent's metadata. Raises OSError."""

    @property
    def ended(self) -> bool: ...


Expose = Callable[[Any, ExposedMemory, str], Exposed]


class NixlTransport:
    """Transport between KV caches, one of which must be exposed to send. Raises ConfigError if NIXL is not installed
    or cannot use the interface. `library` and `expose` are for tests.
    """

    name = "nixl"
    one_sided = networked = True
    reach = ""

    def __init__(
        self, kv: KVCache, settings: TransferSettings, library: Any = None, expose: Expose | None = None
    ) -> None:
        if settings.encrypted:
            raise ConfigError("nixl does not encrypt KV, but security.tls requires encryption")
        try:
            self._library = library or load("nixl._bindings")
            self._config = tcp_on(settings.interface or _interface(settings.bind_host))
            make_agent(self._library, self._config)
        except (ImportError, OSError) as error:
            raise ConfigError(f"NIXL is not installed, or cannot be used here: {error}") from error
        self._memory = kv.exposed if isinstance(kv.exposed, ExposedMemory) else None  # not that of a GPU
        self.sends = self._memory is not None
        self._kv = kv
        self._lock = threading.Lock()
        self._expose = expose or ExposingProcess
        self._exposed: Exposed | None = None
        self._reachable()

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> NixlEnd:
        """See `Transport`."""
        title = f"nixl channel {name}"
        if side is Side.SENDER:
            return NixlEnd(title, translate_errors(f"{title}: not built", partial(self._give, keys, deadline_s)), None)
        take = partial(self._take, title, keys, ring, deadline_s)
        return NixlEnd(title, None, translate_errors(f"{title}: not built", take))

    def _reachable(self) -> Exposed | None:
        """Return the pool, exposed again if its process has ended; None for a cache that cannot be exposed."""
        with self._lock:
            if self._memory is not None and (self._exposed is None or self._exposed.ended):
                self._exposed = self._expose(self._library, self._memory, self._config)
            return self._exposed

    def _give(self, keys: KeyRelay, deadline_s: float) -> Exposed:
        if (exposed := self._reachable()) is None or self._memory is None:
            raise ConnectionError("the KV cache here is not exposed")
        address, metadata = exposed.where(deadline_s)
        shape = self._memory.shape
        keys.send(KEY, _POOL.pack(address, shape.blocks, shape.kv_bytes, self._kv.layout.block_size) + metadata)
        return exposed

    def _take(self, title: str, keys: KeyRelay, ring: Ring, deadline_s: float) -> NixlPool:
        value = keys.expect(KEY, deadline_s)
        if len(value) <= _POOL.size:
            raise ConnectionError("the peer sent no agent")
        address, blocks, kv_bytes, block_size = _POOL.unpack_from(value)
        layout = layout_of(self._kv.layout, blocks, kv_bytes, block_size)
        readers = [Reader(self._library, self._config, value[_POOL.size :], deadline_s) for _ in range(2)]
        return NixlPool(title, readers, address, Shape(blocks, kv_bytes), layout, ring)


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

    def start(self, local: np.ndarray, remote: np.ndarray, nbytes: np.ndarray) -> int:
        """Begin to read pieces: addresses here and there, and bytes, uint64 [pieces] each. Return a handle."""
        library, device = self._library, np.zeros_like(nbytes)
        ours, theirs = (
            library.nixlXferDList(library.DRAM_SEG, np.stack([at, nbytes, device], axis=1)) for at in (local, remote)
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


class NixlPool:
    """The sender's pool, a `StagedPool`. `layout` is the sender's."""

    def __init__(
        self, title: str, readers: Sequence[Reader], address: int, shape: Shape, layout: KVLayout, ring: Ring
    ) -> None:
        self._title = title
        self.total_blocks, self.block_size = shape.blocks, layout.block_size
        self._frames, self._checks = readers
        self._address, self._shape, self._layout = address, shape, layout
        self._staging = local_ring(ring, torch.device("cpu"))
        self._generations = np.zeros(shape.blocks, dtype=np.uint64)
        self._frames.register(self._staging.data_ptr(), self._staging.numel())
        self._checks.register(self._generations.ctypes.data, self._generations.nbytes)
        self._begun: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}  # handle, blocks and generations of a frame
        self._slot, self._fresh = self._staging[0], False  # of the frame that finished last

    def begin(self, number: int, spec: FrameSpec, places: Places) -> None:
        """See `StagedPool`."""
        translate_errors(self._title, partial(self._begin, number, spec, places))

    def _begin(self, number: int, spec: FrameSpec, places: Places) -> None:
        needed = slice(spec.begin // self.block_size, -(-spec.end // self.block_size))
        blocks = np.array(places.blocks[needed], dtype=np.uint64)
        slot = self._staging[number % len(self._staging)].data_ptr()
        if spec.layers:
            remote, nbytes = self._rectangle(spec, blocks)
        else:
            probe = self._address + self._shape.probe_at + number * PROBE_BYTES
            remote, nbytes = np.array([probe], dtype=np.uint64), np.array([spec.nbytes], dtype=np.uint64)
        local = np.uint64(slot) + np.cumsum(nbytes) - nbytes
        handle = self._frames.start(local, remote, nbytes)
        self._begun[number] = handle, blocks, np.array(places.generations[needed], dtype=np.uint64)

    def finish(self, number: int) -> None:
        """Wait until frame `number` has arrived. A frame that was not begun is over. Raises ChannelBroken."""
        if number in self._begun:
            translate_errors(self._title, partial(self._finish, number))

    def _finish(self, number: int) -> None:
        handle, blocks, expected = self._begun.pop(number)
        self._frames.wait(handle)
        self._slot = self._staging[number % len(self._staging)]
        self._fresh = not len(blocks) or bool((self._now(blocks) == expected).all())

    def staged(self, nbytes: int) -> Tensor:
        """See `StagedPool`."""
        return self._slot[:nbytes]

    def probe(self, number: int, nbytes: int) -> Tensor:
        """See `RemotePool`."""
        return self.staged(nbytes)

    def read(self, kv: KVCache, spec: FrameSpec, places: Places, ours: Sequence[int]) -> bool:
        """See `RemotePool`. Generations only grow, so those that are as announced after the copy were so before it."""
        if self._fresh:
            kv.scatter(spec.layers, ours, spec.begin, spec.end, self.staged(spec.nbytes))
            kv.settle()
        return self._fresh

    def close(self) -> None:
        self._frames.close()
        self._checks.close()

    def _rectangle(self, spec: FrameSpec, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return addresses and bytes of the pieces of a frame, in wire order. Neighbouring blocks are one piece."""
        layout, first = self._layout, spec.begin // self.block_size * self.block_size
        row = layout.row_bytes
        starts = np.concatenate([[0], np.flatnonzero(np.diff(blocks.astype(np.int64)) != 1) + 1])  # of runs of blocks
        begins = np.maximum(starts * self.block_size, spec.begin - first)  # in positions from `first` on
        ends = np.minimum(np.append(starts[1:], len(blocks)) * self.block_size, spec.end - first)
        at = (blocks[starts].astype(np.int64) * self.block_size + begins - starts * self.block_size) * row
        tensors, layers = np.arange(len(layout.tensors)), np.arange(spec.layer_begin, spec.layer_end)
        planes = (layers[:, None] + tensors * layout.layers) * (self.total_blocks * self.block_size * row)
        remote = self._address + self._shape.kv_at + planes[:, :, None] + at
        nbytes = np.broadcast_to((ends - begins) * row, remote.shape)
        return remote.reshape(-1).astype(np.uint64), nbytes.reshape(-1).astype(np.uint64)

    def _now(self, blocks: np.ndarray) -> np.ndarray:
        """Read the current generations of these blocks."""
        known = np.unique(blocks).astype(np.int64)
        ends = np.flatnonzero(np.diff(known) > _GAP)
        first, last = known[np.append(0, ends + 1)], known[np.append(ends, len(known) - 1)]
        at, nbytes = (first * _WORD).astype(np.uint64), ((last - first + 1) * _WORD).astype(np.uint64)
        here, there = np.uint64(self._generations.ctypes.data), np.uint64(self._address)
        self._checks.wait(self._checks.start(here + at, there + at, nbytes))
        now: np.ndarray = self._generations[blocks.astype(np.int64)]
        return now


class NixlEnd:
    """An end of a channel without slots: `exposed` at the sender, `pool` at the receiver."""

    control_socket = None
    ordered = False

    def __init__(self, title: str, exposed: Exposed | None, pool: NixlPool | None) -> None:
        self._title, self._exposed = title, exposed
        self.pool = pool

    def slot(self, number: int) -> Tensor:
        """Raise ChannelBroken: the receiver reads from `pool`."""
        raise ChannelBroken(f"{self._title}: has no slots")

    def turn(self) -> AbstractContextManager[None]:
        """Do not wait: frames need no order among channels."""
        return nullcontext()

    def start(self, number: int, nbytes: int) -> None:
        """Raise ChannelBroken if the pool here cannot be read any more."""
        if self._exposed is not None and self._exposed.ended:
            raise ChannelBroken(f"{self._title}: the process that exposes the pool has ended")

    def finish(self, number: int) -> None:
        """Wait until the frame has arrived. Raises ChannelBroken."""
        if self.pool is not None:
            self.pool.finish(number)

    def close(self) -> None:
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.close()


class ExposingProcess:
    """The process that answers reads of a pool (`nixl_agent`). It ends with this object, and with this process."""

    def __init__(self, library: Any, memory: ExposedMemory, config: str) -> None:
        words = ["-m", "kvtransfer.transports.nixl_agent", library.__name__, memory.file, memory.shape.nbytes, config]
        # It answers for any address, so it must not hold the worker's secrets. Ctrl-C reaches the worker alone.
        env = {name: value for name, value in os.environ.items() if name in _ENV or name.startswith(("UCX_", "NIXL_"))}
        self._process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(memory.file,),
            env=env,
            process_group=0,
        )
        self._lock = threading.Lock()  # channels open in threads of their own
        self._found: tuple[int, bytes] | None = None
        weakref.finalize(self, _end, self._process)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def where(self, deadline_s: float) -> tuple[int, bytes]:
        """See `Exposed`."""
        with self._lock:
            self._found = self._found or self._heard(deadline_s)
            return self._found

    def _heard(self, deadline_s: float) -> tuple[int, bytes]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], deadline_s)[0]:
            raise TimeoutError(f"the process that exposes the pool did not start within {deadline_s} s")
        address, _, metadata = self._process.stdout.readline().decode().partition(" ")
        if not metadata:
            raise ConnectionError("the process that exposes the pool has ended; see its messages")
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
