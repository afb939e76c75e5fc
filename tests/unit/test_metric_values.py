"""Values of the metrics of each kind of process, as a scrape reads them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from baton import __version__
from baton.core import BlockCounts, Channel, Load, Pace, Thought
from baton.metrics import Metrics, MetricsServer
from baton.metrics.worker import Counts, Watched, WorkerMetrics
from baton.stages import Timings
from tests.unit.test_telemetry import ask
from tools import metric_docs
from tools.metric_docs import LABELS


def value(registry, name, **labels):
    """Return the value of one sample, or None if the registry has no such sample."""
    return registry.get_sample_value(name, labels)


def test_stages_that_were_not_passed_are_not_observed():
    metrics = Metrics("one", "1")
    metrics.ended("finished", Timings(1, 2, 0, 4, 0, 0, 8, ttft_s=7, e2e_s=15), tokens=1)
    counts = {stage: value(metrics.registry, "baton_stage_seconds_count", stage=stage) for stage in LABELS["stage"]}
    passed = {"queue", "route", "prefill", "decode"}
    assert counts == {stage: float(stage in passed) for stage in LABELS["stage"]}
    sums = sum(value(metrics.registry, "baton_stage_seconds_sum", stage=stage) for stage in LABELS["stage"])
    assert sums == value(metrics.registry, "baton_e2e_seconds_sum") == 15
    assert value(metrics.registry, "baton_tpot_seconds_count") == 0, "one token has no next one"


def test_vllm_names_repeat_what_requests_were():
    metrics = Metrics("one", "1", "tiny")
    metrics.watch_queue(lambda: 5, lambda: 0)
    metrics.ended("finished", Timings(1, 0, 0, 2, 0, 0, 3, ttft_s=3, e2e_s=6), tokens=4)
    metrics.accepted(100)
    metrics.used(100, 20, 4)
    metrics.first(1)
    metrics.gap(0.3, 3)
    for reason in ("eos", "stop_string", "length"):
        metrics.finished(reason)
    labels = {"model_name": "tiny", "engine": "0"}
    for name, expected in (
        ("num_requests_waiting", 5),
        ("time_to_first_token_seconds_sum", 3),
        ("request_decode_time_seconds_sum", 3),
        ("request_time_per_output_token_seconds_sum", 1),
        ("request_queue_time_seconds_sum", 1),
        ("inter_token_latency_seconds_count", 3),
        ("prompt_tokens_total", 100),
        ("generation_tokens_total", 4),
        ("request_generation_tokens_sum", 4),
    ):
        assert value(metrics.registry, f"vllm:{name}", **labels) == expected, name
    for reason, count in (("stop", 2), ("length", 1)):
        assert value(metrics.registry, "vllm:request_success_total", finished_reason=reason, **labels) == count


def test_control_is_said_and_counted_once():
    metrics = Metrics("one", "1")
    slots = [("decode", "ready", 2), ("decode", "starting", 1)]
    metrics.control.update({"prefill": 1, "decode": 2}, slots, [(1.0, "plan")])
    for _ in range(2):
        metrics.control.update({"prefill": 1, "decode": 2}, slots, [(1.0, "plan"), (2.0, "start"), (3.0, "start")])
    assert value(metrics.registry, "baton_slots", role="decode", state="ready") == 1
    assert value(metrics.registry, "baton_slots", role="prefill", state="ready") == 0
    assert value(metrics.registry, "baton_slot_restarts", role="decode") == 3
    assert value(metrics.registry, "baton_planned_workers", role="decode") == 2
    assert value(metrics.registry, "baton_decisions_total", kind="start") == 2
    assert value(metrics.registry, "baton_decisions_total", kind="plan") == 0, "it was decided before this router was"
    metrics.control.clear()
    assert value(metrics.registry, "baton_planned_workers", role="decode") is None


LOAD = Load(
    running=3,
    waiting=2,
    queued_tokens=77,
    prefill_tokens=60,
    cached_tokens=40,
    decode_tokens=9,
    blocks=BlockCounts(10, free=2, owned=3, cached=3, reserved=1, quarantined=1),
    fetched_tokens=16,
    channels=(Channel("decode-0", "shm", 1.0), Channel("decode-1", "shm", 1.0), Channel("decode-2", "made up", 1.0)),
    prefill_pace=Pace(2, 60, 0, 1.5),
    decode_pace=Pace(9, 9, 0, 0.5),
    verify_passes=4,
)


class Worker:
    """A worker's metrics with their sources."""

    def __init__(self):
        self.load, self.age, self.counts = LOAD, 0.1, Counts()
        self.metrics = WorkerMetrics("one", __version__)
        watched = Watched(metric_docs.INFO, 3.0, lambda: self.load, lambda: 6, lambda: self.age, lambda: 2, self.counts)
        self.metrics.watch(watched)
        self.metrics.serving = True

    def __getitem__(self, name):
        return value(self.metrics.registry, name, worker="decode-0")


