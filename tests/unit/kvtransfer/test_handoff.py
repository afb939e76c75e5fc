"""Handoffs between a Sender and a PeerService in one process: what arrives, what is refused, how each push ends."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from baton.core import HandoffId, Incarnation, WorkerRef
from baton.errors import ChannelBroken, DigestMismatch, HandoffError, OfferRefused, StaleAttempt
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.handoff import PushResult
from kvtransfer.memory import MemoryTransport
from kvtransfer.outbox import Outbox
from tests.unit.kvtransfer.support import (
    LAYOUT,
    SETTINGS,
    D,
    FlippingEnd,
    GatedEnd,
    Wrapped,
    make_job,
    make_kv,
    same_kv,
    settled,
)

SMALL_FRAMES = replace(SETTINGS, frame_size=2 * LAYOUT.layer_block_bytes)  # one layer of two blocks


def push(pair, name: str, tokens: int, source: list[int], target: list[int], **kwargs):
    job = make_job(name, tokens, source, **kwargs)
    pair.table.reserve(job.handoff, target)
    pair.sender.push(job)
    return job.handoff


def gated(pairs, settings=SMALL_FRAMES):
    """A pair whose sender stops before each frame."""
    ends: list[GatedEnd] = []

    def gate(end):
        ends.append(GatedEnd(end))
        return ends[-1]

    pair = pairs(settings, wrap_send=lambda transport: Wrapped(transport, gate))
    return pair, ends


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 16, 37])
@pytest.mark.parametrize("settings", [SETTINGS, SMALL_FRAMES, replace(SETTINGS, frame_size=1, credits=1)])
def test_kv_arrives_equal(pairs, tokens: int, settings) -> None:
    pair, blocks = pairs(settings), LAYOUT.blocks_for(tokens)
    source, target = list(range(40, 40 + blocks))[::-1], list(range(3, 3 + 2 * blocks, 2))
    handoff = push(pair, "r", tokens, [*source, 63], [*target, 62])
    result = pair.reports.wait(handoff)
    assert isinstance(result, PushResult), result
    assert result.nbytes == blocks * LAYOUT.block_bytes
    assert result.transport == "memory"
    assert same_kv(pair.source, source, pair.target, target)
    others = [block for block in range(64) if block not in target]
    assert same_kv(make_kv(None), others, pair.target, others)  # nothing else was touched
    commit = pair.table.commits[handoff]
    assert (commit.spec, list(commit.first)) == (
        make_job("r", tokens, source).spec,
        make_job("r", tokens, source).first,
    )
    assert commit.kv_bytes == result.nbytes
    assert 0 <= commit.transfer_s < 10
    assert 0 <= commit.commit_s < 10


def test_many_handoffs_share_a_channel(pairs) -> None:
    pair = pairs(SMALL_FRAMES)
    handoffs = [push(pair, f"r{n}", 4 + n % 5, [n % 60, n % 60 + 1, n % 60 + 2], [1, 2, 3]) for n in range(40)]
    assert all(isinstance(pair.reports.wait(handoff), PushResult) for handoff in handoffs)
    assert [what for kind, what in pair.table.events if kind == "commit"] == handoffs
    assert len(pair.reports.threads) == 1


@pytest.mark.parametrize("frame", [0, 2])
def test_a_flipped_byte_fails_the_handoff_and_no_other(pairs, frame: int) -> None:
    flip = lambda end: FlippingEnd(end, frame)  # noqa: E731
    pair = pairs(SMALL_FRAMES, wrap_recv=lambda transport: Wrapped(transport, flip))
    bad = push(pair, "bad", 8, [1, 2], [11, 12])
    assert isinstance(pair.reports.wait(bad), DigestMismatch)
    assert bad not in pair.table.commits
    pair.table.wait_for(("aborted", bad))
    good = push(pair, "good", 8, [1, 2], [13, 14])
    assert isinstance(pair.reports.wait(good), PushResult)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"fingerprint": "other"}, OfferRefused, "fingerprint"),
        ({"source": make_kv(1, layout=replace(LAYOUT, head_dim=16))}, OfferRefused, "layout"),
        ({"source": make_kv(1, layout=replace(LAYOUT, tensors=("latent",)))}, OfferRefused, "'latent'"),
    ],
)
def test_a_sender_that_does_not_fit_is_refused_by_name(pairs, change, error, match) -> None:
    pair = pairs(**change)
    outcome = pair.reports.wait(push(pair, "r", 3, [0], [1]))
    assert isinstance(outcome, error)
    assert match in str(outcome)
    assert not pair.table.events


@pytest.mark.parametrize(
    "to", [replace(D, incarnation=Incarnation(7, 99)), WorkerRef("decode-1", D.incarnation, D.address)]
)
def test_another_life_at_the_same_address_is_refused(pair, to: WorkerRef) -> None:
    outcome = pair.reports.wait(push(pair, "r", 3, [0], [1], to=to))
    assert isinstance(outcome, StaleAttempt)
    assert str(D) in str(outcome)
    assert not pair.table.events


def test_an_attempt_without_reservation_is_refused_and_the_channel_lives(pair) -> None:
    job = make_job("r", 3, [0], attempt=2)
    pair.table.reserve(replace(job.handoff, attempt=3), [1])
    pair.sender.push(job)
    assert isinstance(pair.reports.wait(job.handoff), StaleAttempt)
    assert isinstance(pair.reports.wait(push(pair, "s", 3, [0], [1])), PushResult)
    assert ("aborted", job.handoff) not in pair.table.events


def test_a_handoff_fenced_between_frames_is_drained_and_dropped(pairs) -> None:
    pair, ends = gated(pairs)
    stale = push(pair, "stale", 8, [1, 2], [11, 12])
    assert settled(lambda: bool(ends))
    assert ends[0].arrived.acquire(timeout=5)
    pair.table.fence(stale)
    other = push(pair, "other", 8, [3, 4], [13, 14])
    for _ in range(6):
        ends[0].gate.release()
    assert isinstance(pair.reports.wait(stale), StaleAttempt)
    assert isinstance(pair.reports.wait(other), PushResult)
    assert same_kv(pair.source, [3, 4], pair.target, [13, 14])
    assert same_kv(make_kv(None), [11, 12], pair.target, [11, 12])


def test_a_job_that_contradicts_itself_is_refused_at_once(pair) -> None:
    with pytest.raises(ValueError, match="blocks"):
        pair.sender.push(make_job("r", 9, [0, 1]))
    with pytest.raises(ValueError, match="spec"):
        pair.sender.push(replace(make_job("r", 4, [0]), known_tokens=3))
    assert not pair.reports.outcomes


# abort, in each state


def test_abort_before_the_link_is_up(pairs) -> None:
    asked = threading.Event()

    class Deaf:
        def send(self, command: pb.PeerCommand) -> None:
            asked.set()

        def close(self) -> None:
            pass

    pair = pairs(connect=lambda address, on_reply, on_end: Deaf())
    handoff = push(pair, "r", 3, [0], [1])
    assert asked.wait(5)
    pair.sender.abort(handoff)
    assert isinstance(pair.reports.wait(handoff, 1), StaleAttempt)


def test_abort_while_offered(pairs) -> None:
    pair = pairs()
    assert isinstance(pair.reports.wait(push(pair, "up", 3, [0], [1])), PushResult)
    free = threading.Event()
    pair.peer.loop.call_soon_threadsafe(free.wait, 5)  # the receiver's loop is busy: no offer is answered
    handoff = push(pair, "r", 3, [0], [1])
    pair.sender.abort(handoff)
    assert isinstance(pair.reports.wait(handoff, 1), StaleAttempt)
    free.set()
    pair.table.wait_for(("aborted", handoff))
    assert isinstance(pair.reports.wait(push(pair, "s", 3, [0], [1])), PushResult)


def test_abort_while_queued_and_while_on_the_wire(pairs) -> None:
    pair, ends = gated(pairs)
    first = push(pair, "first", 8, [1, 2], [11, 12])
    assert settled(lambda: bool(ends))
    assert ends[0].arrived.acquire(timeout=5)
    queued = push(pair, "queued", 8, [3, 4], [13, 14])
    pair.table.wait_for(("offer", queued))
    for handoff in (queued, first):
        pair.sender.abort(handoff)
        assert isinstance(pair.reports.wait(handoff, 1), StaleAttempt)  # although a frame hangs on the wire
        pair.table.wait_for(("aborted", handoff))
    for _ in range(4):
        ends[0].gate.release()
    assert isinstance(pair.reports.wait(push(pair, "next", 8, [5, 6], [15, 16])), PushResult)
    assert same_kv(pair.source, [5, 6], pair.target, [15, 16])
    assert same_kv(make_kv(None), [11, 12, 13, 14], pair.target, [11, 12, 13, 14])


def test_abort_while_blocks_are_read_is_reported_after_the_read(pairs) -> None:
    pair = pairs()
    entered, leave = threading.Event(), threading.Event()
    gather = pair.source.gather

    def slow(*args) -> None:
        entered.set()
        leave.wait(5)
        gather(*args)

    pair.source.gather = slow
    handoff = push(pair, "r", 3, [0], [1])
    assert entered.wait(5)
    pair.sender.abort(handoff)
    pair.sender.abort(handoff)
    with pytest.raises(AssertionError, match="no report"):
        pair.reports.wait(handoff, 0.05)  # its blocks are still being read
    leave.set()
    assert isinstance(pair.reports.wait(handoff, 1), StaleAttempt)


def test_abort_while_waiting_for_the_ack(pairs) -> None:
    pair = pairs()
    committing, leave = threading.Event(), threading.Event()
    commit = pair.table.commit

    def slow(*args) -> None:
        committing.set()
        leave.wait(5)
        commit(*args)

    pair.table.commit = slow
    handoff = push(pair, "r", 3, [0], [1])
    assert committing.wait(5)
    pair.sender.abort(handoff)
    assert isinstance(pair.reports.wait(handoff, 1), StaleAttempt)
    pair.table.wait_for(("aborted", handoff))
    leave.set()
    assert isinstance(pair.reports.wait(push(pair, "s", 3, [0], [1])), PushResult)
    assert handoff not in pair.table.commits


def test_abort_of_the_unknown_and_of_the_done_is_nothing(pair) -> None:
    pair.sender.abort(HandoffId("never", 1))
    handoff = push(pair, "r", 3, [0], [1])
    done = pair.reports.wait(handoff)
    pair.sender.abort(handoff)
    assert pair.reports.wait(handoff) is done


# channels that break


def test_close_ends_every_push_with_channel_broken(pairs) -> None:
    pair, ends = gated(pairs, replace(SMALL_FRAMES, frame_deadline_s=2.0))
    handoffs = [push(pair, f"r{n}", 8, [1, 2], [11, 12]) for n in range(3)]
    assert settled(lambda: bool(ends))
    assert ends[0].arrived.acquire(timeout=5)
    ends[0].gate.release(100)
    pair.sender.close()
    assert all(isinstance(pair.reports.outcomes[handoff], ChannelBroken | PushResult) for handoff in handoffs)
    assert isinstance(pair.reports.outcomes[handoffs[-1]], ChannelBroken)
    with pytest.raises(ChannelBroken):
        pair.sender.push(make_job("late", 3, [0]))


def test_a_receiver_that_leaves_breaks_the_channel_and_the_next_push_builds_another(pairs) -> None:
    pair, ends = gated(pairs)
    first = push(pair, "first", 8, [1, 2], [11, 12])
    assert settled(lambda: bool(ends))
    assert ends[0].arrived.acquire(timeout=5)
    pair.peer.run(pair.peer.service.close())
    assert isinstance(pair.reports.wait(first, 2), ChannelBroken)  # although its frame hangs on the wire
    assert [kind for kind, _ in pair.table.events] == ["offer", "lost"]
    second = push(pair, "second", 8, [3, 4], [13, 14])
    assert settled(lambda: len(ends) == 2)
    ends[0].gate.release(10)
    ends[1].gate.release(10)
    assert isinstance(pair.reports.wait(second), PushResult)
    assert same_kv(pair.source, [3, 4], pair.target, [13, 14])


@pytest.mark.parametrize("answer", ["welcome", "offer_accepted", "credit", "commit_ack"])
def test_an_answer_that_never_comes_breaks_the_channel_by_its_deadline(pairs, answer: str) -> None:
    def connect(address, on_reply, on_end):
        def most(reply: pb.PeerReply) -> None:
            if reply.WhichOneof("reply") != answer:
                on_reply(reply)

        return pair.peer.connect(address, most, on_end)

    pair = pairs(replace(SMALL_FRAMES, frame_deadline_s=0.3, credits=1), connect=connect)
    outcome = pair.reports.wait(push(pair, "r", 8, [1, 2], [11, 12]), 3)
    assert isinstance(outcome, ChannelBroken)
    assert "within 0.3 s" in str(outcome)


def test_time_in_the_queue_counts_against_nobody(pairs) -> None:
    pair, ends = gated(pairs, replace(SETTINGS, frame_deadline_s=1.0))
    handoffs = [push(pair, f"r{n}", 8, [1, 2], [11, 12]) for n in range(4)]
    assert settled(lambda: bool(ends))
    for _ in handoffs:
        assert ends[0].arrived.acquire(timeout=5)
        threading.Event().wait(0.4)  # each frame alone is well within the deadline, all together are not
        ends[0].gate.release()
    assert all(isinstance(pair.reports.wait(handoff), PushResult) for handoff in handoffs)


def test_a_callback_that_raises_costs_the_others_nothing(pairs) -> None:
    pair = pairs()
    tell = pair.sender._on_done

    def bad(handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        tell(handoff, outcome)
        raise RuntimeError("from the worker")

    pair.sender._on_done = bad
    for name in ("a", "b"):
        assert isinstance(pair.reports.wait(push(pair, name, 3, [0], [1])), PushResult)


def test_the_least_recently_used_idle_channels_are_closed(pairs) -> None:
    shared = MemoryTransport()
    others = [pairs(wrap_recv=lambda transport: shared) for _ in range(4)]
    pair = pairs(
        replace(SETTINGS, idle_channels=2),
        wrap_send=lambda transport: shared,
        connect=lambda address, *callbacks: others[int(address)].peer.connect(address, *callbacks),
    )
    for n, where in enumerate([0, 1, 0, 2, 3]):
        job = make_job(f"r{n}", 3, [0], replace(D, address=str(where)))
        others[where].table.reserve(job.handoff, [1])
        pair.sender.push(job)
        assert isinstance(pair.reports.wait(job.handoff), PushResult)
    assert settled(lambda: [link.to.address for link in pair.sender._links if link.running] == ["2", "3"])
    assert [kind for kind, _ in others[1].table.events] == ["offer", "commit", "lost"]


def test_a_push_that_meets_the_eviction_of_its_channel_is_not_lost(pairs, monkeypatch) -> None:
    shared = MemoryTransport()
    others = [pairs(wrap_recv=lambda transport: shared) for _ in range(2)]
    pair = pairs(
        replace(SETTINGS, idle_channels=1),
        wrap_send=lambda transport: shared,
        connect=lambda address, *callbacks: others[int(address)].peer.connect(address, *callbacks),
    )
    jobs = [make_job(f"r{n}", 3, [0], replace(D, address=str(where))) for n, where in enumerate([0, 0, 1])]
    for job in jobs:
        others[int(job.to.address)].table.reserve(job.handoff, [1])
    pair.sender.push(jobs[0])
    assert isinstance(pair.reports.wait(jobs[0].handoff), PushResult)
    found_idle, late = vars(Outbox)["idle"], [jobs[1]]

    def idle(outbox: Outbox) -> bool:
        was = found_idle.fget(outbox)
        if was and late:
            outbox.add(late.pop())  # another thread's push, right after the look
        return was

    monkeypatch.setattr(Outbox, "idle", property(idle))
    pair.sender.push(jobs[2])
    assert [type(pair.reports.wait(job.handoff)) for job in jobs[1:]] == [PushResult, PushResult]


def test_a_warmed_channel_is_the_one_that_the_first_push_takes(pairs) -> None:
    pair, ends = gated(pairs)
    pair.sender.warm(D)
    assert settled(lambda: bool(ends))
    assert not pair.table.events
    handoff = push(pair, "r", 3, [0], [1])
    ends[0].gate.release(10)
    assert isinstance(pair.reports.wait(handoff), PushResult)
    assert len(ends) == 1


# a receiver by hand


class Scripted:
    """A stream whose receiver welcomes, and accepts what is not named `late`; and a channel that takes no byte."""

    def __init__(self, pairs, welcomes: int = 1) -> None:
        self.stuck = threading.Event()
        self.free = threading.Event()
        self._welcomes = welcomes
        self._pool = ThreadPoolExecutor(1)
        stuck = Wrapped(MemoryTransport(), lambda end: self)
        settings = replace(SETTINGS, frame_deadline_s=0.4)
        self.pair = pairs(settings, wrap_send=lambda transport: stuck, connect=self._connect)

    def _connect(self, address, on_reply, on_end):
        self._on_reply = on_reply
        return self

    def send(self, what) -> None:
        """As a stream, a command; as a channel, a frame."""
        if not isinstance(what, pb.PeerCommand):
            self.stuck.set()
            self.free.wait(10)
        elif what.HasField("hello"):
            for _ in range(self._welcomes):
                self._reply(welcome=pb.PeerWelcome(credits=4, frame_size=1 << 20))
        elif what.HasField("offer") and what.offer.handoff.request_id != "late":
            self._reply(offer_accepted=pb.OfferAccepted(handoff=what.offer.handoff))

    def _reply(self, **reply) -> None:
        self._pool.submit(self._on_reply, pb.PeerReply(**reply))

    def close(self) -> None:
        self._pool.shutdown(wait=False)


def test_an_answer_is_overdue_at_its_deadline_although_the_wire_holds_the_link_up(pairs) -> None:
    scripted = Scripted(pairs)
    first = push(scripted.pair, "first", 3, [0], [1])
    assert scripted.stuck.wait(5)
    late = push(scripted.pair, "late", 3, [0], [1])
    try:
        outcomes = [scripted.pair.reports.wait(handoff, 0.4 * 1.8) for handoff in (late, first)]
    finally:
        scripted.free.set()
    assert [type(outcome) for outcome in outcomes] == [ChannelBroken, ChannelBroken]
    assert "no answer" in str(outcomes[0])


def test_a_second_welcome_breaks_the_link(pairs) -> None:
    scripted = Scripted(pairs, welcomes=2)
    scripted.free.set()
    assert "welcome" in str(scripted.pair.reports.wait(push(scripted.pair, "late", 3, [0], [1])))
