"""What Baton measures of itself: the stage clock of one request, and the metrics of one process.

Nothing here is global. A process makes one `Metrics`, hands it down, and serves it with `MetricsServer`.
Names and labels of the metrics are an interface (dashboards and autoscalers read them); labels stay bounded.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, fields
from http import HTTPStatus
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.core import Role
from baton.errors import BatonError, ConfigError
from baton.limits import MAX_METRICS_REQUEST_BYTES
from baton.load import BlockCounts, Channel, Load
from baton.stages import Timings

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_VERIFYING: tuple[tuple[str, str, Callable[[Load], int]], ...] = (
    ("baton_verify_passes", "Verify passes of deterministic requests", lambda load: load.verify_passes),
    ("baton_rollbacks", "Candidates that a verify pass did not agree with", lambda load: load.rollbacks),
    (
        "baton_recomputed_tokens",
        "Candidates that rollbacks dropped, with those behind them",
        lambda load: load.recomputed_tokens,
    ),
)
_BLOCK_STATES = ("free", "owned", "cached", "reserved", "quarantined")


class _Blocks(Collector):
    """Connected workers by role, and their KV blocks by role and state, at a scrape: a lost worker leaves no ghost."""

    def __init__(self, read: Callable[[], Mapping[Role, Iterable[BlockCounts]]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Gauge]:  # type: ignore[override]
        gauge = Gauge("baton_kv_blocks", "KV blocks on all workers", ("role", "state"), registry=None)
        connected = Gauge("baton_workers", "Workers that this router is connected to", ("role",), registry=None)
        for role, workers in self._read().items():
            connected.labels(role.value).set(0)
            for state in _BLOCK_STATES:
                gauge.labels(role.value, state).set(0)
            for counts in workers:
                connected.labels(role.value).inc()
                _add_counts(gauge, role, counts)
        return [*gauge.collect(), *connected.collect()]  # type: ignore[list-item]


def _add_counts(gauge: Gauge, role: Role, counts: BlockCounts) -> None:
    values = {field.name: value for field, value in zip(fields(counts), astuple(counts), strict=True)}
    for state in _BLOCK_STATES:
        gauge.labels(role.value, state).inc(values[state])


class _Channels(Collector):
    """The open data channels of connected workers, at a scrape."""

    def __init__(self, read: Callable[[], Iterable[tuple[str, Channel]]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Gauge]:  # type: ignore[override]
        name, text = "baton_channel_bytes_per_second", "What the probe of an open data channel took per second"
        gauge = Gauge(name, text, ("worker", "peer", "transport"), registry=None)
        for worker, channel in self._read():
            gauge.labels(worker, channel.peer, channel.transport).set(channel.bytes_per_s)
        return gauge.collect()  # type: ignore[return-value]


class _Verifying(Collector):
    """What connected workers did for deterministic requests, at a scrape. By worker: a sum would drop with a loss."""

    def __init__(self, read: Callable[[], Iterable[tuple[str, Load]]]) -> None:
        self._read = read

    def collect(self) -> Iterable[CounterMetricFamily]:
        loads = list(self._read())
        for name, text, value in _VERIFYING:
            family = CounterMetricFamily(name, text, labels=("worker",))
            for worker, load in loads:
                family.add_metric((worker,), value(load))
            yield family


class _Gaps(Collector):
    """A histogram that is counted up once per token: so it costs a list entry, and becomes one at a scrape."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def collect(self) -> Iterable[HistogramMetricFamily]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        yield HistogramMetricFamily(
            self._name, self._text, list(zip(names, accumulate(self._counts), strict=True)), self._sum
        )


