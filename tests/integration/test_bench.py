"""`baton bench` against scripted servers, over gRPC and HTTP, as a user runs it."""

import asyncio
import json
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton import errors
from baton.bench.report import KIND
from baton.cli.exit_codes import exit_code
from tests.integration.access_support import TOKENS, tls_of, token_file
from tests.integration.gateway_support import Alone, tokens
from tests.support.clients import Talking, run, serving, soon
from tests.support.time_factor import scaled

ROOT = Path(__file__).parents[2]
SMALL = ("--prompt-tokens", 8, "--max-tokens", 3)


@pytest.fixture
async def server() -> AsyncIterator[Talking]:
    async with serving(Talking()) as made:
        yield made


def traced(folder: Path, *requests: dict[str, Any]) -> Path:
    trace = folder / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps(request)}\n" for request in requests))
    return trace


async def bench(server: Talking, *args: object) -> Any:
    done = await run("bench", "--target", server.address, *SMALL, "--json", *args)
    assert done.exception is None, done.exception
    return json.loads(done.stdout)


async def test_bench_keeps_so_many_requests_under_way(server: Talking):
    server.together = 4
    found = await bench(server, "--requests", 20, "--concurrency", 4, "--seed", 7, "--ttft-ms", 60000)
    assert (found["completed"], found["errors"], len(server.requests)) == (20, {}, 20)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (160, 60)
    assert server.most == 4
    assert 0 < found["ttft_ms"]["p50"] <= found["e2e_ms"]["p50"] <= found["seconds"] * 1e3
    assert (found["goodput"]["share"], found["plan"]["seed"]) == (1.0, 7)
    first = [list(request.token_ids.ids) for request in server.requests]
    await bench(server, "--requests", 20, "--concurrency", 1, "--seed", 7)
    assert sorted(first) == sorted(list(request.token_ids.ids) for request in server.requests[20:])
    assert (server.requests[0].sampling.ignore_eos, server.requests[0].sampling.max_tokens) == (True, 3)


async def test_bench_without_one_answer_fails(server: Talking):
    server.failing = True
    done = await run("bench", "--target", server.address, "--requests", 2, *SMALL)
    assert "0 requests completed, 2 failed" in done.stdout
    assert exit_code(done.exception) == 5
    done = await run("bench", "--target", "127.0.0.1:1", "--requests", 2)
    assert exit_code(done.exception) == 4
    done = await run("bench", "--target", server.address, "--rate", 1, "--arrivals", "constant", "--duration", 0.5)
    assert isinstance(done.exception, errors.ConfigError)
    assert "no request is due within 0.5 s" in str(done.exception)


