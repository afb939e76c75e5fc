"""Receiving process of measured handoffs: a decode worker's end of transfers, without a model."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from baton.core import HandoffId, Incarnation, KVLayout, WorkerRef
from baton.engine.kernels.select import block_copy, choose_kernels
from baton.engine.kv_cache import DTYPES as TORCH_DTYPES
from baton.engine.kv_cache import KVCache, exposed_memory
from baton.engine.tp.backend import Ranking, load_sharded
from baton.errors import StaleAttempt
from baton.rpc.channel import aio_server, bind
from baton.rpc.v1.peer_pb2_grpc import add_PeerServicer_to_server
from benchmarks.lib.protocol import serve
from benchmarks.lib.shapes import read_shape
from kvtransfer.handoff import TransferSettings
from kvtransfer.receiver import PeerService
from kvtransfer.transports.select import make_transports

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence

    import grpc

    from benchmarks.lib.protocol import Answer, Handler, Setup
    from kvtransfer.handoff import CommitState, Offer

T = TypeVar("T")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
FINGERPRINT = "benchmark"
BLOCK_SIZE = 16
STEP_S = 180.0  # for opening and closing a lane, which loads a model if it has ranks


class Table:
    """Accepts every handoff into the same blocks, and records the arrival time of each frame."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self._blocks = blocks
        self.landed: defaultdict[HandoffId, list[float]] = defaultdict(list)
        self.commits: dict[HandoffId, CommitState] = {}

    def offer(self, handoff: HandoffId, sender: WorkerRef, offer: Offer) -> None:
        """Accept any offer."""

    @contextmanager
    def writing(self, handoff: HandoffId, sender: WorkerRef) -> Iterator[Sequence[int]]:
        """See `HandoffTable`."""
        yield self._blocks
        self.landed[handoff].append(time.monotonic())

    def commit(self, handoff: HandoffId, sender: WorkerRef, commit: CommitState) -> None:
        """See `HandoffTable`."""
        self.commits[handoff] = commit

    def fetch(self, handoff: HandoffId, sender: WorkerRef, begin: int, end: int, *, verify: bool = False) -> None:
        """Reject the fetch, because nothing is cached."""
        raise StaleAttempt(f"{handoff}: nothing of it is here")

    def aborted(self, handoff: HandoffId, sender: WorkerRef) -> None:
        """Do nothing, because blocks are shared by all handoffs."""

    def lost(self, sender: WorkerRef) -> None:
        """Do nothing, because blocks are shared by all handoffs."""


class Receiver:
    """Opens lanes: a Peer service each, with the settings of the lane. All share the memory for KV."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._kv: dict[str, KVCache] = {}
        self._tables: dict[str, Table] = {}
        self._servers: dict[str, tuple[grpc.aio.Server, PeerService]] = {}
        self._counter = count(1000)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def open(self, settings: dict[str, object], device: str) -> Answer:
        """Return the address and the incarnation's counter of a new lane."""
        return self._run(self._open(TransferSettings(**settings), device))  # type: ignore[arg-type]  # from JSON

    def close(self, address: str) -> Answer:
        """End a lane."""
        server, service = self._servers.pop(address)
        self._run(server.stop(0))
        self._run(service.close())
        return {}

    def committed(self, address: str, handoff: str) -> Answer:
        """Return the times of a handoff: seconds as in `CommitState`, and the arrival of each frame in its blocks."""
        table, key = self._tables[address], HandoffId(handoff, 1)
        commit, landed = table.commits.pop(key), table.landed.pop(key)
        return {"transfer_s": commit.transfer_s, "commit_s": commit.commit_s, "landed": landed}

    async def _open(self, settings: TransferSettings, device: str) -> Answer:
        counter = next(self._counter)
        kv = self._kv[device] = self._kv.get(device) or make_kv(self._setup, device, exposed=True)
        table, server = Table(blocks_of(kv, seed=2)), aio_server()
        me = WorkerRef("decode-0", Incarnation(1, counter), bind(server, "127.0.0.1:0"))
        service = PeerService(kv, me, FINGERPRINT, settings, table, make_transports(settings, kv))
        add_PeerServicer_to_server(service, server)
        await server.start()
        self._tables[me.address], self._servers[me.address] = table, (server, service)
        return {"address": me.address, "counter": counter}

    def _run(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(STEP_S)


def layout_of(setup: Setup) -> KVLayout:
    """Return the KV layout of the model."""
    shape = read_shape(Path(setup.model))
    return KVLayout(shape.layers, shape.kv_heads, shape.head_dim, BLOCK_SIZE, DTYPES[setup.dtype])


def make_kv(setup: Setup, device: str, *, exposed: bool = False) -> KVCache:
    """Return a KV cache for `setup.kv_tokens` tokens, with random content. Other processes can read it if `exposed`."""
    layout = layout_of(setup)
    blocks = layout.blocks_for(setup.kv_tokens)
    if setup.ranks > 1:
        ranking = Ranking(setup.ranks, threads=1)
        backend = load_sharded(setup.model, ranking, dtype=layout.dtype, device=device, block_size=BLOCK_SIZE)
        kv = backend.make_cache(blocks, exposed=exposed)
    else:
        copy = block_copy(choose_kernels(torch.device(device), TORCH_DTYPES[layout.dtype]))
        memory = exposed_memory(layout, blocks, device) if exposed else None
        kv = KVCache(layout, blocks, device, copy=copy, exposed=memory)
    for part in kv.tensors:
        part.view(torch.int16).random_()
    return kv


def blocks_of(kv: KVCache, seed: int) -> list[int]:
    """Return all blocks in random order, as in a pool after a while."""
    blocks = list(range(kv.total_blocks))
    random.Random(seed).shuffle(blocks)
    return blocks


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return an empty description and the handlers for `serve`."""
    torch.set_num_threads(1)
    receiver = Receiver(setup)
    return {}, {"open": receiver.open, "close": receiver.close, "committed": receiver.committed}


if __name__ == "__main__":
    serve(load)
