"""Transport between two processes on one GPU: the receiver reads the sender's ring in device memory, without a copy.

    sender: fill slot, record event, notice   --unix socket-->   receiver: notice, poll event, read slot, credit
Only the sender's process owns and writes the memory. It outlives the channel until the receiver has closed it. The
socket proves that: the receiver, or the kernel after its death, closes it after the memory. Not yet run on a GPU; see
`cuda_memory`. The protocol is tested with a device in main memory.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

import torch

from baton.engine.kernels.gpu.cuda_memory import HANDLE_BYTES, CudaDevice, Device
from kvtransfer.transports import unix_socket
from kvtransfer.transports.base import ChannelName, KeyRelay, Ring, Side, translate_errors
from kvtransfer.transports.unix_socket import SocketEnd, UnixSocketPair, host_reach

_POLL_S = 0.00002
_RING = "cuda-ring"  # key with the handles of the memory and of one event per slot


class CudaIpcTransport:
    """Transport within one GPU, because NCCL is as direct between two. Reads of a slot must be done, not only queued,
    before its credit. Raises ConfigError if KV is not on an NVIDIA GPU or cannot be shared. `gpu` is for tests.
    """

    name = "cuda_ipc"
    one_sided, sends = False, True

    def __init__(self, device: torch.device, gpu: Device | None = None) -> None:
        self._gpu = gpu or CudaDevice(device)
        self.device = device
        self.reach = f"{host_reach('ipc', 'pid')}-{self._gpu.uuid}"
        self._lock = threading.Lock()
        self._quarantine: list[tuple[int, Ring, UnixSocketPair]] = []

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> SocketEnd:
        """See `Transport`. No tensor of a slot may be used after the end was closed."""
        self._free_proved()
        title, build = f"cuda_ipc channel {name}", self._take if side is Side.RECEIVER else self._give
        return translate_errors(f"{title}: not built", lambda: build(title, keys, ring, deadline_s))

    @property
    def quarantined(self) -> int:
        """Bytes of device memory of closed channels that the receiver may still have open."""
        self._free_proved()
        return sum(ring.nbytes for _, ring, _ in self._quarantine)

    def _give(self, title: str, keys: KeyRelay, ring: Ring, deadline_s: float) -> SocketEnd:
        with ExitStack() as undo:
            address = self._gpu.allocate(ring.nbytes)
            undo.callback(self._gpu.free, address)
            pair = unix_socket.connect(keys, deadline_s)
            undo.pop_all()
            release = partial(self._retire, address, ring, pair)  # from here on, the receiver may have it open
            undo.callback(release)
            events = [self._gpu.event() for _ in range(ring.slots)]
            keys.send(_RING, self._gpu.handle(address) + b"".join(handle for _, handle in events))
            pair.expect(0, ring.nbytes)
            staging = self._gpu.tensor(address, ring.nbytes).view(ring.slots, ring.size)
            undo.pop_all()
        return SocketEnd(title, staging, pair, Side.SENDER, release, lambda n: events[n % ring.slots][0]())

    def _take(self, title: str, keys: KeyRelay, ring: Ring, deadline_s: float) -> SocketEnd:
        with ExitStack() as held:
            pair = unix_socket.accept(keys, deadline_s)
            held.callback(pair.close)  # closed after the memory, as proof for the sender
            key = keys.expect(_RING, deadline_s)
            if len(key) != (1 + ring.slots) * HANDLE_BYTES:
                raise ConnectionError(f"{len(key)} bytes are not the handles of {ring.slots} slots")
            handles = [key[at : at + HANDLE_BYTES] for at in range(0, len(key), HANDLE_BYTES)]
            address = self._gpu.open(handles[0])
            held.callback(self._gpu.close, address)
            events = [self._gpu.open_event(handle) for handle in handles[1:]]
            staging = self._gpu.tensor(address, ring.nbytes).view(ring.slots, ring.size)
            pair.notify(0, ring.nbytes)  # all of it is mapped
            release = held.pop_all().close
        return SocketEnd(
            title, staging, pair, Side.RECEIVER, release, lambda n: _wait(events[n % ring.slots], deadline_s)
        )

    def _retire(self, address: int, ring: Ring, pair: UnixSocketPair) -> None:
        with suppress(OSError):
            pair.socket.shutdown(socket.SHUT_WR)  # the receiver sees this and closes
        with self._lock:
            self._quarantine.append((address, ring, pair))
        self._free_proved()

    def _free_proved(self) -> None:
        with self._lock:
            proved = [entry for entry in self._quarantine if entry[2].gone]
            self._quarantine = [entry for entry in self._quarantine if entry not in proved]
        for address, _, pair in proved:
            self._gpu.free(address)
            pair.close()


def _wait(done: Callable[[], bool], deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the slot was not written within {deadline_s} s")
        time.sleep(_POLL_S)