class Metrics:
    """The metrics of one process, in a registry of its own. Seconds and bytes, as Prometheus wants them."""

    def __init__(self, cluster: str, version: str) -> None:
        self.registry = registry = CollectorRegistry()
        Info("baton_build", "Which cluster and version this is", registry=registry).info(
            {"cluster": cluster, "version": version}
        )
        self._requests = Counter("baton_requests", "Requests by how they ended", ("outcome",), registry=registry)
        self._deterministic = Counter(
            "baton_deterministic_requests",
            "Those of the requests that were deterministic",
            ("outcome",),
            registry=registry,
        )
        self._refusals = Counter("baton_refusals", "Requests refused, by error class", ("reason",), registry=registry)
        self._slo = Counter(
            "baton_slo", "Finished requests by whether they kept to the SLO", ("met",), registry=registry
        )
        self._recoveries = Counter(
            "baton_recoveries", "Attempts after the first, by what ended the one before", ("reason",), registry=registry
        )
        self._fenced = Counter("baton_fenced", "Attempts fenced at a decode worker", registry=registry)
        self._mismatches = Counter(
            "baton_digest_mismatch", "Handoffs whose bytes did not arrive as sent", registry=registry
        )
        self._bytes = Counter("baton_transfer_bytes", "KV bytes handed over", ("transport",), registry=registry)
        self._ttft = self._seconds("ttft", "Arrival to first token at the router")
        self._e2e = self._seconds("e2e", "Arrival to end")
        self._queue = self._seconds("queue", "Waiting for a worker and for decode room")
        self._prefill = self._seconds("prefill", "Prefill sent to first token at the router")
        self._transfer = self._seconds(
            "transfer", "First frame announced to last frame in its blocks, at the decode worker"
        )
        self._prediction_error = self._seconds(
            "ttft_prediction_error", "Between the first token, from the choice of its workers on, and its prediction"
        )
        self._itl = _Gaps("baton_itl_seconds", "Between two output tokens", _STEP_S)
        registry.register(self._itl)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...] = _LATENCY_S) -> Histogram:
        return Histogram(f"baton_{name}_seconds", text, buckets=buckets, registry=self.registry)

    def watch_blocks(self, read: Callable[[], Mapping[Role, Iterable[BlockCounts]]]) -> None:
        """Export what `read` gives at each scrape as `baton_kv_blocks{role,state}` and `baton_workers{role}`."""
        self.registry.register(_Blocks(read))

    def watch_channels(self, read: Callable[[], Iterable[tuple[str, Channel]]]) -> None:
        """Export what `read` gives at each scrape as `baton_channel_bytes_per_second{worker,peer,transport}`."""
        self.registry.register(_Channels(read))

    def watch_verifying(self, read: Callable[[], Iterable[tuple[str, Load]]]) -> None:
        """Export, of what `read` gives at each scrape, `baton_verify_passes_total{worker}`,
        `baton_rollbacks_total{worker}` and `baton_recomputed_tokens_total{worker}`.
        """
        self.registry.register(_Verifying(read))

    def watch_queue(self, requests: Callable[[], float], tokens: Callable[[], float]) -> None:
        """Export what waits at each scrape as `baton_queued_requests` and `baton_queued_tokens`."""
        for what, read in (("requests", requests), ("tokens", tokens)):
            Gauge(f"baton_queued_{what}", f"Waiting for room, in {what}", registry=self.registry).set_function(read)

    def ended(self, outcome: str, timings: Timings | None = None, *, deterministic: bool = False) -> None:
        """A request ended: finished | cancelled | failed | refused. `timings` only for those that finished."""
        self._requests.labels(outcome).inc()
        if deterministic:
            self._deterministic.labels(outcome).inc()
        if timings is None:
            return
        for histogram, seconds in (
            (self._ttft, timings.ttft_s),
            (self._e2e, timings.e2e_s),
            (self._queue, timings.queue_s),
            (self._prefill, timings.prefill_s),
        ):
            histogram.observe(seconds)

    def kept_slo(self, *, met: bool) -> None:
        """A request finished, and its first token and the others came within `slo.ttft_ms` and `slo.itl_ms`, or not."""
        self._slo.labels(str(met).lower()).inc()

    def ttft_predicted(self, off_s: float) -> None:
        """A first token came so much sooner or later than the choice of its workers foresaw."""
        self._prediction_error.observe(off_s)

    def refused(self, error: BatonError) -> None:
        """A request was turned away; the reason is the error's class."""
        self._refusals.labels(type(error).__name__).inc()

    def gap(self, seconds: float, tokens: int) -> None:
        """`tokens` tokens came `seconds` after the one before: as many gaps of equal length."""
        self._itl.observe(seconds / tokens, tokens)

    def handed_over(self, transfer_s: float, kv_bytes: int, transport: str) -> None:
        """A decode worker committed a handoff. `transfer_s` is its own measure: first frame to last."""
        self._transfer.observe(transfer_s)
        self._bytes.labels(transport or "unknown").inc(kv_bytes)

    def recovery(self, reason: str) -> None:
        """Another attempt begins; `reason` comes from a fixed set."""
        self._recoveries.labels(reason).inc()

    def fenced(self) -> None:
        """A decode worker confirmed that it will never accept a commit of an attempt."""
        self._fenced.inc()

    def digest_mismatch(self) -> None:
        """A handoff failed because its bytes changed on the way."""
        self._mismatches.inc()


class MetricsServer:
    """`/metrics`, `/health` (the process answers) and `/ready` (it can take a request), in the process's own loop.

    In the loop on purpose: a scrape reads what the loop writes without a lock, and a stuck loop does not look healthy.
    """

    def __init__(self, metrics: Metrics, ready: Callable[[], bool] = lambda: True) -> None:
        self._metrics = metrics
        self._ready = ready
        self._server: asyncio.Server | None = None

    async def start(self, address: str) -> str:
        """Listen on "host:port" (port 0: any free one); returns what was bound. Raises ConfigError."""
        host, _, port = address.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._answer, host.strip("[]"), int(port), limit=MAX_METRICS_REQUEST_BYTES
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot listen for metrics on {address!r}: {error}") from error
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close the listener. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(5):
                request = await reader.readuntil(b"\r\n\r\n")
                status, content_type, body = self._respond(request.split(b"\r\n", 1)[0].decode("latin-1"))
                head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a scraper that left or never asked is its own business
        finally:
            writer.close()

    def _respond(self, line: str) -> tuple[HTTPStatus, str, bytes]:
        method, _, rest = line.partition(" ")
        path = rest.split(" ")[0].split("?")[0]
        plain = "text/plain; charset=utf-8"
        if method != "GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, plain, b"GET only\n"
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._metrics.registry)
        if path == "/health":
            return HTTPStatus.OK, plain, b"ok\n"
        if path == "/ready":
            if self._ready():
                return HTTPStatus.OK, plain, b"ready\n"
            return HTTPStatus.SERVICE_UNAVAILABLE, plain, b"not ready\n"
        return HTTPStatus.NOT_FOUND, plain, b"/metrics, /health and /ready are served here\n"
