"""Control packets arrive whole and in order, and each end sees when the other is closed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.errors import ChannelBroken
from kvtransfer.transports.unix_socket import _CONTROL_BYTES, MAX_PACKET, ControlSocket
from tests.support.time_factor import scaled


@pytest.fixture
def two() -> Iterator[tuple[ControlSocket, ControlSocket]]:
    sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for one in sockets:
        one.settimeout(scaled(5.0))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CONTROL_BYTES)
    ends = ControlSocket("a", sockets[0]), ControlSocket("b", sockets[1])
    yield ends
    for end in ends:
        end.close()


def test_packets_come_whole_and_in_order(two) -> None:
    left, right = two
    sent = [bytes([number]) * (number + 100) for number in range(64)]
    for packet in sent:
        left.send(packet)
    right.send(b"back")
    assert [right.receive(5.0) for _ in sent] == sent
    assert left.receive(5.0) == b"back"


def test_a_waiting_end_is_woken(two, pool: ThreadPoolExecutor) -> None:
    waiting = pool.submit(two[0].receive)
    two[0].wake()
    assert waiting.result(scaled(5)) is None


def test_a_wake_before_the_wait_is_not_lost_and_counts_once(two) -> None:
    for _ in range(2):
        two[0].wake()
    assert two[0].receive(5.0) is None
    assert two[0]._poll.poll(0) == []


def test_a_wake_is_nothing_to_take(two) -> None:
    """A caller that checks `ready` and then receives must not wait."""
    left, right = two
    left.wake()
    assert not left.ready
    right.send(b"packet")
    assert left.ready
    assert left.receive(5.0) == b"packet"
    assert not left.ready


def test_the_end_of_the_other_one_is_seen_after_its_last_packet(two) -> None:
    left, right = two
    left.send(b"last")
    left.close()
    assert right.receive(5.0) == b"last"
    assert right.ready
    with pytest.raises(ChannelBroken, match="closed by the peer"):
        right.receive()
    with pytest.raises(ChannelBroken, match="Broken pipe"):
        right.send(b"nobody hears it")


def test_a_packet_that_is_too_large_breaks_the_channel(two) -> None:
    left, right = two
    left.send(bytes(MAX_PACKET))
    left.send(bytes(MAX_PACKET + 1))
    assert right.receive(5.0) == bytes(MAX_PACKET)
    with pytest.raises(ChannelBroken, match="a packet of over 32768 bytes"):
        right.receive(5.0)


def test_it_takes_what_is_neither_too_long_nor_has_to_wait(two) -> None:
    left, right = two
    assert left.takes(MAX_PACKET)
    assert not left.takes(MAX_PACKET + 1)
    while left.takes(MAX_PACKET):
        left.send(bytes(MAX_PACKET))
    assert not left.takes(1)
    while right.ready:
        right.receive()
    assert left.takes(MAX_PACKET)


def test_a_wake_after_the_end_writes_to_no_other_file(two) -> None:
    """The next file gets the descriptor number of the closed one."""
    left, _ = two
    left.close()
    files = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(8)]
    try:
        left.wake()
        left.close()
        for file in files:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(file)
    finally:
        for file in files:
            os.close(file)
