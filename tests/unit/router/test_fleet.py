"""After any events, the snapshot equals one built from scratch."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from baton.core import BlockCounts, Channel, Incarnation, Load, Role, Sampling, SequenceSpec, WorkerRef
from baton.ledger.prefix_index import PrefixIndex
from router.placement.cost_model import UNKNOWN
from router.placement.fleet import Fleet, facts_of
from router.placement.policy import predicted
from router.placement.snapshot import BLANK, Facts, WorkerView
from tests.support.ledger import holders
from tests.unit.router.fakes import block_names, decode, fleet_of, holder, link, pace, prefill, publish

PROMPT = tuple(range(100))


def spec(tokens=PROMPT, scope=""):
    return SequenceSpec(tokens, Sampling(), cache_scope=scope)


def report(fleet, one, **load):
    """Set the worker's reported load."""
    one.view.load = Load(**load)
    fleet.touch(one.info.ref)


def facts(fleet, one):
    """Return the facts in the worker's row."""
    side = fleet.snapshot().prefill if one.info.role is Role.PREFILL else fleet.snapshot().decode
    return Facts(*(float(column[fleet._members[holder(one)].row]) for column in side.at))


class Changes(RuleBasedStateMachine):
    links = Bundle("links")

    def __init__(self):
        super().__init__()
        self.prefixes = PrefixIndex()
        self.fleet = Fleet(self.prefixes)
        self.here = {}
        self.born = 0
        self.seqs = {}

    @rule(target=links, role=st.sampled_from(Role), number=st.integers(0, 5), fingerprint=st.sampled_from("ab"))
    def arrive(self, role, number, fingerprint):
        self.born += 1
        one = link(role, f"{role}-{number}", fingerprint)
        ref = WorkerRef(one.info.ref.worker_id, Incarnation(1, self.born), "x:1")
        one.view.info = replace(one.info, ref=ref)
        self.here[ref] = one
        self.fleet.add(one)
        return one

    @rule(one=consumes(links))
    def leave(self, one):
        del self.here[one.info.ref]
        self.fleet.drop(one.info.ref)

    @rule(one=links, data=st.data())
    def report(self, one, data):
        *counts, running, queued = (data.draw(st.integers(0, 50)) for _ in range(5))
        step = one.view.load.step + data.draw(st.sampled_from([0, 1, 20]))
        done = pace(step, 10, 55, 0.01, 0.001)
        load = {"blocks": BlockCounts(sum(counts), *counts), "channels": (Channel("x", "shm", 1e9),)}
        paces = {"prefill_pace": done, "decode_pace": done}
        report(self.fleet, one, step=step, running=running, queued_tokens=queued, **load, **paces)

    @rule(one=links, field=st.sampled_from(["dispatched", "queued_tokens", "pending_blocks"]), value=st.integers(0, 9))
    def dispatch(self, one, field, value):
        setattr(one.view, field, value)
        self.fleet.touch(one.info.ref)

    @rule(one=links)
    def refuse(self, one):
        one.view.full = not one.view.full
        self.fleet.touch(one.info.ref)

    @rule(one=links)
    def reconnect(self, one):
        one.usable = not one.usable
        one.view = WorkerView(one.info)
        self.fleet.touch(one.info.ref)

    @rule(one=links, blocks=st.integers(0, 6))
    def publish(self, one, blocks):
        who = holder(one)
        self.seqs[who] = self.seqs.get(who, 0) + 1
        publish(self.prefixes, one, block_names(PROMPT, blocks, one.info.fingerprint), self.seqs[who])

    @rule(one=links)
    def forget(self, one):
        kept = {who: seq for who, seq in self.seqs.items() if who != holder(one)}
        self.prefixes.behind(kept)
        self.seqs = {who: seq for who, seq in kept.items() if self.prefixes.slot(who)}

    @rule()
    def choose(self):
        snapshot = self.fleet.snapshot()
        pair = predicted(snapshot, self.fleet.ask(100, 0, None, spec()))
        if pair is not None:
            for role, row in zip(Role, pair[:2], strict=True):
                one = self.here[self.fleet.ref(role, row)]
                assert one.info.role is role
                assert one.usable

    @invariant()
    def equal_to_one_made_from_nothing(self):
        fresh = fleet_of(*self.here.values(), prefixes=self.prefixes)
        both = self.fleet, fresh
        mine, other = self.fleet.snapshot(), fresh.snapshot()
        assert mine.groups == other.groups
        asks = [one.ask(100, 0, None, spec()) for one in both]
        for one in self.here.values():
            assert facts(self.fleet, one)[:-7] == facts(fresh, one)[:-7]
            member = self.fleet._members[holder(one)]
            prompts = member.learned.prompts if one.info.role is Role.DECODE else UNKNOWN
            assert facts(self.fleet, one) == facts_of(one, member.order, member.group, member.learned.cost, prompts)
            cached = [
                float((ask.prefill_cached if one.info.role is Role.PREFILL else ask.decode_cached)[row])
                for ask, row in zip(asks, (fleet._members[holder(one)].row for fleet in both), strict=True)
            ]
            leading = holders(self.prefixes, block_names(PROMPT, 6, one.info.fingerprint)).get(holder(one), 0)
            assert cached == [16.0 * leading] * 2
        for side in (mine.prefill, mine.decode):
            used = {member.row for member in self.fleet._members.values() if member.side is side}
            for row in set(range(len(side))) - used:
                assert Facts(*(float(column[row]) for column in side.at)) == BLANK


