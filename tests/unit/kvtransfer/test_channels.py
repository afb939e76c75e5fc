"""Channels that break, and those whose other end answers too late or makes no sense."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from baton.core import HandoffId
from baton.errors import ChannelBroken, HandoffError
from baton.rpc.v1 import common_pb2 as pb_common
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer import probe
from kvtransfer.handoff import PushResult
from kvtransfer.transport import MAX_VALUE_BYTES
from tests.support.time_factor import scaled
from tests.unit.kvtransfer.support import LAYOUT, SETTINGS, make_end, make_job, same_kv, settled
from tests.unit.kvtransfer.test_handoff import SMALL_FRAMES, gated

WELCOME = pb.PeerWelcome(credits=4, frame_size=1 << 20, transport="stuck")


def test_close_ends_every_push_with_channel_broken(pairs) -> None:
    pair, ends = gated(pairs, replace(SMALL_FRAMES, frame_deadline_s=2.0))
    handoffs = [pair.push(f"r{n}", 8, [1, 2], [11, 12]) for n in range(3)]
    begun = pair.reserve("begun", 8, [13, 14])
    pair.sender.begin(begun)
    assert settled(lambda: bool(ends))
    assert ends[0].arrived.acquire(timeout=scaled(5))
    ends[0].gate.release(100)
    pair.sender.close()
    assert all(isinstance(pair.reports.outcomes[handoff], ChannelBroken | PushResult) for handoff in handoffs)
    assert isinstance(pair.reports.outcomes[begun.handoff], ChannelBroken)
    with pytest.raises(ChannelBroken):
        pair.sender.begin(make_job("late", 3))


def test_a_receiver_that_leaves_breaks_the_channel_and_the_next_push_builds_another(pairs) -> None:
    pair, ends = gated(pairs, replace(SMALL_FRAMES, frame_deadline_s=scaled(1.0)))
    first = pair.push("first", 8, [1, 2], [11, 12])
    assert settled(lambda: bool(ends))
    assert ends[0].arrived.acquire(timeout=scaled(5))
    pair.peer.run(pair.peer.service.close())
    assert isinstance(pair.reports.wait(first, 2), ChannelBroken)  # although its frame hangs on the wire
    assert [kind for kind, _ in pair.table.events] == ["offer", "lost"]
    second = pair.push("second", 8, [3, 4], [13, 14])
    assert settled(lambda: len(ends) == 2)
    ends[0].gate.release(10)
    ends[1].gate.release(10)
    assert isinstance(pair.reports.wait(second), PushResult)
    assert same_kv(pair.source, [3, 4], pair.target, [13, 14], 8)


def test_what_is_computed_after_the_channel_broke_is_nobodys(pairs) -> None:
    """The engine learns of the end later than the sender; the same handoff may be begun again, on a new channel."""
    pair = pairs(SMALL_FRAMES)
    job = pair.reserve("r", 8, [11, 12])
    pair.sender.begin(job)
    pair.sender.computed(job.handoff, [1, 2], 1, 8)
    pair.table.wait_written(job.handoff, 1)
    pair.peer.run(pair.peer.service.close())
    assert isinstance(pair.reports.wait(job.handoff), ChannelBroken)
    pair.sender.computed(job.handoff, [1, 2], LAYOUT.layers, 8)
    pair.sender.withdraw(job.handoff)
    pair.sender.finish(job.handoff, make_end(8))
    again = pair.push("r", 8, [3, 4], [13, 14], attempt=2)
    assert isinstance(pair.reports.wait(again), PushResult)
    assert same_kv(pair.source, [3, 4], pair.target, [13, 14], 8)


def test_a_stream_that_cannot_be_opened_is_reported(pairs) -> None:
    def connect(address, on_reply, on_end):
        raise OSError("no descriptor is left")

    pair = pairs(connect=connect)
    outcome = pair.reports.wait(pair.push("r", 3, [0], [1]))
    assert isinstance(outcome, ChannelBroken)
    assert "no descriptor is left" in str(outcome)


def test_a_callback_that_raises_costs_the_others_nothing(pairs) -> None:
    pair = pairs()
    tell = pair.sender._on_done

    def bad(handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        tell(handoff, outcome)
        raise RuntimeError("from the worker")

    pair.sender._on_done = bad
    for name in ("a", "b"):
        assert isinstance(pair.reports.wait(pair.push(name, 3, [0], [1])), PushResult)


def test_what_cannot_be_read_breaks_the_channel_and_reports(pair) -> None:
    """Too few blocks for what is said to be computed: a mistake of the worker's own."""
    outcome = pair.reports.wait(pair.push("r", 8, [0], [1, 2]))
    assert isinstance(outcome, ChannelBroken)
    assert "IndexError" in str(outcome)
    assert isinstance(pair.reports.wait(pair.push("s", 3, [0], [1])), PushResult)


