"""The decode role on a real engine: one commit at most, one end, the right tokens, and all blocks back."""

import threading

import pytest

from baton.core import HandoffId, Sampling, SequenceSpec, Token
from baton.errors import InvalidRequest, OfferRefused, StaleAttempt
from baton.rpc.v1 import worker_pb2 as pb
from baton.worker.attempts import Attempts
from kvtransfer.handoff import Offer
from tests.unit.worker.pusher import P, commit_of
from tests.unit.worker.support import (
    BACKEND,
    GREEDY,
    D,
    DecodeSide,
    FakeSession,
    H,
    Pair,
    fence,
    malformed,
    next_of,
    prefill,
    release,
    repush,
    reserve,
    spec_of,
)


@pytest.fixture
def pair():
    return Pair()


@pytest.fixture
def side(pair):
    return pair.decode


@pytest.fixture
def router():
    return FakeSession("router-d")


def to_state(pair, state):
    """A handoff of a router of its own, brought to `state`."""
    session = FakeSession()
    if state == "reserved":
        pair.decode.take(session, reserve())
        return session
    pair.hand_over(session, upto={"receiving": "offered", "written": "written"}.get(state, "committed"))
    if state in {"adopted", "decoding", "finished"}:
        pair.decode.loop.drain()
    if state == "decoding":
        pair.decode.step()
    if state == "finished":
        pair.decode.run()
    return session


STATES = ["reserved", "receiving", "written", "committed", "adopted", "decoding", "finished"]


def ends_free(pair):
    """What is left of pushes ends, and their routers leave the KV alone; then nobody holds anything."""
    pair.end_pushes()
    pair.decode.run()
    assert pair.prefill.all_free
    assert pair.decode.all_free
    assert len(pair.decode.role.reservations) == 0


def test_a_handoff_from_reserve_to_finish(pair, side):
    router = FakeSession()
    side.take(router, reserve())
    assert router.kinds() == ["reserved"]
    assert side.counts.reserved == side.engine.layout.blocks_for(9 + 1)
    router = to_state(Pair(), "reserved")
    pair = Pair()
    router = to_state(pair, "finished")
    assert [m[0].WhichOneof("event") for m in router.messages[:3]] == ["reserved", "tokens", "committed"]
    from_d = [e for m in router.messages[2:] for e in m if e.HasField("tokens")]
    ids = [i for e in from_d for i in e.tokens.ids]
    assert ids == BACKEND.expected(spec_of())
    assert router.kinds()[-1] == "finish"
    assert [state for _, _, state in pair.decode.records.notes] == ["RESERVED", "COMMITTED", "RELEASED"]
    assert pair.decode.engine.counters.prefill_tokens == 0
    ends_free(pair)


def test_the_commit_and_token_0_leave_in_one_message(pair):
    router = to_state(pair, "adopted")
    committed, tokens = router.messages[-1]
    assert committed.committed.kv_bytes == 64
    assert committed.committed.transport == "memory"
    assert getattr(tokens.tokens, "from") == 0
    assert list(tokens.tokens.ids) == BACKEND.expected(spec_of(), 1)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (reserve(fingerprint="other"), pb.REFUSAL_REASON_FINGERPRINT),
        (reserve(known=0), pb.REFUSAL_REASON_TOO_LONG),
        (reserve(known=65), pb.REFUSAL_REASON_TOO_LONG),
        (reserve(known=2**32 - 1), pb.REFUSAL_REASON_TOO_LONG),
        (reserve(max_total=65), pb.REFUSAL_REASON_TOO_LONG),
    ],
)
def test_a_reserve_that_never_fits_is_refused(side, router, command, reason):
    side.take(router, command)
    assert [event.refused.reason for event in router.events] == [reason]
    assert side.all_free
    side.take(router, reserve(max_total=64))  # the attempt is not used up
    assert router.kinds() == ["refused", "reserved"]


def test_no_room_now_is_refused_as_such_and_there_is_room_later(router):
    side = DecodeSide(blocks=5)
    side.take(router, reserve())
    side.take(router, reserve(HandoffId("s", 1)))
    assert router.events[-1].refused.reason == pb.REFUSAL_REASON_NO_ROOM
    side.take(router, release())
    side.take(router, reserve(HandoffId("s", 1)))
    assert router.kinds(HandoffId("s", 1)) == ["refused", "reserved"]


@pytest.mark.parametrize("state", STATES)
def test_a_second_reserve_is_stale_and_harms_nobody(pair, side, router, state):
    owner = to_state(pair, state)
    before = list(owner.events)
    for attempt in (H, HandoffId("r", 1)):
        side.take(router, reserve(attempt))
    assert {event.refused.reason for event in router.events} == {pb.REFUSAL_REASON_STALE}
    assert owner.events == before
    side.run()
    if state in {"committed", "adopted", "decoding", "finished"}:
        assert [t.token_id for t in owner.tokens()][1:] == BACKEND.expected(spec_of())  # token 0 twice
    side.role.gone(owner)
    ends_free(pair)


