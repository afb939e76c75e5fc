"""Fetching a cached prefix from the decode worker: when it pays, what may be written, and that the prompt continues."""

import threading
from dataclasses import replace
from unittest.mock import Mock, call

import pytest

from baton.core import HandoffId, Incarnation, WorkerRef
from baton.errors import OfferRefused, StaleAttempt
from kvtransfer.handoff import CommitState, Offer
from prefill_workers.prefix_fetch import CostModel
from tests.support.engines import kv_of
from tests.support.fake_pusher import CUT
from tests.support.sessions import BACKEND, D, H, expected, names_of, next_of, prefill, release, repush, spec_of
from tests.support.time_factor import scaled
from tests.support.workers import PrefillSide

OTHER = WorkerRef("decode-0", Incarnation(7, 99), D.address)
WHOLE = CommitState(None, [], 0.1, 0.1, 64, "memory")
SPEC = spec_of(H, 14)  # three full blocks and two tokens


@pytest.fixture
def side():
    """A worker that has measured slow computation: a second a token."""
    made = PrefillSide(prefix_cache=True)
    made.role.fetches._cost.computed(1, 1.0)
    return made


def offer_of(begin=0, end=12):
    return Offer(BACKEND.fingerprint, end, begin)


def begun(side, router, *, skip=12, handoff=H, spec=SPEC):
    """Begin a handoff and return the positions that it fetches."""
    side.take(router, prefill(handoff, spec, skip=skip))
    return side.pusher.pushes[handoff].job.fetch


def came(side, *, begin=0, end=12, handoff=H):
    """Deliver the right KV, as the decode worker has it."""
    fetches, layers = side.role.fetches, range(BACKEND.layout.layers)
    _, wire = kv_of(PrefillSide().engine, replace(SPEC, prompt=SPEC.prompt[:end]), begin)
    fetches.offer(handoff, D, offer_of(begin, end))
    with fetches.writing(handoff, D) as blocks:
        side.engine.kv.scatter(layers, blocks, begin, end, wire)
    fetches.commit(handoff, D, WHOLE)


def write(side, sender=D):
    with side.role.fetches.writing(H, sender) as blocks:
        return blocks


def ends_well(side, router):
    side.run()
    assert router.ids() == expected(SPEC, 1)
    side.push_ends()
    assert (side.all_free, side.counts.reserved) == (True, 0)


def test_the_cheaper_way_is_taken_and_what_was_seen_counts():
    cost = CostModel(fetch_s=0.1, bytes_per_s=1000.0)
    assert not cost.worth(1000, 1), "nothing was computed yet"
    cost.computed(10, 0.1)
    assert [cost.worth(tokens, 100) for tokens in (19, 20, 21, 100)] == [False, False, True, True]
    for _ in range(50):
        cost.fetched(100, 2.0)
    assert not cost.worth(100, 100)
    for _ in range(50):
        cost.computed(10, 10.0)
    assert cost.worth(100, 100)


@pytest.mark.parametrize(("tokens", "fetch"), [(31, None), (32, (0, 12))])
def test_only_large_steps_tell_what_computing_costs(router, tokens, fetch):
    side = PrefillSide()
    side.role.fetches.step_began()
    side.clock.advance(10.0)
    side.role.fetches.step_ended(tokens)
    assert begun(side, router) == fetch


def test_costs_are_the_times_of_a_step_and_of_a_fetch(side, router):
    cost = side.role.fetches._cost = Mock(wraps=side.role.fetches._cost)
    side.role.fetches.step_began()
    side.clock.advance(4.0)
    side.role.fetches.step_ended(32)
    begun(side, router)
    side.clock.advance(0.5)
    came(side)
    ends_well(side, router)
    assert cost.computed.call_args_list[0] == call(32, 4.0)
    cost.fetched.assert_called_once_with(3 * side.engine.layout.block_bytes, 0.5)


def test_what_came_is_not_computed(side, router):
    assert begun(side, router) == (0, 12)
    side.run()
    assert router.events == []
    assert side.engine.counters.prefill_tokens == 0
    came(side)
    ends_well(side, router)
    assert side.engine.counters.prefill_tokens == len(SPEC) - 12
    assert side.role.fetches.fetched_tokens == 12
    assert side.engine.pool.find(names_of(SPEC.tokens))


def test_only_whole_blocks_that_are_not_here_are_fetched(side, router):
    assert begun(side, router, skip=11) == (0, 8)
    side.serve(router, release(), prefill(HandoffId("before", 1), spec_of(H, 9)))
    assert side.engine.pool.find(names_of(SPEC.tokens)[:2])
    again = HandoffId("again", 1)
    assert begun(side, router, handoff=again) == (8, 12)
    came(side, begin=8, handoff=again)
    side.run()
    assert router.ids(again) == expected(SPEC, 1)
    assert begun(side, router, handoff=HandoffId("more", 1)) is None, "all of it is here now"


