"""The stage clock: every nanosecond of a request is in one stage, in order, and belongs to an attempt."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.stages import Stage, StageClock, Timings
from baton.testing import FakeClock

STEPS = st.lists(
    st.tuples(
        st.sampled_from([*Stage, "first", "over", "verified", "look", "note", "only"]),
        st.floats(0, 1e4),
        st.floats(allow_nan=True, allow_infinity=True),
    ),
    max_size=40,
)


@given(STEPS)
@example([(Stage.TRANSFER, 1.0, 0.0), ("over", 1.0, 1e300)])
def test_passages_follow_each_other_without_gap_whatever_happens(steps):
    clock = FakeClock()
    stages = StageClock(clock)
    begin = round(clock.monotonic() * 1e9)
    for step, seconds, said_s in steps:
        clock.advance(seconds)
        if step == "first":
            stages.first_token()
        elif step == "over":
            stages.handed_over(said_s)
        elif step == "verified":
            stages.verified(said_s)
        elif step == "look":
            stages.so_far()
        elif step == "note":
            stages.note(seconds=seconds)
        elif step == "only":
            stages.ended_at_first_token()
        else:
            stages.attempt += step is Stage.ROUTE
            stages.enter(step)
    looked = [replace(passage) for passage in stages.so_far()]
    timings = stages.timings()
    now = round(clock.monotonic() * 1e9) - begin
    for passages in (looked, stages.passages):
        assert passages[0].start == 0
        for one, following in pairwise(passages):
            assert one.start + one.duration == following.start
        assert sum(passage.duration for passage in passages) == now, "not one nanosecond more or less"
        assert min(passage.duration for passage in passages) >= 0
    assert timings.e2e_s == sum(getattr(timings, f"{stage.value}_s") for stage in Stage)
    assert timings.e2e_s == pytest.approx(now / 1e9, rel=1e-12)
    assert timings.ttft_s <= timings.e2e_s + 1e-6


def walked(*, to: Stage = Stage.PREFILL) -> tuple[FakeClock, StageClock]:
    clock = FakeClock()
    stages = StageClock(clock)
    for number, stage in enumerate((Stage.ROUTE, Stage.RESERVE, Stage.PREFILL)):
        clock.advance(2**number)
        stages.attempt = 1
        stages.enter(stage)
        if stage is to:
            break
    return clock, stages


@pytest.mark.parametrize(
    ("after_s", "commit_s", "expected"),
    [
        (16, 5, Timings(1, 2, 4, 8, 11, 5, 32, ttft_s=15, e2e_s=63)),
        (1, 100, Timings(1, 2, 4, 8, 0, 1, 32, ttft_s=15, e2e_s=48)),  # a commit is no longer than its time
    ],
)
def test_the_stretch_after_the_first_token_ends_with_the_commit(after_s, commit_s, expected):
    clock, stages = walked()
    clock.advance(8)
    stages.first_token()
    clock.advance(after_s)
    stages.handed_over(commit_s=commit_s)
    clock.advance(32)
    assert stages.timings() == expected


def test_a_request_that_ends_with_its_first_token_has_no_handoff():
    clock, stages = walked()
    clock.advance(8)
    stages.first_token()
    clock.advance(3)
    stages.ended_at_first_token()
    assert stages.timings() == Timings(1, 2, 4, 11, 0, 0, 0, ttft_s=15, e2e_s=18)


def test_a_second_attempt_adds_to_the_same_stages_and_keeps_the_first_ttft():
    clock, stages = walked()
    stages.first_token()
    stages.handed_over(0)
    clock.advance(10)
    for stage, seconds in ((Stage.QUEUE, 1), (Stage.ROUTE, 2), (Stage.RESERVE, 4), (Stage.PREFILL, 8)):
        stages.enter(stage)
        clock.advance(seconds)
    stages.first_token()
    assert stages.timings() == Timings(2, 4, 8, 8, 0, 0, 10, ttft_s=7, e2e_s=32)


def test_verify_passes_are_taken_out_of_decoding():
    clock, stages = walked()
    clock.advance(8)
    stages.first_token()
    clock.advance(16)
    stages.handed_over(commit_s=5)
    clock.advance(32)
    stages.verified(12)
    stages.end()
    assert stages.timings() == Timings(1, 2, 4, 8, 11, 5, 20, ttft_s=15, e2e_s=63, verify_s=12)
    assert [passage.stage for passage in stages.passages] == list(Stage)


@pytest.mark.parametrize(("said_s", "counted"), [(1e9, 32), (-3, 0), (math.nan, 0), (math.inf, 0), (1e300, 0), (0, 0)])
def test_a_worker_cannot_take_more_out_of_decoding_than_it_was(said_s, counted):
    clock, stages = walked()
    stages.first_token()
    stages.handed_over(0)
    clock.advance(32)
    stages.verified(said_s)
    timings = stages.timings()
    assert (timings.decode_s, timings.verify_s) == (32 - counted, counted)


def test_what_is_said_of_verify_passes_before_it_decodes_counts_for_nothing():
    clock, stages = walked()
    clock.advance(3)
    stages.verified(2)
    assert stages.timings() == Timings(1, 2, 4, 3, 0, 0, 0, ttft_s=0, e2e_s=10)


def test_the_queue_is_of_no_attempt_and_the_next_stages_of_theirs():
    clock, stages = walked(to=Stage.RESERVE)
    clock.advance(5)
    stages.note(ended="no_room")
    stages.enter(Stage.QUEUE)
    clock.advance(7)
    stages.enter(Stage.ROUTE)
    stages.attempt = 2
    clock.advance(3)
    stages.end()
    found = [(passage.stage.value, passage.attempt, passage.duration / 1e9) for passage in stages.passages]
    assert found == [("queue", 0, 1), ("route", 1, 2), ("reserve", 1, 5), ("queue", 0, 7), ("route", 2, 3)]
    assert [passage.notes for passage in stages.passages] == [{}, {}, {"ended": "no_room"}, {}, {}]


def test_a_look_at_one_that_runs_changes_nothing():
    clock, stages = walked()
    stages.first_token()
    clock.advance(6)
    assert stages.so_far()[-1].duration == 6e9
    clock.advance(4)
    stages.handed_over(commit_s=9)
    assert (stages.timings().transfer_s, stages.timings().commit_s) == (1, 9), "all of it, also from before the look"


def test_what_comes_after_its_end_is_in_no_stage():
    clock, stages = walked()
    clock.advance(3)
    stages.end()
    before = stages.timings()
    clock.advance(100)
    stages.enter(Stage.QUEUE)
    stages.end()
    assert stages.timings() == before
    assert stages.so_far()[-1].stage is Stage.PREFILL
