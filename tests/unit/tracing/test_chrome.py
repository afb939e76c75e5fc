"""A trace file in the trace event format, which Perfetto and chrome://tracing read."""

import json
import random
from itertools import pairwise

import pytest

from baton.tracing.chrome import chrome_trace
from baton.tracing.trace import Span, lanes, processes

AT = 1_795_346_477.0
SPANS = [
    Span("queue", "router-1", "router", AT, 0.001),
    Span("route", "router-1", "router", AT + 0.001, 0.002, {"prefill": "prefill-0@1.1"}, 1),
    Span("prefill", "router-1", "router", AT + 0.003, 0.010, {}, 1),
    Span("transfer", "router-1", "router", AT + 0.013, 0.004, {}, 1),
    Span("decode", "router-1", "router", AT + 0.017, 0.050, {}, 1),
    Span("wait", "prefill-0", "prefill", AT + 0.0035, 0.001, {}, 1),
    Span("compute", "prefill-0", "prefill", AT + 0.0045, 0.008, {"tokens": "40"}, 1),
    Span("push", "prefill-0", "prefill", AT + 0.006, 0.010, {"kv_bytes": "100"}, 1),
    Span("receive", "decode-0", "decode", AT + 0.007, 0.008, {}, 1),
    Span("decode", "decode-0", "decode", AT + 0.016, 0.049, {}, 1),
]


def complete(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def check(trace) -> None:
    """Check the format, and that no two slices of a thread overlap, as viewers require."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    for event in trace["traceEvents"]:
        assert event["ph"] in {"X", "M", "s", "f"}
        assert [type(event[key]) for key in ("name", "pid", "tid")] == [str, int, int]
        assert event["ts"] >= 0
    threads: dict[tuple[int, int], list] = {}
    for event in complete(trace):
        assert event["dur"] >= 0
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for slices in threads.values():
        for one, following in pairwise(sorted(slices, key=lambda event: event["ts"])):
            assert one["ts"] + one["dur"] <= following["ts"] + 1e-6
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == set(threads)
    begins, ends = ([event for event in trace["traceEvents"] if event["ph"] == phase] for phase in "sf")
    assert [event["id"] for event in begins] == [event["id"] for event in ends]
    assert len({event["id"] for event in begins}) == len(begins)
    assert all(begin["ts"] <= end["ts"] for begin, end in zip(begins, ends, strict=True)), "clocks may disagree"


def test_one_row_for_each_process_and_an_arrow_for_the_kv():
    trace = chrome_trace(SPANS, "r", "t" * 32)
    check(trace)
    rows = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert rows == {1: "router-1", 2: "prefill-0", 3: "decode-0"}
    assert trace["otherData"] == {"request_id": "r", "trace_id": "t" * 32, "began_unix_s": AT}
    stages = [event for event in complete(trace) if event["pid"] == 1]
    assert sum(event["dur"] for event in stages) == pytest.approx(67_000)
    (push,) = (event for event in complete(trace) if event["name"] == "push")
    assert (push["ts"], push["dur"]) == (pytest.approx(6000, abs=1), 10_000)
    assert push["args"] == {"kv_bytes": "100", "attempt": 1, "choice": 0}
    begin, end = (event for event in trace["traceEvents"] if event["ph"] in {"s", "f"})
    assert (begin["ph"], begin["pid"], begin["tid"]) == ("s", 2, push["tid"])
    assert (end["ph"], end["pid"], end["bp"]) == ("f", 3, "e")
    (compute,) = (event for event in complete(trace) if event["name"] == "compute")
    assert compute["tid"] != push["tid"], "it streams while it computes: two threads, or a viewer would nest them"


def test_any_spans_make_a_file_that_can_be_read(seed):
    rng = random.Random(seed)
    for _ in range(50):
        check(chrome_trace([any_span(rng) for _ in range(rng.randrange(30))]))


def any_span(rng):
    name, process = rng.choice(["push", "receive", "decode", "x"]), rng.choice(["a", "b"])
    role = rng.choice(["router", "prefill", "decode", "else"])
    times = AT + rng.random(), rng.choice([0.0, rng.random()])
    return Span(name, process, role, *times, {}, rng.randrange(3), rng.randrange(3))


def test_processes_are_in_the_order_of_a_requests_way_and_what_touches_does_not_overlap():
    assert processes(reversed(SPANS)) == [("router", "router-1"), ("prefill", "prefill-0"), ("decode", "decode-0")]
    assert [len(lane) for lane in lanes(SPANS[:5])] == [5]
    assert [len(lane) for lane in lanes(SPANS[5:8])] == [2, 1]
    assert chrome_trace([])["traceEvents"] == []
