"""The loops of `baton bench` with a scripted server, and access tokens that no HTTP header can carry."""

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from baton.bench import output
from baton.bench.requests import BenchPlan, BenchRequest, Load
from baton.bench.runner import Run
from baton.bench.sample import Goals, Sample
from baton.bench.targets import HttpServer
from baton.client import Model
from baton.clock import SystemClock
from baton.errors import BatonError, ConfigError, InvalidRequest, NoWorker, Overloaded, WorkerLost
from tests.support.time_factor import scaled
from tests.support.waiting import at_most

BLOCKED_S = 0.15


class Fake:
    """Blocks the process during request number `blocks`, and fails for those in `fails`."""

    def __init__(self, blocks: int | None = None, fails: tuple[int, ...] = (), error: BatonError | None = None) -> None:
        self.asked: list[BenchRequest] = []
        self.running = self.most = 0
        self.closed = False
        self._blocks, self._fails, self._error = blocks, fails, error

    async def models(self) -> list[Model]:
        return [Model("m", 64, 256)]

    async def send(self, ask: BenchRequest, sample: Sample) -> None:
        number = len(self.asked)
        self.asked.append(ask)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            if number == self._blocks:
                time.sleep(BLOCKED_S)  # noqa: ASYNC251 (a load generator that has no time)
            if number in self._fails:
                raise self._error or WorkerLost("gone")
        finally:
            self.running -= 1
        sample.times += [time.monotonic(), time.monotonic()]
        sample.prompt_tokens, sample.tokens = len(ask.prompt), 2

    async def close(self) -> None:
        self.closed = True


async def made(fake: Fake, **options: Any) -> Run:
    load = Load.read(BenchPlan(**{"prompt_tokens": "8", "max_tokens": "4", **options}))
    run = Run(fake, load, SystemClock(), lambda _: None)
    await run.execute()
    return run


async def test_what_a_busy_client_sends_late_counts_as_late():
    run = await made(Fake(blocks=0), rate=100, arrivals="constant", requests=6)
    first, *others = sorted(run.samples, key=lambda sample: sample.start)
    assert [round((other.start - first.start) * 100) for other in others] == [1, 2, 3, 4, 5]
    second = others[0]
    assert second.sent is not None
    assert second.sent - second.start > BLOCKED_S - 0.05
    assert second.ttft_s >= second.sent - second.start
    assert max(run.generator().lags_s) > BLOCKED_S / 2


async def test_warming_up_does_not_count():
    fake = Fake(fails=(0, 4))
    run = await made(fake, concurrency=2, warmup=3, requests=5)
    assert (len(fake.asked), len(run.samples), fake.most, fake.closed) == (8, 5, 2, True)
    assert [sample.error for sample in run.samples].count("WorkerLost") == 1
    assert str(run.failure) == "gone"


async def test_a_closed_loop_ends_with_its_time():
    run = await made(Fake(), concurrency=1, duration=scaled(0.2))
    assert run.samples
    assert max(sample.start for sample in run.samples) - min(sample.start for sample in run.samples) < scaled(1.0)


@pytest.mark.parametrize("options", [{"requests": 1}, {"requests": 2, "concurrency": 2}, {"duration": 25}])
async def test_nobody_waits_for_what_does_not_come(options: dict[str, Any]):
    refusing = Fake(fails=tuple(range(9)), error=Overloaded("full", retry_after_s=1e6))
    async with at_most(20):
        run = await made(refusing, **{"concurrency": 1, **options})
    assert {sample.error for sample in run.samples} == {"Overloaded"}
    assert len(run.samples) == options.get("requests", 1)


@pytest.mark.parametrize("asked_s", [1e6, math.nan])
async def test_a_server_cannot_ask_for_a_pause_without_end(monkeypatch, asked_s: float):
    monkeypatch.setattr("baton.bench.runner.MOST_PAUSE_S", 0.02)
    run = await made(Fake(fails=(0, 1), error=Overloaded("full", asked_s)), concurrency=1, requests=3)
    first, second, third = (sample.start for sample in run.samples)
    assert min(second - first, third - second) > 0.01


async def test_what_was_cut_is_counted():
    run = await made(Fake(), prompt_tokens="uniform:55-65", max_tokens="4", clip=True, requests=200)
    longest = max(sample.prompt_tokens for sample in run.samples)
    assert longest == 60
    assert 0 < run.generator().clipped < sum(sample.prompt_tokens == 60 for sample in run.samples)


async def test_a_server_is_left_when_it_cannot_be_asked():
    fake = Fake()
    with pytest.raises(InvalidRequest):
        await made(fake, prompt_tokens="100")
    assert (fake.asked, fake.closed) == ([], True)

    fake.models = AsyncMock(side_effect=NoWorker("no"))  # type: ignore[method-assign]
    with pytest.raises(NoWorker):
        await made(fake)


@pytest.mark.slow  # imports matplotlib
def test_each_file_is_tried_and_what_fails_is_named(tmp_path: Path, capsys):
    load, picture = Load.read(BenchPlan(prompt_tokens="8", max_tokens="4", requests=2)), tmp_path / "p.svg"
    with pytest.raises(ConfigError, match=r"^--out: cannot write /dev/full: No space left on device$"):
        output.run_bench(Fake(), load, Goals(), output.Output(True, Path("/dev/full"), picture))
    assert "<svg" in picture.read_text()
    assert json.loads(capsys.readouterr().out)["completed"] == 2


def test_the_report_is_given_when_the_screen_is_clear(monkeypatch):
    shown = MagicMock()
    monkeypatch.setattr(output, "shown", shown)
    monkeypatch.setattr(output.Output, "write", shown.write)
    load = Load.read(BenchPlan(prompt_tokens="8", max_tokens="4", requests=1))
    output.run_bench(Fake(), load, Goals(), output.Output(True, None, None))
    assert [name for name, *_ in shown.mock_calls][-2:] == ["().__exit__", "write"]


@pytest.mark.parametrize("prompt", ["\ud800", [2**64]])
async def test_a_prompt_that_no_json_can_carry(prompt: Any):
    server = HttpServer("http://127.0.0.1:1", {}, SystemClock(), math.inf, None, None)
    with pytest.raises(InvalidRequest, match="prompt: must be JSON"):
        await server.send(BenchRequest(prompt, 4), Sample(0.0))
    await server.close()


@pytest.mark.parametrize("token", ["schl\u00fcssel", "\u2713", "two\nlines"])
def test_a_token_that_no_http_header_can_carry(token: str):
    with pytest.raises(ConfigError, match="token: must be printable ASCII without line breaks"):
        HttpServer("http://127.0.0.1:1", {}, SystemClock(), 10.0, token, None)
