"""Staging memory limits each side's channels: idle ones are closed for new ones, busy ones are not."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from baton.core import HandoffId, Incarnation
from kvtransfer.handoff import PushJob
from kvtransfer.send_queue import SendQueue
from kvtransfer.transports.base import Ring
from tests.support.memory_transport import MemoryTransport
from tests.support.waiting import eventually
from tests.unit.kvtransfer.byhand import SMALL, Receiver
from tests.unit.kvtransfer.support import LAYER, SETTINGS, D, P, hand_over, make_job, same_kv

RING = Ring(SETTINGS.credits, SETTINGS.frame_size)
OTHERS = [replace(P, worker_id=f"prefill-{n}", incarnation=Incarnation(7, 10 + n)) for n in range(5)]


def farm(pairs, count: int, settings):
    """Create one sender and `count` receivers with the addresses "0", "1", ..."""
    shared = MemoryTransport()
    others = [pairs(recv=lambda memory: [shared]) for _ in range(count)]
    pair = pairs(
        settings,
        send=lambda memory: [shared],
        connect=lambda address, *callbacks: others[int(address)].peer.connect(address, *callbacks),
    )
    return pair, others


def reserved(others, name: str, where: int) -> PushJob:
    return others[where].reserve(name, 3, [1], to=replace(D, address=str(where)))


def links(pair) -> Sequence[str]:
    return [channel.to.address for channel in pair.sender._channels if channel.running]


def test_the_least_recently_used_idle_channels_are_closed_and_busy_ones_count(pairs) -> None:
    pair, others = farm(pairs, 5, replace(SETTINGS, staging_memory=3 * RING.nbytes))
    busy = reserved(others, "busy", 4)
    pair.sender.begin(busy)
    for n, where in enumerate([0, 1, 0, 2, 3]):
        pair.reports.done(hand_over(pair.sender, reserved(others, f"r{n}", where), [0]))
    eventually(lambda: links(pair) == ["4", "2", "3"])
    assert [kind for kind, _ in others[1].table.events] == ["offer", "commit", "lost"]
    pair.complete(busy, [0])


def test_five_threads_push_to_two_receivers(pairs) -> None:
    pair, others = farm(pairs, 2, SETTINGS)
    jobs = [make_job(f"r{n}", 1 + n % 4, replace(D, address=str(n % 2))) for n in range(50)]
    for n, job in enumerate(jobs):
        others[n % 2].table.reserve(job.handoff, [n])
    start = threading.Barrier(5)

    def push(part: int) -> None:
        start.wait()
        for n in range(part, 50, 5):
            hand_over(pair.sender, jobs[n], [63 - n])

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(push, range(5)))
    for n, job in enumerate(jobs):
        pair.reports.done(job.handoff)
        assert same_kv(pair.source, [63 - n], others[n % 2].target, [n], job.known_tokens)
    assert [len(other.table.commits) for other in others] == [25, 25]
    assert len(links(pair)) == 2


def test_a_push_that_meets_the_eviction_of_its_channel_is_not_lost(pairs, monkeypatch) -> None:
    pair, others = farm(pairs, 2, replace(SETTINGS, staging_memory=RING.nbytes))
    jobs = [reserved(others, f"r{n}", where) for n, where in enumerate([0, 0, 1])]
    pair.reports.done(hand_over(pair.sender, jobs[0], [0]))
    found_idle, late = vars(SendQueue)["idle"], [jobs[1]]

    def idle(queue: SendQueue) -> bool:
        was = found_idle.fget(queue)
        if was and late:
            queue.add(late.pop())  # another thread's push, right after the check
        return was

    monkeypatch.setattr(SendQueue, "idle", property(idle))
    hand_over(pair.sender, jobs[2], [0])
    assert not late
    pair.complete(jobs[1], [0])
    pair.reports.done(jobs[2].handoff)


def test_the_oldest_idle_channel_makes_room_for_a_new_one() -> None:
    with Receiver(replace(SMALL, staging_memory=3 * SMALL.credits * LAYER)) as receiver:
        busy = receiver.call(OTHERS[0]).offered()
        idle, newer = receiver.call(OTHERS[1]).welcomed(), receiver.call(OTHERS[2]).welcomed()
        receiver.call(OTHERS[3]).welcomed()
        idle.refused("BROKEN", "idle")
        assert receiver.table.events[-1] == ("lost", OTHERS[1])
        assert busy.replies.empty()
        assert newer.replies.empty()


def test_a_channel_is_refused_while_all_others_are_busy() -> None:
    with Receiver(replace(SMALL, staging_memory=2 * SMALL.credits * LAYER)) as receiver:
        first, second = receiver.call(OTHERS[0]).offered(HandoffId("first", 1)), receiver.call(OTHERS[1]).offered()
        second.frame(0)
        for step in (second.abort, receiver.end.arrive):  # after the abort, a frame is still on its way
            refused = receiver.call(OTHERS[2])
            refused.hello()
            refused.refused("BROKEN", "all of them are busy")
            step()
        assert second.hear() == "credit"
        receiver.call(OTHERS[2]).welcomed()
        second.refused("BROKEN", "idle")
        assert first.replies.empty()
