"""KV is sent while it is computed: layer by layer, several prompts at a time, without the part at the receiver."""

import itertools
import random
from dataclasses import replace

import pytest

from baton.rpc import convert
from tests.support.waiting import eventually
from tests.unit.kvtransfer.ends import Stopped
from tests.unit.kvtransfer.prompts import EAGER, TOKEN, announced, fence, poisoned, prompt
from tests.unit.kvtransfer.support import LAYOUT, SETTINGS, make_job, only_these, put, rows


@pytest.mark.parametrize("chunk", [1, 5, 8, 37])
@pytest.mark.parametrize("frame_size", [TOKEN, 5 * TOKEN, 16 * TOKEN, 1 << 16])
def test_kv_that_leaves_while_it_is_computed_arrives_equal(pairs, chunk: int, frame_size: int) -> None:
    pair = pairs(replace(EAGER, frame_size=frame_size), source=poisoned())
    prompt(pair, "r", 37, range(20, 30), range(40, 30, -1)).begin().rest(0, chunk)
    assert only_these(pair.target, range(40, 30, -1), 37)


def test_a_layer_leaves_before_the_next_one_is_computed(pairs) -> None:
    """Only final values are sent: each layer is NaN until right before it is reported."""
    pair = pairs(replace(EAGER, frame_size=1 << 16), source=poisoned())
    push = prompt(pair, "r", 12, [1, 2, 3], [11, 12, 13]).begin()
    for frames, (layer, begin) in enumerate(((layer, begin) for begin in (0, 8) for layer in range(3)), 1):
        push.layer(layer, begin, min(begin + 8, 12))
        pair.table.wait_written(push.job.handoff, frames)
    assert announced(pair, push) == [(n, n + 1, *span) for span in ((0, 8), (8, 12)) for n in range(3)]
    assert push.arrived()  # before the end is reported
    assert push.job.handoff not in pair.table.commits
    assert push.finished().frames == 6


def test_nothing_smaller_than_asked_for_leaves_before_the_end(pairs) -> None:
    pair = pairs(replace(SETTINGS, coalesce_below=16 * TOKEN), source=poisoned())
    push = prompt(pair, "r", 8, range(2), range(10, 12)).begin()
    push.layer(0, 0, 8)
    fence(pair, "one layer is too little")
    assert announced(pair, push) == []
    push.layer(1, 0, 8)
    pair.table.wait_written(push.job.handoff, 1)
    push.layer(2, 0, 8)
    fence(pair, "one layer is too little again")
    assert announced(pair, push) == [(0, 2, 0, 8)]
    push.finished()
    assert announced(pair, push) == [(0, 2, 0, 8), (2, 3, 0, 8)]


def test_a_prompt_that_stalls_does_not_hold_up_one_that_is_ready(pairs) -> None:
    pair = pairs(EAGER, source=poisoned())
    stalled = prompt(pair, "stalled", 30, range(8), range(8)).begin()
    unborn = prompt(pair, "unborn", 30, range(8, 16), range(8, 16)).begin()
    stalled.chunk(0, 7)
    stalled.layer(0, 7, 30)
    for n in range(3):
        prompt(pair, f"ready-{n}", 30, range(16, 24), range(16, 24)).begin().rest(0)
    assert not {stalled.job.handoff, unborn.job.handoff} & set(pair.table.commits)
    unborn.rest(0)
    stalled.rest(7)
    assert len(pair.peer.streams) == 1


def test_a_push_that_waits_for_its_acknowledgement_does_not_hold_up_the_next(pairs) -> None:
    pair = pairs(replace(EAGER, frame_size=1 << 16), source=poisoned())
    commit = Stopped(pair.table, "commit")
    first = prompt(pair, "first", 8, [0, 1], [0, 1]).begin()
    second = prompt(pair, "second", 8, [2, 3], [2, 3]).begin()
    for push in (first, second):
        pair.table.wait_for(("offer", push.job.handoff))
    first.chunk(0, 8)
    first.finish()
    commit.wait()
    second.layer(0, 0, 8)
    eventually(lambda: announced(pair, second) == [(0, 1, 0, 8)])
    commit.go_on()
    second.rest(0)
    first.done()


def test_prompts_of_one_batch_leave_side_by_side(pairs, seed: int) -> None:
    draw, pair = random.Random(seed), pairs(replace(EAGER, credits=2), source=poisoned())
    blocks = [range(7 * n, 7 * n + 7) for n in range(8)]
    batch = [prompt(pair, f"r{n}", draw.randint(1, 28), own, own) for n, own in enumerate(blocks)]
    reached = [0] * 8
    while left := [n for n, push in enumerate(batch) if reached[n] < push.tokens]:
        chosen = draw.sample(left, min(len(left), 3))
        step = {n: min(reached[n] + draw.randint(1, 9), batch[n].tokens) for n in chosen}
        for n in chosen:
            if not reached[n]:
                batch[n].begin()
        for layer, n in itertools.product(range(LAYOUT.layers), chosen):
            batch[n].layer(layer, reached[n], step[n])
        for n in chosen:
            reached[n] = step[n]
            if reached[n] == batch[n].tokens:
                batch[n].finish()
    for push in batch:
        push.done()


@pytest.mark.parametrize(("skip", "begin"), [*((n, n) for n in (1, 3, 4, 5, 12, 15)), (9, 0)])
def test_what_is_skipped_is_not_sent_and_not_touched(pairs, skip: int, begin: int) -> None:
    """The sender has it too, or computes it from `begin` on. At the receiver it has marked values here."""
    pair = pairs(EAGER, source=poisoned())
    put(pair.target, range(10, 14), 0, skip, 7.0)
    push = prompt(pair, "r", 16, range(4), range(10, 14), skip=skip).begin()
    result = push.rest(begin, 5)
    assert bool((rows(pair.target, range(10, 14), 0, skip) == 7.0).all())
    assert all(first >= skip for *_, first, _ in announced(pair, push))
    assert pair.table.commits[push.job.handoff].kv_bytes == result.nbytes == (16 - skip) * LAYOUT.layers * TOKEN
    put(pair.target, range(10, 14), 0, skip, 0.0)
    assert only_these(pair.target, range(10, 14), 16, skip)


@pytest.mark.parametrize("size", [1, 3, 7, 16, 64])
@pytest.mark.parametrize("skip", [0, 6])
def test_the_two_sides_may_have_blocks_of_different_sizes(pairs, size: int, skip: int) -> None:
    layout = replace(LAYOUT, block_size=size)
    pair = pairs(EAGER, source=poisoned(), layout=layout)
    blocks = random.Random(size).sample(range(64), layout.blocks_for(37))
    prompt(pair, "r", 37, range(20, 30), blocks, skip).begin().rest(skip, 9)
    assert only_these(pair.target, blocks, 37, skip)
    hello = pair.stream.said[0].hello
    assert convert.layout_from_pb(hello.layout) == LAYOUT
    assert make_job("r", 37).handoff in pair.table.commits
