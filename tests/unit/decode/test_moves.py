"""A decode worker that leaves holds its running sequences until another one has their KV."""

from dataclasses import replace

import pytest

from baton.core import HandoffId
from baton.errors import ChannelBroken, DigestMismatch
from tests.support.sessions import (
    GREEDY,
    STALE,
    FakeSession,
    H,
    expected,
    names_of,
    next_of,
    prefill,
    release,
    repush,
    reserve,
    spec_of,
)
from tests.support.sessions import prompt_of as prompt
from tests.support.workers import DecodeSide

N, LATER = next_of(H), next_of(next_of(H))


@pytest.fixture
def other():
    return DecodeSide()


def leaves(side, session, steps=3, ahead=0, spec=None):
    """Decode H alone for some steps, leave, and return the delivered tokens."""
    side.attach_pusher()
    side.take(session, reserve(), prefill(spec=spec, to=None))
    side.step(steps)
    side.role.leave(ahead)
    assert session.events[-1].preempted.held
    return session.ids()


def moved(side, other, session, said, **reserving):
    """Reserve on the other worker, and push all of the held KV there."""
    other.take(session, reserve(N, 9 + len(said) - 1, **reserving))
    side.take(session, repush(H, skip=session.cached_at(N)))
    while N in side.pusher.pushes:
        side.pusher.advance(N, other)
    side.loop.drain()
    other.run()


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_another_worker_continues_with_the_kv_and_computes_nothing_again(side, other, router, steps):
    said = leaves(side, router, steps)
    assert said == expected(tokens=steps)
    assert not side.role.idle
    assert [holding.state for holding in side.role.holdings()] == ["moving"]
    moved(side, other, router, said)
    assert router.ids(N) == expected()[steps - 1 :]
    assert router.kinds(N)[:1] + router.kinds(N)[-2:] == ["reserved", "tokens", "finish"]
    assert "pushed" in router.kinds(N)
    assert other.engine.load().prefill_tokens == 0
    assert other.engine.counters.recomputed_tokens == 0
    assert side.role.idle
    assert side.all_free
    assert other.all_free


LONG = spec_of(sampling=replace(GREEDY, max_tokens=20))
AHEAD, KNOWN = 8, 9 + 3 - 1 + 8  # tokens whose KV moves after three steps


def sent(side, other):
    """Send what is final, and return the position that every layer has reached."""
    side.pusher.advance(N, other)
    return side.pusher.pushes[N].progress.lowest


def test_full_blocks_leave_while_it_decodes_and_only_the_last_one_waits(side, other, router):
    said = leaves(side, router, ahead=AHEAD, spec=LONG)
    assert router.events[-1].preempted.known_tokens == KNOWN
    side.step()
    assert router.ids() == said  # the router has left this attempt
    other.take(router, reserve(N, KNOWN))
    side.take(router, repush(H))
    side.pusher.advance(N, other)
    reached = []
    while side.engine.has_work():
        reached.append(sent(side, other))
        side.step()
        assert router.ids(N) == expected(LONG)[3 : 3 + len(router.ids(N))]  # tokens come with each step
    assert reached == [12, 12, 12, 12, 16, 16, 16]
    assert len(router.ids(N)) == AHEAD
    while N in side.pusher.pushes:
        side.pusher.advance(N, other)
    side.loop.drain()
    assert router.kinds(N)[-1] == "pushed"
    other.run()
    assert router.ids(N) == [*expected(LONG)[3 : 3 + AHEAD], *expected(LONG)[2 + AHEAD :]]
    assert other.engine.load().prefill_tokens == 0
    assert side.role.idle
    assert side.all_free
    assert other.all_free


@pytest.mark.parametrize("repushed", [False, True])
def test_a_sequence_that_ends_before_its_stop_is_not_handed_over(side, other, router, repushed):
    leaves(side, router, ahead=AHEAD)
    if repushed:
        other.take(router, reserve(N, router.events[-1].preempted.known_tokens))
        side.take(router, repush(H))
    side.run()
    if not repushed:
        assert side.all_free
        side.take(router, repush(H))
    assert router.ids(N) == expected()[3:]
    assert router.kinds(N)[-1] == "finish"
    assert side.all_free
    assert side.role.idle


