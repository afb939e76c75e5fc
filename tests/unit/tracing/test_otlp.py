"""The exporter with a collector in this process, and with one that does not answer."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
import structlog
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from baton.tracing.otlp import Exporter
from baton.tracing.trace import Ended, TraceContext
from tests.support.time_factor import scaled
from tests.unit.tracing.test_chrome import AT, SPANS

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
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
