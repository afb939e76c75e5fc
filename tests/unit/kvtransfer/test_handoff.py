"""Handoffs between a Sender and a PeerService in one process: the KV that arrives, rejections, and each push's end.

A thinking state arrives bit for bit over real streams, or is rejected with the field's name.
"""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.core import HandoffId, KVLayout, RecurrentState, ThinkingState
from baton.errors import DigestMismatch, StaleAttempt
from baton.hashing import frame_digest
from baton.rpc import convert
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import peer_pb2 as pb
from baton.rpc.v1 import worker_pb2 as worker
from kvtransfer import wire
from kvtransfer.handoff import PushEnd
from kvtransfer.sender import GrpcPeerStream
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.unix_socket import MAX_PACKET
from kvtransfer.wire import STATE_PART_BYTES
from tests.support.time_factor import scaled
from tests.support.transports import served
from tests.unit.kvtransfer.byhand import HANDOFF, JOB, Call, Receiver
from tests.unit.kvtransfer.ends import FlippingEnd, Stopped, wrapped
from tests.unit.kvtransfer.support import (
    LAYOUT,
    SETTINGS,
    SMALL_FRAMES,
    P,
    hand_over,
    make_end,
    make_kv,
    only_these,
    same_kv,
)
from tests.unit.tp.support import GQA, LATENT, POISON, poisoned, put, same, whole


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 16, 37])
@pytest.mark.parametrize("settings", [SETTINGS, SMALL_FRAMES, replace(SETTINGS, frame_size=1, credits=1)])
def test_kv_arrives_equal(pairs, tokens: int, settings) -> None:
    pair, blocks = pairs(settings), LAYOUT.blocks_for(tokens)
    source, target = list(range(40, 40 + blocks))[::-1], list(range(3, 3 + 2 * blocks, 2))
    handoff = pair.push("r", tokens, [*source, 63], [*target, 62])
    result = pair.reports.done(handoff)
    assert result.nbytes == tokens * LAYOUT.layers * LAYOUT.layer_token_bytes
    assert result.frames == len(pair.stream.frames(handoff)) == pair.table.written[handoff]
    assert result.transport == "memory"
    assert same_kv(pair.source, source, pair.target, target, tokens)
    assert only_these(pair.target, target, tokens)
    commit, end = pair.table.commits[handoff], make_end(tokens)
    assert (commit.spec, list(commit.first)) == (end.spec, end.first)
    assert (commit.kv_bytes, commit.transport) == (result.nbytes, "memory")
    assert all(0 <= took < 10 for took in (commit.transfer_s, commit.commit_s, result.filling_s))
    assert all(0 < took < 10 for took in (result.round_trip_s, result.exposed_s))


@pytest.mark.parametrize("layout", [GQA, LATENT], ids=["gqa", "latent"])
@pytest.mark.parametrize(("sender", "receiver"), [(2, 4), (4, 2)])
def test_each_rank_gets_its_heads_layer_by_layer(pairs, sender: int, receiver: int, layout: KVLayout) -> None:
    """Each rank has a cache. Frames cut layers and positions, and blocks differ in size. Uncomputed KV is NaN."""
    kv, blocks, present = whole(layout, 37, 1), list(range(20))[::-1], whole(layout, 37, 1).fill_(POISON)
    source, target = poisoned(layout, sender, 20), poisoned(replace(layout, block_size=5), receiver, 20)
    pair = pairs(replace(SETTINGS, frame_size=14 * layout.layer_token_bytes), source=source, target=target)
    job = pair.begin("r", 37, blocks, skip=5)
    for computed, layer in itertools.product((20, 37), range(layout.layers)):
        present[layer, :, :computed] = kv[layer, :, :computed]
        put(source, blocks, present)
        pair.sender.computed(job.handoff, blocks, layer + 1, computed)
    assert pair.complete(job, blocks).frames > layout.layers
    kv[:, :, :5] = POISON  # nothing is written there
    expected = poisoned(target.layout, receiver, 20)
    put(expected, blocks, kv)
    assert same(target, expected)


def test_many_handoffs_share_a_channel(pairs) -> None:
    pair = pairs(SMALL_FRAMES)
    blocks = [[n % 60, n % 60 + 1, n % 60 + 2] for n in range(40)]
    handoffs = [pair.push(f"r{n}", 4 + n % 5, blocks[n], [1, 2, 3]) for n in range(40)]
    for handoff in handoffs:
        pair.reports.done(handoff)
    assert [what for kind, what in pair.table.events if kind == "commit"] == handoffs
    assert len(pair.reports.threads) == 1
    assert len(pair.peer.streams) == 1


