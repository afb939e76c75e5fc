"""Shared memory: a faulty peer can only break the channel, and all memory is freed."""

import fcntl
import mmap
import os
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from baton.errors import ChannelBroken, ConfigError
from kvtransfer.transports import unix_socket
from kvtransfer.transports.base import ChannelEnd, KeyRelay, Side
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.unix_socket import _CONTROL_BYTES, MAX_PACKET, ControlSocket, host_reach
from tests.support.time_factor import scaled
from tests.support.waiting import eventually
from tests.unit.kvtransfer.transports.pairs import NAME, RING, Pairs, descriptors, mute, relayed

SIZED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture
def kind() -> str:
    return "shm"


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    before = descriptors()
    yield
    eventually(lambda: descriptors() <= before)


def memory_file(nbytes: int = RING.nbytes, seals: int = SIZED) -> int:
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, nbytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def ordinary_file() -> int:
    file, path = tempfile.mkstemp()
    Path(path).unlink()
    os.ftruncate(file, RING.nbytes)
    return file


def mapped() -> int:
    """Return the number of channel mappings of this process."""
    return Path("/proc/self/maps").read_text().count(f"memfd:baton-kv-{NAME}")


@contextmanager
def false_receiver(pool, files: list[int]) -> Iterator[KeyRelay]:
    """Accept the sender like a receiver, and send it `files`. Yields the sender's keys."""
    sender, receiver = relayed()

    def serve() -> None:
        with closing(unix_socket.accept(receiver, 5.0)) as pair:
            socket.send_fds(pair.socket, [b"\0"], files)
            assert pair.socket.recv(1) == b""  # the sender has disconnected

    serving = pool.submit(serve)
    yield sender
    serving.result(scaled(10))
    for file in files:
        os.close(file)


UNSAFE = {
    "smaller": (lambda: [memory_file(RING.nbytes - 1)], "bytes instead of"),
    "larger": (lambda: [memory_file(RING.nbytes + 1)], "bytes instead of"),
    "empty": (lambda: [memory_file(0)], "bytes instead of"),
    "unsealed": (lambda: [memory_file(seals=0)], "not sealed"),
    "shrinks": (lambda: [memory_file(seals=fcntl.F_SEAL_GROW)], "not sealed"),
    "grows": (lambda: [memory_file(seals=fcntl.F_SEAL_SHRINK)], "not sealed"),
    "read-only": (lambda: [memory_file(seals=SIZED | fcntl.F_SEAL_WRITE)], "not permitted"),
    "file": (lambda: [ordinary_file()], "Invalid argument"),
    "device": (lambda: [os.open("/dev/zero", os.O_RDWR)], "Invalid argument"),
    "none": (list, "no memory"),
}


@pytest.mark.parametrize(("files", "why"), UNSAFE.values(), ids=UNSAFE)
def test_a_sender_refuses_memory_that_it_could_not_touch_safely(pool, files, why: str) -> None:
    with false_receiver(pool, files()) as keys, pytest.raises(ChannelBroken, match=why):
        ShmTransport().open(NAME, Side.SENDER, keys, RING, 5.0)


def test_of_many_files_a_sender_keeps_none(pool) -> None:
    with false_receiver(pool, [memory_file() for _ in range(3)]) as keys:
        ShmTransport().open(NAME, Side.SENDER, keys, RING, 5.0).close()


def test_a_sender_connects_to_nothing_but_a_channel(tmp_path: Path) -> None:
    keys = mute()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(tmp_path / "service.sock"))
        other.listen()
        other.setblocking(False)
        keys.deliver("unix", bytes(16) + str(tmp_path / "service.sock").encode())
        with pytest.raises(ChannelBroken, match="not the name of a channel"):
            ShmTransport().open(NAME, Side.SENDER, keys, RING, 5.0)
        with pytest.raises(BlockingIOError):
            other.accept()


def turned_away(connected: socket.socket) -> bool:
    """Return whether the other end closes without sending memory."""
    try:
        return connected.recv(1) == b""
    except ConnectionResetError:  # it closed without reading the secret
        return True


class Stranger:
    """A manual sender's side for a real receiver."""

    def __init__(self, pool, deadline_s: float = 5.0) -> None:
        self.said = mute()
        keys = KeyRelay(self.said.deliver)
        self.opening = pool.submit(ShmTransport().open, NAME, Side.RECEIVER, keys, RING, deadline_s)
        key = self.said.receive(5.0)
        assert key is not None
        self.value = key[1]

    @contextmanager
    def connect(self, secret: bytes | None) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connected:
            connected.settimeout(5)
            connected.connect(self.value[16:])
            if secret is not None:
                with suppress(BrokenPipeError):  # rejected before the secret was sent
                    connected.send(secret)
            yield connected

    @contextmanager
    def joined(self) -> Iterator[tuple[socket.socket, ChannelEnd]]:
        """Connect as the right sender. Yields the connection and the receiver."""
        with self.connect(self.value[:16]) as connected, closing(self.opening.result(scaled(10))) as receiver:
            yield connected, receiver


