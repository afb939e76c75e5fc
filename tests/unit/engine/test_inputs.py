"""What is kept from step to step must never show: each batch equals one that is built from nothing."""

import itertools
import random
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core import HandoffId
from baton.engine.blocks import Allocation, BlockPool
from baton.engine.inputs import STAGES, Inputs, Mirror
from baton.engine.oracle import oracle_layout
from baton.engine.sequence import Sequence, Work
from tests.unit.model.harness import Row, assert_same_batch, make_batch

CPU = torch.device("cpu")
BLOCK, MAX_TOKENS, MAX_ROWS, MAX_LEN = 4, 24, 6, 40
BACKEND = SimpleNamespace(layout=oracle_layout(block_size=BLOCK), device=CPU)


def inputs_of(staged):
    return Inputs(BACKEND, MAX_TOKENS, MAX_ROWS, -(-MAX_LEN // BLOCK), staged=staged)


def from_nothing(work, tokens):
    contexts = [item.sequence.computed + item.count for item in work]
    width = -(-max(contexts) // BLOCK)
    rows = [
        Row(known, 0, item.sequence.computed, item.sequence.allocation.blocks[:width])
        for item, known in zip(work, tokens, strict=True)
    ]
    wanted = [[item.count - 1] * item.completes for item in work]
    return make_batch(rows, [item.count for item in work], wanted, BLOCK)


class Traffic:
    """Sequences that come, grow, are preempted and go. `tokens` by key."""

    def __init__(self, rng):
        self.rng, self.pool = rng, BlockPool(60)
        self.running, self.tokens, self.arrivals = [], {}, 0

    def shake(self):
        rng = self.rng
        if self.running and rng.random() < 0.15:
            self.running.pop(rng.randrange(len(self.running))).allocation.release()
        if self.running and rng.random() < 0.15:
            victim = rng.choice(self.running)  # preempted and back at once, perhaps in the very same blocks
            victim.allocation.release()
            victim.computed = 0
            victim.allocation = self.pool.allocate(-(-victim.known // BLOCK))
        if rng.random() < 0.05:
            rng.shuffle(self.running)
        while len(self.running) < MAX_ROWS and (not self.running or rng.random() < 0.3):
            self.join(rng.randint(1, 20))

    def join(self, known):
        self.arrivals += 1
        key = HandoffId(str(self.arrivals), 1)
        self.tokens[key] = [self.rng.randrange(1000) for _ in range(known)]
        allocation = self.pool.allocate(-(-known // BLOCK) + self.rng.choice([0, 0, 3]))
        self.running.append(Sequence(key, self.arrivals, known, known, allocation=allocation))

    def work(self):
        budget, work = MAX_TOKENS - MAX_ROWS, list[Work]()
        for sequence in self.running:
            if self.rng.random() < 0.1 and work:
                continue
            count = min(sequence.pending, self.rng.choice([1, 30, 30]), 1 + budget)
            budget -= count - 1
            missing = -(-(sequence.computed + count) // BLOCK) - len(sequence.allocation)
            if missing > 0:
                assert sequence.allocation.grow(missing)
            work.append(Work(sequence, count))
        return work

    def advance(self, work):
        for item in work:
            sequence = item.sequence
            sequence.computed += item.count
            if sequence.pending == 0:
                self.tokens[sequence.key].append(self.rng.randrange(1000))
                sequence.known += 1
            if sequence.known > MAX_LEN:
                sequence.allocation.release()
                self.running.remove(sequence)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.booleans())
def test_batches_equal_those_built_from_nothing(number, staged):
    traffic, inputs = Traffic(random.Random(number)), inputs_of(staged)
    for _ in range(40):
        traffic.shake()
        work = traffic.work()
        tokens = [traffic.tokens[item.sequence.key] for item in work]
        assert_same_batch(inputs.build(work, tokens), from_nothing(work, tokens))
        traffic.advance(work)


def held(sequence: Sequence) -> Allocation:
    assert sequence.allocation is not None
    return sequence.allocation


def test_steady_decoding_writes_no_row_of_the_table_again():
    pool, inputs = BlockPool(20), inputs_of(staged=False)
    sequences = [Sequence(HandoffId(str(i), 1), i, 5, 5, 4, pool.allocate(2)) for i in range(3)]
    tokens = [[7] * 5 for _ in sequences]
    tables = inputs.build([Work(sequence, 1) for sequence in sequences], tokens).block_tables
    tables[1, 0] = 77  # a mark that a row written again would lose
    for step in range(5, 9):
        for sequence, known in zip(sequences, tokens, strict=True):
            sequence.computed, sequence.known = step, step + 1
            known.append(step)
        if step == 8:
            assert all(held(sequence).grow(1) for sequence in (sequences[1], sequences[0], sequences[2]))
        batch = inputs.build([Work(sequence, 1) for sequence in sequences], tokens)
        assert batch.block_tables[1, 0] == 77
        assert batch.positions.tolist() == [step] * 3
    assert batch.block_tables[:, 2].tolist() == [held(sequence).blocks[2] for sequence in sequences]


def test_a_copy_in_flight_is_not_written_over():
    mirror = Mirror((4,), torch.int64, CPU, staged=True)
    for step in range(2 * STAGES):
        before = [stage.clone() for stage in mirror.stages]
        mirror.array[:] = step + 1
        assert mirror.push(3, step % STAGES).tolist() == [step + 1] * 3
        for i in range(STAGES):
            assert i == step % STAGES or torch.equal(mirror.stages[i], before[i])
        assert mirror.device[3] == 0, "what was not pushed"


def test_builds_take_the_stages_in_turn(monkeypatch):
    taken: list[int] = []
    push = Mirror.push

    def noted(self: Mirror, n: int, stage: int) -> torch.Tensor:
        taken.append(stage)
        return push(self, n, stage)

    monkeypatch.setattr(Mirror, "push", noted)
    inputs = inputs_of(staged=True)
    sequence = Sequence(HandoffId("a", 1), 1, 5, 5, 0, BlockPool(9).allocate(2))
    rounds = []
    for _ in range(4):
        taken.clear()
        inputs.build([Work(sequence, 5)], [[3] * 5])
        (only,) = set(taken)
        rounds.append(only)
    assert all(left != right for left, right in itertools.pairwise(rounds))
