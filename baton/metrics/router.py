"""The metrics of a router, or of a gateway alone. They include those of the controller, which has no listener."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

from baton.core import BlockCounts, Channel, Load, Role
from baton.errors import BatonError
from baton.metrics import base, vllm_names
from baton.metrics.promises import promises
from baton.stages import Timings


class Controlled:
    """The controller's last report, or nothing without a controller. Every router exports the same: take the max."""

    def __init__(self) -> None:
        self._planned: Mapping[str, int] = {}
        self._slots: Sequence[tuple[str, str, int]] = ()
        self._decided: Counts[str] = Counts(dict.fromkeys(base.DECISIONS, 0))
        self._seen: float | None = None  # time of the last decision

    def clear(self) -> None:
        """Clear the state, because no controller is there."""
        self._planned, self._slots = {}, ()

    def update(
        self, planned: Mapping[str, int], slots: Sequence[tuple[str, str, int]], decisions: Sequence[tuple[float, str]]
    ) -> None:
        """Store workers by role and slots (role, state, restarts). Count decisions after those of the first call."""
        self._planned, self._slots = planned, slots
        for at, kind in decisions:
            if self._seen is not None and at > self._seen:
                self._decided[kind] += 1
        self._seen = max((at for at, _ in decisions), default=self._seen or 0.0)

    def collect(self) -> Iterable[Metric]:
        planned = [((role,), float(count)) for role, count in self._planned.items()]
        yield base.gauge("baton_planned_workers", "Planned number of workers", ("role",), planned)
        slots = {(role, state): 0.0 for role in self._planned for state in base.SLOT_STATES}
        restarts = dict.fromkeys(((role,) for role in self._planned), 0.0)
        for role, state, count in self._slots:
            slots[role, state] = slots.get((role, state), 0.0) + 1
            restarts[(role,)] = restarts.get((role,), 0.0) + count
        yield base.gauge(
            "baton_slots", "Worker slots by their state at the controller", ("role", "state"), slots.items()
        )
        text = "Restarts of workers in the present slots"
        yield base.gauge("baton_slot_restarts", text, ("role",), restarts.items())
        rows = [((kind,), float(count)) for kind, count in self._decided.items()]
        yield base.counter("baton_decisions", "Decisions of the controller since this router started", ("kind",), rows)


_MAX_EXEMPLAR_CHARS = 128  # names and values together


def exemplar_of(request_id: str, trace_id: str) -> dict[str, str] | None:
    """Return the exemplar labels of a request, or None if they exceed the 128 characters that OpenMetrics allows."""
    labels = {"trace_id": trace_id, "request_id": request_id}
    return labels if sum(len(name) + len(value) for name, value in labels.items()) <= _MAX_EXEMPLAR_CHARS else None


