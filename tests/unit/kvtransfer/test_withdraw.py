"""KV that is withdrawn and computed again: nobody reads what was given away, and what arrives is right."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from baton.core import HandoffId
from baton.errors import StaleAttempt
from kvtransfer.outbox import Outbox
from tests.support.time_factor import scaled
from tests.unit.kvtransfer.prompts import EAGER, POISON, RIGHT, Prompt, fence, poisoned, prompt
from tests.unit.kvtransfer.support import LAYOUT, put, rows


@pytest.mark.parametrize("again_from", [0, 5, 12])
@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_what_was_withdrawn_is_computed_again_elsewhere(pairs, layers: int, again_from: int) -> None:
    """At any point of the second chunk; with other chunks afterwards. Positions before `again_from` are in a cache."""
    pair = pairs(EAGER, source=poisoned())
    push = prompt(pair, "r", 30, range(8), range(20, 28)).begin()
    push.chunk(0, 12)
    push.chunk(12, 20, layers)
    push.withdraw()
    push.blocks = range(30, 38)
    for layer in range(LAYOUT.layers):
        values = rows(RIGHT, range(64), 0, again_from)[:, layer]
        put(pair.source, push.blocks, layer, 0, again_from, values)
    for begin, end in ((again_from, 17), (17, 30)):
        push.chunk(begin, end)
    push.finish()
    push.done()


def test_withdrawn_again_and_again_it_arrives_once(pairs, seed: int) -> None:
    draw, pair = random.Random(seed), pairs(EAGER, source=poisoned())
    for n in range(12):
        push = prompt(pair, f"r{n}", 30, range(8), range(20, 28)).begin()
        for _ in range(draw.randint(1, 4)):
            begin, layers = 0, LAYOUT.layers
            while begin < 30 and layers == LAYOUT.layers:
                end, layers = min(begin + draw.randint(1, 12), 30), draw.choice([0, 1, 2, 3, 3, 3])
                push.chunk(begin, end, layers)
                begin = end
            push.withdraw()
            push.blocks = draw.choice([range(8), range(30, 38), range(45, 53)])
        push.chunk(0, 30)
        push.finish()
        push.done()
        for layer in range(LAYOUT.layers):
            put(pair.source, push.blocks, layer, 0, 32, POISON)
            put(pair.target, range(20, 28), layer, 0, 32, POISON)


def stopped_read(pair, push: Prompt) -> tuple[threading.Event, threading.Event]:
    """The next read of its blocks stops half way: two events, one to wait for and one to go on."""
    entered, leave = threading.Event(), threading.Event()
    gather = pair.source.gather

    def slow(*args) -> None:
        pair.source.gather = gather
        entered.set()
        assert leave.wait(scaled(5))
        gather(*args)

    pair.source.gather = slow
    return entered, leave


def test_withdraw_waits_for_a_read_under_way(pairs) -> None:
    pair = pairs(EAGER, source=poisoned())
    push = prompt(pair, "r", 8, [0, 1], [10, 11]).begin()
    entered, leave = stopped_read(pair, push)
    push.layer(0, 0, 8)
    assert entered.wait(scaled(5))
    with ThreadPoolExecutor(1) as pool:
        withdrawn = pool.submit(push.withdraw)
        with pytest.raises(TimeoutError):
            withdrawn.result(0.05)
        leave.set()
        withdrawn.result(scaled(5))
    push.blocks = [2, 3]
    push.chunk(0, 8)
    push.finish()
    push.done()


def test_withdraw_waits_for_a_read_of_a_push_that_has_ended_meanwhile(pairs) -> None:
    pair = pairs(EAGER, source=poisoned())
    push = prompt(pair, "r", 8, [0, 1], [10, 11]).begin()
    entered, leave = stopped_read(pair, push)
    push.layer(0, 0, 8)
    assert entered.wait(scaled(5))
    pair.sender.abort(push.job.handoff)
    with ThreadPoolExecutor(1) as pool:
        withdrawn = pool.submit(push.withdraw)
        with pytest.raises(TimeoutError):
            withdrawn.result(0.05)
        leave.set()
        withdrawn.result(scaled(5))
    assert isinstance(pair.reports.wait(push.job.handoff), StaleAttempt)


def test_withdraw_does_not_wait_for_reads_of_others(pairs) -> None:
    pair = pairs(EAGER, source=poisoned())
    read, other = prompt(pair, "read", 8, [0, 1], [10, 11]).begin(), prompt(pair, "other", 8, [2, 3], [12, 13]).begin()
    entered, leave = stopped_read(pair, read)
    read.layer(0, 0, 8)
    assert entered.wait(scaled(5))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(other.withdraw).result(scaled(5))
    leave.set()
    for push in (read, other):
        push.chunk(0, 8)
        push.finish()
        push.done()


def test_what_is_withdrawn_between_the_choice_and_the_read_is_not_read(pairs, monkeypatch) -> None:
    """Although there are blocks again: less of them is final than was chosen."""
    pair = pairs(replace(EAGER, frame_size=1 << 16), source=poisoned())
    push, chosen, choose = prompt(pair, "r", 8, [0, 1], [10, 11]), threading.Event(), Outbox.next

    def next_and_withdraw(outbox: Outbox):
        found = choose(outbox)
        if not chosen.is_set():
            push.withdraw()
            push.blocks = [2, 3]
            push.layer(0, 0, 3)
            chosen.set()
        return found

    monkeypatch.setattr(Outbox, "next", next_and_withdraw)
    push.begin().layer(0, 0, 8)
    assert chosen.wait(scaled(5))
    push.chunk(0, 3)
    push.chunk(3, 8)
    push.finish()
    push.done()


def test_withdraw_then_abort(pairs) -> None:
    pair = pairs(EAGER, source=poisoned())
    push = prompt(pair, "r", 30, range(8), range(20, 28)).begin()
    push.chunk(0, 12)
    pair.table.wait_for(("offer", push.job.handoff))
    push.withdraw()
    pair.sender.abort(push.job.handoff)
    assert isinstance(pair.reports.wait(push.job.handoff, 1), StaleAttempt)
    pair.table.wait_for(("aborted", push.job.handoff))
    push.withdraw()
    fence(pair, "next")


def test_withdraw_before_anything_and_after_everything_has_left(pairs) -> None:
    pair = pairs(replace(EAGER, frame_size=1 << 16), source=poisoned())
    push = prompt(pair, "r", 8, [0, 1], [10, 11]).begin()
    push.withdraw()
    for layer in range(3):
        push.layer(layer, 0, 8)
        pair.table.wait_written(push.job.handoff, layer + 1)
    push.withdraw()
    push.finish()
    assert push.done().frames == 3
    pair.sender.withdraw(HandoffId("never", 1))


@pytest.mark.parametrize("again", [False, True])
def test_finish_before_anything_is_computed(pairs, again: bool) -> None:
    """It is told that all is computed before it hears of it: it waits, however it is ordered."""
    pair = pairs(EAGER, source=poisoned())
    push = prompt(pair, "r", 8, [0, 1], [10, 11]).begin()
    if again:
        push.chunk(0, 8, 2)
        push.withdraw()
    push.finish()
    fence(pair, "fence")
    assert push.job.handoff not in pair.table.commits
    push.chunk(0, 8)
    push.done()
