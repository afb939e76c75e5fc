"""A worker that drains takes nothing new and ends what it has; then nobody would miss it."""

import pytest

from baton.core import HandoffId
from tests.support.fake_pusher import CUT
from tests.support.sessions import DRAINING, H, expected, next_of, prefill, release, repush, reserve

OTHER = HandoffId("other", 1)


def ends_in_peace(side):
    """What it had has ended, and now it is idle."""
    side.run()
    assert side.role.draining
    assert side.role.idle
    assert side.all_free
    assert not list(side.role.holdings())


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
    """`alone`: it is reserved, and its prompt is computed there as well."""
    sides = [pair.prefill, pair.decode]
    if upto in {"reserved", "alone"}:
        sides = [pair.decode]
        pair.decode.take(router, reserve())
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


def test_so_is_what_decodes_for_nobody(pair, router):
    pair.decode.take(router, reserve(resumable_s=30.0), prefill(to=None))
    pair.decode.step()
    pair.decode.role.gone(router)
    pair.decode.role.drain()
    assert not pair.decode.role.idle
    pair.decode.run()
    assert len(pair.decode.role.parking) == 1  # remembered, and not missed
    ends_in_peace(pair.decode)


def test_a_pin_is_waited_for(pair, router):
    """KV that a prefill worker fetches from here."""
    pair.hand_over(router, upto="offered")
    pins = pair.decode.role.pins
    pins._pins[OTHER] = pair.decode.engine.pool.allocate(1)
    pair.decode.role.drain()
    pair.end_pushes()
    pair.decode.run()
    assert not pair.decode.role.idle
    pins.push_ended(OTHER, CUT)
    ends_in_peace(pair.decode)
