"""The decode role on a real engine: one commit at most, one end, the right tokens, and all blocks freed."""

import pytest

from baton.core import HandoffId, Sampling, SequenceSpec, Token
from baton.errors import OfferRefused, StaleAttempt
from baton.rpc.v1 import worker_pb2 as pb
from baton.worker.service import Attempts
from tests.support.sessions import GREEDY, STALE, FakeSession, H, expected, fence, names_of, release, reserve, spec_of
from tests.support.workers import STATES, Pair


@pytest.fixture
def owner():
    return FakeSession()


def test_a_handoff_from_reserve_to_finish(pair, side, owner):
    pair.adopt(owner)
    assert owner.kinds() == ["reserved", "committed", "tokens"]
    committed, tokens = owner.messages[-1]
    assert (committed.committed.kv_bytes, committed.committed.transport) == (64, "memory")
    assert (getattr(tokens.tokens, "from"), list(tokens.tokens.ids)) == (0, expected(tokens=1)), "in one message"
    side.run()
    assert owner.ids() == expected()
    assert owner.kinds()[-1] == "finish"
    assert [state for _, _, state, _ in side.records.notes] == ["RESERVED", "COMMITTED", "RELEASED"]
    assert side.engine.counters.prefill_tokens == 0
    pair.ends_free()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (reserve(fingerprint="other"), pb.REFUSAL_REASON_FINGERPRINT),
        *((reserve(known=tokens), pb.REFUSAL_REASON_TOO_LONG) for tokens in (0, 65, 2**32 - 1)),
        (reserve(max_total=65), pb.REFUSAL_REASON_TOO_LONG),
    ],
)
def test_a_reserve_that_never_fits_is_refused(side, router, command, reason):
    side.take(router, command)
    assert (router.refusals, side.all_free) == ([reason], True)
    side.take(router, reserve(max_total=64))  # the attempt is not used up
    assert router.kinds() == ["refused", "reserved"]
    assert side.counts.reserved == side.engine.layout.blocks_for(9 + 1)


@pytest.mark.parametrize(("state", "forgotten"), [*((state, False) for state in STATES), ("decoding", True)])
def test_a_second_reserve_is_stale_and_harms_nobody(pair, side, router, owner, state, forgotten):
    pair.bring(owner, state)
    if forgotten:
        side.role.reservations._attempts = Attempts()  # as after many later requests
    before = list(owner.events)
    side.take(router, reserve(), reserve())
    assert router.refusals == [STALE, STALE]
    assert owner.events == before
    side.run()
    if state in {"committed", "adopted", "decoding", "finished"}:
        assert owner.ids()[1:] == expected()  # token 0 twice
    side.role.gone(owner)
    pair.ends_free()


COMMITTED = {"committed", "adopted", "decoding"}


