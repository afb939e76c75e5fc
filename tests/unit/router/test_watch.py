"""The router's statistics of the last minute, its SLO and its event feed, on a simulated clock."""

import asyncio
import math
import random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from baton.core import Sampling, SequenceSpec, Token
from baton.errors import InvalidRequest, NoWorker, Overloaded, Violation
from baton.ledger.control_state import ControlReport
from baton.limits import MAX_STATUS_MESSAGE_BYTES
from baton.rpc.v1 import inference_pb2 as pb
from baton.testing import FakeClock
from baton.tracing.trace import Ended, TraceContext
from router.activity import KEPT, REPEAT_S, ActivityRecorder, EventFeed, LastMinute
from router.request.observer import ChoiceObserver, RequestObserver, _reason
from router.request.traces import Trace, Traces, Track
from router.status import RouterStatus, SingleFlight
from tests.unit.router.fakes import virtual


def test_the_reason_in_the_log_is_bounded():
    many = InvalidRequest(*[Violation("stop", f"number {number}") for number in range(1000)])
    assert "number 7" in _reason(many)
    assert "number 8" not in _reason(many)
    assert len(_reason(InvalidRequest.of("stop", "x" * 10_000))) == MAX_STATUS_MESSAGE_BYTES
    assert _reason(InvalidRequest.of("chat", "a secret")) == "chat"


SPEC = SequenceSpec((0,) * 100, Sampling(max_tokens=9))


@pytest.fixture
def clock():
    return FakeClock()


def test_quantiles_are_right_within_their_bounds(clock, seed):
    recent, rng = LastMinute(clock), random.Random(seed)
    gaps = [math.exp(rng.gauss(-4, 1)) for _ in range(20_000)]
    for number, gap in enumerate(gaps):
        recent.tokens(1, gap)
        if number % 1000 == 0:
            clock.advance(1)
            recent.second()
    found, gaps = recent.window().itl, sorted(gaps)
    assert found.count == len(gaps)
    for quantile, share in ((found.p50, 0.5), (found.p90, 0.9), (found.p99, 0.99)):
        assert quantile == pytest.approx(gaps[math.ceil(share * len(gaps)) - 1], rel=0.026)


def test_what_was_a_minute_ago_is_forgotten(clock):
    recent = LastMinute(clock)
    recent.first_tokens(1, 0.2, 100)
    recent.tokens(3, 0.3)
    recent.finished(0.5)
    for what in ("ended", "judged", "kept", "ended", "refused", "failed", "recovered"):
        recent.count(what)
    clock.advance(10)
    now = recent.window()
    assert (now.seconds, now.itl.count, now.ttft.count, now.e2e.count) == (10, 3, 1, 1)
    assert now.itl.p50 == pytest.approx(0.1, rel=0.026), "three tokens at once are three gaps of equal length"
    assert (now.requests_per_s, now.tokens_per_s, now.prompt_tokens_per_s) == (0.2, 0.4, 10)
    assert (now.failed, now.refused, now.recoveries, now.slo_share) == (1, 1, 1, 1)
    assert not recent.window(5).itl.count
    clock.advance(49.5)
    assert recent.window().itl.count == 3
    clock.advance(0.5)
    empty = recent.window()
    assert (empty.itl.count, empty.tokens_per_s, empty.failed, empty.slo_share) == (0, 0, 0, -1)
    assert empty.seconds == 59, "the second that has just begun is part of it"


def test_a_rate_is_of_the_time_that_there_was(clock):
    recent = LastMinute(clock)
    recent.count("ended")
    assert recent.window().requests_per_s == 1, "not of no time at all"
    clock.advance(2)
    assert recent.window().requests_per_s == 0.5
    assert recent.window(5).requests_per_s == 0.5
    clock.advance(300)
    recent.count("ended")
    assert recent.window(5).requests_per_s == 1 / 4


def test_durations_that_no_bound_fits(clock):
    recent = LastMinute(clock)
    recent.tokens(1, 0.0)
    recent.first_tokens(1, 1e9, 0)
    assert recent.window().itl.p99 == pytest.approx(1e-4, rel=0.026)
    assert recent.window().ttft.p99 == pytest.approx(1e9, rel=0.026)


