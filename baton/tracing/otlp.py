"""Export of traces to an OpenTelemetry collector over OTLP/gRPC. Needs the extra `otel`; imported only if configured.

A separate thread sends them: a slow or unreachable collector loses traces and never delays a request.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache

import structlog
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from baton.tracing.trace import Ended, Span

LINGER_S = 1.0  # spans of a prefill worker may arrive after the request ended
_QUEUED = 2048  # requests
_AT_ONCE = 64
_CLOSE_S = 2.0
_SCOPE = InstrumentationScope("baton")
log = structlog.get_logger(__name__)


class Exporter:
    """A background exporter. `endpoint` is "http://host:port", or https with the system's authorities. Headers,
    certificates and timeouts come from the environment (OTEL_EXPORTER_OTLP_...), as in OpenTelemetry's documentation.
    """

    def __init__(self, endpoint: str, cluster: str, version: str = "", linger_s: float = LINGER_S) -> None:
        self._refused = self._lost = 0  # queue full; export failed
        self._endpoint, self._linger_s = endpoint, linger_s
        self._common = {"service.namespace": cluster, "service.version": version}
        # Silenced, because it logs each failed try; `_run` logs once per batch.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http://"))
        self._queue: queue.Queue[tuple[float, Ended]] = queue.Queue(_QUEUED)
        self._closing, self._over = threading.Event(), threading.Event()
        self._resource = lru_cache(1024)(self._resource_of)
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """The number of requests with spans that did not reach the collector."""
        return self._refused + self._lost

    def put(self, ended: Ended) -> None:
        """Queue a request; drop it if the queue is full. From any thread; never blocks."""
        try:
            self._queue.put_nowait((time.monotonic() + self._linger_s, ended))
        except queue.Full:
            self._refused += 1

    def close(self) -> None:
        """Send queued requests for at most two seconds."""
        self._closing.set()
        self._thread.join(_CLOSE_S)
        self._over.set()
        self._exporter.shutdown()

    def _run(self) -> None:
        reported = 0
        while not (self._over.is_set() or (self._closing.is_set() and self._queue.empty())):
            batch: list[Ended] = []
            try:
                batch = list(self._batch())
                spans = [span for ended in batch for span in self._spans(ended)]
                sent = not batch or self._exporter.export(spans) is SpanExportResult.SUCCESS
            except Exception:  # thread boundary: one bad trace must not stop the others
                log.exception("trace_broke")
                sent = False
            self._lost += 0 if sent else len(batch)
            if self.dropped > reported:
                reported = self.dropped
                log.warning("traces_not_exported", collector=self._endpoint, dropped=reported)

    def _batch(self) -> Iterator[Ended]:
        """Yield requests that have lingered long enough, at least one if there is one soon."""
        for number in range(_AT_ONCE):
            try:
                due, ended = self._queue.get(timeout=0.0 if number else 0.2)
            except queue.Empty:
                return
            self._closing.wait(max(0.0, due - time.monotonic()))
            yield ended

    def _spans(self, ended: Ended) -> Iterator[ReadableSpan]:
        """Yield the request's span, one child per attempt of each choice, and the spans of each attempt."""
        caller = _context(ended, int(ended.context.parent_id, 16), remote=True) if ended.context.parent_id else None
        root = _context(ended)
        facts = {"baton.request_id": ended.request_id, "baton.outcome": ended.outcome}
        times = ended.began_s, ended.ended_s
        yield self._span("request", root, caller, "router", ended.router_id, times, facts, ended.error, SpanKind.SERVER)
        spans = ended.spans()
        mine = [span for span in spans if span.role == "router" and span.attempt]
        attempts = {(span.choice, span.attempt): _context(ended) for span in mine}
        for (choice, attempt), context in attempts.items():
            stages = [span for span in mine if (span.choice, span.attempt) == (choice, attempt)]
            yield self._attempt(ended, context, root, stages)
        for span in spans:
            parent = attempts.get((span.choice, span.attempt), root)
            times = span.start_s, span.end_s
            error = span.attributes.get("error", "")
            yield self._span(span.name, _context(ended), parent, span.role, span.process, times, _facts(span), error)

    def _attempt(self, ended: Ended, context: SpanContext, root: SpanContext, stages: list[Span]) -> ReadableSpan:
        times = min(span.start_s for span in stages), max(span.end_s for span in stages)
        facts = {name: value for span in stages for name, value in _facts(span).items()}
        error = next((span.attributes["error"] for span in stages if "error" in span.attributes), "")
        return self._span("attempt", context, root, "router", ended.router_id, times, facts, error)

    def _span(  # noqa: PLR0913, PLR0917 (the parts of a span)
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        role: str,
        process: str,
        times: tuple[float, float],
        facts: Mapping[str, str | int | float],
        error: str,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> ReadableSpan:
        begin, end = (round(seconds * 1e9) for seconds in times)
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource(role, process),
            facts,
            kind=kind,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=begin,
            end_time=end,
            instrumentation_scope=_SCOPE,
        )

    def _resource_of(self, role: str, process: str) -> Resource:
        return Resource({**self._common, "service.name": f"baton-{role}", "service.instance.id": process})


def _context(ended: Ended, span_id: int = 0, *, remote: bool = False) -> SpanContext:
    """Return the context of a span; `span_id` 0 means a new one."""
    found = span_id or random.getrandbits(64) or 1
    return SpanContext(int(ended.context.trace_id, 16), found, remote, TraceFlags(TraceFlags.SAMPLED))


def _facts(span: Span) -> dict[str, str | int | float]:
    facts: dict[str, str | int | float] = {f"baton.{name}": _number(text) for name, text in span.attributes.items()}
    return facts | {"baton.choice": span.choice, "baton.attempt": span.attempt}


def _number(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
