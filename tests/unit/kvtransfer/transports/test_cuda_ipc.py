"""CUDA IPC over a device made of main memory: runs of copies, lifetime of memory, order of reads and writes.
`test_one_sided.py` tests whole handoffs over it, and `tests/unit/gpu/test_one_gpu.py` a real GPU.
"""

import ctypes
import gc
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.engine import Engine
from baton.engine.kernels.gpu import cuda_memory
from baton.engine.kernels.gpu.cuda_memory import ExposedGpuMemory
from baton.engine.kv_cache import KVCache
from baton.engine.memory.exposed import PROBE_BYTES, PROBES, Shape, pattern
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.errors import ChannelBroken, ConfigError
from kvtransfer.frames import FrameSpec
from kvtransfer.transports.base import Places, Side
from kvtransfer.transports.cuda_ipc import CudaIpcTransport, OpenedPool, OwnerProcess, runs
from kvtransfer.transports.host_pool import PoolEnd
from tests.support.engines import key_of, kv_of, spec_of
from tests.support.time_factor import scaled
from tests.support.transports import MainMemory
from tests.support.waiting import eventually
from tests.unit.kvtransfer.support import LAYER, LAYOUT, SMALL_FRAMES, Pair, make_kv, same_kv
from tests.unit.kvtransfer.support import Pairs as Handoffs
from tests.unit.kvtransfer.transports.pairs import CPU, NAME, RING, descriptors, relayed

TOKENS, SOURCE, TARGET = 22, [5, 9, 2, 40, 33, 1], [7, 3, 60, 11, 12, 13]
WHOLE = FrameSpec(0, 3, 0, TOKENS, 3 * TOKENS * LAYOUT.layer_token_bytes)


@pytest.fixture
def gpu() -> Iterator[MainMemory]:
    """A GPU on which all memory must be closed and freed at the end, and no descriptor be left."""
    before, gpu = descriptors(), MainMemory()
    yield gpu
    gpu.streams.clear()
    gc.collect()
    assert not gpu.memory
    assert not gpu.opened
    eventually(lambda: descriptors() <= before)


@pytest.fixture
def handoffs(gpu: MainMemory) -> Iterator[Handoffs]:
    """Makes pairs whose receiver reads the sender's memory on the GPU, or the memory transport if that fails."""
    made = Handoffs()
    yield made
    made.close()
    made.made.clear()


def over_ipc(handoffs: Handoffs, gpu: MainMemory, reader: MainMemory, settings=SMALL_FRAMES) -> Pair:
    source, target = make_kv(1, gpu=gpu), make_kv(None)
    send, recv = CudaIpcTransport(source, gpu), CudaIpcTransport(target, reader)
    return handoffs(settings, source=source, target=target, send=lambda m: [send, m], recv=lambda m: [recv, m])


def opened(gpu: MainMemory, source: KVCache, target: KVCache, pool) -> tuple[PoolEnd, PoolEnd, OpenedPool]:
    """Return both ends of a channel, and the pool of the receiver, which is another process."""
    sender, receiver = relayed()
    giving = pool.submit(CudaIpcTransport(source, gpu).open, NAME, Side.SENDER, sender, RING, 5.0)
    reader = gpu.beside()
    reader.streams = gpu.streams
    there = CudaIpcTransport(target, reader).open(NAME, Side.RECEIVER, receiver, RING, 5.0)
    assert isinstance(there.pool, OpenedPool)
    return giving.result(scaled(10)), there, there.pool


@contextmanager
def read_from(gpu: MainMemory, source: KVCache, target: KVCache, pool) -> Iterator[OpenedPool]:
    ours, theirs, remote = opened(gpu, source, target, pool)
    with closing(ours), closing(theirs):
        yield remote


