"""The counters of a router, and the HTTP endpoint of every process."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import generate_latest

from baton.core import BlockCounts, Load, Role
from baton.errors import ConfigError, Overloaded
from baton.metrics import Metrics, MetricsServer
from baton.stages import Timings


def test_an_answer_without_a_token_is_no_first_token_in_no_time():
    metrics = Metrics("local", "1.2")
    metrics.ended("finished", Timings(1, 0, 0, 2, 0, 0, 0, ttft_s=0.0, e2e_s=3))
    metrics.ended("finished", Timings(1, 0, 0, 2, 0, 0, 0, ttft_s=3.0, e2e_s=3), tokens=1)
    text = generate_latest(metrics.registry).decode()
    counts = [f"baton_{name}_seconds_count {count}.0" for name, count in (("ttft", 1), ("generation", 1), ("e2e", 2))]
    assert all(line in text.splitlines() for line in counts), text


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
    metrics.watch_verifying(lambda: loads)
    metrics.ended("finished", deterministic=True)
    metrics.ended("finished")
    lines = generate_latest(metrics.registry).decode().splitlines()
    assert {
        'baton_verify_passes_total{worker="decode-0"} 3.0',
        'baton_rollbacks_total{worker="decode-0"} 2.0',
        'baton_recomputed_tokens_total{worker="decode-0"} 40.0',
        'baton_verify_passes_total{worker="decode-1"} 0.0',
        'baton_deterministic_requests_total{outcome="finished"} 1.0',
        'baton_requests_total{outcome="finished"} 2.0',
    } <= set(lines)
    loads.pop()
    assert "decode-1" not in generate_latest(metrics.registry).decode(), "a lost worker leaves no ghost"


def test_two_processes_in_one_interpreter_share_nothing():
    first, second = Metrics("a", ""), Metrics("b", "")
    first.fenced()
    assert "baton_fenced_total 0.0" in generate_latest(second.registry).decode()


async def ask(address: str, request: bytes) -> str:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(request)
    try:
        return (await reader.read()).decode()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        (b"GET /metrics HTTP/1.1", "200 OK", "baton_fenced_total"),
        (b"GET /metrics?name[]=x HTTP/1.1", "200 OK", "baton_fenced_total"),
        (b"GET /health HTTP/1.1", "200 OK", "ok"),
        (b"GET /ready HTTP/1.1", "503 Service Unavailable", "not ready"),
        (b"GET / HTTP/1.1", "404 Not Found", "/metrics"),
        (b"POST /metrics HTTP/1.1", "405 Method Not Allowed", "GET only"),
        (b"\xff\xfe", "405 Method Not Allowed", "GET only"),
    ],
)
async def test_the_http_endpoint(request_line, status, body):
    server = MetricsServer(Metrics("x", "").registry, ready=lambda: False)
    address = await server.start("127.0.0.1:0")
    answer = await ask(address, request_line + b"\r\nHost: x\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status}\r\n")
    assert body in answer
    await server.stop()
    await server.stop()


async def test_a_request_that_never_ends_or_is_too_long_gets_no_answer():
    server = MetricsServer(Metrics("x", "").registry)
    address = await server.start("127.0.0.1:0")
    assert not await ask(address, b"GET /" + b"x" * 20_000 + b"\r\n\r\n")
    assert "200 OK" in await ask(address, b"GET /ready HTTP/1.1\r\n\r\n")
    await server.stop()


async def test_an_address_that_cannot_be_had():
    server = MetricsServer(Metrics("x", "").registry)
    address = await server.start("127.0.0.1:0")
    for wrong in (address, "127.0.0.1:x"):
        with pytest.raises(ConfigError, match="cannot listen for metrics"):
            await MetricsServer(Metrics("y", "").registry).start(wrong)
    await server.stop()
