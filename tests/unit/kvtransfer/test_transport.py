"""The contract of a channel, held by each transport, and the choice of one."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from baton.core import Incarnation
from baton.errors import ChannelBroken, ConfigError
from kvtransfer.handoff import TransferSettings
from kvtransfer.memory import MemoryTransport
from kvtransfer.torch_dist import GlooTransport, make_transport
from kvtransfer.transport import MAX_KEYS, ChannelName, KeyRelay, Side
from tests.unit.kvtransfer.support import settled

NAME = ChannelName(Incarnation(7, 1), Incarnation(7, 2), 1)
CPU = torch.device("cpu")


@pytest.fixture(params=["memory", "gloo"])
def transport(request: pytest.FixtureRequest):
    return MemoryTransport() if request.param == "memory" else GlooTransport("127.0.0.1")


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def open_pair(pool: ThreadPoolExecutor, transport, deadline_s: float = 5.0):
    def to(side: Side):
        def send(key: str, value: bytes) -> None:
            relays[side].deliver(key, value)

        return send

    relays = {Side.SENDER: KeyRelay(to(Side.RECEIVER)), Side.RECEIVER: KeyRelay(to(Side.SENDER))}
    ends = [pool.submit(transport.open, NAME, side, relays[side], deadline_s) for side in Side]
    return [end.result(10) for end in ends]


@pytest.mark.parametrize("size", [1, 4097, 1 << 20])
def test_bytes_arrive_in_order(pool, transport, size: int) -> None:
    sender, receiver = open_pair(pool, transport)
    messages = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(3)]
    out = [torch.empty_like(message) for message in messages]
    sent = pool.submit(lambda: [sender.send(message) for message in messages])
    for part in out:
        receiver.recv(part)
    sent.result(10)
    assert all(map(torch.equal, messages, out))
    sender.close(), receiver.close()


def test_a_closed_peer_is_seen_at_once(pool, transport) -> None:
    sender, receiver = open_pair(pool, transport, deadline_s=30.0)
    waiting = pool.submit(receiver.recv, torch.empty(8, dtype=torch.uint8))
    sender.close()
    sender.close()
    with pytest.raises(ChannelBroken):
        waiting.result(5)
    with pytest.raises(ChannelBroken):
        receiver.recv(torch.empty(8, dtype=torch.uint8))
    receiver.close()


def test_a_silent_peer_is_seen_by_the_deadline_and_the_channel_is_closed(pool, transport) -> None:
    sender, receiver = open_pair(pool, transport, deadline_s=0.2)
    for _ in range(2):
        with pytest.raises(ChannelBroken):
            receiver.recv(torch.empty(8, dtype=torch.uint8))
    with pytest.raises(ChannelBroken):
        sender.send(torch.empty(8, dtype=torch.uint8))
    sender.close(), receiver.close()


def test_close_gives_back_threads_and_descriptors(pool, transport) -> None:
    def held() -> list[int]:
        return [len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("task", "fd")]

    both = threading.Barrier(2)
    assert list(pool.map(lambda _: both.wait() >= 0, range(2))) == [True, True]  # its threads are there now
    before = held()
    for _ in range(3):
        for end in open_pair(pool, transport):
            end.close()
    assert settled(lambda: held() == before), (before, held())


@pytest.mark.parametrize("waiting", [True, False])
def test_a_kept_error_keeps_no_descriptor(pool, transport, waiting: bool) -> None:
    def held() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = held()
    sender, receiver = open_pair(pool, transport)
    if waiting:
        failed = pool.submit(receiver.recv, torch.empty(8, dtype=torch.uint8))
        sender.close()
    else:
        sender.close()
        assert settled(lambda: held() < before + 8 or isinstance(transport, MemoryTransport))
        failed = pool.submit(receiver.recv, torch.empty(8, dtype=torch.uint8))
    gc.disable()
    try:
        error = failed.exception(5)
        assert isinstance(error, ChannelBroken)
        receiver.close()
        del sender, receiver
        assert settled(lambda: held() == before), (before, held())
    finally:
        gc.enable()


def test_a_pair_that_cannot_be_built_keeps_no_descriptor() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    transport, errors = GlooTransport("127.0.0.1"), []
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(ChannelBroken) as caught:
                transport.open(NAME, Side.SENDER, KeyRelay(lambda key, value: None), 0.05)
            errors.append(caught.value)
        assert settled(lambda: len(list(Path("/proc/self/fd").iterdir())) == before)
    finally:
        gc.enable()


def test_memory_refuses_a_message_of_another_size(pool) -> None:
    sender, receiver = open_pair(pool, MemoryTransport())
    sent = pool.submit(sender.send, torch.zeros(9, dtype=torch.uint8))
    with pytest.raises(ChannelBroken, match="size"):
        receiver.recv(torch.empty(8, dtype=torch.uint8))
    with pytest.raises(ChannelBroken):
        sent.result(5)


def test_gloo_without_a_peer_ends_by_the_deadline() -> None:
    with pytest.raises(ChannelBroken, match="not built"):
        GlooTransport("127.0.0.1").open(NAME, Side.SENDER, KeyRelay(lambda key, value: None), 0.2)


def test_keys_that_no_rendezvous_needs_are_refused() -> None:
    relay = KeyRelay(lambda key, value: None)
    with pytest.raises(ChannelBroken):
        relay.deliver("k", bytes(1 << 20))
    with pytest.raises(ChannelBroken):
        relay.deliver("k" * 1000, b"")
    for number in range(MAX_KEYS - 2):
        relay.deliver(str(number), b"")
    with pytest.raises(ChannelBroken):
        relay.deliver("one too many", b"")


def test_early_keys_are_kept() -> None:
    relay = KeyRelay(lambda key, value: None)
    relay.deliver("a", b"1")
    relay.deliver("b", b"2")
    assert [relay.receive(0.01) for _ in range(3)] == [("a", b"1"), ("b", b"2"), None]


def test_auto_takes_gloo_for_a_cpu() -> None:
    assert make_transport(TransferSettings(), CPU).name == "gloo"


@pytest.mark.parametrize("name", ["nccl", "memory", "shm", "carrier-pigeon"])
def test_a_transport_that_cannot_be_had_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make_transport(TransferSettings(transport=name), CPU)


def test_a_foreign_bind_host_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        make_transport(TransferSettings(transport="gloo", bind_host="192.0.2.1"), CPU)
