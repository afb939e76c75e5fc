"""Whom `baton bench` asks: a router over gRPC. Over HTTP: `baton.cli.bench.http`."""

from __future__ import annotations

from typing import Protocol

from baton.cli.bench.plan import Ask
from baton.cli.bench.sample import Sample
from baton.client import AsyncClient, Model, Options
from baton.clock import Clock


class Server(Protocol):
    """Takes requests. All methods raise BatonError."""

    async def models(self) -> list[Model]:
        """What is served; 0 where the server does not say a length or a size."""

    async def send(self, ask: Ask, sample: Sample) -> None:
        """Wait for the whole answer, and note in `sample` when its parts came."""

    async def close(self) -> None: ...


class GrpcServer:
    """A router, by the SDK."""

    def __init__(self, client: AsyncClient, options: Options, clock: Clock) -> None:
        self._client = client
        self._options = options
        self._clock = clock

    async def models(self) -> list[Model]:
        return await self._client.models()

    async def send(self, ask: Ask, sample: Sample) -> None:
        options: Options = {**self._options, "max_tokens": ask.max_tokens, "deterministic": ask.deterministic or None}
        async with self._client.stream(ask.prompt, **options) as stream:
            async for delta in stream:
                if delta.tokens:
                    sample.saw(self._clock.monotonic(), len(delta.tokens))
            done = await stream.collect()
        sample.prompt_tokens = done.usage.prompt_tokens
        sample.tokens = done.usage.completion_tokens
        sample.prefill_worker, sample.decode_worker = done.placement.prefill_worker, done.placement.decode_worker

    async def close(self) -> None:
        await self._client.close()