@pytest.mark.parametrize("by", ["owner", "another router"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("shared", [0, 2])
def test_a_fence_is_answered_in_every_state(router, owner, shared, state, by):
    pair = Pair().warm() if shared else Pair()
    side, blocks = pair.decode, pair.cached()
    pair.bring(owner, state)
    side.take(owner if by == "owner" else router, fence())
    side.run()
    if by == "owner":
        assert owner.kinds().count("fenced") == (state not in COMMITTED)
    else:
        assert router.kinds() == (["committed"] if state in COMMITTED else ["fenced"])
        assert ("fenced" in owner.kinds()) == (state in {"reserved", "receiving", "written"})
    assert owner.kinds().count("committed") == (state in {*COMMITTED, "finished"})
    if "committed" in owner.kinds():
        assert owner.ids()[1:] == expected()
    pair.ends_free()
    assert pair.cached()[:shared] == blocks
    side.take(router, reserve())
    assert router.refusals == [STALE]


@pytest.mark.parametrize("how", ["release", "gone", "another router"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("shared", [0, 2])
def test_whatever_the_state_a_release_frees_at_once_and_what_was_shared_stays(owner, shared, state, how):
    pair = Pair().warm() if shared else Pair()
    side, blocks = pair.decode, pair.cached()
    pair.bring(owner, state)
    kinds = owner.kinds()
    if state != "finished":
        others = side.engine.pool.allocate(side.engine.pool.available)
        assert set(blocks[:shared]).isdisjoint(others.blocks), "no other allocation gets shared blocks"
        others.release()
    for _ in range(2):
        side.give_up(owner, how)
        assert (side.all_free, side.counts.reserved, side.counts.owned) == (True, 0, 0)
        assert pair.cached()[:shared] == blocks
    if how == "another router" and state != "finished":
        kinds.append("failed")
        assert owner.failure.kind == "StaleAttempt"
    side.run()
    assert (owner.kinds(), owner.handoffs) == (kinds, set())
    assert side.records.notes[-1][:3] == (H, "router-a", "RELEASED")
    pair.ends_free()


@pytest.mark.parametrize("state", ["reserved", "receiving"])
def test_a_deadline_ends_what_is_not_committed(side, router, state):
    if state == "reserved":
        side.take(router, reserve(deadline_s=5.0))
    else:
        side.receive(router, deadline_s=5.0)
    side.clock.advance(4.5)
    side.role.tick()
    assert router.kinds() == ["reserved"]
    side.clock.advance(0.5)
    side.role.tick()
    assert router.failure.kind == "DeadlineExceeded"
    side.role.tick()
    assert (router.kinds(), side.all_free) == (["reserved", "failed"], True)
    with pytest.raises(StaleAttempt):
        side.commit()


@pytest.mark.parametrize(("late", "ends"), [(False, False), (True, False), (True, True)])
def test_a_commit_before_its_deadline_counts(side, router, monkeypatch, late, ends):
    """`late`: the handoff was committed, or even finished, between the deadline check and the fence."""
    side.receive(router, deadline_s=5.0)
    side.commit()
    if ends:
        side.run()
    if late:
        monkeypatch.setattr(side.role.reservations, "expired", lambda now: [H])
    side.clock.advance(5.0)
    side.role.tick()
    side.loop.drain()
    assert router.kinds()[:3] == ["reserved", "committed", "tokens"]
    assert router.kinds()[-1] == ("finish" if ends else "tokens")


def test_what_does_not_fit_any_more_is_handed_back(router):
    pair = Pair(decode_blocks=8)
    first, other = HandoffId("a", 1), HandoffId("b", 1)
    sampling = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
    for handoff in (first, other):
        pair.hand_over(router, handoff, spec_of(handoff, sampling=sampling))
    pair.decode.run()
    assert (router.kinds(first)[-1], router.kinds(other)[-1]) == ("finish", "preempted")
    assert router.ids(first)[1:] == expected(spec_of(first, sampling=sampling))
    again = HandoffId("b", 2)
    pair.decode.take(router, reserve(again))
    assert router.kinds(again) == ["reserved"]
    pair.decode.take(router, release(again))
    pair.ends_free()


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
    side.receive(router)
    with pytest.raises(OfferRefused):
        side.commit(H, SequenceSpec(tuple(range(prompt)), GREEDY, known), first)
    side.run()
    assert router.kinds() == ["reserved"]
    side.take(router, fence())
    assert (router.kinds(), side.all_free) == (["reserved", "fenced"], True)


NOT_TAKEN = SequenceSpec((9999,) * 9, GREEDY, (65,))
ENDS_AT_ONCE = SequenceSpec(spec_of().prompt, Sampling(max_tokens=1, temperature=0.0), (65,))


@pytest.mark.parametrize(
    ("spec", "kinds"), [(NOT_TAKEN, ["failed"]), (ENDS_AT_ONCE, ["committed", "tokens", "finish"])], ids=["no", "ends"]
)
@pytest.mark.parametrize("shared", [0, 2])
def test_a_commit_that_the_engine_does_not_take_or_that_ends_at_once(router, shared, spec, kinds):
    pair = Pair().warm()
    side, names = pair.decode, names_of(spec_of().tokens)[:shared]
    side.receive(router, skip=4 * shared, prefix=names)
    side.commit(H, spec)
    side.run()
    assert (router.kinds(), side.all_free, router.handoffs) == (["reserved", *kinds], True, set())
    assert side.records.notes[-1][2] == "RELEASED"
    assert len(pair.cached()) == 2