def test_a_reserve_is_stale_even_when_the_attempt_was_forgotten(pair, side, router):
    side.role.reservations._attempts = Attempts(limit=1)
    owner = to_state(pair, "decoding")
    side.take(router, reserve(HandoffId("s", 1)))
    side.take(router, reserve(H))
    assert router.kinds() == ["reserved", "refused"]
    side.run()
    assert owner.kinds()[-1] == "finish"
    side.role.gone(router)
    ends_free(pair)


@pytest.mark.parametrize("state", STATES)
def test_a_fence_is_answered_in_every_state(pair, side, state):
    router = to_state(pair, state)
    side.take(router, fence())
    side.run()
    kinds = router.kinds()
    assert kinds.count("fenced") == (state not in {"committed", "adopted", "decoding"})
    assert kinds.count("committed") == (state in {"committed", "adopted", "decoding", "finished"})
    if kinds.count("committed"):
        assert [t.token_id for t in router.tokens()][1:] == BACKEND.expected(spec_of())
    ends_free(pair)
    side.take(router, reserve())
    assert router.events[-1].refused.reason == pb.REFUSAL_REASON_STALE


@pytest.mark.parametrize("state", STATES)
def test_a_fence_of_another_router_is_answered_to_both(pair, side, router, state):
    owner = to_state(pair, state)
    side.take(router, fence())
    side.run()
    committed = state in {"committed", "adopted", "decoding"}
    assert router.kinds() == (["committed"] if committed else ["fenced"])
    assert ("fenced" in owner.kinds()) == (state in {"reserved", "receiving", "written"})
    ends_free(pair)


@pytest.mark.parametrize("state", STATES)
def test_a_release_frees_in_every_state(pair, side, state):
    router = to_state(pair, state)
    before = len(router.events)
    side.take(router, release())
    side.take(router, release())
    assert side.all_free
    side.run()
    assert len(router.events) == before
    assert router.handoffs == set()
    assert side.records.notes[-1] == (H, "router-a", "RELEASED")
    ends_free(pair)


@pytest.mark.parametrize("state", STATES[:-1])
def test_a_release_of_another_router_is_told_to_the_owner(pair, side, router, state):
    owner = to_state(pair, state)
    side.take(router, release())
    assert router.events == []
    assert (owner.kinds()[-1], owner.events[-1].failed.kind) == ("failed", "StaleAttempt")
    ends_free(pair)


@pytest.mark.parametrize("state", STATES)
def test_a_router_that_is_gone_leaves_nothing(pair, side, state):
    router = to_state(pair, state)
    side.role.gone(router)
    side.role.gone(router)
    assert side.all_free
    ends_free(pair)


@pytest.mark.parametrize("state", ["reserved", "receiving", "committed"])
def test_a_deadline_ends_what_is_not_committed(pair, side, state):
    session = FakeSession()
    side.take(session, reserve(deadline_s=5.0))
    table = side.role.reservations
    if state != "reserved":
        table.offer(H, P, Offer(BACKEND.fingerprint, 9, 0))
    if state == "committed":
        spec = SequenceSpec(spec_of().prompt, GREEDY, (65,))
        table.commit(H, P, commit_of(spec, [Token(0, 65, "A")]))
    side.clock.advance(4.9)
    side.role.tick()
    assert session.kinds() == ["reserved"]
    side.clock.advance(0.1)
    side.role.tick()
    if state == "committed":
        side.loop.drain()
        assert session.kinds() == ["reserved", "committed", "tokens"]
        return
    assert session.events[-1].failed.kind == "DeadlineExceeded"
    side.role.tick()
    assert session.kinds() == ["reserved", "failed"]
    assert side.all_free
    with pytest.raises(StaleAttempt), table.writing(H, P):
        raise AssertionError("must not get here")


def test_a_commit_that_lands_while_its_deadline_passes_counts(side, router, monkeypatch):
    """It came between the look at the deadlines and the fence."""
    receiving(side, router)
    commit(side, SequenceSpec(spec_of().prompt, GREEDY, (65,)), [Token(0, 65, "A")])
    monkeypatch.setattr(side.role.reservations, "expired", lambda now: [H])
    side.role.tick()
    side.loop.drain()
    assert router.kinds() == ["reserved", "committed", "tokens"]


def test_what_does_not_fit_any_more_is_handed_back(router):
    pair = Pair(decode_blocks=8)
    handoffs = [HandoffId("a", 1), HandoffId("b", 1)]
    sampling = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
    for handoff in handoffs:
        pair.hand_over(router, handoff, spec_of(handoff, sampling=sampling))
    pair.decode.run()
    assert router.kinds(handoffs[0])[-1] == "finish"
    assert router.kinds(handoffs[1])[-1] == "preempted"
    assert [t.token_id for t in router.tokens(handoffs[0])][1:] == BACKEND.expected(
        spec_of(handoffs[0], sampling=sampling)
    )
    again = next_of(handoffs[1])
    pair.decode.take(router, reserve(again))
    assert router.kinds(again) == ["reserved"]
    pair.decode.take(router, release(again))
    ends_free(pair)