@pytest.mark.parametrize("frame", [0, 2])
def test_a_flipped_byte_fails_the_handoff_and_no_other(pairs, frame: int) -> None:
    pair = pairs(SMALL_FRAMES, recv=wrapped(lambda end: FlippingEnd(end, wire.FRAMES + frame)))
    bad = pair.push("bad", 8, [1, 2], [11, 12])
    pair.reports.failed(bad, DigestMismatch, f"frames [{frame}] of 3")
    assert bad not in pair.table.commits
    pair.table.wait_for(("aborted", bad))
    pair.reports.done(pair.push("good", 8, [1, 2], [13, 14]))


def test_an_attempt_without_reservation_is_refused_and_the_channel_lives(pair) -> None:
    newer = pair.reserve("r", 3, [1], attempt=3)
    job = replace(newer, handoff=replace(newer.handoff, attempt=2))
    pair.reports.failed(hand_over(pair.sender, job, [0]), StaleAttempt)
    pair.reports.done(pair.push("s", 3, [0], [1]))
    assert ("aborted", job.handoff) not in pair.table.events
    assert len(pair.peer.streams) == 1


def test_a_handoff_fenced_between_frames_is_drained_and_dropped(pairs) -> None:
    pair, gate = pairs.gated(SMALL_FRAMES)
    stale = pair.push("stale", 8, [1, 2], [11, 12])
    gate.wait_stopped()
    pair.table.fence(stale)
    other = pair.push("other", 8, [3, 4], [13, 14])
    gate.let(6)
    pair.reports.failed(stale, StaleAttempt)
    pair.reports.done(other)
    assert same_kv(pair.source, [3, 4], pair.target, [13, 14], 8)
    assert only_these(pair.target, [13, 14], 8)


@pytest.mark.parametrize(("tokens", "skip"), [(8, 8), (8, 9), (8, -1), (0, 0)])
def test_a_job_that_contradicts_itself_is_refused_at_once(pair, tokens: int, skip: int) -> None:
    with pytest.raises(ValueError, match=f"{skip} of {tokens}"):
        pair.sender.begin(pair.reserve("r", tokens, [1], skip=skip))
    assert not pair.peer.streams
    assert not pair.reports.outcomes


def test_a_job_that_is_under_way_is_refused_and_goes_on(pair) -> None:
    job = pair.begin("r", 8, [11, 12])
    with pytest.raises(ValueError, match="under way"):
        pair.sender.begin(job)
    pair.complete(job, [1, 2])


@pytest.mark.parametrize(("cached", "verify"), [(12, False), (12, True), (8, False)])
def test_a_fetch_follows_the_offer_and_one_that_is_refused_is_told(pair, cached: int, verify: bool) -> None:
    pair.table.cached = cached
    job = pair.begin("r", 16, range(4), skip=12, fetch=(4, 12), verify=verify)
    fetched = [(job.handoff, P, 4, 12, verify)] if cached == 12 else []
    if fetched:
        pair.table.wait_for(("fetch", job.handoff))
    else:
        assert pair.unfetched.get(timeout=scaled(5)) == job.handoff
    pair.complete(job, range(10, 14))  # the push goes on
    assert (pair.table.fetches, pair.unfetched.empty()) == (fetched, True)
    assert [kind for kind, _ in pair.table.events] == ["offer", *["fetch"] * len(fetched), "commit"]


def test_the_answer_to_a_fetch_is_committed_without_a_sequence(pair) -> None:
    job = pair.begin("r", 12, range(3), skip=4)
    pair.complete(job, range(10, 13), PushEnd())
    commit = pair.table.commits[job.handoff]
    assert (commit.spec, list(commit.first)) == (None, [])
    assert same_kv(pair.source, range(10, 13), pair.target, range(3), 12, 4)
    assert only_these(pair.target, range(3), 12, 4)


def aborted(pair, handoff: HandoffId) -> None:
    """Abort the handoff and wait for its report, although the push cannot continue."""
    pair.sender.abort(handoff)
    pair.reports.failed(handoff, StaleAttempt, timeout=3)