def test_a_worker_says_what_it_does():
    worker = Worker()
    worker.counts.ended("committed")
    worker.counts.moved("received", "shm", 100, 0, 0.5)
    worker.counts.moved("received", "shm", 100, 0, 0.25)
    worker.counts.moved("sent", "carrier pigeon", 7, 1, 1.0)
    worker.counts.thought([Thought(0, (1, 2)), Thought(1, ())])
    for name, expected in (
        ("baton_running_requests", 3),
        ("baton_waiting_requests", 2),
        ("baton_waiting_tokens", 77),
        ("baton_prefix_cache_queries_total", 100),
        ("baton_prefix_cache_hits_total", 40),
        ("baton_prefix_cache_fetches_total", 16),
        ("baton_preemptions_total", 6),
        ("baton_verify_passes_total", 4),
        ("baton_thinking_chunks_total", 2),
        ("baton_thinking_tokens_total", 2),
        ("baton_lease_age_seconds", 0.1),
        ("baton_routers", 2),
    ):
        assert worker[name] == expected, name
    registry, me = worker.metrics.registry, {"worker": "decode-0"}
    assert value(registry, "baton_kv_blocks", role="decode", state="cached") == 3
    assert value(registry, "baton_step_seconds_sum", kind="prefill", **me) == 1.5
    assert value(registry, "baton_step_seconds_count", kind="decode", **me) == 9
    assert value(registry, "baton_handoffs_total", outcome="committed", **me) == 1
    assert value(registry, "baton_moved_bytes_total", direction="received", transport="shm", **me) == 200
    assert value(registry, "baton_moved_seconds_total", direction="received", transport="shm", **me) == 0.75
    assert value(registry, "baton_moved_frames_total", direction="sent", transport="unknown", **me) == 1
    assert value(registry, "baton_channels", transport="shm", **me) == 2
    assert value(registry, "baton_channels", transport="unknown", **me) == 1
    engine = {"model_name": "m", "engine": "0"}
    assert value(registry, "vllm:kv_cache_usage_perc", **engine) == 0.5
    assert value(registry, "vllm:prefix_cache_hits_total", **engine) == 40
    assert value(registry, "vllm:cache_config_info", block_size="16", num_gpu_blocks="8", **engine) == 1


async def test_health_looks_beyond_the_loop():
    worker = Worker()
    server = MetricsServer(worker.metrics.registry, worker.metrics.ready, trouble=worker.metrics.trouble)
    address = await server.start("127.0.0.1:0")

    async def says(path):
        return (await ask(address, b"GET " + path + b" HTTP/1.1\r\n\r\n")).split("\r\n")[0].split(" ")[1]

    assert [await says(path) for path in (b"/health", b"/ready")] == ["200", "200"]
    worker.age = 2.5
    assert "no progress for 2.5 s" in await ask(address, b"GET /health HTTP/1.1\r\n\r\n")
    assert [await says(path) for path in (b"/health", b"/ready")] == ["503", "200"]
    worker.age, worker.load = 0.0, replace(LOAD, draining=True)
    assert [await says(path) for path in (b"/health", b"/ready")] == ["200", "503"]
    worker.load, worker.metrics.serving = LOAD, False
    assert await says(b"/ready") == "503"
    assert await says(b"/targets") == "404"
    await server.stop()


async def test_counts_from_many_threads():
    counts = Counts()

    def count():
        for _ in range(2000):
            counts.ended("committed")
            counts.moved("received", "shm", 1, 1, 0.0)

    await asyncio.gather(*(asyncio.to_thread(count) for _ in range(4)))
    assert counts.handoffs["committed"] == 8000
    assert counts.transfers == {("received", "shm"): (8000, 8000, 0.0)}