class Metrics:
    """The metrics of one process, in its own registry. In seconds and bytes, as Prometheus expects. `model`: the model
    served, for the `vllm:*` names. Empty for a gateway alone, because its router exports them.
    """

    def __init__(self, cluster: str, version: str, model: str = "") -> None:
        self.registry = base.new_registry(cluster, version)
        self.control = Controlled()
        self.registry.register(base.Scraped(self.control.collect))
        self._requests = self._counter("requests", "Requests by outcome", "outcome", base.OUTCOMES)
        text = "Deterministic requests by outcome"
        self._deterministic = self._counter("deterministic_requests", text, "outcome", base.OUTCOMES)
        self._refusals = self._counter("refusals", "Rejected requests by error class", "reason")
        text = "Finished requests by whether they met the SLO"
        self._slo = self._counter("slo", text, "met", ("true", "false"))
        text = "Attempts after the first, by the failure of the one before"
        self._recoveries = self._counter("recoveries", text, "reason", base.RECOVERIES)
        self._fenced = self._counter("fenced", "Attempts fenced at a decode worker")
        self._mismatches = self._counter("digest_mismatch", "Handoffs whose bytes changed in transit")
        self._bytes = self._counter("transfer_bytes", "KV bytes of committed handoffs", "transport")
        self._finished = Counts(dict.fromkeys(base.FINISHES, 0))
        self._prompts = self._counter("prompt_tokens", "Prompt tokens of requests that were placed on workers")
        self._cached = self._counter("cached_tokens", "Prompt tokens of finished requests found in a prefix cache")
        self._first_tokens = 0
        self._model = model
        self._make_histograms()
        self.registry.register(base.Scraped(self._counted))
        if model:
            self._also_as_vllm()

    def _counter(self, name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Counter:
        """Create a counter. `values` exist from the start, so that the first increment shows in a rate."""
        made = Counter(f"baton_{name}", text, (label,) if label else (), registry=self.registry)
        for value in values:
            made.labels(value)
        return made

    def _make_histograms(self) -> None:
        self._ttft = self._histogram("ttft_seconds", "Time from arrival to first token at the router")
        self._e2e = self._histogram("e2e_seconds", "Time from arrival to end")
        self._queue = self._histogram(
            "queue_seconds", "Time of parsing, and of the wait for a worker and capacity", base.STAGE_S
        )
        self._prefill = self._histogram("prefill_seconds", "Time from Prefill sent to first token at the router")
        text = "Time from the announcement of the first frame to the last frame in its blocks, at the decode worker"
        self._transfer = self._histogram("transfer_seconds", text, base.STAGE_S)
        text = "Time between the first token and its prediction, both counted from the choice of workers"
        self._prediction_error = self._histogram("ttft_prediction_error_seconds", text)
        self._generation = self._histogram("generation_seconds", "Time from first token at the router to the end")
        self._tpot = self._histogram(
            "tpot_seconds", "Time per output token after the first, mean of a request", base.STEP_S
        )
        self._prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of finished requests", base.TOKENS)
        self._output_size = self._histogram("request_output_tokens", "Output tokens of finished requests", base.TOKENS)
        text = "Time of finished requests in each stage"
        stages = Histogram("baton_stage_seconds", text, ("stage",), buckets=base.STAGE_S, registry=self.registry)
        self._stages = {stage: stages.labels(stage) for stage in base.STAGES}
        self._itl = base.Gaps("baton_itl_seconds", "Time between two output tokens", base.STEP_S)
        self.registry.register(self._itl)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = base.LATENCY_S) -> Histogram:
        return Histogram(f"baton_{name}", text, buckets=buckets, registry=self.registry)

    def _counted(self) -> Iterable[Metric]:
        """Return counters that change too often for a counter with a lock."""
        yield base.counter(
            "baton_output_tokens", "Tokens sent to clients", (), [((), self._itl.count + self._first_tokens)]
        )
        rows = [((reason,), float(count)) for reason, count in self._finished.items()]
        yield base.counter("baton_finished_choices", "Finished choices by reason", ("reason",), rows)

    def _also_as_vllm(self) -> None:
        output = base.Scraped(lambda: [metric for metric in self._counted() if metric.name == "baton_output_tokens"])
        sources = (
            ("time_to_first_token_seconds", self._ttft),
            ("inter_token_latency_seconds", self._itl),
            ("time_per_output_token_seconds", self._itl),  # its old name
            ("request_time_per_output_token_seconds", self._tpot),
            ("e2e_request_latency_seconds", self._e2e),
            ("request_queue_time_seconds", self._queue),
            ("request_prefill_time_seconds", self._prefill),
            ("request_decode_time_seconds", self._generation),
            ("request_prompt_tokens", self._prompt_size),
            ("request_generation_tokens", self._output_size),
            ("prompt_tokens", self._prompts),
            ("generation_tokens", output),
        )
        self.registry.register(vllm_names.Renamed(self._model, sources))
        self.registry.register(base.Scraped(lambda: [vllm_names.success(self._model, self._finished)]))

    # --- read at a scrape ----------------------------------------------------------------------------------------

    def watch_blocks(self, read: Callable[[], Mapping[Role, Iterable[BlockCounts]]]) -> None:
        """Export `read()` at each scrape as `baton_kv_blocks{role,state}` and `baton_workers{role}`."""

        def families() -> Iterable[Metric]:
            by_role = {role: list(workers) for role, workers in read().items()}
            connected = [((role.value,), float(len(workers))) for role, workers in by_role.items()]
            yield base.blocks(by_role)
            yield base.gauge("baton_workers", "Workers connected to this router", ("role",), connected)

        self.registry.register(base.Scraped(families))

    def watch_channels(self, read: Callable[[], Iterable[tuple[str, Channel]]]) -> None:
        """Export `read()` at each scrape as `baton_channel_bytes_per_second{worker,peer,transport}`."""
        name, text = "baton_channel_bytes_per_second", "Bytes per second in the probe of an open data channel"

        def families() -> Iterable[Metric]:
            fastest: dict[tuple[str, str, str], float] = {}  # two may exist for a moment
            for worker, channel in read():
                key = worker, channel.peer, base.transport_label(channel.transport)
                fastest[key] = max(channel.bytes_per_s, fastest.get(key, 0.0))
            yield base.gauge(name, text, ("worker", "peer", "transport"), fastest.items())

        self.registry.register(base.Scraped(families))

    def watch_verifying(self, read: Callable[[], Iterable[tuple[str, Load]]]) -> None:
        """Export verify passes, rollbacks and recomputed tokens of `read()` at each scrape, with the label `worker`."""
        self.registry.register(base.Scraped(lambda: base.verifying(read())))

    def watch_promises(self, outcomes: Mapping[str, int], bins: Mapping[str, Mapping[int, int]]) -> None:
        """Export `baton_promises` and `baton_promise_calibration` at each scrape."""
        self.registry.register(base.Scraped(lambda: promises(outcomes, bins)))

    def watch_queue(self, requests: Callable[[], float], tokens: Callable[[], float]) -> None:
        """Export the queue at each scrape as `baton_queued_requests` and `baton_queued_tokens`."""
        gauges = []
        for what, read in (("requests", requests), ("tokens", tokens)):
            made = Gauge(f"baton_queued_{what}", f"Queued for capacity, in {what}", registry=self.registry)
            made.set_function(read)
            gauges.append(made)
        if self._model:
            self.registry.register(vllm_names.Renamed(self._model, [("num_requests_waiting", gauges[0])]))

    # --- events --------------------------------------------------------------------------------------------------

    def ended(
        self,
        outcome: str,
        timings: Timings | None = None,
        *,
        deterministic: bool = False,
        tokens: int = 0,
        staged: bool = True,
        exemplar: dict[str, str] | None = None,
    ) -> None:
        """Count the end of a request: finished | cancelled | failed | refused. Finished ones also have `timings` and
        the number of output `tokens` in them. `staged`: observe the stages, too. `exemplar`: see `exemplar_of`.
        """
        self._requests.labels(outcome).inc()
        if deterministic:
            self._deterministic.labels(outcome).inc()
        if timings is None:
            return
        for histogram, seconds in (
            (self._e2e, timings.e2e_s),
            (self._queue, timings.queue_s),
            (self._prefill, timings.prefill_s),
        ):
            histogram.observe(seconds, exemplar)
        for name, seconds in asdict(timings).items() if staged else ():
            if seconds > 0 and (stage := self._stages.get(name.removesuffix("_s"))) is not None:
                stage.observe(seconds, exemplar)
        if timings.ttft_s > 0:  # 0 if the answer has no token
            self._ttft.observe(timings.ttft_s, exemplar)
            self._generation.observe(timings.e2e_s - timings.ttft_s, exemplar)
        if tokens > 1:
            self._tpot.observe((timings.e2e_s - timings.ttft_s) / (tokens - 1), exemplar)

    def accepted(self, prompt_tokens: int) -> None:
        """Count the prompt of a request that got workers for the first time."""
        self._prompts.inc(prompt_tokens)

    def used(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        self._prompt_size.observe(prompt_tokens)
        self._output_size.observe(completion_tokens)
        self._cached.inc(cached_tokens)

    def finished(self, reason: str) -> None:
        """Count a finished choice; `reason` is a `FinishReason`."""
        self._finished[reason] += 1

    def kept_slo(self, *, met: bool) -> None:
        """Count a finished request by whether it met `slo.ttft_ms` and `slo.itl_ms`."""
        self._slo.labels(str(met).lower()).inc()

    def ttft_predicted(self, off_s: float) -> None:
        """Record the error of a TTFT prediction, early or late."""
        self._prediction_error.observe(off_s)

    def refused(self, error: BatonError) -> None:
        """Count a rejected request by the class of its error."""
        self._refusals.labels(type(error).__name__).inc()

    def first(self, tokens: int) -> None:
        self._first_tokens += tokens

    def gap(self, seconds: float, tokens: int, exemplar: dict[str, str] | None = None) -> None:
        """Record `tokens` tokens that came `seconds` after the one before, as gaps of equal length."""
        self._itl.observe(seconds / tokens, tokens, exemplar)

    def handed_over(self, transfer_s: float, kv_bytes: int, transport: str) -> None:
        """Count a committed handoff. `transfer_s` is measured by the decode worker: first frame to last."""
        self._transfer.observe(transfer_s)
        self._bytes.labels(base.transport_label(transport)).inc(kv_bytes)

    def recovery(self, reason: str) -> None:
        """Count another attempt; `reason` is from a fixed set."""
        self._recoveries.labels(reason).inc()

    def fenced(self) -> None:
        """Count a fence that a decode worker confirmed: it will never accept a commit of that attempt."""
        self._fenced.inc()

    def digest_mismatch(self) -> None:
        """Count a handoff that failed because its bytes changed in transit."""
        self._mismatches.inc()
