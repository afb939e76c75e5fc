"""CUDA IPC's protocol over a device made of main memory: order of events, proof before memory is freed.

What a GPU does to it is for `tests/unit/gpu/test_cuda_ipc.py`, on a machine with one.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from baton.engine.kernels.gpu.cuda_driver import HANDLE_BYTES, CudaDevice
from baton.errors import ChannelBroken, ConfigError
from kvtransfer.transport import KeyRelay, Side
from kvtransfer.transports import unix_pair
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from tests.support.time_factor import scaled
from tests.unit.kvtransfer.transports.pairs import (
    CPU,
    NAME,
    RING,
    Control,
    Pairs,
    breaks,
    descriptors,
    frames,
    receive,
    relayed,
    send,
    settled,
)


class MainMemory:
    """A GPU that both ends of a test share. `memory`: what is allocated; `opened`: addresses in use by the receiver."""

    uuid = "GPU-of-main-memory"

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._handles: dict[bytes, Any] = {}
        self.memory: dict[int, torch.Tensor] = {}
        self.opened: dict[int, int] = {}
        self.torn: list[int] = []
        self.recorded: list[int] = []  # how often, of each event
        self.busy = False

    def allocate(self, nbytes: int) -> int:
        address = next(self._numbers)
        self.memory[address] = torch.zeros(nbytes, dtype=torch.uint8)
        return address

    def free(self, address: int) -> None:
        if address in self.opened.values():
            self.torn.append(address)
        del self.memory[address]

    def handle(self, address: int) -> bytes:
        return self._say(address)

    def open(self, handle: bytes) -> int:
        address = self._handles.get(handle)
        if not isinstance(address, int):
            raise RuntimeError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)")
        self.opened[mine := next(self._numbers)] = address
        return mine

    def close(self, address: int) -> None:
        del self.opened[address]

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        memory = self.memory[self.opened.get(address, address)]
        assert memory.numel() == nbytes
        return memory

    def event(self) -> tuple[Callable[[], None], bytes]:
        index = len(self.recorded)
        self.recorded.append(0)

        def record() -> None:
            self.recorded[index] += 1

        return record, self._say(lambda: self.recorded[index] > 0 and not self.busy)

    def open_event(self, handle: bytes) -> Callable[[], bool]:
        return self._handles[handle]

    def _say(self, what: object) -> bytes:
        handle = os.urandom(HANDLE_BYTES)
        self._handles[handle] = what
        return handle


@pytest.fixture
def gpu() -> MainMemory:
    return MainMemory()


@pytest.fixture
def pairs(gpu: MainMemory, pool) -> Iterator[Pairs]:
    """In the end all memory is free, and none was freed that the receiver had open."""
    before = descriptors()
    pairs = Pairs((CudaIpcTransport(CPU, gpu), CudaIpcTransport(CPU, gpu)), pool)
    yield pairs
    pairs.close()
    assert quarantined(pairs) == 0
    assert not gpu.memory
    assert not gpu.opened
    assert not gpu.torn
    assert settled(lambda: descriptors() <= before), descriptors() - before


def quarantined(pairs: Pairs) -> int:
    transport = pairs.sides[Side.SENDER]
    assert isinstance(transport, CudaIpcTransport)
    return transport.quarantined


def test_bytes_arrive_in_the_same_memory(pairs: Pairs, gpu: MainMemory, seed: int) -> None:
    sender, receiver = pairs()
    control, data = Control(RING.slots), frames(seed, 40)
    sending = pairs.pool.submit(send, sender, control, data, RING.slots)
    assert all(map(torch.equal, receive(receiver, control, len(data), 2), data))
    sending.result(scaled(10))
    assert gpu.recorded == [10] * RING.slots
    assert len(gpu.memory) == 1


def test_a_frame_is_there_when_the_gpu_has_written_it(pairs: Pairs, gpu: MainMemory) -> None:
    sender, receiver = pairs()
    gpu.busy = True
    sender.start(0, 8)
    receiver.start(0, 8)
    finishing = pairs.pool.submit(receiver.finish, 0)
    assert settled(lambda: gpu.recorded[0] == 1)
    assert not finishing.done()
    gpu.busy = False
    finishing.result(scaled(10))


def test_a_gpu_that_never_writes_it_is_given_up_by_the_deadline(pairs: Pairs, gpu: MainMemory) -> None:
    sender, receiver = pairs(deadline_s=0.2)
    gpu.busy = True
    sender.start(0, 8)
    receiver.start(0, 8)
    with pytest.raises(ChannelBroken, match="not written"):
        receiver.finish(0)


@pytest.mark.parametrize("first", list(Side))
def test_memory_is_freed_when_both_have_closed(pairs: Pairs, gpu: MainMemory, first: Side) -> None:
    ends = pairs()
    ends[first].close()
    assert len(gpu.memory) == 1
    assert quarantined(pairs) == (RING.nbytes if first is Side.SENDER else 0)
    ends[1 - first].close()
    assert quarantined(pairs) == 0
    assert not gpu.memory


def test_closed_peers_are_seen_at_once(pairs: Pairs) -> None:
    sender, receiver = pairs(deadline_s=30.0)
    receiver.start(0, 8)
    waiting, started = pairs.pool.submit(receiver.finish, 0), time.monotonic()
    sender.close()
    with pytest.raises(ChannelBroken, match="closed by the other end"):
        waiting.result(scaled(10))
    sender, receiver = pairs(deadline_s=30.0)
    receiver.close()
    assert breaks(lambda: sender.start(0, 8))
    assert time.monotonic() - started < 20.0  # less than the deadline


def test_a_ring_is_never_used_by_the_next_channel_while_the_receiver_may_have_it(pairs: Pairs, gpu: MainMemory) -> None:
    sender, kept = pairs()
    sender.close()
    for _ in range(3):
        for end in pairs():
            end.close()
    assert quarantined(pairs) == RING.nbytes
    assert list(gpu.memory) == list(gpu.opened.values())
    kept.close()


def test_without_a_receiver_nothing_is_shared_or_kept(pairs: Pairs, gpu: MainMemory) -> None:
    with pytest.raises(ChannelBroken, match="not built"):
        pairs.sides[Side.SENDER].open(NAME, Side.SENDER, KeyRelay(lambda key, value: None), RING, 0.1)
    assert not gpu.memory


@pytest.mark.parametrize("handles", [b"", bytes(HANDLE_BYTES), bytes(HANDLE_BYTES * (RING.slots + 1))])
def test_a_receiver_refuses_handles_that_are_none(pairs: Pairs, pool, handles: bytes) -> None:
    ours, theirs = relayed()
    opening = pool.submit(pairs.sides[Side.RECEIVER].open, NAME, Side.RECEIVER, theirs, RING, 5.0)
    pair = unix_pair.connect(ours, 5.0)
    ours.send("cuda-ring", handles)
    with pytest.raises(ChannelBroken, match=r"no handles|INVALID_VALUE"):
        opening.result(scaled(10))
    assert pair.gone
    pair.close()


def test_a_sender_keeps_what_it_offered_until_the_receiver_is_gone(pairs: Pairs, pool, gpu: MainMemory) -> None:
    ours, theirs = relayed()
    opening = pool.submit(pairs.sides[Side.SENDER].open, NAME, Side.SENDER, ours, RING, 0.3)
    pair = unix_pair.accept(theirs, 5.0)
    key = theirs.receive(5.0)
    assert key is not None
    address = gpu.open(key[1][:HANDLE_BYTES])  # and never says so
    with pytest.raises(ChannelBroken, match="not built"):
        opening.result(scaled(10))
    assert quarantined(pairs) == RING.nbytes
    gpu.close(address)
    pair.close()


def test_processes_reach_each_other_on_one_gpu(gpu: MainMemory) -> None:
    other = MainMemory()
    assert CudaIpcTransport(CPU, gpu).reach == CudaIpcTransport(CPU, gpu).reach
    other.uuid = "GPU-another"
    assert CudaIpcTransport(CPU, gpu).reach != CudaIpcTransport(CPU, other).reach


def test_it_is_not_for_kv_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="NVIDIA GPU; KV is on cpu"):
        CudaDevice(CPU)
