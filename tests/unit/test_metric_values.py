"""Values of the metrics of each kind of process, as a scrape reads them."""

import asyncio
from dataclasses import replace

from prometheus_client import generate_latest

from baton import __version__
from baton.core import BlockCounts, Channel, LeftOut, Load, Pace, Role, Thought
from baton.errors import Overloaded
from baton.metrics import Metrics
from baton.metrics.worker import Counts, Watched, WorkerMetrics
from baton.stages import Timings
from tools import metric_docs
from tools.metric_docs import LABELS


def value(registry, name, **labels):
    """Return the value of one sample, or None if the registry has no such sample."""
    return registry.get_sample_value(name, labels)


def test_an_answer_without_a_token_is_no_first_token_in_no_time():
    metrics = Metrics("local", "1.2")
    metrics.ended("finished", Timings(1, 0, 0, 2, 0, 0, 0, ttft_s=0.0, e2e_s=3))
    metrics.ended("finished", Timings(1, 0, 0, 2, 0, 0, 0, ttft_s=3.0, e2e_s=3), tokens=1)
    counts = [value(metrics.registry, f"baton_{name}_seconds_count") for name in ("ttft", "generation", "e2e")]
    assert counts == [1, 1, 2]


def test_metrics_have_the_names_that_dashboards_read():
    metrics = Metrics("local", "1.2")
    blocks = [BlockCounts(10, 4, 1, 2, 0, 3), BlockCounts(10, 10)]
    metrics.watch_blocks(lambda: {Role.PREFILL: [], Role.DECODE: blocks})
    metrics.watch_queue(lambda: 3, lambda: 70)
    metrics.ended("finished", Timings(1, 0, 0, 2, 3, 0, 0, ttft_s=2.5, e2e_s=6))
    metrics.ended("cancelled")
    metrics.refused(Overloaded("no", 1))
    metrics.recovery("preempted")
    metrics.fenced()
    metrics.digest_mismatch()
    metrics.handed_over(0.5, 4096, "gloo")
    metrics.gap(0.2, 4)
    metrics.ttft_predicted(0.03)
    metrics.kept_slo(met=True)
    metrics.kept_slo(met=False)
    text = generate_latest(metrics.registry).decode()
    for line in (
        'baton_requests_total{outcome="finished"} 1.0',
        'baton_requests_total{outcome="cancelled"} 1.0',
        'baton_refusals_total{reason="Overloaded"} 1.0',
        'baton_recoveries_total{reason="preempted"} 1.0',
        "baton_fenced_total 1.0",
        'baton_slo_total{met="true"} 1.0',
        'baton_slo_total{met="false"} 1.0',
        "baton_digest_mismatch_total 1.0",
        'baton_transfer_bytes_total{transport="gloo"} 4096.0',
        "baton_ttft_seconds_sum 2.5",
        "baton_e2e_seconds_sum 6.0",
        "baton_queue_seconds_sum 1.0",
        "baton_prefill_seconds_sum 2.0",
        "baton_transfer_seconds_sum 0.5",
        'baton_itl_seconds_bucket{le="0.05"} 4.0',
        'baton_ttft_prediction_error_seconds_bucket{le="0.05"} 1.0',
        'baton_kv_blocks{role="decode",state="free"} 14.0',
        'baton_kv_blocks{role="decode",state="owned"} 2.0',
        'baton_kv_blocks{role="decode",state="quarantined"} 3.0',
        'baton_kv_blocks{role="prefill",state="free"} 0.0',
        'baton_workers{role="decode"} 2.0',
        "baton_queued_requests 3.0",
        "baton_queued_tokens 70.0",
        'baton_workers{role="prefill"} 0.0',
        'baton_build_info{cluster="local",version="1.2"} 1.0',
    ):
        assert line in text


def test_what_workers_did_for_deterministic_requests():
    metrics = Metrics("test", "0")
    loads = [("decode-0", Load(verify_passes=3, rollbacks=2, recomputed_tokens=40)), ("decode-1", Load())]
    loads[0][1].speculated_tokens, loads[0][1].accepted_tokens = 9, 6
    metrics.watch_verifying(lambda: loads)
    metrics.ended("finished", deterministic=True)
    metrics.ended("finished")
    lines = generate_latest(metrics.registry).decode().splitlines()
    assert {
        'baton_verify_passes_total{worker="decode-0"} 3.0',
        'baton_rollbacks_total{worker="decode-0"} 2.0',
        'baton_recomputed_tokens_total{worker="decode-0"} 40.0',
        'baton_speculated_tokens_total{worker="decode-0"} 9.0',
        'baton_accepted_tokens_total{worker="decode-0"} 6.0',
        'baton_verify_passes_total{worker="decode-1"} 0.0',
        'baton_deterministic_requests_total{outcome="finished"} 1.0',
        'baton_requests_total{outcome="finished"} 2.0',
    } <= set(lines)
    loads.pop()
    assert "decode-1" not in generate_latest(metrics.registry).decode(), "a lost worker leaves no ghost"


def test_two_processes_in_one_interpreter_share_nothing():
    first, second = Metrics("a", ""), Metrics("b", "")
    first.fenced()
    assert value(second.registry, "baton_fenced_total") == 0


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
    channels=(
        *(Channel(f"decode-{n}", "shm", 1.0) for n in range(2)),
        *(Channel(f"decode-{n}", "made up", 1.0, (LeftOut("shm", "reach"), LeftOut("?", "peer"))) for n in range(3)),
    ),
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
    assert value(registry, "baton_channels", transport="unknown", **me) == 3
    assert value(registry, "baton_channels_left_out", transport="shm", reason="reach", **me) == 3
    assert value(registry, "baton_channels_left_out", transport="unknown", reason="peer", **me) == 3
    engine = {"model_name": "m", "engine": "0"}
    assert value(registry, "vllm:kv_cache_usage_perc", **engine) == 0.5
    assert value(registry, "vllm:prefix_cache_hits_total", **engine) == 40
    assert value(registry, "vllm:cache_config_info", block_size="16", num_gpu_blocks="8", **engine) == 1


async def test_health_looks_beyond_the_loop(listen):
    worker = Worker()
    ask = await listen(worker.metrics.registry, ready=worker.metrics.ready, trouble=worker.metrics.trouble)

    async def says(path):
        return (await ask(b"GET %s HTTP/1.1" % path)).split("\r\n")[0].split(" ")[1]

    assert [await says(path) for path in (b"/health", b"/ready")] == ["200", "200"]
    worker.age = 2.5
    assert "no progress for 2.5 s" in await ask(b"GET /health HTTP/1.1")
    assert [await says(path) for path in (b"/health", b"/ready")] == ["503", "200"]
    worker.age, worker.load = 0.0, replace(LOAD, draining=True)
    assert [await says(path) for path in (b"/health", b"/ready")] == ["200", "503"]
    worker.load, worker.metrics.serving = LOAD, False
    worker.age = 2.5  # it leaves, and renews no lease
    assert [await says(path) for path in (b"/health", b"/ready")] == ["200", "503"]
    assert await says(b"/targets") == "404"


async def test_counts_from_many_threads():
    counts = Counts()

    def count():
        for _ in range(2000):
            counts.ended("committed")
            counts.moved("received", "shm", 1, 1, 0.0)

    await asyncio.gather(*(asyncio.to_thread(count) for _ in range(4)))
    assert counts.handoffs["committed"] == 8000
    assert counts.transfers == {("received", "shm"): (8000, 8000, 0.0)}
