from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core import HandoffId
from baton.engine.block_pool import BlockPool
from baton.engine.prefix_cache import BlockHashChain
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence

PATIENCE = 5


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, adoptions, aborts and foreign users of blocks, with tiny pools and budgets. Contents are shared."""

    @initialize(
        total=st.integers(1, 14),
        block_size=st.integers(1, 4),
        budget=st.integers(1, 12),
        max_running=st.integers(1, 5),
        recompute=st.booleans(),
    )
    def start(self, total, block_size, budget, max_running, recompute):
        self.total, self.block_size, self.recompute = total, block_size, recompute
        self.scheduler = scheduler(total, block_size, budget, max_running, recompute)
        self.pool = self.scheduler.pool
        self.alive = {}  # sequence -> its final length
        self.foreign = []  # reserved or used by others
        self.endings = {}
        self.arrivals = 0

    def new(self, data, known, prefill_end, computed, allocation, length):
        self.arrivals += 1
        key, priority = HandoffId(str(self.arrivals), 1), data.draw(st.integers(-2, 2))
        sequence = Sequence(key, self.arrivals, known, prefill_end, computed, allocation, priority)
        content = data.draw(st.sampled_from([None, 1, 2]))
        if content is not None:
            sequence.chain = BlockHashChain(bytes(32), [content] * length, self.block_size)
        self.alive[sequence] = length
        self.endings[sequence] = 0
        return sequence

    @rule(data=st.data())
    def submit(self, data):
        room = self.total * self.block_size
        length = data.draw(st.integers(1, room))
        known = data.draw(st.integers(1, length))
        self.scheduler.add(self.new(data, known, known, 0, None, length))

    @precondition(lambda self: self.pool.available * self.block_size > 1)
    @rule(data=st.data())
    def adopt(self, data):
        known = data.draw(st.integers(2, self.pool.available * self.block_size))
        length = data.draw(st.integers(known, self.total * self.block_size))
        allocation = self.pool.allocate(-(-known // self.block_size))
        self.scheduler.adopt(self.new(data, known, known - 1, known - 1, allocation, length))

    @rule(n=st.integers(1, 4))
    def foreign_takes(self, n):
        allocation = self.pool.allocate(n, reserved=True)
        if allocation is not None:
            self.foreign.append(allocation)

    @precondition(lambda self: self.foreign)
    @rule()
    def foreign_gives_back(self):
        self.foreign.pop().release()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data):
        self.end(data.draw(st.sampled_from(list(self.alive))))

    @rule()
    def step(self):
        before = {sequence: (sequence.known, sequence.computed) for sequence in self.alive}
        newcomers = list(self.scheduler.waiting)
        eldest = min(self.alive, key=attrgetter("rank"), default=None)
        plan = self.scheduler.schedule()
        self.check(plan, eldest)
        for sequence in plan.preempted:
            assert (sequence.known, sequence.computed) == (before[sequence][0], 0)
            if not self.recompute:
                self.end(sequence)
        for item in plan.work:
            known, computed = before[item.sequence]
            cached = item.sequence.computed if item.sequence in newcomers + plan.preempted else computed
            assert (item.sequence.known, item.sequence.computed) == (known, cached)
            assert cached % self.block_size == 0 or item.sequence not in newcomers
        completed = [item.sequence for item in plan.work if item.completes]
        self.scheduler.commit_step(plan.work)
        for sequence in completed:
            self.sampled(sequence)

    def check(self, plan, eldest):
        worked = [item.sequence for item in plan.work]
        assert len(worked) == len(set(worked)) <= self.scheduler.max_running
        assert sum(item.count for item in plan.work) <= self.scheduler.max_batched_tokens
        for item in plan.work:
            assert 1 <= item.count <= item.sequence.pending
            assert len(item.sequence.allocation) * self.block_size >= item.sequence.computed + item.count
        assert not set(worked) & set(plan.preempted)
        if eldest is not None:
            assert eldest not in plan.preempted
            assert eldest in worked or self.foreign, "the first in rank stands still"

    def sampled(self, sequence):
        if sequence.known >= self.alive[sequence]:
            self.end(sequence)
        else:
            sequence.known += 1

    def end(self, sequence):
        self.endings[sequence] += 1
        del self.alive[sequence]
        self.scheduler.remove(sequence)
        if sequence.allocation is not None:
            sequence.allocation.release()
            sequence.allocation = None

    @invariant()
    def ledger(self):
        mine = [b for s in self.scheduler.running if s.allocation for b in s.allocation.blocks]
        counts = self.pool.counts()
        assert len(set(mine)) == counts.owned
        assert counts.reserved == sum(len(a) for a in self.foreign)
        assert set(self.alive) == {*self.scheduler.running, *self.scheduler.waiting}
        for line in (self.scheduler.running, self.scheduler.waiting):
            assert line == sorted(line, key=attrgetter("rank"))
        assert all(s.allocation is None and s.computed == 0 for s in self.scheduler.waiting)
        assert self.scheduler.waiting_tokens == sum(s.known for s in self.scheduler.waiting)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        while self.foreign:
            self.foreign_gives_back()
        bound = sum(2 * length + 2 for length in self.alive.values()) * (len(self.alive) + 1) + 1
        while self.alive:
            bound -= 1
            assert bound > 0, "starved"
            self.step()
        assert set(self.endings.values()) <= {1}
        assert self.pool.available == self.total


TestScheduler = pytest.mark.slow(SchedulerMachine.TestCase)
TestScheduler.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def scheduler(total=8, block_size=4, budget=8, running=4, recompute=True):
    limits = {"max_batched_tokens": budget, "max_running": running, "recompute_preempted": recompute}
    return Scheduler(BlockPool(total), block_size, **limits, patience=PATIENCE)


def sequence(arrival, known, computed=0, allocation=None, priority=0):
    return Sequence(HandoffId(f"r{arrival}", 1), arrival, known, computed or known, computed, allocation, priority)


def counts(plan):
    return {item.sequence.arrival: item.count for item in plan.work}


def advance(plan):
    for item in plan.work:
        item.sequence.known += item.completes
        item.sequence.computed += item.count


def adopted(s, arrival, known, blocks, priority=0):
    s.adopt(found := sequence(arrival, known, known - 1, s.pool.allocate(blocks), priority))
    return found


def steps_until_served(s, victim, rivals):
    """Count steps until `victim` has its last token, while one rival arrives per step. There are enough rivals."""
    ends = {other: other.known + 2 for other in (victim, *rivals)}
    s.add(victim)
    for step, rival in enumerate(rivals, 1):
        s.add(rival)
        work = s.schedule().work
        done = [item.sequence for item in work if item.completes]
        s.commit_step(work)
        for sequence in done:
            sequence.known += 1
            if sequence.known == ends[sequence]:
                s.remove(sequence)
                sequence.allocation.release()
        if victim.known == ends[victim]:
            return step
    raise AssertionError("starved")


@settings(max_examples=60, deadline=None)
@given(
    lead=st.integers(1, 3),
    length=st.integers(1, 9),
    budget=st.integers(2, 9),
    running=st.integers(1, 3),
    total=st.integers(4, 9),
)
def test_nobody_starves_behind_an_endless_stream_of_the_more_urgent(lead, length, budget, running, total):
    """Only rivals of the first `lead * PATIENCE` steps are served before. Each advances in every step."""
    overtakers = lead * PATIENCE + 1
    bound = (overtakers + 1) * (length + 2)
    rivals = [sequence(i, known=length, priority=lead) for i in range(2, 2 * bound)]
    s = scheduler(total=total, block_size=4, budget=budget, running=running)
    assert steps_until_served(s, sequence(1, known=length), rivals) <= bound


def test_the_urgent_go_first_and_take_the_place_of_the_last_if_that_helps():
    s = scheduler(total=4, budget=100)
    s.add(low := sequence(1, known=15))
    advance(s.schedule())
    assert low in s.running
    s.add(sequence(2, known=4))
    s.add(sequence(3, known=4, priority=1))
    plan = s.schedule()
    assert plan.preempted == [low]
    assert counts(plan) == {3: 4}
    assert [w.arrival for w in s.waiting] == [1, 2]


def test_nobody_is_preempted_for_what_would_not_fit_even_then():
    s = scheduler(total=4, budget=100)
    foreign = s.pool.allocate(2, reserved=True)
    s.add(low := sequence(1, known=5))
    advance(s.schedule())
    s.add(sequence(2, known=12, priority=1))
    plan = s.schedule()
    assert plan.preempted == []
    assert counts(plan) == {1: 1}
    foreign.release()
    assert s.schedule().preempted == [low]


def test_of_equal_priority_the_latest_is_preempted_and_of_others_the_least_urgent():
    s = scheduler(total=6, budget=100)
    for arrival, priority in ((1, 0), (2, -1), (3, 0)):
        adopted(s, arrival, 8, 2, priority)
    first = s.running[0]
    assert first.arrival == 1
    for computed, preempted in ((8, 2), (16, 3)):
        first.known, first.computed = computed + 1, computed
        assert [v.arrival for v in s.schedule().preempted] == [preempted]
        s.pool.allocate(s.pool.available, reserved=True)


def test_a_preempted_sequence_finds_its_own_blocks():
    s = scheduler(total=6, budget=100)
    s.add(old := sequence(1, known=7))
    s.add(young := sequence(2, known=9))
    young.chain = BlockHashChain(bytes(32), [7] * 20, 4)
    s.commit_step(s.schedule().work)
    old.known = 9
    foreign = s.pool.allocate(s.pool.available, reserved=True)
    assert s.schedule().preempted == [young]
    old.allocation.release()
    s.remove(old)
    plan = s.schedule()
    assert (counts(plan), plan.cached_tokens, young.computed) == ({2: 1}, 8, 8)
    assert young.cached == 0, "what it found at first is what it saved"
    foreign.release()


def test_long_prompt_is_cut_and_leaves_room_for_decodes():
    s = scheduler(total=12)
    s.add(sequence(1, known=20))
    found = []
    for _ in range(3):
        plan = s.schedule()
        found.append(counts(plan))
        advance(plan)
        if len(found) == 1:
            adopted(s, 2, 5, 2)
    assert found == [{1: 8}, {1: 7, 2: 1}, {1: 5, 2: 1}]


def test_a_budget_below_the_running_sequences_goes_to_the_first_in_rank():
    s = scheduler(budget=2)
    for arrival in (1, 2, 3):
        adopted(s, arrival, 5, 2)
    assert counts(s.schedule()) == {1: 1, 2: 1}


def test_a_prompt_goes_on_by_one_token_next_to_more_decodes_than_the_budget():
    s = scheduler(total=12, budget=2, running=4)
    s.add(sequence(1, known=8))
    advance(s.schedule())
    for arrival in (2, 3):
        adopted(s, arrival, 5, 2)
    assert counts(s.schedule()) == {1: 1, 2: 1}


@pytest.mark.parametrize("recompute", [True, False])
def test_full_pool_preempts_the_latest_and_the_oldest_goes_on(recompute):
    s = scheduler(total=3, recompute=recompute)
    adopted(s, 1, 5, 1)
    young = adopted(s, 2, 6, 2)
    plan = s.schedule()
    assert counts(plan) == {1: 1}
    assert plan.preempted == [young]
    assert s.waiting == ([young] if recompute else [])
    assert (young.computed, young.prefill_end, young.allocation) == (0, 6, None)


def test_youngest_without_room_waits_and_keeps_its_blocks():
    s = scheduler(total=3)
    adopted(s, 1, 6, 2)
    young = adopted(s, 2, 5, 1)
    plan = s.schedule()
    assert (counts(plan), plan.preempted) == ({1: 1}, [])
    assert len(young.allocation or ()) == 1


def test_admission_leaves_a_growth_block_for_each_that_runs():
    s = scheduler(total=4, budget=20)
    s.add(sequence(1, known=8))
    s.add(sequence(2, known=8))
    assert counts(s.schedule()) == {1: 8}
    assert [w.arrival for w in s.waiting] == [2]
    assert s.watermark == 1 + 2


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"budget": 0}, {"running": 0}])
def test_limits_below_one_are_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        scheduler(**wrong)