def test_abort_before_the_link_is_up(pairs) -> None:
    asked = threading.Event()
    deaf = SimpleNamespace(send=lambda command: asked.set(), close=lambda: None)
    pair = pairs(connect=lambda *_: deaf)
    handoff = pair.push("r", 3, [0], [1])
    assert asked.wait(scaled(5))
    aborted(pair, handoff)


def test_abort_while_offered(pair) -> None:
    pair.reports.done(pair.push("up", 3, [0], [1]))
    free = threading.Event()
    pair.peer.loop.call_soon_threadsafe(free.wait, scaled(10))  # the receiver's loop is busy and answers no offer
    handoff = pair.push("r", 3, [0], [1])
    aborted(pair, handoff)
    free.set()
    pair.table.wait_for(("aborted", handoff))
    pair.reports.done(pair.push("s", 3, [0], [1]))


def test_abort_while_accepted_while_queued_and_while_on_the_wire(pairs) -> None:
    pair, gate = pairs.gated(SMALL_FRAMES)
    first = pair.push("first", 8, [1, 2], [11, 12])
    gate.wait_stopped()
    accepted = pair.begin("accepted", 8, [13, 14]).handoff
    queued = pair.push("queued", 8, [3, 4], [13, 14])
    for handoff in (accepted, queued):
        pair.table.wait_for(("offer", handoff))
    for handoff in (accepted, queued, first):
        aborted(pair, handoff)  # although a frame is blocked on the wire
        pair.table.wait_for(("aborted", handoff))
    pair.sender.computed(accepted, [3, 4], LAYOUT.layers, 8)  # the engine has not learned of the abort yet
    pair.sender.finish(accepted, make_end(8))
    gate.let(4)
    pair.reports.done(pair.push("next", 8, [5, 6], [15, 16]))
    assert same_kv(pair.source, [5, 6], pair.target, [15, 16], 8)
    assert only_these(pair.target, [15, 16], 8)


def test_abort_while_waiting_for_the_ack(pair) -> None:
    commit = Stopped(pair.table, "commit")
    handoff = pair.push("r", 3, [0], [1])
    commit.wait()
    aborted(pair, handoff)
    pair.table.wait_for(("aborted", handoff))
    commit.go_on()
    pair.reports.done(pair.push("s", 3, [0], [1]))
    assert handoff not in pair.table.commits


def test_an_abort_or_an_ack_of_the_unknown_or_the_done_is_nothing(pair) -> None:
    never = HandoffId("never", 1)
    pair.sender.abort(never)
    handoff = pair.push("r", 3, [0], [1])
    done = pair.reports.wait(handoff)
    pair.sender.abort(handoff)
    send_queue = pair.sender._channels[0].queue
    for acked in (never, handoff):
        send_queue.take(pb.PeerReply(commit_ack=pb.CommitAck(handoff=convert.handoff_to_pb(acked))))
    assert send_queue.idle, "it is not broken"
    assert pair.reports.outcomes == {handoff: done}
    assert not pair.reports.twice


TRANSPORTS = ("memory", "shm")
SMALL, LARGE = MAX_PACKET // 32, MAX_PACKET * 32  # state bytes: below and above a control packet's limit


def state_of(nbytes: int, *, rows: int = 0, thoughts: int = 2) -> ThinkingState:
    """Return a state of random bytes, which include every byte value."""
    generator = torch.Generator().manual_seed(nbytes + rows)
    noise = [bytes(torch.randint(256, (n,), generator=generator, dtype=torch.uint8).numpy()) for n in (nbytes, rows)]
    made = tuple((n, 2**32 - 1 - n) if n % 2 else () for n in range(thoughts))
    return ThinkingState("t" * 64, thoughts, 3, bytes(range(256)) + noise[0][256:], noise[1], made)


