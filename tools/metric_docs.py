"""Generates the tables of docs/reference/metrics.md from the metrics that Baton's processes export.

python -m tools.metric_docs [--check]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from baton import __version__, errors
from baton.core import LEFT_OUT, BlockCounts, Channel, Incarnation, KVLayout, LeftOut, Load, Role, WorkerInfo, WorkerRef
from baton.errors import BatonError, Overloaded
from baton.metrics import Metrics
from baton.metrics.base import (
    BLOCK_STATES,
    DECISIONS,
    FINISHES,
    HANDOFFS,
    OUTCOMES,
    PROMISES,
    RECOVERIES,
    SLOT_STATES,
    STAGES,
    SUCCESS,
    TRANSPORTS,
)
from baton.metrics.worker import Counts, Watched, WorkerMetrics
from baton.stages import Timings
from baton.testing import FakeClock
from router.context import RouterSettings, build_context

DOCS = Path(__file__).resolve().parent.parent / "docs/reference/metrics.md"
BEGIN, END = "<!-- made by tools/metric_docs.py: {} -->\n", "<!-- end -->\n"
SUFFIXES = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "info": ["_info"], "gauge": [""]}
SUFFIXES["summary"] = ["_sum", "_count"]
SHOWN = {"counter": "_total", "info": "_info"}
INFO = WorkerInfo(
    ref=WorkerRef("decode-0", Incarnation(1, 1), "127.0.0.1:1"),
    role=Role.DECODE,
    fingerprint="f" * 64,
    model="m",
    max_model_len=64,
    total_blocks=8,
    layout=KVLayout(1, 1, 8, 16, "float32"),
)


def _classes(kind: type[BatonError]) -> Iterable[str]:
    yield kind.__name__
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from _classes(below)


REFUSALS = tuple(sorted(set(_classes(BatonError))))

# The allowed values, or a description if their number depends on workers or versions.
Values = tuple[str, ...] | str
# Labels that mean the same in every metric.
LABELS: Mapping[str, Values] = {
    "cluster": "the cluster file's `name`",
    "version": "Baton's version",
    "met": ("true", "false"),
    "stage": STAGES,
    "role": tuple(role.value for role in Role),
    "transport": TRANSPORTS,
    "direction": ("sent", "received"),
    "worker": "a worker's id",
    "peer": "a worker's id",
    "model": "the name of the model that is served",
    "model_name": "the name of the model that is served",
    "fingerprint": "the first 12 digits of the fingerprint of the model that is served",
    "engine": ("0",),
    "finished_reason": tuple(dict.fromkeys(SUCCESS.values())),
    "block_size": "tokens per KV block",
    "num_gpu_blocks": "KV blocks of a worker, also without a GPU",
    "le": "upper limit of a bucket",
}
# Labels that differ by metric; names without suffix.
OF_METRIC: Mapping[str, Mapping[str, Values]] = {
    "baton_requests": {"outcome": OUTCOMES},
    "baton_deterministic_requests": {"outcome": OUTCOMES},
    "baton_handoffs": {"outcome": HANDOFFS},
    "baton_channels_left_out": {"reason": tuple(LEFT_OUT)},
    "baton_refusals": {"reason": REFUSALS},
    "baton_recoveries": {"reason": RECOVERIES},
    "baton_finished_choices": {"reason": FINISHES},
    "baton_kv_blocks": {"state": BLOCK_STATES},
    "baton_slots": {"state": SLOT_STATES},
    "baton_step_seconds": {"kind": ("prefill", "decode", "mixed")},
    "baton_computed_tokens": {"kind": ("prefill", "decode")},
    "baton_decisions": {"kind": DECISIONS},
    "baton_promises": {"outcome": PROMISES},
    "baton_promise_calibration": {"latency": ("ttft", "itl"), "bin": tuple(map(str, range(10)))},
}
_SUFFIX = re.compile(r"_(total|created|bucket|sum|count|info)$")


def values(metric: str, label: str) -> Values:
    """Return the values of `label` in `metric`, which may be a sample's name. Raises KeyError if it has none."""
    own = OF_METRIC.get(_SUFFIX.sub("", metric), {})
    return own[label] if label in own else LABELS[label]


@dataclass(slots=True)
class Family:
    """An exported metric. `name` has no suffix."""

    name: str
    kind: str
    text: str
    labels: set[str]
    processes: list[str]

    @property
    def samples(self) -> set[str]:
        """Names used in queries."""
        return {self.name + suffix for suffix in SUFFIXES[self.kind]}