def test_without_room_the_prompt_is_computed(router):
    side = PrefillSide(blocks=5)
    side.role.fetches._cost.computed(1, 1.0)
    taken = side.engine.pool.allocate(3)
    assert begun(side, router) is None
    taken.release()
    ends_well(side, router)
    assert side.engine.counters.prefill_tokens == len(SPEC)


def test_nothing_is_written_that_was_not_asked_for(side, router):
    fetches = side.role.fetches
    with pytest.raises(StaleAttempt, match="was requested from"):
        fetches.offer(H, D, offer_of())
    begun(side, router)
    for sender, offer, error in ((OTHER, offer_of(), StaleAttempt), (D, offer_of(0, 8), OfferRefused)):
        with pytest.raises(error, match="requested"):
            fetches.offer(H, sender, offer)
    with pytest.raises(StaleAttempt):
        write(side)
    fetches.offer(H, D, offer_of())
    with pytest.raises(OfferRefused, match="once"):
        fetches.offer(H, D, offer_of())
    with pytest.raises(StaleAttempt):
        write(side, OTHER)
    with pytest.raises(OfferRefused):
        fetches.fetch(H, D, 0, 4)
    with pytest.raises(StaleAttempt):  # a commit with a sequence does not answer a fetch
        fetches.commit(H, D, replace(WHOLE, spec=SPEC))
    assert side.counts.reserved == 3
    fetches.commit(H, D, WHOLE)


def by_sender(side, end):
    """End the fetch by its sender, after another sender did the same without effect."""
    end(OTHER)
    assert not side.loop.jobs
    end(D)


ENDINGS = {
    "release": lambda side, router: side.give_up(router, "release"),
    "gone": lambda side, router: side.give_up(router, "gone"),
    "repush": lambda side, router: side.take(router, repush(skip=12)),
    "push failed": lambda side, router: side.pusher.done(H, CUT),
    "refused": lambda side, router: side.role.fetch_ended(H),
    "late": lambda side, router: side.clock.advance(10.0),
    "aborted": lambda side, router: by_sender(side, lambda sender: side.role.fetches.aborted(H, sender)),
    "lost": lambda side, router: by_sender(side, side.role.fetches.lost),
}


@pytest.mark.parametrize(
    ("how", "accepted"), [(how, accepted) for how in ENDINGS for accepted in (False, True) if accepted or how != "lost"]
)
def test_a_fetch_that_ends_early_gives_its_blocks_back_and_the_prompt_goes_on(side, router, how, accepted):
    begun(side, router)
    fetches = side.role.fetches
    if accepted:
        fetches.offer(H, D, offer_of())
    ENDINGS[how](side, router)
    side.step()
    assert side.counts.reserved == 0
    with pytest.raises(StaleAttempt):
        write(side)
    with pytest.raises(StaleAttempt):
        fetches.commit(H, D, WHOLE)
    side.run()
    assert fetches.fetched_tokens == 0
    if how in {"release", "gone"}:
        assert (router.events, side.all_free, side.engine.counters.prefill_tokens) == ([], True, 0)
        return
    assert side.engine.counters.prefill_tokens == len(SPEC)
    assert router.ids(next_of(H) if how == "repush" else H) == expected(SPEC, 1)


def test_who_was_late_is_not_waited_for_again_for_a_while(side, router):
    for name, waits_s, fetch in (("first", 0.0, (0, 12)), ("next", 10.0, None), ("later", 60.0, (0, 12))):
        side.clock.advance(waits_s)
        side.run()
        handoff = HandoffId(name, 1)
        assert begun(side, router, handoff=handoff, spec=spec_of(handoff, 14)) == fetch


def test_a_fetch_is_given_up_when_the_prompt_could_have_been_computed_meanwhile(router):
    side = PrefillSide(prefix_cache=True)
    side.role.fetches._cost.computed(1, 0.1)
    assert begun(side, router) == (0, 12)
    side.clock.advance(1.1)
    side.run()
    assert router.events == []
    side.clock.advance(0.2)
    side.run()
    assert router.ids(H) == expected(SPEC, 1)


def test_what_came_for_a_handoff_that_was_released_is_kept_in_the_cache(side, router):
    begun(side, router)
    came(side)
    side.serve(router, release())
    assert (side.all_free, len(side.engine.pool.find(names_of(SPEC.tokens)))) == (True, 3)


def test_the_end_waits_for_a_write_under_way_and_none_begins_after_it(side, router, monkeypatch):
    begun(side, router)
    fetches = side.role.fetches
    fetches.offer(H, D, offer_of())
    entry = fetches._fetch(H, D)
    ending = threading.Thread(target=fetches.end, args=[H])
    with fetches.writing(H, D):
        ending.start()
        ending.join(0.05)  # enough time for an end that does not wait
        assert ending.is_alive()
    ending.join(scaled(10))
    monkeypatch.setattr(fetches, "_fetch", lambda handoff, sender: entry)  # it was looked up just before
    with pytest.raises(StaleAttempt, match="has ended"):
        write(side)
