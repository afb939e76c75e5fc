"""A sender and a receiver in one process, over memory, with what a test wants to see or to spoil."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from baton.engine.kv import KVCache
from kvtransfer.handoff import TransferSettings
from kvtransfer.memory import MemoryTransport
from kvtransfer.receiver import PeerService
from kvtransfer.sender import Sender
from tests.unit.kvtransfer.support import (
    FINGERPRINT,
    SETTINGS,
    D,
    LoopbackPeer,
    P,
    RecordingTable,
    Reports,
    make_kv,
    settled,
)


@dataclass
class Pair:
    table: RecordingTable
    source: KVCache
    target: KVCache
    reports: Reports
    peer: LoopbackPeer
    sender: Sender


class Pairs:
    """Makes pairs; `wrap_send` and `wrap_recv` wrap the transport of one side."""

    def __init__(self) -> None:
        self.made: list[Pair] = []

    def __call__(
        self,
        settings: TransferSettings = SETTINGS,
        *,
        wrap_send=lambda transport: transport,
        wrap_recv=lambda transport: transport,
        source: KVCache | None = None,
        fingerprint: str = FINGERPRINT,
        connect=None,
    ) -> Pair:
        memory, table, reports = MemoryTransport(), RecordingTable(), Reports()
        target, source = make_kv(None), source or make_kv(1)
        peer = LoopbackPeer(lambda: PeerService(target, D, FINGERPRINT, settings, table, transport=wrap_recv(memory)))
        connect = connect or peer.connect
        sender = Sender(source, P, fingerprint, settings, reports, transport=wrap_send(memory), connect=connect)
        self.made.append(Pair(table, source, target, reports, peer, sender))
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
