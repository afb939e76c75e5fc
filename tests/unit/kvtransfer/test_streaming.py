"""KV is sent while it is computed, layer by layer, and not from withdrawn blocks.

Prompts are computed layer by layer, as by an engine. Blocks are NaN until they are computed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from baton.core import HandoffId
from baton.engine.kv_cache import KVCache
from baton.errors import StaleAttempt
from baton.rpc import convert
from kvtransfer.handoff import PushJob, PushResult
from tests.support.time_factor import scaled
from tests.support.waiting import eventually
from tests.unit.kvtransfer.ends import Stopped
from tests.unit.kvtransfer.support import LAYOUT, SETTINGS, Pair, make_end, make_job, make_kv, only_these, put, rows

POISON = float("nan")  # values that are not final or belong to others; they must never arrive
TOKEN = LAYOUT.layer_token_bytes
EAGER = replace(SETTINGS, frame_size=5 * TOKEN, coalesce_below=1, verify_kv=True)
RIGHT = make_kv(1)  # final values of all positions, in blocks 0, 1, 2, ...


def poisoned() -> KVCache:
    kv = make_kv(None)
    for tensor in kv.tensors:
        tensor.fill_(POISON)
    return kv


@dataclass
class Prompt:
    """One prompt of an engine, on a cache that is NaN wherever nothing was computed."""

    pair: Pair
    job: PushJob
    blocks: Sequence[int]

    @property
    def tokens(self) -> int:
        return self.job.known_tokens

    def begin(self) -> Prompt:
        self.pair.sender.begin(self.job)
        return self

    def layer(self, layer: int, begin: int, end: int) -> None:
        values, layers = rows(RIGHT, range(64), begin, end), slice(layer, layer + 1)
        put(self.pair.source, self.blocks, begin, end, values[:, layers], layers)
        self.pair.sender.computed(self.job.handoff, self.blocks, layer + 1, end)

    def chunk(self, begin: int, end: int, layers: int = LAYOUT.layers) -> None:
        for layer in range(layers):
            self.layer(layer, begin, end)

    def rest(self, begin: int, size: int = 1 << 16) -> PushResult:
        """Compute everything from `begin` on, in chunks of this size, and finish."""
        for start in range(begin, self.tokens, size):
            self.chunk(start, min(start + size, self.tokens))
        return self.finished()

    def withdraw(self) -> None:
        """Withdraw the blocks and overwrite them, as their next owner does."""
        self.pair.sender.withdraw(self.job.handoff)
        put(self.pair.source, self.blocks, 0, len(self.blocks) * LAYOUT.block_size, POISON)

    def finish(self) -> None:
        self.pair.sender.finish(self.job.handoff, make_end(self.tokens))

    def arrived(self) -> bool:
        """Return whether the receiver has the correct values of all positions due."""
        there = self.pair.table.blocks[self.job.handoff]
        due = rows(RIGHT, range(64), self.job.skip, self.tokens)
        return torch.equal(rows(self.pair.target, there, self.job.skip, self.tokens), due)

    def finished(self) -> PushResult:
        self.finish()
        return self.done()

    def done(self) -> PushResult:
        result = self.pair.reports.done(self.job.handoff)
        assert self.arrived()
        assert result.nbytes == (self.tokens - self.job.skip) * LAYOUT.layers * TOKEN
        return result


def prompt(pair, name: str, tokens: int, blocks: Sequence[int], target: Sequence[int], skip: int = 0) -> Prompt:
    return Prompt(pair, pair.reserve(name, tokens, target, skip=skip), blocks)


def fence(pair, name: str) -> None:
    """Push a handoff after all others. Afterwards, nothing of these is left to send."""
    prompt(pair, name, 1, [63], [63]).begin().rest(0)


def announced(pair, push: Prompt) -> list[tuple[int, int, int, int]]:
    return [(f.layer_begin, f.layer_end, f.begin, f.end) for f in pair.stream.frames(push.job.handoff)]


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


@pytest.fixture
def eager(pairs) -> Pair:
    return pairs(EAGER, source=poisoned())


def short(pair: Pair, name: str = "r") -> Prompt:
    return prompt(pair, name, 8, [0, 1], [10, 11]).begin()


@pytest.mark.parametrize("again_from", [0, 5, 12])
@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_what_was_withdrawn_is_computed_again_elsewhere(eager: Pair, layers: int, again_from: int) -> None:
    """At any layer of the second chunk, with other chunks afterwards. Positions before `again_from` are in a cache."""
    push = prompt(eager, "r", 30, range(8), range(20, 28)).begin()
    push.chunk(0, 12)
    push.chunk(12, 20, layers)
    push.withdraw()
    push.blocks = range(30, 38)
    put(eager.source, push.blocks, 0, again_from, rows(RIGHT, range(64), 0, again_from))
    push.chunk(again_from, 17)
    push.rest(17)


@pytest.mark.parametrize("ended", [False, True])
def test_withdraw_and_abort_wait_for_a_read_under_way_but_not_for_reads_of_others(eager: Pair, ended: bool) -> None:
    push, other = short(eager), prompt(eager, "other", 8, [4, 5], [12, 13]).begin()
    read = Stopped(eager.source, "gather")
    push.layer(0, 0, 8)
    read.wait()
    if ended:
        for _ in range(2):
            eager.sender.abort(push.job.handoff)
        with pytest.raises(AssertionError, match="a report"):
            eager.reports.wait(push.job.handoff, 0.05)  # its blocks are still being read
    with ThreadPoolExecutor(1) as pool:
        pool.submit(other.withdraw).result(scaled(5))
        withdrawn = pool.submit(push.withdraw)
        with pytest.raises(TimeoutError):
            withdrawn.result(0.05)
        read.go_on()
        withdrawn.result(scaled(5))
    if ended:
        eager.reports.failed(push.job.handoff, StaleAttempt)
    else:
        push.blocks = [2, 3]
        push.rest(0)
    other.rest(0)


def test_what_is_withdrawn_between_the_choice_and_the_read_is_not_read(pairs) -> None:
    """There are new blocks, but fewer final positions than were chosen."""
    pair = pairs(replace(EAGER, frame_size=1 << 16), source=poisoned())
    push = short(pair)
    read = Stopped(pair.sender._channels[0].queue, "reading")
    push.layer(0, 0, 8)
    read.wait()
    push.withdraw()
    push.blocks = [2, 3]
    push.layer(0, 0, 3)
    read.go_on()
    push.chunk(0, 3)
    push.rest(3)


def test_withdraw_before_anything_and_after_everything_has_left(pairs) -> None:
    pair = pairs(replace(EAGER, frame_size=1 << 16), source=poisoned())
    push = short(pair)
    push.withdraw()
    for layer in range(3):
        push.layer(layer, 0, 8)
        pair.table.wait_written(push.job.handoff, layer + 1)
    push.withdraw()
    assert push.finished().frames == 3
    pair.sender.withdraw(HandoffId("never", 1))


@pytest.mark.parametrize("again", [False, True])
def test_finish_before_anything_is_computed(eager: Pair, again: bool) -> None:
    """The push can be finished before its progress is reported. It waits, whatever the order."""
    push = short(eager)
    if again:
        push.chunk(0, 8, 2)
        push.withdraw()
    push.finish()
    fence(eager, "fence")
    assert push.job.handoff not in eager.table.commits
    push.chunk(0, 8)
    push.done()
