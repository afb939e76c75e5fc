"""CUDA IPC's protocol over a device made of main memory: order of events, proof before memory is freed.
`test_contract.py` tests the contract of a channel, and `tests/unit/gpu/test_one_gpu.py` a real GPU.
"""

from collections.abc import Iterator

import pytest
import torch

from baton.engine.kernels.gpu.cuda_memory import HANDLE_BYTES
from baton.errors import ChannelBroken
from kvtransfer.transports import unix_socket
from kvtransfer.transports.base import Side
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from tests.support.time_factor import scaled
from tests.support.transports import MainMemory
from tests.support.waiting import eventually
from tests.unit.kvtransfer.transports.pairs import CPU, RING, Pairs, descriptors, frames, relayed


@pytest.fixture
def gpu() -> MainMemory:
    return MainMemory()


@pytest.fixture
def pairs(gpu: MainMemory, pool) -> Iterator[Pairs]:
    """Channels that must free all memory at the end, and none that the receiver has open."""
    before = descriptors()
    pairs = Pairs((CudaIpcTransport(CPU, gpu), CudaIpcTransport(CPU, gpu)), pool)
    yield pairs
    pairs.close()
    assert quarantined(pairs) == 0
    assert not gpu.memory
    assert not gpu.opened
    eventually(lambda: descriptors() <= before)


def quarantined(pairs: Pairs) -> int:
    transport = pairs.sides[Side.SENDER]
    assert isinstance(transport, CudaIpcTransport)
    return transport.quarantined


def test_bytes_arrive_in_the_same_memory(pairs: Pairs, gpu: MainMemory, seed: int) -> None:
    data = frames(seed, 40)
    assert all(map(torch.equal, pairs.carry(pairs(), data, 2), data))
    assert gpu.recorded == [10] * RING.slots
    assert len(gpu.memory) == 1


def test_a_frame_is_there_when_the_gpu_has_written_it(pairs: Pairs, gpu: MainMemory) -> None:
    sender, receiver = pairs()
    gpu.busy = True
    sender.start(0, 8)
    receiver.start(0, 8)
    finishing = pairs.pool.submit(receiver.finish, 0)
    eventually(lambda: gpu.recorded[0] == 1)
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


def test_a_ring_is_never_used_by_the_next_channel_while_the_receiver_may_have_it(pairs: Pairs, gpu: MainMemory) -> None:
    sender, kept = pairs()
    sender.close()
    for _ in range(3):
        for end in pairs():
            end.close()
    assert quarantined(pairs) == RING.nbytes
    assert list(gpu.memory) == list(gpu.opened.values())
    kept.close()


@pytest.mark.parametrize("handles", [b"", bytes(HANDLE_BYTES), bytes(HANDLE_BYTES * (RING.slots + 1))])
def test_a_receiver_refuses_handles_that_are_none(pairs: Pairs, handles: bytes) -> None:
    ours, theirs = relayed()
    opening = pairs.alone(Side.RECEIVER, theirs)
    pair = unix_socket.connect(ours, 5.0)
    ours.send("cuda-ring", handles)
    with pytest.raises(ChannelBroken, match=r"not the handles|INVALID_VALUE"):
        opening.result(scaled(10))
    assert pair.gone
    pair.close()


def test_a_sender_keeps_what_it_offered_until_the_receiver_is_gone(pairs: Pairs, gpu: MainMemory) -> None:
    ours, theirs = relayed()
    opening = pairs.alone(Side.SENDER, ours, 0.3)
    pair = unix_socket.accept(theirs, 5.0)
    key = theirs.receive(5.0)
    assert key is not None
    address = gpu.open(key[1][:HANDLE_BYTES])  # and never reports it
    with pytest.raises(ChannelBroken, match="not built"):
        opening.result(scaled(10))
    assert quarantined(pairs) == RING.nbytes
    gpu.close(address)
    pair.close()


def test_processes_reach_each_other_on_one_gpu(gpu: MainMemory) -> None:
    other = MainMemory()
    other.uuid = "GPU-another"
    here, again, there = (CudaIpcTransport(CPU, each).reach for each in (gpu, gpu, other))
    assert here == again != there
