"""Withdrawn and recomputed KV: freed blocks are not read, and the right values arrive."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from baton.core import HandoffId
from baton.errors import StaleAttempt
from tests.support.time_factor import scaled
from tests.unit.kvtransfer.ends import Stopped
from tests.unit.kvtransfer.prompts import EAGER, RIGHT, Prompt, fence, poisoned, prompt
from tests.unit.kvtransfer.support import Pair, Pairs, put, rows


@pytest.fixture
def eager(pairs: Pairs) -> Pair:
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


def test_what_is_withdrawn_between_the_choice_and_the_read_is_not_read(pairs: Pairs) -> None:
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


def test_withdraw_before_anything_and_after_everything_has_left(pairs: Pairs) -> None:
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
