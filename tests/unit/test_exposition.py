"""What is served of the metrics of each kind of process: both formats, their names, labels and exemplars."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from baton import __version__
from baton.core import Thought
from baton.errors import EngineFault
from baton.load import BlockCounts, Channel, Load, Pace
from baton.stages import Timings
from baton.telemetry import Metrics, MetricsServer
from baton.telemetry.labels import LABELS, values
from baton.telemetry.serve import render
from baton.telemetry.worker import Counts, Watched, WorkerMetrics
from tests.unit.test_telemetry import ask
from tools import metric_docs

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"
# interfaces.md: by name, the labels
PROMISED = {
    "baton_requests_total": {"outcome"},
    "baton_ttft_seconds": set(),
    "baton_itl_seconds": set(),
    "baton_e2e_seconds": set(),
    "baton_queue_seconds": set(),
    "baton_prefill_seconds": set(),
    "baton_transfer_seconds": set(),
    "baton_transfer_bytes_total": {"transport"},
    "baton_kv_blocks": {"role", "state"},
    "baton_recoveries_total": {"reason"},
    "baton_fenced_total": set(),
    "baton_digest_mismatch_total": set(),
    "baton_verify_passes_total": {"worker"},
    "baton_rollbacks_total": {"worker"},
    "baton_refusals_total": {"reason"},
}
# What vLLM's own board (examples/observability/prometheus_grafana) and the routers and autoscalers around it ask for.
READ_BY_OTHERS = [
    "e2e_request_latency_seconds_bucket",
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "prompt_tokens_total",
    "request_decode_time_seconds_sum",
    "request_generation_tokens_bucket",
    "request_prefill_time_seconds_sum",
    "request_prompt_tokens_bucket",
    "request_queue_time_seconds_sum",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
]
REGISTRIES = {
    "router": metric_docs.router_registry,
    "worker": metric_docs.worker_registry,
    "gateway": metric_docs.gateway_registry,
}


def samples(registry, accept=""):
    _, text = render(registry, accept)
    parse = parse_openmetrics if accept else parse_text
    return [sample for family in parse(text.decode()) for sample in family.samples]


@pytest.mark.parametrize("accept", ["", OPENMETRICS], ids=["text", "openmetrics"])
@pytest.mark.parametrize("process", REGISTRIES)
def test_both_formats_are_valid_and_name_the_same(process, accept):
    registry = REGISTRIES[process]()
    found = samples(registry, accept)
    keys = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in found]
    assert len(keys) == len(set(keys)), "each series once"
    known = {name for family in metric_docs.exported().values() for name in family.samples}
    assert {name for name, _ in keys if not name.endswith("_created")} <= known
    assert {sample.name for sample in samples(registry)} == {name for name, _ in keys}


def test_openmetrics_keeps_the_colon():
    content_type, text = render(metric_docs.worker_registry(), OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    assert b'\nvllm:num_requests_running{engine="0",model_name="m"} 0.0\n' in text
    assert b"vllm_" not in text


@pytest.mark.parametrize("process", REGISTRIES)
def test_labels_and_their_values_are_those_of_the_list(process):
    for sample in samples(REGISTRIES[process]()):
        for name, value in sample.labels.items():
            allowed = values(sample.name, name)
            assert isinstance(allowed, str) or value in allowed, sample


def test_what_is_promised_is_there():
    found = metric_docs.exported()
    names = {family.name + metric_docs.SHOWN.get(family.kind, ""): family.labels for family in found.values()}
    assert {name: names.get(name) for name in PROMISED} == PROMISED
    sampled = {name for family in found.values() for name in family.samples}
    assert [name for name in READ_BY_OTHERS if f"vllm:{name}" not in sampled] == []


def test_the_page_lists_what_there_is(capsys):
    assert metric_docs.main(["--check"]) == 0, capsys.readouterr().out


def test_the_check_notices(tmp_path, monkeypatch):
    stale = tmp_path / "metrics.md"
    stale.write_text(metric_docs.DOCS.read_text().replace("baton_fenced_total", "baton_fences_total"))
    monkeypatch.setattr(metric_docs, "DOCS", stale)
    assert metric_docs.main(["--check"]) == 1
    assert metric_docs.main([]) == metric_docs.main(["--check"]) == 0


def ended(exemplar):
    metrics = Metrics("one", "1", "m")
    metrics.ended("finished", Timings(1, 1, 1, 1, 1, 1, 4, ttft_s=4), tokens=4, exemplar=exemplar)
    return metrics


def test_exemplars_are_in_openmetrics():
    found = samples(ended({"request_id": "r-1"}).registry, OPENMETRICS)
    for name, value in (("ttft", 4), ("e2e", 10), ("tpot", 2)):
        (one,) = (s.exemplar for s in found if s.name == f"baton_{name}_seconds_bucket" and s.exemplar)
        assert (one.labels, one.value) == ({"request_id": "r-1"}, value)
    assert b"r-1" not in render(ended({"request_id": "r-1"}).registry, "")[1]


def test_an_exemplar_that_is_too_long_is_none():
    longest = 128 - len("request_id")
    for length, count in ((longest, 1), (longest + 1, 0)):
        found = samples(ended({"request_id": "x" * length}).registry, OPENMETRICS)
        assert sum(s.name == "baton_ttft_seconds_bucket" and s.exemplar is not None for s in found) == count


def value(registry, name, **labels):
    """Of one sample; None: it is not there."""
    return registry.get_sample_value(name, labels)


def test_stages_that_were_not_passed_are_not_observed():
    metrics = Metrics("one", "1")
    metrics.ended("finished", Timings(1, 2, 0, 4, 0, 0, 8, ttft_s=7), tokens=1)
    counts = {stage: value(metrics.registry, "baton_stage_seconds_count", stage=stage) for stage in LABELS["stage"]}
    passed = {"queue", "route", "prefill", "decode"}
    assert counts == {stage: float(stage in passed) for stage in LABELS["stage"]}
    sums = sum(value(metrics.registry, "baton_stage_seconds_sum", stage=stage) for stage in LABELS["stage"])
    assert sums == value(metrics.registry, "baton_e2e_seconds_sum") == 15
    assert value(metrics.registry, "baton_tpot_seconds_count") == 0, "one token has no next one"


def test_vllm_names_repeat_what_requests_were():
    metrics = Metrics("one", "1", "tiny")
    metrics.watch_queue(lambda: 5, lambda: 0)
    metrics.ended("finished", Timings(1, 0, 0, 2, 0, 0, 3, ttft_s=3), tokens=4)
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


def test_a_gateway_alone_has_no_vllm_names():
    assert b"vllm:" not in render(metric_docs.gateway_registry(), "")[1]


def test_control_is_said_and_counted_once():
    metrics = Metrics("one", "1")
    slots = [("decode", "ready", 2), ("decode", "starting", 1)]
    metrics.control.said({"prefill": 1, "decode": 2}, slots, [(1.0, "plan")])
    for _ in range(2):
        metrics.control.said({"prefill": 1, "decode": 2}, slots, [(1.0, "plan"), (2.0, "start"), (3.0, "start")])
    assert value(metrics.registry, "baton_slots", role="decode", state="ready") == 1
    assert value(metrics.registry, "baton_slots", role="prefill", state="ready") == 0
    assert value(metrics.registry, "baton_slot_restarts", role="decode") == 3
    assert value(metrics.registry, "baton_planned_workers", role="decode") == 2
    assert value(metrics.registry, "baton_decisions_total", kind="start") == 2
    assert value(metrics.registry, "baton_decisions_total", kind="plan") == 0, "it was decided before this router was"
    metrics.control.nobody()
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
    """Its metrics, and what they ask."""

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
    server = MetricsServer(worker.metrics, worker.metrics.ready, trouble=worker.metrics.trouble)
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


async def test_openmetrics_by_the_header():
    server = MetricsServer(ended({"request_id": "r"}))
    address = await server.start("127.0.0.1:0")
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nACCEPT: " + OPENMETRICS.encode() + b"\r\n\r\n"
    answer = await ask(address, request)
    assert "Content-Type: application/openmetrics-text; version=1.0.0" in answer
    assert answer.endswith("# EOF\n")
    assert "# EOF" not in await ask(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    await server.stop()


def test_a_refusal_is_counted_by_its_class_alone():
    metrics = Metrics("one", "1")
    before = len(samples(metrics.registry))
    for index in range(50):
        metrics.refused(EngineFault(f"words of a client {index}"))
    assert len(samples(metrics.registry)) == before + 2  # and when it was made


async def test_counts_from_many_threads():
    counts = Counts()

    def count():
        for _ in range(2000):
            counts.ended("committed")
            counts.moved("received", "shm", 1, 1, 0.0)

    await asyncio.gather(*(asyncio.to_thread(count) for _ in range(4)))
    assert counts.handoffs["committed"] == 8000
    assert counts.all_moved == [(("received", "shm"), (8000, 8000, 0.0))]