STATES = {
    "none": None,
    "small": state_of(SMALL),
    "with rows": state_of(SMALL, rows=512, thoughts=0),
    "large": state_of(LARGE),
    "large with rows and thoughts": state_of(LARGE, rows=LARGE, thoughts=5000),
    "of recurrent layers": RecurrentState(8, bytes(range(256)) * 4),
    "of recurrent layers, in three parts": RecurrentState(8, bytes(range(256)) * (2 * STATE_PART_BYTES // 256 + 1)),
}
MOST_STATE = max(len(state.data) for state in STATES.values() if isinstance(state, RecurrentState))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_states_arrive_bit_for_bit_over_grpc(pairs, transport: str) -> None:
    where: list[str] = []
    layout = replace(LAYOUT, state_size=MOST_STATE // 4)
    source, target = make_kv(1, layout=layout, exposed=True), make_kv(None, layout=layout)
    over = {"send": lambda _: [ShmTransport(source)], "recv": lambda _: [ShmTransport(target)]}
    pair = pairs(
        source=source,
        target=target,
        connect=lambda address, *callbacks: GrpcPeerStream(where[0], *callbacks),
        **(over if transport == "shm" else {}),
    )
    with served(pair.peer) as address:
        where.append(address)
        for name, state in STATES.items():
            job = pair.begin(name, 8, [11, 12])
            pair.complete(job, [1, 2], replace(make_end(8), state=state))
            assert pair.table.commits[job.handoff].state == state, name
        assert same_kv(pair.source, [1, 2], pair.target, [11, 12], 8)
        pair.sender.close()


@pytest.fixture
def call() -> Iterator[Call]:
    with Receiver() as receiver:
        yield receiver.call().offered().arrived()


RIGHT: dict[str, Any] = {"thinker": "t", "chunk": 2, "offset": 0, "state": b"state"}


@pytest.mark.parametrize(
    ("change", "commit", "named"),
    [
        ({"thinker": ""}, {}, "thinking.thinker: must not be empty"),
        ({"state": b""}, {}, "thinking.state: must not be empty"),
        ({"thoughts": [common.TokenIds(ids=[1])] * 3}, {}, "thinking.thoughts: must be at most 2"),
        ({}, {"spec": None, "first": None}, "thinking: must not be set"),  # no decode follows
    ],
)
def test_a_state_that_makes_no_sense_is_refused_by_name_and_ends_the_channel(call: Call, change, commit, named) -> None:
    call.commit(thinking=worker.ThinkingState(**{**RIGHT, **change}), **commit)
    call.refused("FRAME", named)
    assert not call.receiver.table.commits


def test_any_other_state_is_for_the_engine_to_judge(call: Call) -> None:
    call.commit(thinking=worker.ThinkingState(**RIGHT))
    assert call.hear() == "commit_ack"
    assert call.receiver.table.commits[JOB.handoff].state == ThinkingState(**RIGHT)


STATE = b"state of recurrent layers"
DIGEST = frame_digest(STATE)


@pytest.mark.parametrize(
    ("parts", "digest", "outcome"),
    [
        ([STATE], DIGEST, "commit_ack"),
        ([STATE[:5], STATE[5:]], DIGEST, "commit_ack"),
        ([STATE[5:], STATE[:5]], DIGEST, "DIGEST"),
        ([STATE[:-1]], DIGEST, "DIGEST"),
        ([], DIGEST, "DIGEST"),
        ([STATE], b"", "DIGEST"),
        ([STATE], None, "DIGEST"),  # a state that no commit mentions
    ],
)
def test_a_recurrent_state_with_another_digest_is_refused(parts, digest, outcome) -> None:
    with Receiver(state_size=MOST_STATE // 4) as receiver:
        call = receiver.call().offered().arrived()
        for part in parts:
            call.say(state=pb.StatePart(handoff=HANDOFF, data=part))
        call.commit(recurrent=None if digest is None else pb.RecurrentState(position=8, digest=digest))
        assert call.hear() == outcome
        commits = receiver.table.commits
        expected = {JOB.handoff: RecurrentState(8, STATE)} if outcome == "commit_ack" else {}
        assert {handoff: commit.state for handoff, commit in commits.items()} == expected


def test_a_recurrent_state_without_a_sequence_is_refused(call: Call) -> None:
    call.commit(recurrent=pb.RecurrentState(position=8, digest=frame_digest(b"")), spec=None, first=None)
    call.refused("FRAME", "recurrent: must not be set")
    assert not call.receiver.table.commits


def test_a_recurrent_state_that_is_too_long_ends_the_channel() -> None:
    with Receiver(state_size=2) as receiver:
        call = receiver.call().offered()
        call.say(state=pb.StatePart(handoff=convert.handoff_to_pb(HandoffId("never", 1)), data=STATE))
        call.say(state=pb.StatePart(handoff=HANDOFF, data=bytes(8)))
        call.say(state=pb.StatePart(handoff=HANDOFF, data=bytes(1)))
        call.refused("FRAME", "has more than the 8 bytes")
