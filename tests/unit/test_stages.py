"""The stage clock: every nanosecond of a request is in one stage, in order, and belongs to an attempt."""

import math
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from operator import methodcaller

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.stages import Stage, StageClock, Timings
from baton.testing import FakeClock

FIRST = methodcaller("first_token")
ENDED_AT_FIRST = methodcaller("ended_at_first_token")
END = methodcaller("end")
SO_FAR = methodcaller("so_far")
NOTE = methodcaller("note", ended="no_room")
handed_over = partial(methodcaller, "handed_over")
verified = partial(methodcaller, "verified")


class Walk(StageClock):
    """A stage clock that takes steps: seconds that pass, a stage that begins, or a call. Each route is an attempt."""

    def __init__(self, *steps):
        self.fake = FakeClock()
        super().__init__(self.fake)
        self.take(*steps)

    def take(self, *steps):
        for step in steps:
            if isinstance(step, Stage):
                self.attempt += step is Stage.ROUTE
                self.enter(step)
            elif callable(step):
                step(self)
            else:
                self.fake.advance(step)


TO_PREFILL = 1, Stage.ROUTE, 2, Stage.RESERVE, 4, Stage.PREFILL
SAID_S = st.floats(allow_nan=True, allow_infinity=True)
CALLS = st.sampled_from([*Stage, FIRST, ENDED_AT_FIRST, SO_FAR, NOTE]) | SAID_S.map(handed_over) | SAID_S.map(verified)


@given(st.lists(st.tuples(st.floats(0, 1e4), CALLS), max_size=40))
@example([(1.0, Stage.TRANSFER), (1.0, handed_over(1e300))])
def test_passages_follow_each_other_without_gap_whatever_happens(steps):
    stages = Walk()
    begin = round(stages.fake.monotonic() * 1e9)
    stages.take(*chain.from_iterable(steps))
    looked = [replace(passage) for passage in stages.so_far()]
    timings = stages.timings()
    now = round(stages.fake.monotonic() * 1e9) - begin
    for passages in (looked, stages.passages):
        assert passages[0].start == 0
        for one, following in pairwise(passages):
            assert one.start + one.duration == following.start
        assert sum(passage.duration for passage in passages) == now, "not one nanosecond more or less"
        assert min(passage.duration for passage in passages) >= 0
    assert timings.e2e_s == sum(getattr(timings, f"{stage.value}_s") for stage in Stage)
    assert timings.e2e_s == pytest.approx(now / 1e9, rel=1e-12)
    assert timings.ttft_s <= timings.e2e_s + 1e-6


AGAIN = Stage.QUEUE, 1, Stage.ROUTE, 2, Stage.RESERVE, 4, Stage.PREFILL, 8, FIRST


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([8, FIRST, 16, handed_over(5), 32], Timings(1, 2, 4, 8, 11, 5, 32, ttft_s=15, e2e_s=63)),
        ([8, FIRST, 1, handed_over(100), 32], Timings(1, 2, 4, 8, 0, 1, 32, ttft_s=15, e2e_s=48)),
        ([8, FIRST, 3, ENDED_AT_FIRST], Timings(1, 2, 4, 11, 0, 0, 0, ttft_s=15, e2e_s=18)),
        ([FIRST, handed_over(0), 10, *AGAIN], Timings(2, 4, 8, 8, 0, 0, 10, ttft_s=7, e2e_s=32)),
        (
            [8, FIRST, 16, handed_over(5), 32, verified(9)],
            Timings(1, 2, 4, 8, 11, 5, 23, ttft_s=15, e2e_s=63, verify_s=9),
        ),
        ([3, verified(2)], Timings(1, 2, 4, 3, 0, 0, 0, ttft_s=0, e2e_s=10)),
    ],
    ids=[
        "the stretch after the first token ends with the commit",
        "a commit is no longer than its time",
        "a request that ends with its first token has no handoff",
        "a second attempt adds to the same stages and keeps the first TTFT",
        "verify passes are taken out of decoding",
        "verify passes before it decodes count for nothing",
    ],
)
def test_each_second_counts_in_its_stage(steps, expected):
    assert Walk(*TO_PREFILL, *steps).timings() == expected


def test_passages_have_the_order_of_the_stages():
    stages = Walk(*TO_PREFILL, 8, FIRST, 16, handed_over(5), 32, verified(12), END)
    assert [passage.stage for passage in stages.passages] == list(Stage)


@pytest.mark.parametrize(("said_s", "counted"), [(1e9, 32), (-3, 0), (math.nan, 0), (math.inf, 0), (1e300, 0), (0, 0)])
def test_a_worker_cannot_take_more_out_of_decoding_than_it_was(said_s, counted):
    timings = Walk(*TO_PREFILL, FIRST, handed_over(0), 32, verified(said_s)).timings()
    assert (timings.decode_s, timings.verify_s) == (32 - counted, counted)


def test_the_queue_is_of_no_attempt_and_the_next_stages_of_theirs():
    stages = Walk(1, Stage.ROUTE, 2, Stage.RESERVE, 5, NOTE, Stage.QUEUE, 7, Stage.ROUTE, 3, END)
    found = [(passage.stage.value, passage.attempt, passage.duration / 1e9) for passage in stages.passages]
    assert found == [("queue", 0, 1), ("route", 1, 2), ("reserve", 1, 5), ("queue", 0, 7), ("route", 2, 3)]
    assert [passage.notes for passage in stages.passages] == [{}, {}, {"ended": "no_room"}, {}, {}]


def test_a_look_at_one_that_runs_changes_nothing():
    stages = Walk(*TO_PREFILL, FIRST, 6)
    assert stages.so_far()[-1].duration == 6e9
    stages.take(4, handed_over(9))
    assert (stages.timings().transfer_s, stages.timings().commit_s) == (1, 9), "all of it, also from before the look"


def test_what_comes_after_its_end_is_in_no_stage():
    stages = Walk(*TO_PREFILL, 3, END)
    before = stages.timings()
    stages.take(100, Stage.QUEUE, END)
    assert stages.timings() == before
    assert stages.so_far()[-1].stage is Stage.PREFILL
