"""Which verify passes and grid chunks a step has next to ordinary work, and which blocks it allocates for them."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from baton.engine.determinism.planner import PATIENCE, VerifiedProgress, WindowPlanner, begin
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.sequence import Sequence
from tests.support.engines import Streams, key_of
from tests.unit.engine.test_deterministic import RAGGED, Tampered, engine_of, spec_of, waiting
from tests.unit.engine.test_scheduler import adopted, counts, scheduler, sequence

BEHIND_PROMPT = RAGGED, 1, 2, 1  # shapes, prompt, verified, final


def test_a_due_sequence_does_not_wait_for_one_without_blocks():
    engine = engine_of(Tampered(), shapes=RAGGED, total_blocks=11, prefix_cache=False)
    engine.submit(key_of("due"), spec_of("a" * 33, max_tokens=60))
    engine.submit(key_of("other"), spec_of("x" * 60, deterministic=False, max_tokens=60))
    while engine.has_work():
        assert not engine.step().idle


def test_replays_that_fill_passes_do_not_wait():
    backend, asked = Tampered(), spec_of("abc", max_tokens=340)
    wanted = backend.expected(asked)
    engine, found = engine_of(backend, shapes=RAGGED), Streams()
    engine.submit(key_of("other"), spec_of("o", deterministic=False, max_tokens=400))
    engine.submit(key_of(), replace(asked, known=tuple(wanted[:320])))
    while not found.tokens[key_of()]:
        found.step(engine)
    assert found.steps <= 12  # ten passes of 32 tokens, and the prompt


@pytest.mark.parametrize("sequences", [64, 65])
def test_more_sequences_than_windows_make_passes_no_smaller(sequences):
    most = FixedShapes(2, 256, ragged=True)
    planner, fixed = WindowPlanner(), [waiting(9, shapes=most) for _ in range(sequences)]
    while not (windows := planner.next(fixed, lambda _: True)):
        for each in fixed:
            each.known += 1
    assert sum(window.count for window in windows) > most.total - most.most


@pytest.mark.parametrize(("total", "blocks"), [(3, 1), (4, 1), (5, 1), (6, 2)])
def test_a_block_for_the_next_pass_is_allocated_early_only_if_others_can_grow(total, blocks):
    planned = scheduler(total=total)
    fixed = sequence(1, 4, 3, planned.pool.allocate(1))  # its last token ends a block
    fixed.policies = (VerifiedProgress(RAGGED, 3, 4, 3),)
    planned.adopt(fixed)
    adopted(planned, 2, 8, 2)
    plan = planned.schedule()
    assert (counts(plan), plan.preempted, len(fixed.allocation)) == ({1: 1, 2: 1}, [], blocks)


def test_a_preempted_sequence_leaves_the_pass():
    planned = scheduler(total=10)
    adopted(planned, 1, 5, 1)  # needs a block
    due = sequence(2, 33, 32, planned.pool.allocate(9))  # a full pass
    due.policies = (VerifiedProgress(*BEHIND_PROMPT),)
    planned.adopt(due)
    plan = planned.schedule()
    assert (counts(plan), plan.windows, plan.preempted) == ({1: 1}, [], [due])


def test_a_due_sequence_that_has_just_got_its_last_block_is_verified_in_that_step():
    planned = scheduler(total=9)
    due = sequence(1, 33, 32, planned.pool.allocate(8))  # its last token begins a block
    due.policies = (VerifiedProgress(*BEHIND_PROMPT),)
    planned.adopt(due)
    assert [window.sequence for window in planned.schedule().windows] == [due]


def test_grid_chunks_and_passes_alternate():
    prompt = Sequence(key_of("p"), 0, 1000, 1000, policies=(VerifiedProgress(RAGGED, 1000, 1000),))
    planner = WindowPlanner()
    kinds = [planner.next([prompt, waiting(24), waiting(24)], lambda _: True)[0].on_grid for _ in range(4)]
    assert kinds == [True, False, True, False]


@pytest.mark.parametrize("budget", [6, 512])
def test_decodes_go_on_next_to_passes_and_chunks_larger_than_a_step(budget):
    engine = engine_of(Tampered(range(400)), max_batched_tokens=budget)
    engine.submit(key_of("plain"), spec_of("x", deterministic=False, max_tokens=60))
    engine.step()
    for number in range(3):
        engine.submit(key_of(number), spec_of("x" * 200, max_tokens=60))
    for _ in range(55):
        assert key_of("plain") in {output.key for output in engine.step().outputs}


def on_grid(final, prompt=1000):
    return Sequence(key_of(f"p{final}"), 0, prompt, prompt, policies=(VerifiedProgress(RAGGED, prompt, prompt, final),))


@pytest.mark.parametrize(
    ("finals", "tokens", "counts"),
    [
        ([0, 0, 0], 300, [128, 128]),
        ([0, 0, 0], 256, [128, 128]),
        ([0, 256, 0], 300, [128]),  # the turn of the second comes next; the third does not pass it
        ([256, 0], 100, [256]),  # one chunk always goes on
        ([768, 0], 512, [232, 128]),  # the rest of a prompt is padded to its chunk
        ([768, 0], 383, [232]),
    ],
)
def test_grid_chunks_of_a_step_have_no_more_tokens_than_it_may_have(finals, tokens, counts):
    assert [window.count for window in begin([on_grid(final) for final in finals], tokens)] == counts


def test_the_longest_waits_are_verified_first():
    square = FixedShapes(2, 16)
    due = [waiting(24, shapes=square, waited=waited) for waited in (1, 3, 0, 2)]
    assert [window.sequence for window in WindowPlanner().next(due, lambda _: True)] == [due[1], due[3]]


def test_a_sequence_waits_anew_after_each_pass():
    engine = engine_of(Tampered(), shapes=RAGGED)
    engine.submit(key_of("other"), spec_of("o", deterministic=False, max_tokens=200))
    engine.submit(key_of(), spec_of("abc", max_tokens=100))
    steps, passes = 0, list[int]()
    while len(passes) < 4:
        engine.step()
        steps += 1
        if engine.counters.verify_passes > len(passes):
            passes.append(steps)
    gaps = [after - before for before, after in pairwise(passes)]
    assert gaps == [RAGGED.tokens + PATIENCE] * 3  # the token of the pass, the others, and the wait


def test_a_preempted_sequence_starts_anew():
    due = waiting(24, waited=3, margin=0.5)
    progress = due.policy(VerifiedProgress)
    progress.ended, progress.proposed = True, 4
    progress.preempted(due)
    assert (due.known, progress.final, progress.ended, progress.waited) == (9, 0, False, 0)
    assert (progress.proposed, progress.margin) == (0, math.inf)