@given(
    begin=st.integers(0, 40),
    count=st.integers(1, 40),
    sizes=st.tuples(st.sampled_from([1, 3, 4, 16]), st.sampled_from([1, 4, 6, 16])),
    draw=st.randoms(),
)
def test_runs_are_the_longest_that_are_contiguous_on_both_sides(begin, count, sizes, draw) -> None:
    end = begin + count
    blocks = [draw.sample(range(60), 60) if draw.random() < 0.7 else list(range(3, 63)) for _ in sizes]
    blocks = [part + draw.sample(range(60, 120), 30) for part in blocks]
    inside = [part[begin // size : -(-end // size)] for part, size in zip(blocks, sizes, strict=True)]
    slots = [[b[p // s] * s + p % s for p in range(begin, end)] for b, s in zip(blocks, sizes, strict=True)]
    there, here, counts = runs(begin, end, (inside[0], sizes[0]), (inside[1], sizes[1]))
    assert [at + n for at, count in zip(there.tolist(), counts.tolist(), strict=True) for n in range(count)] == slots[0]
    assert [at + n for at, count in zip(here.tolist(), counts.tolist(), strict=True) for n in range(count)] == slots[1]
    steps = zip(*((b - a for a, b in pairwise(side)) for side in slots), strict=True)
    assert len(counts) == 1 + sum(step != (1, 1) for step in steps)


def test_the_probe_reads_the_pattern_from_device_memory(gpu, pool) -> None:
    source, target = make_kv(1, gpu=gpu), make_kv(None)
    with read_from(gpu, source, target, pool) as remote:
        for number in range(PROBES):
            assert torch.equal(remote.probe(number, 1000), pattern(number, 1000))
        assert isinstance(source.exposed, ExposedGpuMemory)
        gpu.at(source.exposed.address + source.exposed.shape.kv_bytes + PROBE_BYTES, 1)[0] ^= 1
        assert not torch.equal(remote.probe(1, 1000), pattern(1, 1000))


def test_the_first_copy_of_a_sequence_follows_the_compute_stream_and_no_later_one(gpu, pool) -> None:
    """Kernels that were launched before may still write to blocks that were freed. The host waits for none of them."""
    source, target, one, two = make_kv(1, gpu=gpu), make_kv(None), Places(SOURCE, [0] * 6), Places(SOURCE, [0] * 6)
    with read_from(gpu, source, target, pool) as remote:
        counts = []
        for places in (one, two, one, two):
            assert remote.read(target, WHOLE, places, TARGET)
            counts.append(gpu.streams[-1].followed)
    assert counts == [1, 2, 2, 2]
    assert same_kv(source, SOURCE, target, TARGET, TOKENS)


def test_stale_places_are_not_read_at_all(gpu, pool) -> None:
    source, target = make_kv(1, gpu=gpu), make_kv(None)
    assert source.exposed is not None
    source.exposed.generations[SOURCE[2]] += 1
    with read_from(gpu, source, target, pool) as remote:
        assert not remote.read(target, WHOLE, Places(SOURCE, [0] * 6), TARGET)
    assert not target.k.any()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_block_that_is_given_away_before_the_copies_have_ended_voids_the_read(gpu, pool, share: float) -> None:
    source, target = make_kv(1, gpu=gpu), make_kv(None)
    assert source.exposed is not None
    generations = source.exposed.generations

    def give_away(number: int, count: int) -> None:
        generations[SOURCE[2]] += number == int(count * share)

    with read_from(gpu, source, target, pool) as remote:
        gpu.streams[-1].gpu.before = give_away
        assert not remote.read(target, WHOLE, Places(SOURCE, [0] * 6), TARGET)
        assert generations[SOURCE[2]] == 1


def test_channels_of_one_sender_open_the_memory_once_and_close_it_as_often(gpu, pool) -> None:
    source, target, reader = make_kv(1, gpu=gpu), make_kv(None), gpu.beside()
    transports, ends = (CudaIpcTransport(source, gpu), CudaIpcTransport(target, reader)), []
    for _ in range(2):
        sender, receiver = relayed()
        giving = pool.submit(transports[0].open, NAME, Side.SENDER, sender, RING, 5.0)
        ends += [transports[1].open(NAME, Side.RECEIVER, receiver, RING, 5.0), giving.result(scaled(10))]
    assert [users for _, users in gpu.opened.values()] == [2]
    for end in ends[:2]:
        end.close()
        end.close()  # does nothing
    assert ends[2].pool.read(target, WHOLE, Places(SOURCE, [0] * 6), TARGET)
    for end in ends[2:]:
        end.close()


def test_memory_is_freed_with_its_last_tensor_once_the_reader_has_closed_it(gpu, pool) -> None:
    source, target = make_kv(1, gpu=gpu), make_kv(None)
    ours, theirs, _ = opened(gpu, source, target, pool)
    kept = [source.k[1]]
    ours.close()
    del source, ours
    gc.collect()
    assert len(gpu.memory) == 1  # the tensor is a part of it
    freeing = pool.submit(kept.clear)
    eventually(lambda: not kept)
    assert len(gpu.memory) == 1  # the reader has it open
    theirs.close()
    freeing.result(scaled(10))
    eventually(lambda: not gpu.memory)


def test_memory_that_a_reader_does_not_close_is_never_freed(pool, monkeypatch) -> None:
    monkeypatch.setattr(cuda_memory, "CLOSE_S", 0.01)
    gpu = MainMemory()
    memory = ExposedGpuMemory(Shape(4, 4 * LAYOUT.block_bytes), gpu)
    ended = iter([True, False, False, False, False, *[False] * 1000])
    memory.lend(lambda: next(ended))
    memory.lend(lambda: False)  # the first reader has closed it, so it is asked no more
    del memory
    gc.collect()
    assert len(gpu.memory) == 1
    assert next(ended) is False


def test_an_end_shuts_its_socket_after_its_memory(gpu, pool) -> None:
    source, target = make_kv(1, gpu=gpu), make_kv(None)
    ours, theirs, _ = opened(gpu, source, target, pool)
    shut, still_open = theirs.control_socket.close, list[bool]()

    def close() -> None:
        still_open.append(bool(gpu.opened))
        shut()

    vars(theirs.control_socket)["close"] = close
    theirs.close()
    ours.close()
    assert still_open == [False]


def test_without_peer_access_the_next_transport_is_taken(handoffs, gpu) -> None:
    reader = gpu.beside()
    reader.strange.add(0)
    pair = over_ipc(handoffs, gpu, reader)
    pair.reports.failed(pair.push("r", TOKENS, SOURCE, TARGET), ChannelBroken, "PEER_ACCESS_UNSUPPORTED")
    assert pair.reports.done(pair.push("again", TOKENS, SOURCE, TARGET)).transport == "memory"
    [reason] = [reason for channel in pair.sender.channels() for reason in channel.left_out]
    assert (reason.transport, reason.reason) == ("cuda_ipc", "failed")
    assert "PEER_ACCESS_UNSUPPORTED" in reason.detail


def test_a_process_cannot_read_its_own_pool(gpu, pool) -> None:
    source, (sender, receiver) = make_kv(1, gpu=gpu), relayed()
    gpu.beside()
    giving = pool.submit(CudaIpcTransport(source, gpu).open, NAME, Side.SENDER, sender, RING, 5.0)
    with pytest.raises(ChannelBroken, match="INVALID_CONTEXT"):
        CudaIpcTransport(make_kv(None), gpu).open(NAME, Side.RECEIVER, receiver, RING, 5.0)
    giving.result(scaled(10)).close()


class Kernels:
    """Marks of work that a GPU has not done yet. It is done when the host waits for its mark."""

    def __init__(self, kv: KVCache) -> None:
        self._kv, self.waited = kv, list[int]()
        self._truth = [tensor.clone() for tensor in kv.tensors]
        for tensor in kv.tensors:
            tensor.fill_(float("nan"))
        self._next = 0

    def __call__(self) -> Any:
        """Launch the kernels of the next layer, and return their mark."""
        layer, self._next = self._next, self._next + 1

        def synchronize() -> None:
            self.waited.append(layer)
            for tensor, truth in zip(self._kv.tensors, self._truth, strict=True):
                tensor[: layer + 1] = truth[: layer + 1]

        return SimpleNamespace(synchronize=synchronize)


def test_a_frame_is_announced_when_the_gpu_has_written_it_and_not_when_it_has_written_more(handoffs, gpu) -> None:
    layer = replace(SMALL_FRAMES, frame_size=3 * LAYER, coalesce_below=TOKENS * LAYOUT.layer_token_bytes)
    pair = over_ipc(handoffs, gpu, gpu.beside(), layer)
    source, truth, kernels = pair.source, make_kv(1), Kernels(pair.source)
    vars(source)["mark"] = kernels
    job = pair.begin("r", TOKENS, TARGET)
    for layers in range(1, 4):
        pair.sender.computed(job.handoff, SOURCE, layers, TOKENS)
        pair.table.wait_written(job.handoff, layers)
    assert kernels.waited == [0, 1, 2]
    vars(source)["mark"] = lambda: None
    pair.complete(job, SOURCE)
    assert same_kv(truth, SOURCE, pair.target, TARGET, TOKENS)


def test_a_generation_changes_before_the_forward_that_overwrites_the_block(gpu) -> None:
    """Forwards launch kernels. A reader of the old content must see the change after its copy, whenever it began."""

    class Backend(OracleBackend):
        def make_cache(self, total_blocks: int, *, exposed: bool = False) -> KVCache:
            self._seen = None
            shape = Shape(total_blocks, total_blocks * self.layout.block_bytes)
            return KVCache(self.layout, total_blocks, exposed=ExposedGpuMemory(shape, gpu))

        def forward(self, batch, kv):
            written = {slot // self.layout.block_size for slot in batch.slot_mapping.tolist()}
            changes.append([kv.exposed.generations[block] != before.get(block) for block in written])
            return super().forward(batch, kv)

    changes, before = list[list[bool]](), dict[int, int]()
    backend = Backend(oracle_layout(4))
    engine = Engine(backend, backend.tokenizer, total_blocks=4, prefix_cache=False)
    for _ in range(2):
        kv_of(engine, spec_of(range(10)))
        engine.release(key_of())
        assert engine.kv.exposed is not None
        before.update(enumerate(engine.kv.exposed.generations))
    assert len(changes) >= 2
    assert all(map(all, changes))


def test_nothing_is_committed_from_an_owner_that_has_died(handoffs, gpu, monkeypatch) -> None:
    """All packets of the sender arrive, and its memory was freed in the middle of a copy."""
    pair = over_ipc(handoffs, gpu, reader := gpu.beside())
    job = pair.begin("r", TOKENS, TARGET)
    eventually(pair.sender.channels)

    def dies(number: int, count: int) -> None:
        if number == 1:
            gpu.dies()
            monkeypatch.setattr(OwnerProcess, "check", Mock(side_effect=ConnectionError("it has ended")))

    reader.before = dies
    pair.sender.computed(job.handoff, SOURCE, LAYOUT.layers, TOKENS)
    pair.reports.failed(job.handoff, ChannelBroken, "it has ended")
    assert job.handoff not in pair.table.commits


@pytest.mark.parametrize("reaped", [False, True])
def test_the_end_of_the_peers_process_is_seen_without_its_socket(reaped: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, ExitStack() as ending:
        listener.bind("")  # an abstract name of the kernel's choice
        listener.listen()
        program = f"import socket, time; s = socket.socket(1, 5); s.connect({listener.getsockname()!r}); time.sleep(99)"
        listener.settimeout(scaled(30))
        process = ending.enter_context(subprocess.Popen([sys.executable, "-c", program]))
        ending.callback(process.kill)
        with closing(listener.accept()[0]) as connected, closing(OwnerProcess(connected)) as owner:
            owner.check()
            process.kill()
            if reaped:
                process.wait()
            eventually(lambda: ended(owner))


def ended(owner: OwnerProcess) -> bool:
    try:
        owner.check()
    except OSError:
        return True
    return False


class Driver:
    """The calls of `_CudaCopies`, on main memory. cuda.h 12.8: cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs,
    size_t *sizes, size_t count, CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, size_t *failIdx,
    CUstream hStream). cuda.h 13.0 names cuMemcpyBatchAsync_v2, which lacks failIdx; the library keeps the first symbol.
    """

    torch = CPU

    def __init__(self, *, batched: bool) -> None:
        self._batched = batched
        self.called: list[str] = []

    def has(self, name: str) -> bool:
        return self._batched and name == "cuMemcpyBatchAsync"

    @contextmanager
    def current(self) -> Iterator[Any]:
        yield self.call

    def call(self, name: str, *arguments: Any) -> None:
        self.called.append(name)
        if name == "cuMemcpyAsync":
            target, source, size, stream = (each.value for each in arguments)
            copies = [(target, source, size)]
        else:
            assert name == "cuMemcpyBatchAsync"
            count, attributes, first, entries, failed, stream = arguments[3].value, *arguments[4:8], arguments[8].value
            words = (ctypes.cast(each, ctypes.POINTER(ctypes.c_uint64))[:count] for each in arguments[:3])
            copies = list(zip(*words, strict=True))
            assert (attributes._obj.order, attributes._obj.flags, first._obj.value, entries.value) == (1, 1, 0, 1)
            assert (ctypes.sizeof(attributes._obj), ctypes.sizeof(failed._obj)) == (24, 8)
        assert stream == 7
        for target, source, size in copies:
            ctypes.memmove(target, source, size)


@pytest.mark.parametrize("batched", [True, False])
def test_the_driver_copies_on_a_stream_of_its_own(monkeypatch, batched: bool) -> None:
    waits: list[object] = []
    stream = SimpleNamespace(cuda_stream=7, wait_stream=waits.append, synchronize=lambda: waits.append("host"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "compute")
    driver = Driver(batched=batched)
    copies = cuda_memory._CudaCopies(driver)  # type: ignore[arg-type]
    source, target = torch.arange(24, dtype=torch.uint8), torch.zeros(24, dtype=torch.uint8)
    at = [(2, 0, 4), (20, 10, 3), (8, 16, 8)]
    rows = [(source.data_ptr() + begin, target.data_ptr() + to, size) for begin, to, size in at]
    copies.follow()
    copies.copy(*(np.array(column, dtype=np.uint64) for column in zip(*rows, strict=True)))
    copies.wait()
    assert torch.equal(source, torch.arange(24, dtype=torch.uint8))
    for begin, to, size in at:
        assert torch.equal(source[begin : begin + size], target[to : to + size])
    assert driver.called == (["cuMemcpyBatchAsync"] if batched else ["cuMemcpyAsync"] * 3)
    assert waits == ["compute", "host"]


def test_a_cache_that_is_not_exposed_can_only_receive_and_one_in_parts_cannot(gpu) -> None:
    assert not CudaIpcTransport(make_kv(None), gpu).sends
    with pytest.raises(ConfigError, match="memory of one process"):
        CudaIpcTransport(KVCache(LAYOUT, 2, storage=[torch.empty(3, 2, 4, 2, 8, device="meta")]), gpu)


def test_too_little_memory_is_a_config_error(monkeypatch) -> None:
    gpu = MainMemory()
    error = RuntimeError("cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")
    monkeypatch.setattr(gpu, "allocate", Mock(side_effect=error))
    with pytest.raises(ConfigError, match=r"KV memory of \d+ bytes on the GPU: .*OUT_OF_MEMORY"):
        make_kv(1, gpu=gpu)