@pytest.mark.parametrize("how", ["release", "gone", "push fails"])
def test_a_move_that_fails_while_it_decodes_frees_everything(side, other, router, how):
    leaves(side, router, ahead=AHEAD, spec=LONG)
    other.take(router, reserve(N, KNOWN))
    side.take(router, repush(H))
    side.pusher.advance(N, other)
    sent(side, other)
    side.step()
    if how == "push fails":
        side.push_ends(N, ChannelBroken("cut"))
        assert not router.failure.held
    else:
        side.role.gone(router) if how == "gone" else side.take(router, release(N))
    side.run()
    assert side.all_free
    assert side.role.idle
    assert not side.engine.has_work()
    assert side.pusher.log[-2:] == [("withdraw", N), ("abort", N)] or how == "push fails"


def test_a_moving_sequence_that_loses_its_blocks_fails(side, other, router):
    """An older sequence needs a block when none is left."""
    older = HandoffId("older", 1)
    side.take(router, reserve(older), prefill(older, spec_of(older, sampling=LONG.sampling), to=None))
    leaves(side, router, ahead=AHEAD, spec=LONG)
    other.take(router, reserve(N, KNOWN))
    side.take(router, repush(H))
    side.pusher.advance(N, other)
    side.pusher.advance(N, other)
    kept = side.engine.pool.allocate(side.counts.available)
    side.run()
    assert router.kinds(N)[-1] == "failed"
    assert side.pusher.log[-2:] == [("withdraw", N), ("abort", N)]
    side.take(router, release(older))
    kept.release()
    assert side.all_free


def test_cached_blocks_are_not_sent(side, other, router):
    other.serve(FakeSession("before"), reserve(), prefill(to=None))
    said = leaves(side, router)
    moved(side, other, router, said, prefix=names_of(prompt(H)))
    assert router.cached_at(N) == 8
    assert router.ids(N) == expected()[2:]


def test_a_sequence_that_arrives_while_the_worker_leaves_moves_too(pair, router):
    pair.hand_over(router)
    pair.decode.attach_pusher()
    pair.decode.role.leave()
    pair.decode.loop.drain()
    assert router.kinds()[-3:] == ["committed", "tokens", "preempted"]
    assert router.events[-1].preempted.held


@pytest.mark.parametrize("error", [ChannelBroken("cut"), DigestMismatch("bits")])
def test_a_failed_push_frees_the_kv(side, router, error):
    leaves(side, router)
    side.take(router, repush(H))
    side.push_ends(N, error)
    assert not router.failure.held
    assert side.all_free
    assert side.role.idle


def test_a_repush_of_a_push_under_way_ends_that_push_first(side, other, router):
    leaves(side, router)
    other.take(router, reserve(N, 11))
    side.take(router, repush(H), repush(N, LATER))
    assert side.pusher.log[-4:] == [("begin", N), ("withdraw", N), ("abort", N), ("begin", LATER)]


@pytest.mark.parametrize("pushing", [False, True])
@pytest.mark.parametrize("how", ["release", "gone"])
def test_a_router_that_gives_up_frees_it(side, router, how, pushing):
    leaves(side, router)
    if pushing:
        side.take(router, repush(H))
    side.role.gone(router) if how == "gone" else side.take(router, release(N if pushing else H))
    assert side.all_free
    assert side.role.idle
    assert not router.handoffs
    assert [name for name, _ in side.pusher.log[-2:]] == (["withdraw", "abort"] if pushing else [])


def test_a_late_release_of_its_router_before_changes_nothing(side, router, second):
    leaves(side, second)
    side.take(router, release(H))
    side.take(second, repush(H))
    assert (second.refusals, len(side.role.moves)) == ([], 1)


def test_a_push_that_cannot_begin_frees_the_kv(side, router):
    leaves(side, router)
    side.pusher.refuse = ChannelBroken("no address")
    side.take(router, repush(H))
    assert router.failure.kind == "ChannelBroken"
    assert side.all_free


def test_a_repush_under_a_used_name_changes_nothing(side, other, router):
    said = leaves(side, router)
    other.take(router, reserve(N, 11))
    side.take(router, repush(H, H), repush(H), repush(N, N))
    assert router.refusals == [STALE, STALE]
    while N in side.pusher.pushes:
        side.pusher.advance(N, other)
    side.loop.drain()
    other.run()
    assert said + router.ids(N)[1:] == expected()
    assert side.all_free


def test_only_its_router_moves_it(side, router, second):
    leaves(side, router)
    side.take(second, repush(H))
    side.take(router, repush(N))
    assert second.refusals == router.refusals == [STALE]


def test_a_prompt_without_a_token_is_given_back_without_kv(side, router):
    side.attach_pusher()
    side.take(router, reserve(), prefill(to=None))
    side.role.leave()
    assert router.kinds()[-1] == "preempted"
    assert not router.events[-1].preempted.held
    assert side.all_free
