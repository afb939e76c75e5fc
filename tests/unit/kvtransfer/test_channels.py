"""Channels: failures, deadlines, and staging memory.

Staging memory limits each side's channels. Idle ones are closed for new ones, busy ones are not.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest

from baton.core import HandoffId, Incarnation
from baton.errors import ChannelBroken, HandoffError
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer import send_queue, wire
from kvtransfer.handoff import PushJob, PushResult
from kvtransfer.send_queue import SendQueue, State
from kvtransfer.transports.base import MAX_VALUE_BYTES, Ring
from tests.support.time_factor import scaled
from tests.support.transports import MemoryTransport
from tests.support.waiting import eventually
from tests.unit.kvtransfer.byhand import SMALL, Receiver
from tests.unit.kvtransfer.ends import Stopped
from tests.unit.kvtransfer.support import LAYER, SETTINGS, SMALL_FRAMES, D, P, hand_over, make_end, make_job, same_kv


def test_close_ends_every_push_with_channel_broken(pairs) -> None:
    pair, gate = pairs.gated(replace(SMALL_FRAMES, frame_deadline_s=2.0))
    handoffs = [pair.push(f"r{n}", 8, [1, 2], [11, 12]) for n in range(3)]
    begun = pair.begin("begun", 8, [13, 14])
    gate.wait_stopped()
    gate.let(100)
    pair.sender.close()
    assert all(isinstance(pair.reports.outcomes[handoff], ChannelBroken | PushResult) for handoff in handoffs)
    assert isinstance(pair.reports.outcomes[begun.handoff], ChannelBroken)
    with pytest.raises(ChannelBroken):
        pair.sender.begin(make_job("late", 3))


def test_a_receiver_that_leaves_breaks_the_channel_and_the_next_attempt_builds_another(pairs) -> None:
    pair, gate = pairs.gated(replace(SMALL_FRAMES, frame_deadline_s=scaled(1.0)))
    first = pair.begin("r", 8, [11, 12])
    pair.sender.computed(first.handoff, [1, 2], 1, 8)
    gate.wait_stopped()
    pair.peer.run(pair.peer.service.close())
    pair.reports.failed(first.handoff, ChannelBroken)  # although its frame is blocked on the wire
    assert [kind for kind, _ in pair.table.events] == ["offer", "lost"]
    pair.sender.computed(first.handoff, [1, 2], pair.source.layout.layers, 8)  # the engine has not learned of it yet
    pair.sender.withdraw(first.handoff)
    pair.sender.finish(first.handoff, make_end(8))
    second = pair.push("r", 8, [3, 4], [13, 14], attempt=2)
    gate.wait_stopped()
    gate.let(20)
    pair.reports.done(second)
    assert gate.channels == 2
    assert same_kv(pair.source, [3, 4], pair.target, [13, 14], 8)


def test_a_stream_that_cannot_be_opened_is_reported(pairs) -> None:
    pair = pairs(connect=Mock(side_effect=OSError("no descriptor is left")))
    pair.reports.failed(pair.push("r", 3, [0], [1]), ChannelBroken, "no descriptor is left")


def test_a_channel_without_a_thread_is_refused_and_the_next_one_works(pair, monkeypatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(ChannelBroken, match=r"no channel to .* can be opened: can't start new thread"):
            pair.sender.begin(make_job("r", 3))
    pair.reports.done(pair.push("r", 3, [0], [1], attempt=2))


def test_the_mark_of_a_copied_frame_is_read_together_with_its_blocks(pair) -> None:
    """A withdrawal in between would remove the mark, and the copy would begin before the KV is written."""
    pair.reports.done(pair.push("r", 3, [0], [1]))
    vars(pair.sender._channels[0].queue)["mark_of"] = Mock(side_effect=AssertionError)
    pair.reports.done(pair.push("s", 3, [0], [2]))


def test_a_callback_that_raises_costs_the_others_nothing(pair) -> None:
    tell = pair.sender._on_done

    def bad(handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        tell(handoff, outcome)
        raise RuntimeError("from the worker")

    pair.sender._on_done = bad
    for name in ("a", "b"):
        pair.reports.done(pair.push(name, 3, [0], [1]))


def test_what_cannot_be_read_breaks_the_channel_and_reports(pair) -> None:
    """The engine reports more tokens than the blocks can hold, a bug of the worker."""
    pair.reports.failed(pair.push("r", 8, [0], [1, 2]), ChannelBroken, "IndexError")
    pair.reports.done(pair.push("s", 3, [0], [1]))


@pytest.mark.parametrize(
    ("answer", "missed"),
    [
        ("welcome", "within"),  # on either side, because the receiver waits for the channel too
        ("probed", "no answer to the probe within"),
        ("offer_accepted", "no answer within"),
        ("credit", "no credit within"),
        ("commit_ack", "no answer within"),
    ],
)
def test_an_answer_that_never_comes_breaks_the_channel_by_its_deadline(pairs, answer: str, missed: str) -> None:
    settings = replace(SMALL_FRAMES, frame_deadline_s=scaled(0.6), credits=1)
    pair = pairs(settings, heard=lambda reply: reply.WhichOneof("reply") != answer)
    handoff = pair.push("r", 8, [1, 2], [11, 12])
    pair.reports.failed(handoff, ChannelBroken, f"{missed} {settings.frame_deadline_s} s")
    offered = answer in {"offer_accepted", "commit_ack"}
    assert (("offer", handoff) in pair.table.events) == offered


class Clock:
    """The clock of the send queue. It moves only in `add`."""

    def __init__(self) -> None:
        self._now, self._looks = time.monotonic(), 0

    def monotonic(self) -> float:
        self._looks += threading.current_thread().name == "kv-deadlines"
        return self._now

    def add(self, seconds: float) -> None:
        """Advance the clock and wait until the deadlines were checked."""
        self._now += seconds
        seen = self._looks
        eventually(lambda: self._looks >= seen + 2)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(send_queue, "time", clock)
    return clock


def test_time_in_the_queue_and_time_spent_computing_count_against_nobody(pairs, clock: Clock) -> None:
    pair, gate = pairs.gated(SMALL_FRAMES)
    slow = pair.begin("slow", 8, [11, 12])
    pair.sender.computed(slow.handoff, [1, 2], 1, 8)
    handoffs = [pair.push(f"r{n}", 8, [1, 2], [11, 12]) for n in range(3)]
    gate.wait_stopped()
    pushes = pair.sender._channels[0].queue._pushes
    eventually(lambda: [push.state for push in pushes.values()] == [State.ACCEPTED] * 4)
    clock.add(10 * SETTINGS.frame_deadline_s)
    gate.let(100)
    for handoff in handoffs:
        pair.reports.done(handoff)
    clock.add(10 * SETTINGS.frame_deadline_s)
    pair.complete(slow, [1, 2])


def test_an_answer_is_overdue_at_its_deadline_although_the_wire_holds_the_link_up(pairs, clock: Clock) -> None:
    pair, gate = pairs.gated(SETTINGS, heard=lambda reply: reply.offer_accepted.handoff.request_id != "late")
    first = pair.push("first", 3, [0], [1])
    gate.wait_stopped()
    late = pair.push("late", 3, [0], [1])
    clock.add(SETTINGS.frame_deadline_s)
    for handoff in (late, first):
        pair.reports.failed(handoff, ChannelBroken, "no answer")
    gate.let(1)


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (pb.PeerReply(welcome=pb.PeerWelcome(credits=4, frame_size=1 << 20)), "a second welcome"),
        (pb.PeerReply(credit=pb.Credit(sequence=wire.FRAMES)), f"frame {wire.FRAMES}, but only {wire.FRAMES} are"),
        (pb.PeerReply(credit=pb.Credit(sequence=0)), "credit for frame 0"),
        (pb.PeerReply(commit_ack=pb.CommitAck()), "handoff"),
        (pb.PeerReply(store_key=pb.StoreKey(key="k", value=b"." * (MAX_VALUE_BYTES + 1))), "rendezvous key"),
    ],
)
def test_an_answer_that_makes_no_sense_breaks_the_link(pair, reply: pb.PeerReply, named: str) -> None:
    job = pair.begin("r", 3, [1])
    send_queue = pair.sender._channels[0].queue
    pair.table.wait_for(("offer", job.handoff))  # the probe is over
    eventually(lambda: send_queue.window._credited == wire.FRAMES)
    send_queue.take(reply)
    pair.reports.failed(job.handoff, ChannelBroken, named)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("credits", 0, "no frames"), ("frame_size", 7, "7 bytes"), ("transport", "gloo", "'gloo', which is not offered")],
)
def test_a_welcome_that_grants_nothing_or_what_was_not_offered_breaks_the_link(pairs, field, value, named) -> None:
    def heard(reply: pb.PeerReply) -> bool:
        if reply.HasField("welcome"):
            setattr(reply.welcome, field, value)
        return True

    pair = pairs(replace(SETTINGS, frame_deadline_s=scaled(0.3)), heard=heard)
    pair.reports.failed(pair.push("r", 3, [0], [1]), ChannelBroken, named)
    assert not any(kind == "offer" for kind, _ in pair.table.events)


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


def test_replies_that_wait_in_the_loop_leave_before_the_end() -> None:
    async def end() -> None:
        [session] = receiver.peer.service._sessions
        session._reply(pb.PeerReply(commit_ack=pb.CommitAck()))
        session.end(ChannelBroken("closed"))

    with Receiver() as receiver:
        call = receiver.call().welcomed()
        receiver.peer.run(end())
        assert call.hear() == "commit_ack"
        call.refused("BROKEN", "closed")


@pytest.mark.parametrize("control_socket", [False, True])
def test_a_channel_with_a_commit_that_is_not_answered_is_busy(control_socket: bool) -> None:
    with Receiver(replace(SMALL, staging_memory=1), control_socket=control_socket) as receiver:
        first, second = receiver.call(OTHERS[0]).offered().arrived(), receiver.call(OTHERS[1])
        committing = Stopped(receiver.table, "commit")
        first.commit()
        committing.wait()
        second.hello()
        second.refused("BROKEN", "all of them are busy")
        committing.go_on()
        assert first.hear() == "commit_ack"