async def test_ctrl_c_leaves_the_report_of_a_bench(server: Talking, tmp_path: Path):
    trace = traced(tmp_path, {"prompt": "a"}, {"prompt": "hang"})
    command = f"{sys.executable} -m baton bench --target {server.address} --trace {trace} --concurrency 1"
    process = await asyncio.create_subprocess_exec(*command.split(), cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    await soon(server.hanging.wait())
    process.send_signal(signal.SIGINT)
    out, _ = await soon(process.communicate())
    assert b"1 requests completed, 0 failed" in out
    assert process.returncode == 130


async def test_an_open_loop_sends_at_its_times_and_writes_what_it_saw(server: Talking, tmp_path: Path):
    out = tmp_path / "out.json"
    args = ("--rate", 100, "--arrivals", "constant", "--requests", 20, "--warmup", 3, "--deterministic-share", 1)
    found = await bench(server, *args, "--e2e-ms", 60000, "--out", out)
    assert (found["kind"], found["completed"], len(server.requests)) == (KIND, 20, 23)
    assert [request.deterministic for request in server.requests] == [False] * 3 + [True] * 20
    assert found["seconds"] >= 0.19
    assert found["generator"]["cpu_share"] > 0
    assert abs(found["began"] - time.time()) < 60
    assert found["generator"]["late_p99_s"] >= 0
    written = json.loads(out.read_text())
    samples = written.pop("samples")
    assert written == found
    assert sorted(sample["intended_at_s"] for sample in samples) == pytest.approx([each / 100 for each in range(20)])
    for sample in samples:
        assert sample["intended_at_s"] <= sample["sent_at_s"]
        assert 0 < sample["ttft_s"] <= sample["ttft_s"] + sum(sample["gaps_s"]) <= sample["e2e_s"] + 1e-5
        assert (sample["gap_tokens"], sample["new_tokens"], sample["error"]) == ([1, 1], 3, "")


async def test_what_would_be_too_many_at_once_is_not_sent(server: Talking, tmp_path: Path):
    trace = traced(tmp_path, *[{"prompt": "hang"}] * 5)
    args = ("--trace", trace, "--rate", 1000, "--max-in-flight", 2, "--timeout", scaled(2), "--json")
    done = await run("bench", "--target", server.address, *args)
    assert json.loads(done.stdout)["errors"] == {"NotSent": 3, "DeadlineExceeded": 2}
    assert len(server.requests) == 2
    assert isinstance(done.exception, errors.DeadlineExceeded)


async def test_progress_is_shown_on_terminals_only(server: Talking, monkeypatch: pytest.MonkeyPatch):
    args = ("bench", "--target", server.address, *SMALL, "--duration", 0.2)
    assert (await run(*args)).stderr == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = await run(*args)
    assert "in flight, 0 failed" in done.stderr
    assert "in flight" not in done.stdout


async def bench_http(address: str, *args: object, scheme: str = "http") -> Any:
    return await run("bench", "--http", f"{scheme}://{address}", *SMALL, "--json", *args)


async def test_over_http(gateway: Alone, server: Talking):
    args = ("--requests", 6, "--concurrency", 2, "--seed", 5)
    found = json.loads((await bench_http(f"{gateway.address}/v1", *args)).stdout)
    assert (found["completed"], found["errors"], found["plan"]["api"]) == (6, {}, "http")
    assert (found["prompt_tokens"], found["completion_tokens"], found["messages"]) == (18, 12, 12)
    assert 0 < found["ttft_ms"]["p50"] <= found["e2e_ms"]["p50"]
    requests = gateway.fake.requests
    asked_for = [(len(each.token_ids.ids), each.sampling.max_tokens, each.model) for each in requests]
    assert asked_for == [(8, 3, "org/tiny")] * 6, "other servers need a model"
    assert all(each.sampling.ignore_eos and not each.deterministic for each in requests)
    asked = {tuple(each.token_ids.ids) for each in requests}
    assert len(asked) == 6
    await bench(server, *args)
    assert {tuple(each.token_ids.ids) for each in server.requests} == asked, "the same seed asks the same over both"


ERRORS = ["PromiseRefused", "RateLimited", "Overloaded", "NoWorker", "WorkerLost", "InvalidRequest"]
ERRORS += ["Unauthenticated", "UnknownModel", "EngineFault"]


@pytest.mark.parametrize(
    ("name", "after"), [*((name, 0) for name in ERRORS), ("WorkerLost", 2), ("DeadlineExceeded", 2)]
)
async def test_errors_over_http_are_of_the_same_classes(gateway: Alone, name: str, after: int):
    error = errors.InvalidRequest.of("n", "too many") if name == "InvalidRequest" else getattr(errors, name)("because")
    gateway.plays(*(tokens(0, number, [number + 1], "x") for number in range(after)), error)
    found = json.loads((await bench_http(gateway.address, "--requests", 1)).stdout)
    assert (found["completed"], found["errors"]) == (0, {name: 1})


async def test_servers_that_are_no_servers(gateway: Alone):
    async def silent(request: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield {}

    assert exit_code((await bench_http("127.0.0.1:1")).exception) == 4
    assert isinstance((await bench_http(f"{gateway.address}/nothing")).exception, errors.UnknownModel)
    assert exit_code((await bench_http("127.0.0.1:port")).exception) == 2
    assert exit_code((await bench_http(gateway.address, "--model", "x")).exception) == 2
    gateway.fake.script = silent
    done = await bench_http(gateway.address, "--requests", 1, "--timeout", 2)
    assert json.loads(done.stdout)["errors"] == {"DeadlineExceeded": 1}


TEXT = 'data: {"choices": [{"text": "a"}]}\n\n'
EMPTY = 'data: {"choices": [{"text": "", "finish_reason": null}]}\n\n'
STOP = EMPTY.replace("null", '"stop"')
USAGE = 'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}}\n\n'
DONE = "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("status", "kind", "body", "found", "counts"),
    [
        ("200 OK", "text/event-stream", f"{TEXT}{DONE}", {}, (1, 1)),  # without usage, each message is a token
        ("200 OK", "text/event-stream", f"{EMPTY}{TEXT}{EMPTY}{TEXT}{STOP}{USAGE}{DONE}", {}, (2, 4)),
        ("200 OK", "text/event-stream", TEXT, {"WorkerLost": 1}, (0, 0)),
        ("200 OK", "text/event-stream", 'data: {"choices": null}\n\n', {"EngineFault": 1}, (0, 0)),
        ("200 OK", "text/event-stream", 'data: {"usage": {"completion_tokens": 1}}\n\n', {"EngineFault": 1}, (0, 0)),
        ("200 OK", "text/event-stream", "data: what?\n\n", {"EngineFault": 1}, (0, 0)),
        ("200 OK", "text/html", "<html>", {"WorkerLost": 1}, (0, 0)),
        ("502 Bad Gateway", "text/html", "<html>", {"EngineFault": 1}, (0, 0)),
        ("429 Too Many Requests", "text/plain", "later", {"Overloaded": 1}, (0, 0)),
    ],
    ids=["no usage", "usage", "cut", "no choices", "only usage", "no JSON", "a page", "a proxy's error", "later"],
)
async def test_other_servers(
    tmp_path: Path, status: str, kind: str, body: str, found: dict[str, int], counts: tuple[int, int]
):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        if length := re.search(rb"content-length: (\d+)", asked.lower()):
            await reader.readexactly(int(length[1]))
        lists = asked.startswith(b"GET /v1/models ")
        said = ("200 OK", "application/json", '{"data": [{"id": "m"}]}') if lists else (status, kind, body)
        head = f"HTTP/1.1 {said[0]}\r\ncontent-type: {said[1]}\r\ncontent-length: {len(said[2])}\r\nconnection: close"
        writer.write(f"{head}\r\n\r\n{said[2]}".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await bench_http(f"127.0.0.1:{port}", "--requests", 1, "--out", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["errors"], report["completed"]) == (found, 1 - len(found))
    assert report["ttft_ms"] is None or not found
    assert (report["messages"], report["completion_tokens"]) == counts
    assert report["samples"][0]["gap_tokens"] == [1] * (counts[0] - 1), "no message has a token count"


async def test_over_https_with_a_token(make: Any, folder: Path, tmp_path: Path):
    cluster = await make(tokens=token_file(tmp_path / "tokens"), tls=tls_of(folder), http="127.0.0.1:0")
    out = tmp_path / "out.json"  # the router logs to stdout too

    async def https(*args: object) -> Any:
        return await bench_http(cluster.router.http, "--requests", 3, *args, scheme="https")

    await https("--tls", folder, "--token", TOKENS["alice"], "--out", out)
    found = json.loads(out.read_text())
    assert (found["completed"], found["completion_tokens"]) == (3, 9)
    assert isinstance((await https("--tls", folder, "--token", "x" * 16)).exception, errors.Unauthenticated)
    assert isinstance((await https()).exception, errors.BatonError)  # an unknown CA
    assert isinstance((await bench_http(cluster.router.http, "--requests", 1)).exception, errors.BatonError)
    assert [spec.cache_scope[:6] for spec in cluster.prefill[0].specs] == ["alice/"] * 3
    assert "has no certificate of an authority" in str((await https("--tls", tmp_path / "tokens")).exception)