TestChanges = pytest.mark.slow(Changes.TestCase)
TestChanges.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_costs_are_fitted_to_what_came_since_the_last_report():
    one = prefill()
    fleet, rng, done = fleet_of(one, decode()), random.Random(5), pace(0, 0, 0)
    for number in range(1, 100):
        tokens = rng.randint(10, 1000)
        more = pace(1, tokens, tokens * tokens // 2, 0.01, 0.001)
        done = done.plus(more.tokens, more.context, more.seconds)
        report(fleet, one, step=number, prefill_pace=done)
    found = facts(fleet, one)
    assert abs(found.step_s + 500 * found.token_s + 125000 * found.context_s - 0.51) < 0.05
    assert found.queued_s > 0


def test_a_router_that_starts_goes_by_all_that_was_before_it_and_a_new_worker_is_like_the_others():
    old, other = prefill("old", pace=pace(1000, 100, 5050, 0.01, 0.001)), prefill("new")
    fleet = fleet_of(old, other, decode())
    found = facts(fleet, old)
    assert abs(found.step_s + 100 * found.token_s + 5050 * found.context_s - 0.11) < 0.01
    report(fleet, other)  # a heartbeat
    assert facts(fleet, other).token_s > 0
    stranger = prefill("stranger", "b")
    fleet.add(stranger)
    assert facts(fleet, stranger).token_s == 0


def test_what_is_known_of_an_idle_worker_ages_and_a_count_that_goes_back_is_no_observation():
    one = prefill(pace=pace(100, 100, 5050, 0.01))
    fleet = fleet_of(one)
    weights = []
    for _ in range(3):
        weights.append(fleet._members[holder(one)].learned.fit._sums[0, 4])
        one.view.load = replace(one.view.load)  # a heartbeat
        fleet.touch(one.info.ref)
    assert weights[0] > weights[1] > weights[2] > 0
    before = facts(fleet, one)
    report(fleet, one, step=200, prefill_pace=pace(50, 100, 5050, 90.0))
    assert np.allclose(facts(fleet, one)[-7:], before[-7:])


def test_what_is_cached_is_found_by_its_name_in_its_scope_and_leaves_one_token_to_compute():
    prefixes, one, other = PrefixIndex(), decode("1"), decode("2", "b")
    for each in (one, other):
        publish(prefixes, each, block_names(PROMPT, 6))
    fleet = fleet_of(one, other, prefixes=prefixes)
    fleet.snapshot()

    def cached(asked, tokens=100):
        return list(fleet.ask(tokens, 0, None, asked).decode_cached)

    assert cached(spec()) == [96.0, 96.0], "by name alone; groups keep them apart"
    assert cached(spec(scope="x")) == cached(None) == [0, 0]
    assert [cached(spec(PROMPT[:n]), n)[0] for n in (15, 16, 17, 96, 97)] == [0, 0, 16, 80, 96]


def test_a_prompt_that_waits_is_looked_for_under_new_names_too():
    prefixes, asked = PrefixIndex(), spec()
    fleet = fleet_of(decode("1"), prefixes=prefixes)
    fleet.snapshot()
    assert not fleet.ask(100, 0, None, asked).decode_cached.any()
    wide = decode("2")
    wide.view.info = replace(wide.info, layout=replace(wide.info.layout, block_size=32))
    publish(prefixes, wide, block_names(PROMPT, 2, size=32))
    fleet.add(wide)
    fleet.snapshot()
    assert list(fleet.ask(100, 0, None, asked).decode_cached) == [0, 64]


def test_a_worker_may_tell_its_address_in_other_words():
    one = prefill()
    fleet, known = fleet_of(one), one.info.ref
    fleet.snapshot()
    one.view.info = replace(one.info, ref=replace(known, address="y:2"))
    one.view.queued_tokens = 7
    fleet.touch(one.info.ref)
    assert facts(fleet, one).backlog == 7
    assert fleet.ref(Role.PREFILL, 0) == known


def test_what_moving_costs_follows_the_channels():
    one = prefill()
    fleet = fleet_of(one)
    report(fleet, one, step=1, channels=(Channel("d", "shm", 4e9), Channel("e", "shm", 4e9)))
    assert np.isclose(fleet.snapshot().byte_s, 1 / 4e9)
