"""A request's trace: its identity, its trace file for Perfetto and chrome://tracing, and its export to a collector."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import grpc
import pytest
import structlog
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from baton.errors import Unauthenticated
from baton.tracing.chrome import chrome_trace
from baton.tracing.otlp import Exporter
from baton.tracing.trace import Ended, Span, TraceContext, lanes, processes
from router.openai.upstream import metadata_of
from tests.support.time_factor import scaled

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)])
def test_what_a_caller_says(flags, sampled):
    assert TraceContext.parse(f"00-{TRACE}-{PARENT}-{flags}") == TraceContext(TRACE, PARENT, sampled)


SHAPES = ["", "00", GOOD.upper(), f" {GOOD}", f"{GOOD}\n", f"{GOOD}-00", f"{GOOD}\r\nauthorization: Bearer x"]
VERSIONS = [GOOD.replace("00-", version, 1) for version in ("01-", "ff-")]
ZEROS = [f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01"]
LENGTHS_AND_DIGITS = [f"00-{TRACE[1:]}-{PARENT}-01", f"00-{TRACE}-{PARENT}-1", GOOD.replace("4", "٤", 1)]


@pytest.mark.parametrize("header", [*SHAPES, *VERSIONS, *ZEROS, *LENGTHS_AND_DIGITS])
def test_what_is_not_exactly_that_is_ignored(header):
    assert TraceContext.parse(header) is None
    assert metadata_of(None, header) == ()
    assert metadata_of("Bearer x", header) == (("authorization", "Bearer x"),)


def test_the_gateway_passes_on_what_is():
    assert metadata_of(None, GOOD) == (("traceparent", GOOD),)
    assert metadata_of("Bearer x", GOOD) == (("authorization", "Bearer x"), ("traceparent", GOOD))
    assert metadata_of(None, None) == ()
    with pytest.raises(Unauthenticated):
        metadata_of("Bearer \n", GOOD)


def test_new_ones_are_new():
    made = {TraceContext.new().trace_id for _ in range(50)}
    assert len(made) == 50
    assert all(len(one) == 32 and int(one, 16) for one in made)


def test_the_caller_decides_and_else_the_share_does():
    assert TraceContext(TRACE, PARENT, sampled=True).exported(0.0)
    assert not TraceContext(TRACE, PARENT, sampled=False).exported(1.0)
    low, high = TraceContext("f" * 16 + "1" + "0" * 15), TraceContext("0" * 16 + "f" * 16)
    for share, exported in ((0.0, [False, False]), (0.5, [True, False]), (1.0, [True, True])):
        assert [low.exported(share), high.exported(share)] == exported


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
    for begin, end in zip(begins, ends, strict=True):
        assert begin["ts"] <= end["ts"], "no arrow ends before it begins, even if clocks disagree"


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
    assert push["args"] == {"kv_bytes": 100, "attempt": 1, "choice": 0}
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


WAIT_S = scaled(20)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the received spans. `gate` delays its answers."""

    def __init__(self):
        self.got, self.answered = threading.Semaphore(0), 0
        self.gate = threading.Event()
        self.gate.set()
        self.spans = []  # (resource, span)

    def Export(self, request, context):
        for group in request.resource_spans:
            resource = {one.key: one.value.string_value for one in group.resource.attributes}
            for scope in group.scope_spans:
                assert scope.scope.name == "baton"
                self.spans += [(resource, span) for span in scope.spans]
        self.got.release()
        self.gate.wait(WAIT_S)
        self.answered += 1
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, service, name):
        return [span for resource, span in self.spans if (resource["service.name"], span.name) == (service, name)]


