"""Label values with a fixed set, and collectors that build metric families at each scrape.

Families show the state at the scrape, so a worker that has left leaves no stale series. `tools/metric_docs.py` lists
all labels with their values.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, Info
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from baton.control_plane import DecisionKind, SlotState
from baton.core import BlockCounts, FinishReason, Load, Role
from baton.stages import Stage

OUTCOMES = ("finished", "cancelled", "failed", "refused")
PROMISES = ("kept", "broken_ttft", "broken_itl", "broken_death", "refused")
RECOVERIES = ("preempted", "no_room", "kv_dropped", "prefill_lost", "decode_lost", "not_there")
TRANSPORTS = ("nccl", "gloo", "shm", "cuda_ipc", "nixl", "grpc", "memory", "unknown")
BLOCK_STATES = ("free", "owned", "cached", "reserved", "quarantined")
HANDOFFS = ("pushed", "failed", "aborted", "committed", "fenced")
SLOT_STATES: tuple[str, ...] = get_args(SlotState)
DECISIONS: tuple[str, ...] = get_args(DecisionKind)
STAGES = tuple(stage.value for stage in Stage)
FINISHES = tuple(reason.value for reason in FinishReason)
SUCCESS = {"eos": "stop", "stop_token": "stop", "stop_string": "stop", "length": "length"}  # vLLM's names


def transport_label(transport: str) -> str:
    """Return `transport` if it is known, else `unknown`, because peers may send anything."""
    return transport if transport in TRANSPORTS else "unknown"


Row = tuple[Sequence[str], float]
LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
STAGE_S = (0.0001, 0.0005, 0.001, *LATENCY_S)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
_VERIFYING: tuple[tuple[str, str, Callable[[Load], int]], ...] = (
    ("baton_verify_passes", "Verify passes of deterministic requests", lambda load: load.verify_passes),
    ("baton_rollbacks", "Candidates rejected by a verify pass", lambda load: load.rollbacks),
    (
        "baton_recomputed_tokens",
        "Candidates dropped by rollbacks, later ones included",
        lambda load: load.recomputed_tokens,
    ),
    ("baton_speculated_tokens", "Tokens of speculation that were computed", lambda load: load.speculated_tokens),
    ("baton_accepted_tokens", "Tokens of speculation that were drawn", lambda load: load.accepted_tokens),
)


def new_registry(cluster: str, version: str) -> CollectorRegistry:
    """Return a registry for one process, with its cluster and version, memory, CPU time and files."""
    registry = CollectorRegistry()
    about = {"cluster": cluster, "version": version}
    Info("baton_build", "Cluster and version of this process", registry=registry).info(about)
    ProcessCollector(registry=registry)
    return registry


class Scraped(Collector):
    """Collects the families that `read` returns, at each scrape."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    """Return a family of gauges; a row is (label values, value)."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: Sequence[str], rows: Iterable[Row]) -> Metric:
    """Return a family of counters; a row is (label values, value). `name` is without `_total`."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def blocks(by_role: Mapping[Role, Iterable[BlockCounts]]) -> Metric:
    """Return the KV blocks of workers, by role and state."""
    rows: dict[tuple[str, str], int] = {}
    for role, workers in by_role.items():
        rows |= {(role.value, state): 0 for state in BLOCK_STATES}
        for counts in workers:
            states = counts.free, counts.owned, counts.cached, counts.reserved, counts.quarantined
            for state, value in zip(BLOCK_STATES, states, strict=True):
                rows[role.value, state] += value
    return gauge("baton_kv_blocks", "KV blocks, of all workers or of this one", ("role", "state"), rows.items())


def verifying(loads: Iterable[tuple[str, Load]]) -> Iterable[Metric]:
    """Return the metrics of deterministic requests, per worker, because a sum would drop when a worker is lost."""
    known = list(loads)
    for name, text, value in _VERIFYING:
        yield counter(name, text, ("worker",), [((worker,), value(load)) for worker, load in known])


class Gaps(Collector):
    """A histogram that is cheap to update for every token; its family is built at a scrape."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._exemplars: list[Exemplar | None] = [None] * len(self._counts)
        self._sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, seconds: float, times: int, exemplar: dict[str, str] | None = None) -> None:
        bucket = bisect_left(self._bounds, seconds)
        self._counts[bucket] += times
        if exemplar is not None:
            self._exemplars[bucket] = Exemplar(exemplar, seconds, time.time())
        self._sum += seconds * times

    def collect(self) -> Iterable[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        rows = zip(names, accumulate(self._counts), self._exemplars, strict=True)
        buckets = [(name, float(count), by) if by else (name, float(count)) for name, count, by in rows]
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)