def test_a_receiver_turns_strangers_away_and_still_meets_its_sender(pool, monkeypatch) -> None:
    monkeypatch.setattr(unix_socket, "_GREETING_S", 0.1)
    stranger = Stranger(pool)
    for secret in (bytes(16), b"", b"short", stranger.value[:16] + b"!", bytes(4000)):
        with stranger.connect(secret) as connected:
            assert turned_away(connected)
    with stranger.connect(None), stranger.connect(stranger.value[:16]) as right:  # the silent one is skipped later
        # half of a control socket, and memory
        given = [file for _ in range(2) for file in socket.recv_fds(right, 1, 1)[1]]
        assert [os.fstat(file).st_size for file in given] == [0, RING.nbytes]
        for file in given:
            os.close(file)
        stranger.opening.result(scaled(10)).close()


def test_neither_end_takes_one_of_another_user(pool, monkeypatch) -> None:
    stranger = Stranger(pool, deadline_s=0.5)
    keys = mute()
    keys.deliver("unix", stranger.value)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(ChannelBroken, match="another user"):
        ShmTransport().open(NAME, Side.SENDER, keys, RING, 5.0)
    with stranger.connect(stranger.value[:16]) as connected:  # although the secret is right
        assert turned_away(connected)
    with pytest.raises(ChannelBroken, match="not built"):
        stranger.opening.result(scaled(10))


NOTICES = {
    "number": unix_socket._NOTICE.pack(1, 8),
    "size": unix_socket._NOTICE.pack(0, 9),
    "huge": unix_socket._NOTICE.pack(0, 1 << 63),
    "short": b"short",
    "long": unix_socket._NOTICE.pack(0, 8) + b"!",
    "large": bytes(5000),
}


@pytest.mark.parametrize("notice", NOTICES.values(), ids=NOTICES)
def test_a_receiver_refuses_another_notice_than_the_expected_one(pool, notice: bytes) -> None:
    with Stranger(pool).joined() as (connected, receiver):
        receiver.start(0, 8)
        connected.send(notice)
        with pytest.raises(ChannelBroken, match="frame 0 of 8 bytes was expected"):
            receiver.finish(0)
        assert connected.recv(2) == connected.recv(2) == b"\0"  # with the control socket, and with the memory
        assert connected.recv(1) == b""


def test_both_ends_see_the_same_memory_and_all_of_it_is_there(pairs: Pairs) -> None:
    sender, receiver = pairs()
    sender.slot(3)[-1] = 77
    assert receiver.slot(3)[-1] == 77
    resident = Path("/proc/self/smaps").read_text().split(f"memfd:baton-kv-{NAME}")[1:]
    assert len(resident) == 2
    for part in resident:
        kib = next(int(line.split()[1]) for line in part.splitlines() if line.startswith("Rss:"))
        assert kib * 1024 >= RING.nbytes // mmap.PAGESIZE * mmap.PAGESIZE


def test_the_memory_goes_with_the_last_tensor_of_it(pairs: Pairs) -> None:
    sender, receiver = pairs()
    pairs.opened.clear()
    sender.slot(1).fill_(5)
    kept = receiver.slot(1)
    sender.close()
    receiver.close()
    del sender, receiver
    eventually(lambda: mapped() == 1)
    assert int(kept.sum()) == 5 * RING.size
    del kept
    eventually(lambda: mapped() == 0)


def test_nobody_can_join_an_open_channel_and_no_file_is_there(pool) -> None:
    before = sorted(path.name for path in Path("/dev/shm").iterdir())
    stranger = Stranger(pool)
    with stranger.joined():
        assert sorted(path.name for path in Path("/dev/shm").iterdir()) == before
        with pytest.raises(ConnectionRefusedError), stranger.connect(stranger.value[:16]):
            pass


def test_no_memory_is_an_error_and_no_signal(pool, monkeypatch) -> None:
    transport = ShmTransport()
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(ChannelBroken, match="No space left"):
        transport.open(NAME, Side.RECEIVER, mute(), RING, 5.0)


def test_reach_names_the_host_what_divides_it_and_the_user(monkeypatch) -> None:
    here, mine = host_reach(), os.geteuid()
    assert ShmTransport().reach == ShmTransport().reach == here
    assert len({here, host_reach("pid"), host_reach("pid", "ipc")}) == 3
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert host_reach() != here


def test_without_proc_it_cannot_be_had(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: (tmp_path / "none").open().read())
    with pytest.raises(ConfigError, match="Linux"):
        ShmTransport()


# The control socket: packets arrive whole and in order, and each end sees when the other is closed


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


def test_a_waiting_end_is_woken_and_a_wake_before_the_wait_counts_once(two, pool: ThreadPoolExecutor) -> None:
    waiting = pool.submit(two[0].receive)
    two[0].wake()
    assert waiting.result(scaled(5)) is None
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
        right.send(b"no receiver")


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
