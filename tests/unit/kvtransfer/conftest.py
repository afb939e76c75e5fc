"""A sender and a receiver in one process, over memory, with what a test wants to see or to spoil."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from baton.core import HandoffId, KVLayout, WorkerRef
from baton.engine.kv import KVCache
from kvtransfer.handoff import PushJob, TransferSettings
from kvtransfer.receiver import PeerService
from kvtransfer.sender import Sender
from kvtransfer.transport import Transport
from kvtransfer.transports.memory import MemoryTransport
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
    make_job,
    make_kv,
    settled,
)

Choice = Callable[[MemoryTransport], Sequence[Transport]]


def plain(memory: MemoryTransport) -> Sequence[Transport]:
    return [memory]


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
        """A push that has not begun, and room for it."""
        made = make_job(name, tokens, **job)
        self.table.reserve(made.handoff, target)
        return made

    def push(self, name: str, tokens: int, source: Sequence[int], target: Sequence[int], **job) -> HandoffId:
        """A push all of whose KV is computed."""
        return hand_over(self.sender, self.reserve(name, tokens, target, **job), source, self.source.layout.layers)

    @property
    def stream(self) -> LoopbackStream:
        """The newest channel's."""
        return self.peer.streams[-1]


class Pairs:
    """Makes pairs. `send` and `recv` say what transports each side has, made of the one that both could use."""

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
    ) -> Pair:
        memory, table, reports = MemoryTransport(), RecordingTable(layout), Reports()
        target, source = make_kv(None, layout=layout), source or make_kv(1)
        theirs = receiver or settings
        peer = LoopbackPeer(lambda: PeerService(target, D, FINGERPRINT, theirs, table, recv(memory)))
        connect = connect or peer.connect
        unfetched: queue.Queue[HandoffId] = queue.Queue()
        told = {"on_unfetched": unfetched.put, "connect": connect}
        sender = Sender(source, me, fingerprint, settings, send(memory), reports, **told)
        self.made.append(Pair(table, source, target, reports, peer, sender, unfetched))
        return self.made[-1]

    def close(self) -> None:
        for pair in self.made:
            pair.sender.close()
            pair.peer.close()


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    """Closed at the end, which must leave no thread."""
    torch.set_num_threads(1)
    before = set(threading.enumerate())
    pairs = Pairs()
    yield pairs
    pairs.close()
    assert settled(lambda: set(threading.enumerate()) <= before), set(threading.enumerate()) - before


@pytest.fixture
def pair(pairs: Pairs) -> Pair:
    """With the settings that most tests need."""
    return pairs()
