"""The contract of a channel, tested on each transport."""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from baton.errors import ChannelBroken
from kvtransfer.transports.base import ALIGNMENT, MAX_KEYS, Ring, Side
from tests.support.time_factor import scaled
from tests.support.waiting import eventually
from tests.unit.kvtransfer.transports.pairs import PATIENT_S, RING, Pairs, broken, frames, held, mute, receive, send

LARGE = Ring(2, 9 << 20)  # frames larger than any buffer of the system


@pytest.mark.parametrize(("ring", "count", "ahead"), [*((RING, 40, ahead) for ahead in (1, 3, 4)), (LARGE, 5, 1)])
def test_bytes_arrive_in_order_through_a_ring_that_is_used_again(pairs: Pairs, ring, count, ahead, seed: int) -> None:
    data = frames(seed, count, ring)
    taken = pairs.carry(pairs(ring=ring), data, ahead, ring)
    assert [len(part) for part in taken] == [len(part) for part in data]
    assert all(map(torch.equal, taken, data))


def test_the_sender_starts_all_its_slots_before_the_receiver_takes_one(pairs: Pairs, seed: int) -> None:
    sender, receiver = pairs()
    credits, data = threading.Semaphore(RING.slots), frames(seed, RING.slots)
    send(sender, credits, data, RING.slots)  # on this thread: no send may wait for the receiver
    assert all(map(torch.equal, receive(receiver, credits, list(map(len, data)), RING.slots), data))
    for number in range(RING.slots):
        sender.finish(number)


def test_the_receiver_expects_frames_before_the_sender_has_them(pairs: Pairs, seed: int) -> None:
    sender, receiver = pairs()
    data = frames(seed, RING.slots)
    for number, part in enumerate(data):
        receiver.start(number, len(part))
    send(sender, threading.Semaphore(RING.slots), data, RING.slots)
    for number, part in enumerate(data):
        receiver.finish(number)
        assert torch.equal(receiver.slot(number)[: len(part)], part)


def test_slots_are_as_promised(pairs: Pairs) -> None:
    for end in pairs():
        slots = [end.slot(number) for number in range(RING.slots)]
        assert {(slot.dtype, slot.shape, slot.device) for slot in slots} == {
            (torch.uint8, (RING.size,), torch.device("cpu"))
        }
        assert all(slot.is_contiguous() and slot.data_ptr() % ALIGNMENT == 0 for slot in slots)
        assert len({slot.data_ptr() for slot in slots}) == RING.slots
        assert end.slot(RING.slots + 1).data_ptr() == slots[1].data_ptr()


@pytest.mark.slow
def test_an_idle_channel_has_no_deadline(pairs: Pairs, seed: int) -> None:
    ends, data = pairs(deadline_s=scaled(0.6)), frames(seed, 6)
    time.sleep(scaled(0.7))  # longer than the deadline of a real socket, which must not apply to an idle channel
    assert all(map(torch.equal, pairs.carry(ends, data, 1), data))


@pytest.mark.parametrize("nbytes", [0, RING.size + 1])
def test_no_frame_is_larger_than_a_slot(pairs: Pairs, nbytes: int) -> None:
    for end in pairs():
        with pytest.raises(ChannelBroken, match=r"slot|clos"):
            end.start(0, nbytes)


def test_a_receiver_that_waits_sees_at_once_that_the_sender_closed(pairs: Pairs, kind: str) -> None:
    sender, receiver = pairs(PATIENT_S)
    receiver.start(0, 8)
    waiting = pairs.pool.submit(receiver.finish, 0)
    sender.close()
    with pytest.raises(ChannelBroken, match=None if kind == "gloo" else "closed by the peer|was cut"):
        waiting.result(scaled(10))
    with pytest.raises(ChannelBroken):
        receiver.start(1, 8)


@pytest.mark.parametrize("side", list(Side))
def test_an_idle_end_sees_at_once_that_the_other_one_closed(pairs: Pairs, side: Side) -> None:
    ends = pairs(PATIENT_S)
    ends[1 - side].close()
    broken(ends[side])
    for call in (lambda: ends[side].start(0, 8), lambda: ends[side].finish(0), lambda: ends[side].slot(0)):
        with pytest.raises(ChannelBroken):
            call()


