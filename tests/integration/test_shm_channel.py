"""Shared memory between two processes: bytes, and the effects of a death or a freeze on either side."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from baton.errors import ChannelBroken
from kvtransfer.transports.base import Side
from tests.integration.channel_peer import NAME, RING, Peer, frame
from tests.support.waiting import eventually
from tests.unit.kvtransfer.transports.pairs import PATIENT_S, breaks, descriptors

Peers = Callable[..., Peer]


@pytest.fixture
def peers() -> Iterator[Peers]:
    """A function that starts a peer. After the test, this process has no file, mapping or descriptor left."""
    torch.set_num_threads(1)
    files, before = sorted(os.listdir("/dev/shm")), descriptors()  # noqa: PTH208
    with ExitStack() as stack:

        def start(side: Side, *flags: str, deadline_s: float = PATIENT_S) -> Peer:
            peer = Peer(side, *flags, deadline_s=deadline_s)
            stack.callback(peer.end.close)
            stack.callback(peer.stop)
            return peer

        yield start
    assert sorted(os.listdir("/dev/shm")) == files  # noqa: PTH208
    eventually(lambda: f"memfd:baton-kv-{NAME}" not in Path("/proc/self/maps").read_text())
    eventually(lambda: descriptors() <= before)


def take(peer: Peer, numbers: range) -> None:
    """Receive frames without announcements, which may be lost. Slots of frames that were sent are complete."""
    for number in numbers:
        peer.end.start(number, len(frame(number)))
        peer.end.finish(number)
        assert torch.equal(peer.end.slot(number)[: len(frame(number))], frame(number))


def test_a_sender_killed_in_the_middle_is_seen_at_once(peers: Peers) -> None:
    peer = peers(Side.RECEIVER)
    assert all(peer.take(number) for number in range(10))
    peer.process.send_signal(signal.SIGKILL)  # the sender is filling slots now
    assert breaks(lambda: take(peer, range(10, 10 + 2 * RING.slots)))


def test_a_receiver_killed_in_the_middle_is_seen_at_once(peers: Peers) -> None:
    peer, count = peers(Side.SENDER), 12
    for number in range(count):
        if number >= RING.slots:
            assert peer.credit() == number - RING.slots
        peer.give(number)
    assert peer.credit() == count - RING.slots  # the receiver is reading slots now
    peer.kill()
    assert breaks(lambda: peer.end.start(count, 8))


def test_a_frozen_sender_is_given_up_and_wakes_up_to_memory_of_its_own_generation(peers: Peers) -> None:
    peer = peers(Side.RECEIVER, deadline_s=0.6)
    assert all(peer.take(number) for number in range(3))
    peer.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(ChannelBroken, match=r"no progress within 0\.6 s"):
        take(peer, range(3, 4 + 2 * RING.slots))
    assert time.monotonic() - started > 0.5
    peer.wire.say(credit=3)  # if all slots were filled by then, the sender waits for one
    successor = peers(Side.RECEIVER, "--frames", "6")
    peer.process.send_signal(signal.SIGCONT)
    while (said := peer.wire.hear()) is not None and "failed" not in said:
        assert said["number"] < 3 + 2 * RING.slots
    assert said is not None
    assert said["failed"].startswith("shm channel")
    assert all(successor.take(number) for number in range(6))
