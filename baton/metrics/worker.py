"""The metrics of a worker process, read at a scrape from state that the worker keeps anyway."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.metrics_core import InfoMetricFamily, Metric, SummaryMetricFamily

from baton.core import Load, Thought, WorkerInfo
from baton.metrics import vllm_names
from baton.metrics.base import HANDOFFS, Scraped, blocks, counter, gauge, new_registry, transport_label, verifying

_LATE = 2 / 3  # share of the lease; unhealthy after that time without progress, before the worker is restarted
_SHOWN = 12  # digits of the fingerprint
_MOVED = (
    ("baton_moved_bytes", "KV bytes that this worker sent or received"),
    ("baton_moved_frames", "Frames that this worker sent; the sending worker counts those received"),
    ("baton_moved_seconds", "Sent: from the end of a prompt to the acknowledged commit; received: frames in flight"),
)


class Counts:
    """Counts that are in no load report. From any thread, a few times per request.

    At the prefill worker a handoff ends as pushed, failed (its KV waits for another attempt, or is computed again), or
    aborted (not needed). At the decode worker it ends as committed, or as fenced: no commit came or will be accepted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.handoffs: Counter[str] = Counter(dict.fromkeys(HANDOFFS, 0))
        self.thought_chunks = self.thought_tokens = 0
        # Bytes, frames and seconds by direction and transport.
        self.transfers: dict[tuple[str, str], tuple[float, float, float]] = {}

    def ended(self, outcome: str) -> None:
        with self._lock:
            self.handoffs[outcome] += 1

    def moved(self, direction: str, transport: str, nbytes: int, frames: int, seconds: float) -> None:
        key = direction, transport_label(transport)
        with self._lock:
            before = self.transfers.get(key, (0.0, 0.0, 0.0))
            self.transfers[key] = before[0] + nbytes, before[1] + frames, before[2] + seconds

    def thought(self, thoughts: Iterable[Thought]) -> None:
        """Count thoughts about chunks; recomputed ones count again."""
        for thought in thoughts:
            self.thought_chunks += 1
            self.thought_tokens += len(thought.token_ids)


@dataclass(frozen=True, slots=True)
class Watched:
    """The view of an incarnation for its metrics. Times in seconds."""

    info: WorkerInfo
    lease_s: float
    load: Callable[[], Load]
    preemptions: Callable[[], int]
    lease_age_s: Callable[[], float]  # since the last progress reported to the ledger
    routers: Callable[[], int]
    counts: Counts


class WorkerMetrics:
    """Created before the worker, because its registration contains their address; `watch` adds the worker."""

    def __init__(self, cluster: str, version: str) -> None:
        self.registry = new_registry(cluster, version)
        self._watched: Watched | None = None
        self.serving = False

    def watch(self, watched: Watched) -> None:
        """Export the metrics of an incarnation. Called once."""
        self._watched = watched
        self.registry.register(Scraped(lambda: families(watched)))

    def ready(self) -> bool:
        return self.serving and self._watched is not None and not self._watched.load().draining

    def trouble(self) -> str:
        """Return why a worker is unhealthy, or "": its engine thread makes no progress. A leaving one has no lease."""
        if self._watched is None or not self.serving:
            return ""
        age = self._watched.lease_age_s()
        return f"no progress for {age:.1f} s" if age > _LATE * self._watched.lease_s else ""


def families(watched: Watched) -> Iterable[Metric]:
    """Return all metrics of a worker, labelled with its id, and those of its engine as `vllm:*`."""
    info, load = watched.info, watched.load()
    worker = info.ref.worker_id
    about = InfoMetricFamily("baton_worker", "Identity of this worker")
    facts = {"role": info.role.value, "model": info.model, "fingerprint": info.fingerprint[:_SHOWN]}
    about.add_metric((), {"worker": worker, **facts})
    yield about
    yield blocks({info.role: [load.blocks]})
    for name, text, value in (
        ("baton_running_requests", "Requests in computation", load.running),
        ("baton_waiting_requests", "Requests that wait for a step or for blocks", load.waiting),
        ("baton_waiting_tokens", "Accepted prompt tokens that are not computed yet", load.queued_tokens),
        ("baton_draining", "1 while the worker drains and accepts no requests", load.draining),
        ("baton_routers", "Connected routers", watched.routers()),
        ("baton_lease_age_seconds", "Seconds since the last progress that renewed the lease", watched.lease_age_s()),
        ("baton_lease_seconds", "Seconds without progress until the worker counts as dead", watched.lease_s),
    ):
        yield gauge(name, text, ("worker",), [((worker,), value)])
    yield from _computing(worker, load)
    yield from verifying([(worker, load)])
    yield from _handing_over(worker, load, watched.counts)
    preempted = watched.preemptions()
    for name, text, count in (
        ("baton_preemptions", "Preempted requests, which lost their blocks to others", preempted),
        ("baton_thinking_chunks", "Chunks with computed thoughts", watched.counts.thought_chunks),
        ("baton_thinking_tokens", "Tokens of thoughts", watched.counts.thought_tokens),
    ):
        yield counter(name, text, ("worker",), [((worker,), count)])
    yield from vllm_names.engine(info, load, preempted)


def _computing(worker: str, load: Load) -> Iterable[Metric]:
    steps = SummaryMetricFamily("baton_step_seconds", "Time of engine steps by kind", labels=("worker", "kind"))
    for kind, pace in (("prefill", load.prefill_pace), ("decode", load.decode_pace), ("mixed", load.joint_pace)):
        steps.add_metric((worker, kind), pace.steps, pace.seconds)
    yield steps
    computed = (((worker, "prefill"), load.prefill_tokens), ((worker, "decode"), load.decode_tokens))
    yield counter("baton_computed_tokens", "Tokens computed by the model", ("worker", "kind"), computed)
    for name, text, count in (
        ("queries", "Prompt tokens that were computed or found in the cache", load.prefill_tokens + load.cached_tokens),
        ("hits", "Prompt tokens found in this worker's prefix cache", load.cached_tokens),
        ("fetches", "Prompt tokens whose KV was fetched from a decode worker", load.fetched_tokens),
    ):
        yield counter(f"baton_prefix_cache_{name}", text, ("worker",), [((worker,), count)])


def _handing_over(worker: str, load: Load, counts: Counts) -> Iterable[Metric]:
    rows = [((worker, outcome), float(count)) for outcome, count in counts.handoffs.items()]
    yield counter("baton_handoffs", "Handoffs by outcome at this worker", ("worker", "outcome"), rows)
    transfers = list(counts.transfers.items())  # another thread may add one
    for index, (name, text) in enumerate(_MOVED):
        of_it = [((worker, *key), values[index]) for key, values in transfers]
        yield counter(name, text, ("worker", "direction", "transport"), of_it)
    by_transport = Counter(transport_label(channel.transport) for channel in load.channels)
    open_ = [((worker, transport), float(count)) for transport, count in by_transport.items()]
    yield gauge("baton_channels", "Open data channels on which this worker sends", ("worker", "transport"), open_)
    left_out = Counter((transport_label(o.transport), o.reason) for channel in load.channels for o in channel.left_out)
    by_reason = [((worker, *key), float(count)) for key, count in left_out.items()]
    text = "Open data channels that do not use this better transport, by the reason"
    yield gauge("baton_channels_left_out", text, ("worker", "transport", "reason"), by_reason)