ANSWERS = ["welcome", "probed", "offer_accepted", "credit", "commit_ack"]


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_never_comes_breaks_the_channel_by_its_deadline(pairs, answer: str) -> None:
    def connect(address, on_reply, on_end):
        def most(reply: pb.PeerReply) -> None:
            if reply.WhichOneof("reply") != answer:
                on_reply(reply)

        return pair.peer.connect(address, most, on_end)

    pair = pairs(replace(SMALL_FRAMES, frame_deadline_s=0.3, credits=1), connect=connect)
    outcome = pair.reports.wait(pair.push("r", 8, [1, 2], [11, 12]), 3)
    assert isinstance(outcome, ChannelBroken)
    assert "within 0.3 s" in str(outcome)


@pytest.mark.slow
def test_time_in_the_queue_counts_against_nobody(pairs) -> None:
    pair, ends = gated(pairs, replace(SETTINGS, frame_deadline_s=scaled(1.0)))
    handoffs = [pair.push(f"r{n}", 8, [1, 2], [11, 12]) for n in range(4)]
    assert settled(lambda: bool(ends))
    for _ in handoffs:
        assert ends[0].arrived.acquire(timeout=scaled(5))
        threading.Event().wait(scaled(0.4))  # each frame alone is well within the deadline, all together are not
        ends[0].gate.release()
    assert all(isinstance(pair.reports.wait(handoff), PushResult) for handoff in handoffs)


@pytest.mark.slow
def test_time_spent_computing_counts_against_nobody(pairs) -> None:
    pair = pairs(replace(SMALL_FRAMES, frame_deadline_s=scaled(0.8)))
    job = pair.reserve("slow", 8, [11, 12])
    pair.sender.begin(job)
    pair.sender.computed(job.handoff, [1, 2], 1, 8)
    pair.table.wait_written(job.handoff, 1)
    threading.Event().wait(scaled(1.0))  # longer than any answer or frame may take
    pair.sender.computed(job.handoff, [1, 2], LAYOUT.layers, 8)
    pair.sender.finish(job.handoff, make_end(8))
    assert isinstance(pair.reports.wait(job.handoff), PushResult)


# a receiver by hand


class Scripted:
    """A stream whose receiver welcomes, finds the probe right, says `more`, and accepts what is not named `late`."""

    def __init__(self, pairs, *more: pb.PeerReply, welcome: pb.PeerWelcome = WELCOME) -> None:
        self._welcome = pb.PeerReply(welcome=welcome)
        self._more = more
        self._pool = ThreadPoolExecutor(1)
        self.end = StuckEnd()
        settings = replace(SETTINGS, frame_deadline_s=scaled(0.4))
        self.pair = pairs(settings, send=lambda memory: [Stuck(self.end)], connect=self._connect)

    def _connect(self, address, on_reply, on_end):
        self._on_reply = on_reply
        return self

    def send(self, command: pb.PeerCommand) -> None:
        match command.WhichOneof("command"):
            case "hello":
                self._reply(self._welcome)
            case "frame" if not command.frame.HasField("handoff"):
                last = [command.frame, *command.more][-1].sequence
                self._reply(pb.PeerReply(credit=pb.Credit(sequence=last)))
                if last == probe.FRAMES - 1:
                    self._reply(pb.PeerReply(probed=pb.Probed(frames=probe.FRAMES)), *self._more)
            case "offer" if command.offer.handoff.request_id != "late":
                self._reply(pb.PeerReply(offer_accepted=pb.OfferAccepted(handoff=command.offer.handoff)))

    def _reply(self, *replies: pb.PeerReply) -> None:
        for reply in replies:
            self._pool.submit(self._on_reply, reply)

    def close(self) -> None:
        self._pool.shutdown(wait=False)


