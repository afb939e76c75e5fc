"""The served metrics of each kind of process: HTTP, both formats, names, labels with their values, and exemplars."""

import asyncio
from collections import defaultdict
from contextlib import suppress

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from baton.errors import ConfigError
from baton.metrics import Metrics, MetricsServer, http
from baton.metrics.http import render
from baton.metrics.router import exemplar_of
from baton.stages import Timings
from tests.support.time_factor import scaled
from tests.support.waiting import until
from tools import metric_docs
from tools.metric_docs import LABELS, OF_METRIC, values

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"
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
    assert b"vllm:" not in render(metric_docs.gateway_registry(), "")[1], "a gateway alone has none"


def test_labels_have_the_values_of_the_list_and_all_of_them_from_the_start():
    found = defaultdict(set)
    for metric in (metric for registry in REGISTRIES.values() for metric in registry().collect()):
        for sample in metric.samples:
            for label, value in sample.labels.items():
                allowed = values(sample.name, label)
                assert isinstance(allowed, str) or value in allowed, sample
                found[metric.name, label].add(value)
    of_metric = {(metric, label) for metric, own in OF_METRIC.items() for label in own}
    # Their series start with the first of its kind.
    wanted = of_metric - {("baton_refusals", "reason"), ("baton_channels_left_out", "reason")}
    assert {key: found[key] for key in wanted} == {key: set(values(*key)) for key in wanted}
    assert not LABELS.keys() & {label for _, label in of_metric}, "it is the same in all metrics or listed for each"
    with pytest.raises(KeyError):
        values("baton_kv_blocks", "outcome")


def test_the_page_lists_what_there_is_and_nothing_else(tmp_path, monkeypatch, capsys):
    assert metric_docs.main(["--check"]) == 0, capsys.readouterr().out
    stale = tmp_path / "metrics.md"
    stale.write_text(metric_docs.DOCS.read_text().replace("baton_fenced_total", "baton_fences_total"))
    monkeypatch.setattr(metric_docs, "DOCS", stale)
    assert metric_docs.main(["--check"]) == 1
    assert metric_docs.main([]) == metric_docs.main(["--check"]) == 0


def ended(exemplar):
    metrics = Metrics("one", "1", "m")
    metrics.gap(2.0, 1, {"request_id": "r-0"})
    metrics.gap(4.0, 2, exemplar)
    metrics.ended("finished", Timings(1, 1, 1, 1, 1, 1, 4, ttft_s=4, e2e_s=10), tokens=4, exemplar=exemplar)
    return metrics


def test_exemplars_are_in_openmetrics():
    found = samples(ended({"request_id": "r-1"}).registry, OPENMETRICS)
    for name, value in (("ttft", 4), ("e2e", 10), ("tpot", 2), ("itl", 2), ("generation", 6)):
        (one,) = (s.exemplar for s in found if s.name == f"baton_{name}_seconds_bucket" and s.exemplar)
        assert (one.labels, one.value) == ({"request_id": "r-1"}, value)
    stages = {
        s.labels["stage"]: s.exemplar.value for s in found if s.name == "baton_stage_seconds_bucket" if s.exemplar
    }
    assert stages["decode"] == 4
    assert set(stages.values()) == {1, 4}
    assert b"r-1" not in render(ended({"request_id": "r-1"}).registry, "")[1]


def test_what_is_too_long_for_an_exemplar_is_not_named():
    longest = 128 - len("request_id") - len("trace_id") - 32
    trace = "0123" * 8
    assert exemplar_of("x" * longest, trace) == {"request_id": "x" * longest, "trace_id": trace}
    assert exemplar_of("x" * (longest + 1), trace) is None
    found = samples(ended(exemplar_of("x" * longest, trace)).registry, OPENMETRICS)
    assert sum(s.exemplar is not None for s in found if s.name == "baton_ttft_seconds_bucket") == 1


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
async def test_the_http_endpoint(listen, request_line, status, body):
    ask = await listen(Metrics("x", "").registry, ready=lambda: False)
    answer = await ask(request_line)
    assert answer.startswith(f"HTTP/1.1 {status}\r\n")
    assert body in answer


async def test_a_request_that_never_ends_gets_no_answer(monkeypatch):
    monkeypatch.setattr(http, "MAX_METRICS_SECONDS", 0.1)
    server = MetricsServer(Metrics("x", "").registry)
    reader, writer = await asyncio.open_connection(*(await server.start("127.0.0.1:0")).split(":"))
    writer.write(b"GET /metrics HTTP/1.1\r\n")
    with suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), scaled(10)) == b""
    await until(lambda: not server._connections, "it holds no connection")
    writer.close()
    await server.stop()


async def test_a_request_that_is_too_long_gets_no_answer(listen):
    ask = await listen(Metrics("x", "").registry)
    assert not await ask(b"GET /" + b"x" * 20_000)
    assert "200 OK" in await ask(b"GET /ready HTTP/1.1")


async def test_a_scraper_that_reads_no_answer_holds_neither_memory_nor_a_connection(monkeypatch):
    size = 32 * 2**20  # more than the system's buffers take
    monkeypatch.setattr(http, "render", lambda registry, accept: ("text/plain", bytes(size)))
    monkeypatch.setattr(http, "MAX_METRICS_SECONDS", 0.2)
    server = MetricsServer(Metrics("x", "").registry)
    reader, writer = await asyncio.open_connection(*(await server.start("127.0.0.1:0")).split(":"), limit=1)
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    await reader.readexactly(8)
    await until(lambda: not server._connections, "it is given up")
    got = 0
    with suppress(ConnectionResetError):
        while more := await reader.read(2**20):
            got += len(more)
    assert got < size
    writer.close()
    await server.stop()


async def test_connections_beyond_the_limit_are_closed_without_an_answer(monkeypatch):
    monkeypatch.setattr(http, "MAX_METRICS_CONNECTIONS", 1)
    server = MetricsServer(Metrics("x", "").registry)
    address = (await server.start("127.0.0.1:0")).split(":")
    _, first = await asyncio.open_connection(*address)
    await until(lambda: server._connections == 1, "it is open")
    reader, second = await asyncio.open_connection(*address)
    second.write(b"GET /health HTTP/1.1\r\n\r\n")
    with suppress(ConnectionResetError):
        assert await reader.read() == b""
    first.close()
    await until(lambda: not server._connections, "it has left")
    reader, third = await asyncio.open_connection(*address)
    third.write(b"GET /health HTTP/1.1\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    for writer in (second, third):
        writer.close()
    await server.stop()


async def test_an_address_that_cannot_be_had():
    server = MetricsServer(Metrics("x", "").registry)
    address = await server.start("127.0.0.1:0")
    for wrong in (address, "127.0.0.1:x"):
        with pytest.raises(ConfigError, match=r"^metrics: cannot listen on"):
            await MetricsServer(Metrics("y", "").registry).start(wrong)
    await server.stop()
    await server.stop()


async def test_openmetrics_by_the_header(listen):
    ask = await listen(ended({"request_id": "r"}).registry)
    answer = await ask(b"GET /metrics HTTP/1.1\r\nACCEPT: " + OPENMETRICS.encode())
    assert "Content-Type: application/openmetrics-text; version=1.0.0" in answer
    assert answer.endswith("# EOF\n")
    assert "# EOF" not in await ask(b"GET /metrics HTTP/1.1")
