"""Inputs kept between steps change nothing: each batch equals a newly built one."""

import random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.block_pool import BlockPool
from baton.engine.memory.staging import STAGES, BlockTables, Staged
from baton.engine.model_runner import Inputs
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


@pytest.mark.slow
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
    staged = Staged(CPU, staged=True, a=(torch.int64, (4,)), b=(torch.int32, (3,)))
    seen = []
    for step in range(2 * STAGES):
        before = [stage.clone() for stage in staged._stages]
        staged.arrays["a"][:] = staged.arrays["b"][:] = step + 1
        staged.push()
        seen += [i for i in range(STAGES) if not torch.equal(staged._stages[i], before[i])]
        assert staged.tensors["a"].tolist() == [step + 1] * 4
        assert staged.tensors["b"].tolist() == [step + 1] * 3
    assert seen in ([0, 1] * STAGES, [1, 0] * STAGES)


def test_a_partial_push_copies_no_more():
    staged = Staged(CPU, staged=True, a=(torch.int64, (4,)))
    staged.arrays["a"][:] = 7
    staged.push(16)
    assert staged.tensors["a"].tolist() == [7, 7, 0, 0]


def test_arrays_are_aligned_as_torch_allocates():
    staged = Staged(CPU, staged=True, a=(torch.int32, (1,)), b=(torch.int32, (5,)), c=(torch.int64, (1,)))
    assert [each.storage_offset() * each.element_size() % 16 for each in staged.tensors.values()] == [0] * 3


def test_on_a_cpu_the_host_writes_to_the_tensors():
    staged = Staged(CPU, staged=False, a=(torch.int64, (2,)))
    staged.arrays["a"][:] = 5
    assert staged.tensors["a"].tolist() == [5, 5]


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([1, 8, 2000]))
def test_pushed_tables_equal_the_tables_of_the_host(number, changes):
    """Sequences come, grow, and move to other rows. Few changed entries are copied alone, many as one rectangle."""
    rng, pool = random.Random(number), BlockPool(200)
    tables, held = BlockTables(5, 12, CPU, staged=True), [allocated(pool, rng.randint(1, 12)) for _ in range(5)]

    def change(row):
        if len(held[row].blocks) < 12 and rng.random() < 0.5:
            assert held[row].grow(1)
        if rng.random() < 0.2:
            held[row].release()
            held[row] = allocated(pool, rng.randint(1, 12))

    for _ in range(6):
        rng.shuffle(held)
        for row in range(rng.randint(1, 5)):
            change(row)
            tables.write(row, held[row])
        with patch("baton.engine.memory.staging.CHANGES", changes):
            tables.push()
        assert tables.tensor.tolist() == tables.array.tolist()
    assert tables.array[0, : len(held[0].blocks)].tolist() == held[0].blocks


def test_behind_a_decode_step_is_padding():
    """A graph for more rows reads it: no KV, a slot that is not stored, and the logits of a row that exists."""
    pool, inputs = BlockPool(20), inputs_of(staged=True)
    sequences, widest = [Sequence(key_of(i), i, 5, 5, 4, allocated(pool, 2)) for i in range(6)], inputs.widest()
    assert widest.slot_mapping.tolist() == [-1] * 6, "a capture stores nothing"
    for rows in (6, 2):  # a fuller step first, whose rows must not be stored again
        batch = inputs.build([ScheduledSequence(each, 1) for each in sequences[:rows]], [[7] * 5] * rows)
    assert widest.slot_mapping[:2].tolist() == batch.slot_mapping.tolist()
    assert widest.slot_mapping[2:].tolist() == [-1] * 4
    assert widest.kv_lens.tolist() == [5, 5, 0, 0, 0, 0]
    assert widest.query_starts.tolist() == list(range(7))
    assert widest.logit_rows.tolist() == [0, 1, 0, 0, 0, 0]
    assert widest.token_ids.data_ptr() == batch.token_ids.data_ptr()
    assert widest.query_lens == [1] * 6
    assert widest.context_lens == [MAX_LEN] * 6