class StuckEnd:
    """Takes the probe, and not a byte of anything else."""

    express = None

    def __init__(self) -> None:
        self.stuck = threading.Event()
        self.free = threading.Event()

    def slot(self, number: int) -> torch.Tensor:
        return torch.empty(1 << 20, dtype=torch.uint8)

    def start(self, number: int, nbytes: int) -> None:
        if number >= probe.FRAMES:
            self.stuck.set()
            self.free.wait(10)

    def finish(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass


class Stuck:
    name, reach, device = "stuck", "", torch.device("cpu")

    def __init__(self, end: StuckEnd) -> None:
        self._end = end

    def open(self, *args) -> StuckEnd:
        return self._end


def test_an_answer_is_overdue_at_its_deadline_although_the_wire_holds_the_link_up(pairs) -> None:
    scripted = Scripted(pairs)
    first = scripted.pair.push("first", 3, [0], [1])
    assert scripted.end.stuck.wait(scaled(5))
    late = scripted.pair.push("late", 3, [0], [1])
    try:
        outcomes = [scripted.pair.reports.wait(handoff, 0.4 * 1.8) for handoff in (late, first)]
    finally:
        scripted.end.free.set()
    assert [type(outcome) for outcome in outcomes] == [ChannelBroken, ChannelBroken]
    assert "no answer" in str(outcomes[0])


NONSENSE = [
    (pb.PeerReply(welcome=WELCOME), "a second welcome"),
    (pb.PeerReply(credit=pb.Credit(sequence=probe.FRAMES)), f"credit for frame {probe.FRAMES}, with {probe.FRAMES}"),
    (pb.PeerReply(credit=pb.Credit(sequence=0)), "credit for frame 0"),
    (pb.PeerReply(commit_ack=pb.CommitAck()), "handoff"),
    (pb.PeerReply(store_key=pb.StoreKey(key="k", value=b"." * (MAX_VALUE_BYTES + 1))), "rendezvous key"),
]


@pytest.mark.parametrize(("reply", "match"), NONSENSE)
def test_an_answer_that_makes_no_sense_breaks_the_link(pairs, reply: pb.PeerReply, match: str) -> None:
    scripted = Scripted(pairs, reply)
    outcome = scripted.pair.reports.wait(scripted.pair.push("late", 3, [0], [1]))
    assert isinstance(outcome, ChannelBroken)
    assert match in str(outcome)


@pytest.mark.parametrize(("change", "match"), [({"credits": 0}, "no frames"), ({"frame_size": 7}, "7 bytes")])
def test_a_welcome_that_grants_nothing_breaks_the_link(pairs, change, match: str) -> None:
    welcome = pb.PeerWelcome(**{"credits": 4, "frame_size": 1 << 20, "transport": "stuck", **change})
    scripted = Scripted(pairs, welcome=welcome)
    outcome = scripted.pair.reports.wait(scripted.pair.push("r", 3, [0], [1]))
    assert isinstance(outcome, ChannelBroken)
    assert match in str(outcome)


def test_an_ack_of_what_is_unknown_is_nothing(pairs) -> None:
    pair = pairs()
    handoff = pair.push("r", 3, [0], [1])
    assert isinstance(pair.reports.wait(handoff), PushResult)
    outbox, never = pair.sender._links[0].outbox, pb_common.HandoffId(request_id="never", attempt=1)
    outbox.take(pb.PeerReply(commit_ack=pb.CommitAck(handoff=never)))
    assert not outbox.broken
    assert pair.sender._links[0].outbox.idle
    assert HandoffId("never", 1) not in pair.reports.outcomes
