"""A draining worker finishes its work; at SIGTERM, it hands its work over. Afterwards it can end."""

import pytest

from baton.core import HandoffId
from tests.support.fake_pusher import CUT
from tests.support.sessions import DRAINING, H, expected, next_of, prefill, release, repush, reserve

OTHER = HandoffId("other", 1)


def ends_free(side):
    side.run()
    assert side.all_free
    assert not list(side.role.holdings())


def ends_in_peace(side):
    ends_free(side)
    assert side.role.draining
    assert side.role.idle


@pytest.mark.parametrize("how", ["drain", "leave"])
def test_nothing_new_is_taken_and_idle_workers_are_drained_at_once(pair, router, how):
    for side in (pair.prefill, pair.decode):
        assert not side.role.draining
        getattr(side.role, how)()
        ends_in_peace(side)
    pair.decode.take(router, reserve())
    pair.prefill.take(router, prefill())
    assert router.refusals == [DRAINING, DRAINING]
    ends_in_peace(pair.decode)
    ends_in_peace(pair.prefill)


@pytest.mark.parametrize("upto", ["reserved", "alone", "queued", "offered", "written", "committed"])
def test_a_handoff_that_is_under_way_ends_with_its_last_token(pair, router, upto):
    """`alone`: the decode worker also computes the prompt."""
    sides = [pair.prefill, pair.decode]
    if upto in {"reserved", "alone"}:
        sides = [pair.decode]
        pair.bring(router, "reserved")
    elif upto == "queued":
        pair.begin(router)
    else:
        pair.hand_over(router, upto=upto)
    for side in sides:
        side.role.drain()
        assert not side.role.idle
    if upto == "reserved":
        pair.prefill.take(router, prefill())
    elif upto == "alone":
        pair.decode.take(router, prefill(to=None))
    pair.end_pushes()
    pair.decode.run()
    assert router.ids()[-6:] == expected()
    assert router.refusals == []
    assert ("pushed" in router.kinds()) == (upto != "alone")
    assert "finish" in router.kinds()
    ends_in_peace(pair.decode)
    pair.prefill.role.drain()
    ends_in_peace(pair.prefill)


def test_kv_that_waits_for_a_repush_is_waited_for(pair, router):
    pair.begin(router)
    pair.prefill.run()
    pair.prefill.pusher.break_channel(pair.decode)
    pair.decode.take(router, release())
    pair.prefill.run()
    pair.prefill.role.drain()
    assert not pair.prefill.role.idle
    pair.decode.take(router, reserve(next_of(H)))
    pair.prefill.take(router, repush(H))
    assert router.refusals == []
    pair.end_pushes()
    pair.decode.run()
    assert router.kinds(next_of(H))[-1] == "finish"
    ends_in_peace(pair.prefill)


@pytest.mark.parametrize("how", ["drain", "leave"])
def test_what_decodes_without_a_router_is_waited_for_unless_the_worker_leaves(pair, router, how):
    side = pair.decode
    side.take(router, reserve(resumable_s=30.0), prefill(to=None))
    side.step()
    side.role.gone(router)
    getattr(side.role, how)()
    if how == "drain":
        assert not side.role.idle
        side.run()
    assert len(side.role.detached) == (how == "drain")  # a drained worker remembers the stream, but need not wait
    ends_in_peace(side)


def test_a_pin_is_waited_for(pair, router):
    pair.hand_over(router, upto="offered")
    pins = pair.decode.role.pins
    pins._pins[OTHER] = pair.decode.engine.pool.allocate(1)
    pair.decode.role.drain()
    pair.end_pushes()
    pair.decode.run()
    assert not pair.decode.role.idle
    pair.decode.role.push_ended(OTHER, CUT)
    ends_in_peace(pair.decode)


# --- SIGTERM: its work continues elsewhere, from any state


@pytest.mark.parametrize("state", ["reserved", "receiving", "written"])
def test_what_is_reserved_is_given_back(pair, router, state):
    pair.bring(router, state)
    pair.decode.role.leave()
    assert router.refusals == [DRAINING]
    pair.end_pushes()
    ends_free(pair.decode)
    assert "committed" not in router.kinds()


@pytest.mark.parametrize("how", ["handed over", "while it drains", "alone"])
def test_what_decodes_is_handed_back_and_nothing_said_is_lost(pair, router, how):
    if how == "alone":
        pair.decode.take(router, reserve(), prefill(to=None))
    else:
        pair.adopt(router)
        pair.decode.step()
    if how == "while it drains":
        pair.decode.role.drain()
    pair.decode.role.leave()
    assert router.kinds()[-1] == "preempted"
    assert router.ids() == expected(tokens=0 if how == "alone" else 2)
    assert [span.name for span in router.events[-1].spans] == ["decode"]
    ends_free(pair.decode)


def test_a_commit_that_was_accepted_is_told_and_then_handed_back(pair, router):
    pair.hand_over(router)
    pair.decode.role.leave()
    assert "refused" not in router.kinds()
    pair.decode.loop.drain()
    assert router.kinds()[-3:] == ["committed", "tokens", "preempted"]
    ends_free(pair.decode)


def test_a_prompt_that_is_not_computed_yet_is_given_back(pair, router):
    pair.begin(router)
    pair.prefill.role.leave()
    assert router.refusals == [DRAINING]
    pair.decode.take(router, release())
    ends_free(pair.decode)
    pair.end_pushes()
    ends_free(pair.prefill)