@contextmanager
def collectors():
    server, collector = grpc.server(ThreadPoolExecutor(2)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        collector.gate.set()
        server.stop(0).wait(WAIT_S)


@contextmanager
def exporting(linger_s=0.0):
    """Yield a collector, and an exporter to it that is closed at the end."""
    with collectors() as (collector, address):
        exporter = Exporter(address, "local", "1.2", linger_s=linger_s)
        yield collector, exporter
        exporter.close()


def ended(context=None, spans=SPANS, error="", outcome="finished") -> Ended:
    context = context or TraceContext(TRACE, PARENT, sampled=True)
    return Ended("r-1", "router-1", context, AT - 0.001, AT + 0.07, outcome, error, lambda: spans)


def facts(span) -> dict:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_one_trace_through_all_processes():
    with exporting() as (collector, exporter):
        exporter.put(ended())
        assert collector.got.acquire(timeout=WAIT_S)
    instances = {(resource["service.name"], resource["service.instance.id"]) for resource, _ in collector.spans}
    assert instances == {("baton-router", "router-1"), ("baton-prefill", "prefill-0"), ("baton-decode", "decode-0")}
    assert {(one["service.namespace"], one["service.version"]) for one, _ in collector.spans} == {("local", "1.2")}
    spans = [span for _, span in collector.spans]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert len({span.span_id for span in spans}) == len(spans) == len(SPANS) + 2
    (root,), (attempt,) = collector.named("baton-router", "request"), collector.named("baton-router", "attempt")
    assert root.parent_span_id.hex() == PARENT
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (round((AT - 0.001) * 1e9), round((AT + 0.07) * 1e9))
    assert facts(root) == {"baton.request_id": "r-1", "baton.outcome": "finished"}
    (queue,) = collector.named("baton-router", "queue")
    assert queue.parent_span_id == attempt.parent_span_id == root.span_id
    below = [span for span in spans if span not in (root, attempt, queue)]
    assert {span.parent_span_id for span in below} == {attempt.span_id}
    (compute,) = collector.named("baton-prefill", "compute")
    assert facts(compute) == {"baton.tokens": 40, "baton.choice": 0, "baton.attempt": 1}
    assert compute.end_time_unix_nano - compute.start_time_unix_nano == pytest.approx(8e6, abs=1e3)
    assert attempt.start_time_unix_nano == min(span.start_time_unix_nano for span in below)


def test_without_a_caller_there_is_no_parent_and_errors_are_seen():
    lost = [*SPANS[:3], *(one for one in SPANS if one.attempt == 2)]
    lost[2] = type(lost[2])("prefill", "router-1", "router", AT + 0.003, 0.01, {"error": "WorkerLost"}, 1)
    with exporting() as (collector, exporter):
        exporter.put(ended(TraceContext.new(), lost, "WorkerLost", "failed"))
        exporter.put(ended(TraceContext.new(), [], "InvalidRequest", "refused"))
    failed, refused = collector.named("baton-router", "request")
    assert not failed.parent_span_id
    assert (failed.status.code, failed.status.message) == (2, "WorkerLost")
    assert (refused.status.code, facts(refused)["baton.outcome"]) == (2, "refused")
    (attempt,) = collector.named("baton-router", "attempt")
    assert attempt.status.code == 2


def test_it_waits_for_what_workers_say_late():
    spans = list(SPANS[:3])
    with exporting(0.2) as (collector, exporter):
        exporter.put(ended(spans=spans))
        spans.append(SPANS[7])
        assert collector.got.acquire(timeout=WAIT_S)
    assert collector.named("baton-prefill", "push")


def test_one_trace_that_breaks_does_not_end_the_others():
    taken = threading.Event()  # so that the next trace is in another batch

    def broken():
        taken.set()
        raise RuntimeError("of this test")

    with exporting() as (collector, exporter):
        exporter.put(Ended("r", "router-1", TraceContext.new(), AT, AT, "finished", "", broken))
        assert taken.wait(WAIT_S)
        exporter.put(ended())
        assert collector.got.acquire(timeout=WAIT_S)


@contextmanager
def held_up():
    """Yield a collector and an exporter that waits for its first answer and whose queue is full."""
    with exporting() as (collector, exporter):
        collector.gate.clear()
        exporter.put(ended())
        assert collector.got.acquire(timeout=WAIT_S)
        for _ in range(3000):
            exporter.put(ended())
        assert exporter.dropped >= 3000 - 2048
        yield collector, exporter


@pytest.mark.slow
def test_a_collector_that_does_not_answer_delays_nobody():
    with held_up() as (collector, exporter):
        exporter.close()
        assert collector.answered == 0
        collector.gate.set()
        exporter._thread.join(WAIT_S)


@pytest.mark.slow
def test_what_found_no_room_is_told_though_the_collector_works():
    with structlog.testing.capture_logs() as logged, held_up() as (collector, exporter):
        dropped = exporter.dropped
        collector.gate.set()
        assert collector.got.acquire(timeout=WAIT_S)  # another batch, so the first one is done
        assert [one["dropped"] for one in logged if one["event"] == "traces_not_exported"] == [dropped]