def test_happenings_are_numbered_and_equal_ones_are_one(clock):
    happenings = EventFeed(clock)
    assert happenings.settle() == 0
    happenings.add("joined", "here", worker_id="p-0")
    for number in range(3):
        happenings.add("recovered", "goes on", f"r{number}", "d-0")
    assert happenings.settle() == 2
    first, second = happenings.since(0)
    assert (first.kind, first.text, first.worker_id, first.time_s) == ("joined", "here", "p-0", clock.wall())
    assert (second.text, second.request_id, second.worker_id) == ("goes on (3 times)", "", "d-0")
    happenings.add("recovered", "goes on", "r3", "d-0")
    assert happenings.settle() == 3
    assert [one.request_id for one in happenings.since(2)] == ["r3"]
    assert happenings.since(3) == []


def test_happenings_are_bounded(clock):
    happenings = EventFeed(clock)
    for times, (number, how) in enumerate(((3 * KEPT, "in way"), (KEPT, "in another way")), 1):
        for each in range(number):
            happenings.add("failed", f"{how} {each}")
        assert happenings.settle() == times * KEPT
    assert len(happenings.since(0)) == KEPT == len(happenings.since(10))
    assert happenings.since(2 * KEPT - 1)[0].text == f"in another way {KEPT - 1}"


async def test_the_latest_happenings_are_known_though_nobody_has_watched(clock, monkeypatch):
    monkeypatch.setattr("router.status._LOOK_S", 0)
    sinks: Any = SimpleNamespace(activity=(seen := ActivityRecorder(clock)), clock=clock)
    context: Any = SimpleNamespace(sinks=sinks, pool=SimpleNamespace(connected=[]))
    looking = asyncio.create_task(RouterStatus(context).run())
    for when in ("early", "late"):
        for number in range(KEPT):
            seen.happenings.add("failed", f"{when} {number}")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    looking.cancel()
    assert [one.text for one in seen.happenings.since(0)] == [f"late {number}" for number in range(KEPT)]


def test_refusals_under_load_leave_room_for_what_else_happens(clock):
    seen = ActivityRecorder(clock)
    for number in range(2 * KEPT):
        seen.ended("r", "refused", Overloaded(f"it would wait for about {number} s", 1.0))
    seen.ended("r", "refused", NoWorker("none is there"))
    seen.happenings.add("left", "a decode worker is gone", worker_id="d-0")
    assert seen.happenings.settle() == 3
    refusals = ["Overloaded: it would wait for about 0 s (400 times)", "NoWorker: none is there"]
    assert [one.text for one in seen.happenings.since(0)] == [*refusals, "a decode worker is gone"]


def test_a_rejection_that_repeats_is_one_event_in_ten_seconds(clock):
    seen = ActivityRecorder(clock)
    texts = []
    for _ in range(25):
        for _ in range(4):
            seen.rejected("HTTP 404 not_found")
        before = seen.happenings.last
        seen.happenings.settle()
        texts.append([one.text for one in seen.happenings.since(before)])
        clock.advance(1.0)
    assert [place for place, found in enumerate(texts) if found] == [0, 10, 20]
    assert texts[0] + texts[10] == ["HTTP 404 not_found (4 times)", "HTTP 404 not_found (40 times)"]
    assert seen.recent.window().refused == 100


def test_rejections_with_many_reasons_push_out_no_other_event(clock):
    seen = ActivityRecorder(clock)
    seen.happenings.add("left", "a decode worker is gone")
    for turn in range(5):
        for number in range(KEPT):
            seen.rejected(f"HTTP 400 {turn} {number}")
        seen.happenings.settle()
        clock.advance(REPEAT_S)
    texts = [one.text for one in seen.happenings.since(0)]
    assert texts[0] == "a decode worker is gone"
    assert len(texts) == 1 + KEPT // 2
    assert texts[-1] == "other rejections (100 times)"


def test_rejected_requests_are_grouped_by_their_fields_and_show_no_value(clock):
    seen = ActivityRecorder(clock)
    for fields in (("sampling.n", "seed"), ("sampling.n", "seed"), ("A prompt?", "x" * 99), ("A prompt?", "stop[0]")):
        seen.ended("r", "refused", InvalidRequest(*(Violation(field, "got 'secret'") for field in fields)))
    assert seen.happenings.settle() == 3
    lines = ["InvalidRequest: sampling.n, seed (2 times)", "InvalidRequest", "InvalidRequest: stop[0]"]
    assert [one.text for one in seen.happenings.since(0)] == lines


def test_happenings_name_a_request_as_its_client_does(clock):
    """A resumed request has another id on the workers, under which no trace is found."""
    sinks: Any = MagicMock(clock=clock, activity=(seen := ActivityRecorder(clock)))
    request = RequestObserver(sinks, "mine", resumes=True)
    life = ChoiceObserver(request, 0, "r9", "mine", SPEC, 0)
    for reason in ("decode_lost", "prefill_lost"):
        attempt: Any = MagicMock(workers=("p-0", "d-0"), retry_reason=reason, fencing=NoWorker("gone"))
        life.recovered(attempt)
    life.is_accepted = True  # so its end is no rejection
    request.ended(pb.GenerateRequest(), NoWorker("gone"))
    assert seen.happenings.settle() == 4
    assert {one.request_id for one in seen.happenings.since(0)} == {"mine"}


