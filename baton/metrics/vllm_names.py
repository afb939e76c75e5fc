"""The `vllm:*` metrics that existing dashboards, autoscalers and routers read, built at a scrape from Baton's own.

Each name comes from one kind of process, so that sums are right: latencies and tokens of requests from routers, queues
and KV of engines from workers. `vllm:num_requests_waiting` comes from both, because a router's queue is on no worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.core import Load, WorkerInfo
from baton.metrics.base import SUCCESS, counter, gauge

_NAMES = ("model_name", "engine")


def _labels(model: str) -> Mapping[str, str]:
    return dict(zip(_NAMES, (model, "0"), strict=True))  # each process has one engine


class Renamed(Collector):
    """Repeats metrics of `model` under other names."""

    def __init__(self, model: str, sources: Sequence[tuple[str, Collector]]) -> None:
        self._labels, self._sources = _labels(model), sources

    def collect(self) -> Iterable[Metric]:
        for name, source in self._sources:
            for metric in source.collect():
                made = Metric(f"vllm:{name}", metric.documentation, metric.type)
                made.samples = [
                    sample._replace(
                        name=made.name + sample.name.removeprefix(metric.name), labels={**sample.labels, **self._labels}
                    )
                    for sample in metric.samples
                ]
                yield made


def success(model: str, finished: Mapping[str, int]) -> Metric:
    """Return the finished choices; `finished` has their number by reason."""
    sums: Counter[str] = Counter()
    for reason, count in finished.items():
        sums[SUCCESS[reason]] += count
    rows = [((model, "0", reason), float(count)) for reason, count in sums.items()]
    return counter("vllm:request_success", "Finished choices", (*_NAMES, "finished_reason"), rows)


def engine(info: WorkerInfo, load: Load, preemptions: int) -> Iterable[Metric]:
    """Return the load of a worker's engine."""
    values, counts = (info.model, "0"), load.blocks
    used = counts.owned + counts.reserved + counts.quarantined
    queried = load.prefill_tokens + load.cached_tokens
    for name, text, value in (
        ("num_requests_running", "Requests in computation", load.running),
        ("num_requests_waiting", "Requests that wait", load.waiting),
        ("kv_cache_usage_perc", "Share of KV blocks in use; 1 means all", used / (counts.total or 1)),
        ("gpu_cache_usage_perc", "The old name of vllm:kv_cache_usage_perc", used / (counts.total or 1)),
    ):
        yield gauge(f"vllm:{name}", text, _NAMES, [(values, value)])
    for name, text, value in (
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", queried),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache", load.cached_tokens),
        ("num_preemptions", "Preempted requests, which lost their blocks to others", preemptions),
    ):
        yield counter(f"vllm:{name}", text, _NAMES, [(values, value)])
    sizes = (*values, str(info.layout.block_size), str(info.total_blocks))
    yield gauge("vllm:cache_config_info", "KV cache settings", (*_NAMES, "block_size", "num_gpu_blocks"), [(sizes, 1)])