def router_registry() -> CollectorRegistry:
    """Return a router's registry after one event of each kind, so that each family has its labels."""

    async def no_workers() -> Sequence[WorkerInfo]:
        return []

    metrics = build_context(RouterSettings("one", "m", __version__), no_workers, FakeClock()).sinks.metrics
    _happen(metrics)
    metrics.control.update({"decode": 1}, [("decode", "ready", 0)], [(1.0, "start")])
    return metrics.registry


def _happen(metrics: Metrics) -> None:
    metrics.ended("finished", Timings(1, 2, 3, 4, 5, 6, 7, 8, 28), deterministic=True, tokens=3)
    metrics.refused(Overloaded("", 1.0))
    metrics.handed_over(1.0, 1, "shm")


def worker_registry(info: WorkerInfo = INFO) -> CollectorRegistry:
    """Return a worker's registry."""
    metrics, counts = WorkerMetrics("one", __version__), Counts()
    counts.moved("sent", "shm", 1, 1, 1.0)
    load = Load(blocks=BlockCounts(8, 8), channels=(Channel("prefill-0", "gloo", 1.0, (LeftOut("shm", "reach"),)),))
    metrics.watch(Watched(info, 3.0, lambda: load, lambda: 0, lambda: 0.5, lambda: 1, counts))
    return metrics.registry


def gateway_registry() -> CollectorRegistry:
    """Return the registry of a separate gateway."""
    metrics = Metrics("one", __version__)
    _happen(metrics)
    return metrics.registry


def exported() -> dict[str, Family]:
    """Return the metrics of all processes, by name."""
    found: dict[str, Family] = {}
    made = {"router": router_registry(), "worker": worker_registry(), "gateway": gateway_registry()}
    for process, registry in made.items():
        for metric in registry.collect():
            family = found.setdefault(metric.name, Family(metric.name, metric.type, metric.documentation, set(), []))
            labels = {name for sample in metric.samples for name in sample.labels}
            family.labels |= (labels or set(vars(metric).get("_labelnames", ()))) - {"le"}
            if process not in family.processes:
                family.processes.append(process)
    return found


def tables() -> dict[str, str]:
    """Return the Markdown rows of each table, by its name."""
    return {"metrics": "".join(_metrics()), "labels": "".join(_labels())}


def _metrics() -> Iterator[str]:
    yield "| metric | type | labels | from | what |\n|---|---|---|---|---|\n"
    for family in sorted(exported().values(), key=lambda family: (":" in family.name, family.name)):
        labels = ", ".join(sorted(family.labels)) or "-"
        name = family.name + SHOWN.get(family.kind, "")
        yield f"| `{name}` | {family.kind} | {labels} | {', '.join(family.processes)} | {family.text} |\n"


def _labels() -> Iterator[str]:
    yield "| label | in | values |\n|---|---|---|\n"
    for name, (metrics, values) in sorted(_meanings(), key=lambda meaning: (meaning[0], meaning[1][0])):
        where = ", ".join(f"`{metric}`" for metric in metrics) or "all"
        shown = values if isinstance(values, str) else ", ".join(f"`{value}`" for value in values)
        yield f"| `{name}` | {where} | {shown} |\n"


def _meanings() -> Iterator[tuple[str, tuple[list[str], Values]]]:
    """Yield each label with the metrics that share one meaning (empty for all metrics) and its values there."""
    yield from ((name, ([], values)) for name, values in LABELS.items())
    families, grouped = exported(), dict[tuple[str, Values], list[str]]()
    for metric, own in OF_METRIC.items():
        shown = metric + SHOWN.get(families[metric].kind, "")
        for meaning in own.items():
            grouped.setdefault(meaning, []).append(shown)
    yield from ((name, (metrics, values)) for (name, values), metrics in grouped.items())


def filled(text: str) -> str:
    """Return the page with fresh tables."""
    for name, rows in tables().items():
        begin = BEGIN.format(name)
        before, _, rest = text.partition(begin)
        text = before + begin + rows + END + rest.partition(END)[2]
    return text


def main(arguments: Sequence[str]) -> int:
    """Write the page, or with --check return 1 if it is stale."""
    text = DOCS.read_text(encoding="utf-8")
    if "--check" not in arguments:
        DOCS.write_text(filled(text), encoding="utf-8")
        return 0
    if filled(text) != text:
        print(f"{DOCS.name} is not fresh: make fmt")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