def receiving(side, session):
    side.take(session, reserve())
    side.role.reservations.offer(H, P, Offer(BACKEND.fingerprint, 9, 0))


def commit(side, spec, first):
    side.role.reservations.commit(H, P, commit_of(spec, first))


@pytest.mark.parametrize(
    ("prompt", "known", "first"),
    [
        (9, (65,), []),
        (9, (65,), [Token(0, 66, "B")]),
        (9, (65,), [Token(1, 65, "A")]),
        (8, (65, 66), [Token(0, 65, "A"), Token(1, 66, "B")]),
        (10, (), []),
        (9, (65, 66, 67), [Token(2, 67, "C")]),
        (60, (65,), [Token(0, 65, "A")]),
    ],
)
def test_a_commit_that_contradicts_itself_is_refused_and_the_handoff_can_still_end(side, router, prompt, known, first):
    receiving(side, router)
    spec = SequenceSpec(tuple(range(prompt)), GREEDY, known)
    with pytest.raises(OfferRefused):
        commit(side, spec, first)
    side.run()
    assert router.kinds() == ["reserved"]
    side.take(router, fence())
    assert router.kinds() == ["reserved", "fenced"]
    assert side.all_free


def test_a_commit_that_the_engine_does_not_take_fails_that_handoff_alone(side, router):
    receiving(side, router)
    commit(side, SequenceSpec((9999,) * 9, GREEDY, (65,)), [Token(0, 65, "A")])
    side.run()
    assert router.kinds() == ["reserved", "failed"]
    assert side.all_free
    assert router.handoffs == set()
    assert side.records.notes[-1][2] == "RELEASED"


def test_a_commit_that_ends_with_its_first_token_only_finishes(side, router):
    receiving(side, router)
    sampling = Sampling(max_tokens=1, temperature=0.0)
    commit(side, SequenceSpec(spec_of().prompt, sampling, (65,)), [Token(0, 65, "A")])
    side.run()
    assert router.kinds() == ["reserved", "committed", "tokens", "finish"]
    assert side.all_free


@pytest.mark.parametrize("how", ["release", "gone", "fence then release"])
def test_a_release_between_commit_and_adoption_wins(side, router, how):
    receiving(side, router)
    commit(side, SequenceSpec(spec_of().prompt, GREEDY, (65,)), [Token(0, 65, "A")])
    if how == "gone":
        side.role.gone(router)
    else:
        for command in [fence(), release()] if "fence" in how else [release()]:
            side.take(router, command)
    side.run()
    assert side.all_free
    assert router.kinds() == ["reserved"]


def test_commits_and_fences_that_race_agree(side, router):
    """Threads commit while the engine thread fences: each handoff has one outcome, and the events say so."""
    handoffs = [HandoffId(f"h{n}", 1) for n in range(6)]
    for handoff in handoffs:
        side.take(router, reserve(handoff))
        side.role.reservations.offer(handoff, P, Offer(BACKEND.fingerprint, 9, 0))
    start, accepted = threading.Barrier(2), []

    def receiver():
        start.wait(10)
        for handoff in handoffs:
            spec = SequenceSpec(spec_of(handoff).prompt, GREEDY, (65,))
            try:
                side.role.reservations.commit(handoff, P, commit_of(spec, [Token(0, 65, "A")]))
            except StaleAttempt:
                continue
            accepted.append(handoff)

    thread = threading.Thread(target=receiver)
    thread.start()
    start.wait(10)
    for handoff in reversed(handoffs):
        side.take(router, fence(handoff))
    thread.join(10)
    side.run()
    for handoff in handoffs:
        assert ("committed" in router.kinds(handoff)) == (handoff in accepted)
        assert ("fenced" in router.kinds(handoff)) == (handoff not in accepted)
    assert side.all_free


CASES = {name: (command, named) for name, command, named in malformed()} | {
    "prefill": (prefill(), "command"),
    "repush": (repush(), "command"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_malformed_command_changes_nothing(side, router, case):
    command, named = CASES[case]
    if command.WhichOneof("command") == "repush":
        named = "command"
    if command.WhichOneof("command") == "prefill":
        named = f"{named}|to: a decode worker hands over to nobody"
    with pytest.raises(InvalidRequest, match=named):
        side.role.command(router, command)
    side.run()
    assert side.all_free
    assert (router.handoffs, router.events) == (set(), [])


def test_a_push_to_another_decode_worker_fails_there_and_the_reservation_here_is_fenced(pair, side):
    """The Prefill names the wrong worker: its table knows no such reservation."""
    router, elsewhere = FakeSession(), DecodeSide()
    side.take(router, reserve())
    pair.prefill.take(router, prefill(to=D))
    pair.prefill.run()
    pair.prefill.pusher.advance(H, elsewhere)
    pair.prefill.run()
    assert router.events[-1].failed.kind == "StaleAttempt"
    side.take(router, fence())
    assert router.kinds()[-1] == "fenced"
    assert elsewhere.all_free
    ends_free(pair)
