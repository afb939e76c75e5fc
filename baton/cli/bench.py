"""`baton bench`: keep so many requests under way, and measure what a client sees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from baton.cli import bench_load, bench_report
from baton.cli.bench_load import Ask
from baton.cli.bench_report import Goals, Sample
from baton.client import AsyncClient, Options
from baton.clock import Clock, SystemClock
from baton.errors import BatonError, Overloaded

REQUESTS = 100
PAUSE_S = 0.1  # after a failure: a closed loop must not become a storm


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent. `duration` in seconds; with a trace the lengths count only where it leaves them out."""

    concurrency: int
    requests: int | None
    duration: float | None
    prompt_tokens: int
    max_tokens: int
    trace: Path | None
    seed: int

    def plain(self) -> dict[str, Any]:
        """As JSON can carry it."""
        return asdict(self) | {"trace": None if self.trace is None else str(self.trace)}


def bench(client: AsyncClient, plan: Plan, options: Options, goals: Goals, as_json: bool) -> None:
    """Run the plan and print the report, also of what Ctrl-C leaves. Raises the last error if no request succeeded."""
    run = Run(client, options, SystemClock())
    try:
        asyncio.run(run.whole(plan))
    finally:
        if run.samples:
            report = bench_report.report(run.samples, goals, plan.plain())
            typer.echo(json.dumps(report) if as_json else bench_report.table(report))
    if run.failure is not None and not any(sample.error == "" for sample in run.samples):
        raise run.failure


class Run:
    """The requests of one plan, and what was seen of each that has ended."""

    def __init__(self, client: AsyncClient, options: Options, clock: Clock) -> None:
        self.samples: list[Sample] = []
        self.failure: BatonError | None = None
        self._client = client
        self._options = options
        self._clock = clock
        self._until: float | None = None

    async def whole(self, plan: Plan) -> None:
        """All of the plan. Raises BatonError when the plan cannot be, such as for a prompt that is too long."""
        async with self._client:
            asks = await self._asks(plan)
            self._until = None if plan.duration is None else self._clock.monotonic() + plan.duration
            async with asyncio.TaskGroup() as group:
                for _ in range(plan.concurrency):
                    group.create_task(self._in_turn(asks))

    async def _asks(self, plan: Plan) -> Iterator[Ask]:
        lines = bench_load.trace(plan.trace) if plan.trace else [{}]
        needed = plan.trace is None or any("prompt_tokens" in line for line in lines)
        model = bench_load.served(await self._client.models(), self._options.get("model", "")) if needed else None
        default = len(lines) if plan.trace else REQUESTS
        count = plan.requests or (None if plan.duration is not None else default)
        lengths = bench_load.Lengths(plan.prompt_tokens, plan.max_tokens)
        return bench_load.asks(lines, lengths, model, plan.seed, count)

    async def _in_turn(self, asks: Iterator[Ask]) -> None:
        for ask in asks:
            if self._until is not None and self._clock.monotonic() >= self._until:
                return
            await self._one(ask)

    async def _one(self, ask: Ask) -> None:
        sample = Sample(start=self._clock.monotonic())
        wait = 0.0
        try:
            await self._measure(ask, sample)
        except BatonError as error:
            self.failure, sample.error = error, type(error).__name__
            wait = error.retry_after_s if isinstance(error, Overloaded) else PAUSE_S
        sample.end = self._clock.monotonic()
        self.samples.append(sample)
        await asyncio.sleep(wait)

    async def _measure(self, ask: Ask, sample: Sample) -> None:
        options: Options = {**self._options, "max_tokens": ask.max_tokens}
        async with self._client.stream(ask.prompt, **options) as stream:
            async for delta in stream:
                if delta.tokens:
                    sample.times.append(self._clock.monotonic())
            done = await stream.collect()
        sample.prompt_tokens = done.usage.prompt_tokens
        sample.tokens = done.usage.completion_tokens
