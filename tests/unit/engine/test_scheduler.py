import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core import HandoffId
from baton.engine.blocks import BlockPool
from baton.engine.scheduler import Scheduler, Sequence


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, adoptions, aborts and foreign holders of blocks, under tiny pools and budgets."""

    @initialize(
        total=st.integers(1, 14),
        block_size=st.integers(1, 4),
        budget=st.integers(1, 12),
        max_running=st.integers(1, 5),
        recompute=st.booleans(),
    )
    def start(self, total, block_size, budget, max_running, recompute):
        self.total, self.block_size, self.recompute = total, block_size, recompute
        self.pool = BlockPool(total)
        self.scheduler = Scheduler(
            self.pool,
            block_size,
            max_batched_tokens=budget,
            max_running=max_running,
            recompute_preempted=recompute,
        )
        self.alive = {}  # sequence -> the length at which it ends
        self.foreign = []  # reserved or held by others
        self.endings = {}
        self.arrivals = 0

    def new(self, known, prefill_end, computed, allocation, length):
        self.arrivals += 1
        sequence = Sequence(HandoffId(str(self.arrivals), 1), self.arrivals, known, prefill_end, computed, allocation)
        self.alive[sequence] = length
        self.endings[sequence] = 0
        return sequence

    @rule(data=st.data())
    def submit(self, data):
        room = self.total * self.block_size
        length = data.draw(st.integers(1, room))
        known = data.draw(st.integers(1, length))
        self.scheduler.add(self.new(known, known, 0, None, length))

    @precondition(lambda self: self.pool.free * self.block_size > 1)
    @rule(data=st.data())
    def adopt(self, data):
        known = data.draw(st.integers(2, self.pool.free * self.block_size))
        length = data.draw(st.integers(known, self.total * self.block_size))
        allocation = self.pool.allocate(-(-known // self.block_size))
        self.scheduler.adopt(self.new(known, known - 1, known - 1, allocation, length))

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
        eldest = min(self.alive, key=lambda s: s.arrival, default=None)
        plan = self.scheduler.plan()
        self.check(plan, eldest)
        for sequence in plan.preempted:
            assert (sequence.known, sequence.computed) == (before[sequence][0], 0)
            if not self.recompute:
                self.end(sequence)
        for item in plan.work:
            if item.sequence not in plan.preempted:
                assert (item.sequence.known, item.sequence.computed) == before[item.sequence]
            self.compute(item)

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
            assert eldest in worked or self.foreign, "the oldest stands still"

    def compute(self, item):
        completes = item.completes
        item.sequence.computed += item.count
        if not completes:
            return
        if item.sequence.known >= self.alive[item.sequence]:
            self.end(item.sequence)
        else:
            item.sequence.known += 1

    def end(self, sequence):
        self.endings[sequence] += 1
        del self.alive[sequence]
        self.scheduler.remove(sequence)
        if sequence.allocation is not None:
            sequence.allocation.release()
            sequence.allocation = None

    @invariant()
    def ledger(self):
        if not hasattr(self, "pool"):
            return
        mine = [b for s in self.scheduler.running if s.allocation for b in s.allocation.blocks]
        counts = self.pool.counts()
        assert len(mine) == len(set(mine)) == counts.owned
        assert counts.reserved == sum(len(a) for a in self.foreign)
        assert set(self.alive) == {*self.scheduler.running, *self.scheduler.waiting}
        for line in (self.scheduler.running, self.scheduler.waiting):
            assert [s.arrival for s in line] == sorted(s.arrival for s in line)
        assert all(s.allocation is None and s.computed == 0 for s in self.scheduler.waiting)

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
        assert self.pool.free == self.total


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def scheduler(total=8, block_size=4, budget=8, running=4, recompute=True):
    return Scheduler(
        BlockPool(total), block_size, max_batched_tokens=budget, max_running=running, recompute_preempted=recompute
    )


def sequence(arrival, known, computed=0, allocation=None):
    return Sequence(HandoffId(f"r{arrival}", 1), arrival, known, computed or known, computed, allocation)


def counts(plan):
    return {item.sequence.arrival: item.count for item in plan.work}


def advance(plan):
    for item in plan.work:
        item.sequence.known += item.completes
        item.sequence.computed += item.count


def test_long_prompt_is_cut_and_leaves_room_for_decodes():
    s = scheduler(total=12)
    s.add(sequence(1, known=20))
    first = s.plan()
    assert counts(first) == {1: 8}
    advance(first)
    s.adopt(sequence(2, known=5, computed=4, allocation=s.pool.allocate(2)))
    second = s.plan()
    assert counts(second) == {1: 7, 2: 1}
    advance(second)
    assert counts(s.plan()) == {1: 5, 2: 1}


def test_full_pool_preempts_the_latest_and_the_oldest_goes_on():
    s = scheduler(total=3)
    old = sequence(1, known=5, computed=4, allocation=s.pool.allocate(1))
    young = sequence(2, known=6, computed=5, allocation=s.pool.allocate(2))
    s.adopt(old)
    s.adopt(young)
    plan = s.plan()
    assert counts(plan) == {1: 1}
    assert plan.preempted == [young] == s.waiting
    assert (young.computed, young.prefill_end, young.allocation) == (0, 6, None)


def test_handing_back_drops_the_preempted():
    s = scheduler(total=3, recompute=False)
    s.adopt(sequence(1, known=5, computed=4, allocation=s.pool.allocate(1)))
    s.adopt(young := sequence(2, known=6, computed=5, allocation=s.pool.allocate(2)))
    assert s.plan().preempted == [young]
    assert s.waiting == []


def test_youngest_without_room_waits_and_keeps_its_blocks():
    s = scheduler(total=3)
    s.adopt(sequence(1, known=6, computed=5, allocation=s.pool.allocate(2)))
    s.adopt(young := sequence(2, known=5, computed=4, allocation=s.pool.allocate(1)))
    plan = s.plan()
    assert counts(plan) == {1: 1}
    assert plan.preempted == []
    assert len(young.allocation or ()) == 1


def test_admission_leaves_a_growth_block_for_each_that_runs():
    s = scheduler(total=4, budget=20)
    s.add(sequence(1, known=8))
    s.add(sequence(2, known=8))
    assert counts(s.plan()) == {1: 8}
    assert [w.arrival for w in s.waiting] == [2]
    assert s.watermark == 1 + 2


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"budget": 0}, {"running": 0}])
def test_limits_below_one_are_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        scheduler(**wrong)
