"""Inputs kept between steps change nothing: each batch equals a newly built one."""

import itertools
import random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.block_pool import BlockPool
from baton.engine.model_runner import STAGES, Inputs, Mirror
from baton.engine.oracle import oracle_layout
from baton.engine.sequence import ScheduledSequence, Sequence
from tests.support.engines import Streams, allocated, engine_of, key_of, numbers, oracle, spec_of
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


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.booleans())
def test_batches_of_an_engine_equal_those_built_from_nothing(number, staged):
    """The engine's sequences arrive, grow, are computed in chunks, are preempted and end."""
    rng, own, build, found = random.Random(number), inputs_of(staged), Inputs.build, Streams()

    def checked(self, work, tokens, *args, **options):
        assert_same_batch(build(own, work, tokens), from_nothing(work, tokens))
        return build(self, work, tokens, *args, **options)

    engine = engine_of(oracle(BLOCK), 24, max_batched_tokens=rng.choice([6, MAX_TOKENS]), max_running=MAX_ROWS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Inputs, "build", checked)
        for arrival in range(12):
            some = {"max_tokens": rng.randint(1, 20), "priority": rng.choice([0, 0, 1])}
            engine.submit(key_of(arrival), spec_of(numbers(rng, rng.randint(1, 20)), **some))
            for _ in range(rng.choice([0, 1, 4])):
                found.step(engine)
        found.drain(engine)
    assert len(found.finishes) == 12


def test_steady_decoding_writes_no_row_of_the_table_again():
    pool, inputs = BlockPool(20), inputs_of(staged=False)
    held = [allocated(pool, 2) for _ in range(3)]
    sequences = [Sequence(key_of(i), i, 5, 5, 4, held[i]) for i in range(3)]
    tokens = [[7] * 5 for _ in sequences]
    tables = inputs.build([ScheduledSequence(sequence, 1) for sequence in sequences], tokens).block_tables
    tables[1, 0] = 77  # a mark that a rewritten row would lose
    for step in range(5, 9):
        for sequence, known in zip(sequences, tokens, strict=True):
            sequence.computed, sequence.known = step, step + 1
            known.append(step)
        if step == 8:
            assert all(held[i].grow(1) for i in (1, 0, 2))
        batch = inputs.build([ScheduledSequence(sequence, 1) for sequence in sequences], tokens)
        assert batch.block_tables[1, 0] == 77
        assert batch.positions.tolist() == [step] * 3
    assert batch.block_tables[:, 2].tolist() == [each.blocks[2] for each in held]


def test_a_copy_in_flight_is_not_written_over():
    mirror = Mirror((4,), torch.int64, CPU, staged=True)
    for step in range(2 * STAGES):
        before = [stage.clone() for stage in mirror.stages]
        mirror.array[:] = step + 1
        assert mirror.push(3, step % STAGES).tolist() == [step + 1] * 3
        for i in range(STAGES):
            assert i == step % STAGES or torch.equal(mirror.stages[i], before[i])
        assert mirror.device[3] == 0, "what was not pushed"


def test_builds_take_the_stages_in_turn():
    work = ScheduledSequence(Sequence(key_of(), 1, 5, 5, 0, BlockPool(9).allocate(2)), 5)
    inputs, each = inputs_of(staged=True), []
    for _ in range(4):
        with patch.object(Mirror, "push", autospec=True, side_effect=Mirror.push) as push:
            inputs.build([work], [[3] * 5])
        each.append({call.args[2] for call in push.call_args_list})
    assert all(len(stages) == 1 for stages in each)
    assert all(left != right for left, right in itertools.pairwise(each))
