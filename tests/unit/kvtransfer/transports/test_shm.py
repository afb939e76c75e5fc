"""Shared memory: a faulty peer can only break the channel, only the owner can write, and all memory is freed."""

import fcntl
import mmap
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from baton.engine.kv_cache import exposed_memory
from baton.engine.memory.exposed import Shape
from baton.errors import ChannelBroken, ConfigError
from kvtransfer.transports import unix_socket
from kvtransfer.transports.base import ChannelEnd, KeyRelay, Side
from kvtransfer.transports.host_pool import _POOL
from kvtransfer.transports.shm import MappedPool, ShmTransport
from kvtransfer.transports.unix_socket import _CONTROL_BYTES, MAX_PACKET, ControlSocket, Watch, host_reach
from tests.support.time_factor import scaled
from tests.support.waiting import eventually
from tests.unit.kvtransfer.support import LAYOUT, make_kv
from tests.unit.kvtransfer.transports.pairs import NAME, RING, descriptors, mute, relayed

SIZED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
BLOCKS = 4
SHAPE = Shape(BLOCKS, BLOCKS * LAYOUT.block_bytes)
POOL = _POOL.pack(SHAPE.blocks, SHAPE.kv_bytes, LAYOUT.block_size)


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    before = descriptors()
    yield
    eventually(lambda: descriptors() <= before)


def receiving() -> ShmTransport:
    return ShmTransport(make_kv(None, BLOCKS))


def sending() -> ShmTransport:
    return ShmTransport(make_kv(1, BLOCKS, exposed=True))


def memory_file(nbytes: int = SHAPE.nbytes, seals: int = SIZED) -> int:
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, nbytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def ordinary_file() -> int:
    file, path = tempfile.mkstemp()
    Path(path).unlink()
    os.ftruncate(file, SHAPE.nbytes)
    return file


def mapped() -> int:
    """Return the number of mappings of KV memory in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:baton-kv")


def give(keys: KeyRelay, files: list[int], packed: bytes) -> None:
    """Connect as the sender, and send these files as the pool."""
    with closing(unix_socket.connect(keys, 5.0)) as connected:
        socket.send_fds(connected, [packed], files)
        with suppress(ConnectionError):
            connected.recv(1)  # until the receiver has disconnected


UNSAFE = {
    "smaller": (lambda: [memory_file(SHAPE.nbytes - 1)], POOL, "bytes instead of"),
    "larger": (lambda: [memory_file(SHAPE.nbytes + 1)], POOL, "bytes instead of"),
    "unsealed": (lambda: [memory_file(seals=0)], POOL, "not sealed"),
    "shrinks": (lambda: [memory_file(seals=fcntl.F_SEAL_GROW)], POOL, "not sealed"),
    "grows": (lambda: [memory_file(seals=fcntl.F_SEAL_SHRINK)], POOL, "not sealed"),
    "file": (lambda: [ordinary_file()], POOL, "Invalid argument"),
    "device": (lambda: [os.open("/dev/zero", os.O_RDWR)], POOL, "Invalid argument"),
    "none": (list, POOL, "no memory"),
    "short": (lambda: [memory_file()], POOL[:-1], "no memory"),
    "more blocks": (
        lambda: [memory_file()], _POOL.pack(BLOCKS + 1, SHAPE.kv_bytes, LAYOUT.block_size), "are not 5 blocks of 4",
    ),
    "larger blocks": (lambda: [memory_file()], _POOL.pack(BLOCKS, SHAPE.kv_bytes, 8), "are not 4 blocks of 8"),
    "no positions": (lambda: [memory_file()], _POOL.pack(BLOCKS, SHAPE.kv_bytes, 0), "are not 4 blocks of 0"),
    "more than there is": (
        lambda: [memory_file()], _POOL.pack(1 << 40, (1 << 40) * LAYOUT.block_bytes, 4), "bytes instead of",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "packed", "why"), UNSAFE.values(), ids=UNSAFE)
def test_a_receiver_refuses_memory_that_it_could_not_read_safely(pool, files, packed: bytes, why: str) -> None:
    sender, receiver = relayed()
    made = files()
    giving = pool.submit(give, sender, made, packed)
    with pytest.raises(ChannelBroken, match=why):
        receiving().open(NAME, Side.RECEIVER, receiver, RING, 5.0)
    giving.result(scaled(10))
    for file in made:
        os.close(file)


def test_of_many_files_a_receiver_keeps_none(pool) -> None:
    sender, receiver = relayed()
    made = [memory_file() for _ in range(3)]
    giving = pool.submit(give, sender, made, POOL)
    receiving().open(NAME, Side.RECEIVER, receiver, RING, 5.0).close()
    giving.result(scaled(10))
    for file in made:
        os.close(file)


@pytest.mark.parametrize("change", [lambda file: mmap.mmap(file, SHAPE.nbytes), lambda file: os.ftruncate(file, 0)])
def test_nothing_but_the_owner_can_write_or_resize_the_memory(pool, change) -> None:
    sender, receiver = relayed()
    opening = pool.submit(sending().open, NAME, Side.SENDER, sender, RING, 5.0)
    with closing(unix_socket.accept(receiver, 5.0)) as connected:
        _, [file], _, _ = socket.recv_fds(connected, _POOL.size, 1)
        with pytest.raises(PermissionError):
            change(file)
        os.close(file)
        opening.result(scaled(10)).close()


def test_a_cache_that_is_not_exposed_can_only_receive() -> None:
    assert (sending().sends, receiving().sends) == (True, False)
    with pytest.raises(ChannelBroken, match="not exposed"):
        receiving().open(NAME, Side.SENDER, mute(), RING, 5.0)


def test_a_sender_connects_to_nothing_but_a_channel(tmp_path: Path) -> None:
    keys = mute()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(tmp_path / "service.sock"))
        other.listen()
        other.setblocking(False)
        keys.deliver("unix", bytes(16) + str(tmp_path / "service.sock").encode())
        with pytest.raises(ChannelBroken, match="not the name of a channel"):
            sending().open(NAME, Side.SENDER, keys, RING, 5.0)
        with pytest.raises(BlockingIOError):
            other.accept()


def turned_away(connected: socket.socket) -> bool:
    """Return whether the other end closes without a word."""
    try:
        return connected.recv(1) == b""
    except ConnectionResetError:  # it closed without reading the secret
        return True


class Stranger:
    """A manual sender's side for a real receiver."""

    def __init__(self, pool, deadline_s: float = 5.0) -> None:
        self.said = mute()
        keys = KeyRelay(self.said.deliver)
        self.opening = pool.submit(receiving().open, NAME, Side.RECEIVER, keys, RING, deadline_s)
        key = self.said.receive(5.0)
        assert key is not None
        self.value = key[1]

    @contextmanager
    def connect(self, secret: bytes | None) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connected:
            connected.settimeout(scaled(5))
            connected.connect(self.value[16:])
            if secret is not None:
                with suppress(BrokenPipeError):  # rejected before the secret was sent
                    connected.send(secret)
            yield connected

    @contextmanager
    def joined(self) -> Iterator[tuple[socket.socket, ChannelEnd]]:
        """Connect as the right sender. Yields the connection and the receiver."""
        with self.connect(self.value[:16]) as connected:
            file = memory_file()
            socket.send_fds(connected, [POOL], [file])
            os.close(file)
            with closing(self.opening.result(scaled(10))) as receiver:
                yield connected, receiver