def test_a_prompt_counts_once_however_many_choices_it_has(clock):
    sinks: Any = MagicMock(clock=clock, activity=(seen := ActivityRecorder(clock)))
    request = RequestObserver(sinks, "r")
    for choice in range(3):
        ChoiceObserver(request, choice, f"r{choice}", f"r.{choice}", SPEC, 0).delivered([Token(0, 7, "")])
    window = seen.recent.window()
    assert (window.prompt_tokens_per_s, window.tokens_per_s, window.ttft.count) == (100, 3, 3)


@pytest.mark.parametrize("received", [0, 3], ids=["new", "resumed"])
@pytest.mark.parametrize(
    ("waits_s", "met"),
    [
        ((), True),  # no token, no wait for one
        ((1.0,), True),
        ((1.5,), False),
        ((1.0, 0.25), True),
        ((1.0, 0.5), False),
        ((1.0, 0.375, 0.125), True),  # on average
        ((1.0, 0.125, 0.125, 0.75), False),
    ],
)
def test_the_first_token_is_in_time_and_the_others_are_on_average(clock, waits_s, met, received):
    sinks = MagicMock(clock=clock, slo_ttft_s=1.0, slo_itl_s=0.25)
    life = ChoiceObserver(RequestObserver(sinks, "r"), 0, "r", "r", SPEC, received)
    for index, wait_s in enumerate(waits_s, received):
        clock.advance(wait_s)
        if index == received:
            life.stages.first_token()  # as an attempt would report it
        life.delivered([Token(index, 7, "")])
    assert life.met_slo() == met


@pytest.fixture
def trace(clock):
    """The trace of a request that has just arrived."""
    trace = Trace("x", TraceContext.new(), "router", clock.wall())
    trace.tracks.append(Track("router", 0, clock))
    return trace


def test_a_request_does_not_end_before_it_began_though_the_clock_was_set_back(clock, trace, monkeypatch):
    ended, wall_s = list[Ended](), clock.wall()
    clock.advance(2)
    monkeypatch.setattr(clock, "wall", lambda: wall_s - 600)
    Traces(8, 1.0, clock, ended.append).ended(trace, "finished", "")
    assert ended[0].ended_s == ended[0].began_s + 2 == max(span.end_s for span in ended[0].spans())


@pytest.mark.parametrize("left_s", [-1, 0, 0.02])
@virtual
async def test_nothing_is_waited_for_that_would_make_an_answer_late(trace, left_s):
    trace.tracks[0].expect_report()
    async with asyncio.timeout(0.3):
        await trace.settled(left_s)


@pytest.mark.parametrize(
    ("waits_s", "works_s", "shown_s"), [(2, 0, 0.09), (0, 0.05, 1), (2, 0.05, 1), (0, 0.5, 2), (0, 3, 6)]
)
async def test_a_view_is_shown_for_as_long_as_its_making_is_worth_not_as_redis_is_silent(
    clock, waits_s, works_s, shown_s
):
    made = []

    async def wait():
        clock.advance(waits_s)

    async def make():
        clock.advance(works_s)
        made.append(clock.monotonic() - works_s)
        return len(made)

    shared = SingleFlight(wait, make, clock)
    assert await shared.get() == 1
    clock.advance(made[0] + shown_s - 0.001 - clock.monotonic())
    assert await shared.get() == 1
    clock.advance(0.002)
    assert await shared.get() == 2


async def test_a_decision_is_told_once_and_without_the_end_of_a_log(clock):
    said = [(1.0, "started"), (2.0, 'ended:\n{"event": "loaded"}'), (2.0, "at the same time")]
    decisions = [SimpleNamespace(at=at, kind="replace", text=text) for at, text in said]
    sinks: Any = SimpleNamespace(activity=(seen := ActivityRecorder(clock)), clock=clock)
    live = RouterStatus(MagicMock(sinks=sinks))
    live.control = cast("ControlReport", SimpleNamespace(decisions=decisions))
    for _ in range(2):
        live._add_decisions()
        assert seen.happenings.settle() == 3
    told = [(one.time_s, one.text) for one in seen.happenings.since(0)]
    assert told == [(1, "replace: started"), (2, "replace: ended"), (2, "replace: at the same time")]
