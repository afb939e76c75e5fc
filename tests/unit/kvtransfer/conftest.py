"""A sender and a receiver in one process, over memory, with hooks to watch and corrupt transfers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from baton.core import HandoffId, KVLayout, WorkerRef
from baton.engine.kv_cache import KVCache
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.handoff import PushEnd, PushJob, PushResult, TransferSettings
from kvtransfer.receiver import PeerService
from kvtransfer.sender import Sender
from kvtransfer.transports.base import Transport
from tests.support.memory_transport import MemoryTransport
from tests.support.waiting import eventually
from tests.unit.kvtransfer.ends import Gate, Wrapped
from tests.unit.kvtransfer.support import (
    FINGERPRINT,
    LAYOUT,
    SETTINGS,
    D,
    LoopbackPeer,
    LoopbackStream,
    P,
    RecordingTable,
    Reports,
    hand_over,
    make_end,
    make_job,
    make_kv,
)

Choice = Callable[[MemoryTransport], Sequence[Transport]]


def plain(memory: MemoryTransport) -> Sequence[Transport]:
    return [memory]


def wrapped(wrap) -> Choice:
    return lambda memory: [Wrapped(memory, wrap)]


@dataclass
class Pair:
    table: RecordingTable
    source: KVCache
    target: KVCache
    reports: Reports
    peer: LoopbackPeer
    sender: Sender
    unfetched: queue.Queue[HandoffId]

    def reserve(self, name: str, tokens: int, target: Sequence[int], **job) -> PushJob:
        """Reserve blocks for a push that has not begun."""
        made = make_job(name, tokens, **job)
        self.table.reserve(made.handoff, target)
        return made

    def begin(self, name: str, tokens: int, target: Sequence[int], **job) -> PushJob:
        made = self.reserve(name, tokens, target, **job)
        self.sender.begin(made)
        return made

    def push(self, name: str, tokens: int, source: Sequence[int], target: Sequence[int], **job) -> HandoffId:
        return hand_over(self.sender, self.reserve(name, tokens, target, **job), source, self.source.layout.layers)

    def complete(self, job: PushJob, blocks: Sequence[int], end: PushEnd | None = None) -> PushResult:
        """Compute and finish a push that has begun. Return its result."""
        self.sender.computed(job.handoff, blocks, self.source.layout.layers, job.known_tokens)
        self.sender.finish(job.handoff, end or make_end(job.known_tokens))
        return self.reports.done(job.handoff)

    @property
    def stream(self) -> LoopbackStream:
        return self.peer.streams[-1]


class Pairs:
    """Creates pairs. `send`, `recv`: each side's transports. `heard` may change a reply, or return False to drop it."""

    def __init__(self) -> None:
        self.made: list[Pair] = []

    def __call__(
        self,
        settings: TransferSettings = SETTINGS,
        *,
        receiver: TransferSettings | None = None,
        send: Choice = plain,
        recv: Choice = plain,
        source: KVCache | None = None,
        layout: KVLayout = LAYOUT,
        fingerprint: str = FINGERPRINT,
        me: WorkerRef = P,
        connect=None,
        heard: Callable[[pb.PeerReply], bool] = lambda reply: True,
    ) -> Pair:
        memory, table, reports = MemoryTransport(), RecordingTable(layout), Reports()
        source, target = source or make_kv(1), make_kv(None, layout=layout)
        theirs = receiver or settings
        peer = LoopbackPeer(lambda: PeerService(target, D, FINGERPRINT, theirs, table, recv(memory)))

        def filtered(address, on_reply, on_end) -> LoopbackStream:
            return peer.connect(address, lambda reply: heard(reply) and on_reply(reply), on_end)

        unfetched: queue.Queue[HandoffId] = queue.Queue()
        told: dict[str, Any] = {"on_unfetched": unfetched.put, "connect": connect or filtered}
        sender = Sender(source, me, fingerprint, settings, send(memory), reports, **told)
        self.made.append(Pair(table, source, target, reports, peer, sender, unfetched))
        return self.made[-1]

    def gated(self, settings: TransferSettings, **change) -> tuple[Pair, Gate]:
        """Create a pair whose sender stops before each frame."""
        gate = Gate()
        return self(settings, send=wrapped(gate), **change), gate

    def close(self) -> None:
        for pair in self.made:
            pair.sender.close()
            pair.peer.close()


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    """Pairs that are closed at the end. Closing must leave no thread."""
    torch.set_num_threads(1)
    before = set(threading.enumerate())
    pairs = Pairs()
    yield pairs
    pairs.close()
    eventually(lambda: set(threading.enumerate()) <= before, f"no more threads than {before}")


@pytest.fixture
def pair(pairs: Pairs) -> Pair:
    return pairs()