def test_a_silent_sender_is_seen_by_the_deadline_and_the_channel_is_closed(pairs: Pairs) -> None:
    sender, receiver = pairs(deadline_s=scaled(1.0))
    receiver.start(0, 8)
    started = time.monotonic()
    with pytest.raises(ChannelBroken):
        receiver.finish(0)
    assert time.monotonic() - started > scaled(0.9)
    with pytest.raises(ChannelBroken):
        receiver.start(1, 8)
    broken(sender)


@contextmanager
def nothing_stays(before: tuple[int, int]) -> Iterator[None]:
    """Wait until there are at most `before` descriptors and threads, without garbage collection."""
    gc.disable()
    try:
        yield
        eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    finally:
        gc.enable()


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("side", list(Side))
def test_without_another_end_none_opens_and_nothing_stays(pairs: Pairs, side: Side) -> None:
    pairs()[0].close()
    pairs.close()
    gc.collect()  # garbage of other tests may hold descriptors
    with nothing_stays(held()):
        started = time.monotonic()
        with pytest.raises(ChannelBroken) as kept:
            pairs.open(side, mute(), 0.2)
        assert time.monotonic() - started > 0.15
        assert kept.value.__context__ is None


def test_close_gives_back_threads_and_descriptors_and_can_be_repeated(pairs: Pairs, pool) -> None:
    def one() -> None:
        ends = pairs()
        pairs.carry(ends, frames(1, 6), 2)
        for end in (*reversed(ends), *ends):
            end.close()
        pairs.opened.clear()

    all_there = threading.Barrier(4)
    assert list(pool.map(lambda _: all_there.wait() >= 0, range(4))) == [True] * 4
    one()  # creates what libraries keep for the whole process
    with nothing_stays(held()):
        for _ in range(3):
            one()


@pytest.mark.parametrize("waiting", [True, False])
def test_a_kept_error_keeps_no_descriptor(pairs: Pairs, pool, waiting: bool) -> None:
    for end in pairs():
        end.close()
    pairs.opened.clear()
    gc.collect()
    before = held()
    sender, receiver = pairs()
    pairs.opened.clear()
    receiver.start(0, 8)
    failed = pool.submit(receiver.finish, 0) if waiting else None
    sender.close()
    failed = failed or pool.submit(receiver.finish, 0)
    with nothing_stays(before):
        error = failed.exception(scaled(10))
        assert isinstance(error, ChannelBroken)
        assert error.__context__ is None
        del sender, receiver


def test_keys_that_no_rendezvous_needs_are_refused() -> None:
    relay = mute()
    for key, value in (("k", bytes(1 << 20)), ("k" * 1000, b"")):
        with pytest.raises(ChannelBroken):
            relay.deliver(key, value)
    for number in range(MAX_KEYS - 2):
        relay.deliver(str(number), b"")
    with pytest.raises(ChannelBroken):
        relay.deliver("one too many", b"")


def test_early_keys_are_kept() -> None:
    relay = mute()
    relay.deliver("a", b"1")
    relay.deliver("b", b"2")
    assert [relay.receive(0.01) for _ in range(3)] == [("a", b"1"), ("b", b"2"), None]


@pytest.mark.parametrize("kind", ["grpc"])
def test_a_foreign_key_ends_the_opening(pairs: Pairs) -> None:
    keys = mute()
    keys.deliver("what is this", b"?")
    with pytest.raises(ChannelBroken, match="what is this"):
        pairs.open(Side.SENDER, keys)


@pytest.mark.parametrize("kind", ["memory"])
@pytest.mark.parametrize("nbytes", [7, 9])
def test_a_frame_of_another_size_is_refused(pairs: Pairs, nbytes: int) -> None:
    sender, receiver = pairs(PATIENT_S)
    receiver.start(0, 8)
    sender.start(0, nbytes)
    with pytest.raises(ChannelBroken, match="expected"):
        receiver.finish(0)
    broken(sender, 1)