def test_a_receiver_turns_strangers_away_and_still_meets_its_sender(pool, monkeypatch) -> None:
    monkeypatch.setattr(unix_socket, "_GREETING_S", 0.1)
    stranger = Stranger(pool)
    for secret in (bytes(16), b"", b"short", stranger.value[:16] + b"!", bytes(4000)):
        with stranger.connect(secret) as connected:
            assert turned_away(connected)
    with stranger.connect(None) as silent:
        assert turned_away(silent)
    monkeypatch.setattr(unix_socket, "_GREETING_S", scaled(5.0))
    with stranger.connect(stranger.value[:16]) as right:
        file = memory_file()
        socket.send_fds(right, [POOL], [file])
        os.close(file)
        stranger.opening.result(scaled(10)).close()


def test_neither_end_takes_one_of_another_user(pool, monkeypatch) -> None:
    stranger = Stranger(pool, deadline_s=scaled(3.0))
    keys = mute()
    keys.deliver("unix", stranger.value)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(ChannelBroken, match="another user"):
        sending().open(NAME, Side.SENDER, keys, RING, 5.0)
    with stranger.connect(stranger.value[:16]) as connected:  # although the secret is right
        assert turned_away(connected)
    with pytest.raises(ChannelBroken, match="not built"):
        stranger.opening.result(scaled(10))


def test_the_memory_goes_with_the_last_tensor_of_it(pool) -> None:
    before = mapped()
    sender, receiver = relayed()
    source = make_kv(1, BLOCKS, exposed=True)
    opening = pool.submit(ShmTransport(source).open, NAME, Side.SENDER, sender, RING, 5.0)
    end = receiving().open(NAME, Side.RECEIVER, receiver, RING, 5.0)
    opening.result(scaled(10)).close()
    end.close()
    assert isinstance(end.pool, MappedPool)
    kept = end.pool.cache.k[1]
    del end
    assert mapped() == before + 2
    source.k[1].fill_(5.0)
    assert kept.eq(5.0).all()
    del kept, source, opening
    eventually(lambda: mapped() == before)


def named() -> list[str]:
    """Return the shared memory with a name that this process has mapped. Other processes come and go."""
    return re.findall(r"/dev/shm/\S+", Path("/proc/self/maps").read_text())


def test_nobody_can_join_an_open_channel_and_no_file_is_there(pool) -> None:
    before = named()
    stranger = Stranger(pool)
    with stranger.joined():
        assert named() == before
        with pytest.raises(ConnectionRefusedError), stranger.connect(stranger.value[:16]):
            pass


def test_no_memory_is_an_error_and_no_signal(monkeypatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=[None, OSError(28, "No space left on device")]))
    with pytest.raises(ConfigError, match=r"KV memory of \d+ bytes for readers on this host: .*No space left"):
        exposed_memory(LAYOUT, BLOCKS)


def test_reach_names_the_host_what_divides_it_and_the_user(monkeypatch) -> None:
    here, mine = host_reach(), os.geteuid()
    assert sending().reach == receiving().reach == f"{here}-2"
    assert len({here, host_reach("pid"), host_reach("pid", "ipc")}) == 3
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert host_reach() != here


def test_without_proc_it_cannot_be_had(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: (tmp_path / "none").open().read())
    with pytest.raises(ConfigError, match="Linux"):
        receiving()


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


def test_a_waiting_end_is_woken_and_a_wake_before_the_wait_counts_once(two, pool) -> None:
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


def test_a_watch_sees_the_peer_close_after_its_own_end_was_closed(two) -> None:
    left, right = two
    watch = Watch(left._socket)
    right.check()
    left.close()
    with pytest.raises(ChannelBroken, match="closed by the peer"):
        right.check()
    assert not watch()
    right.close()
    assert watch()
    assert watch()  # also without its descriptor


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
