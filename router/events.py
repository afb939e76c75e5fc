"""What a client hears of its request: numbered events on its stream."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from grpc import aio

from baton.core import Finish, Token
from baton.errors import Cancelled
from baton.rpc import convert
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.telemetry import Timings
from router.lifecycle import Summary

Context = aio.ServicerContext[Any, Any]


class EventStream:
    """Writes one request's numbered events. A client that takes none for `stall_s` is given up.

    What a slow client has not taken waits in its request's mailbox, which max_tokens bounds; nobody else waits for it.
    """

    def __init__(self, context: Context, request_id: str, stall_s: float) -> None:
        self._context = context
        self._request_id = request_id
        self._stall_s = stall_s
        self._seq = 0

    async def accepted(self, prompt_tokens: int, cached_tokens: int) -> None:
        await self._write(pb.GenerateEvent(
            accepted=pb.Accepted(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        ))  # fmt: skip

    async def tokens(self, tokens: list[Token]) -> None:
        if tokens:
            await self._write(pb.GenerateEvent(tokens=convert.tokens_to_public_pb(tokens)))

    async def finished(self, finish: Finish, delivered: int) -> None:
        """The text that was held back for a stop string belongs to the stream: it comes without a token."""
        if finish.tail:
            tail = pb.Tokens(choice=0, ids=[], text=finish.tail, logprobs=[], **{"from": delivered})
            await self._write(pb.GenerateEvent(tokens=tail))
        reason = convert.finish_reason_to_pb(finish.reason)
        await self._write(pb.GenerateEvent(finished=pb.Finished(reason=reason, matched_stop=finish.matched)))

    async def completed(self, summary: Summary) -> None:
        await self._write(pb.GenerateEvent(completed=_completed(summary)))

    async def _write(self, event: pb.GenerateEvent) -> None:
        event.request_id, event.seq = self._request_id, self._seq
        self._seq += 1
        try:
            async with asyncio.timeout(self._stall_s):
                await self._context.write(event)
        except TimeoutError:
            raise Cancelled(f"the client did not read for {self._stall_s:g} s") from None


def _completed(summary: Summary) -> pb.Completed:
    return pb.Completed(
        usage=pb.Usage(
            prompt_tokens=summary.prompt_tokens,
            cached_tokens=summary.cached_tokens,
            completion_tokens=summary.completion_tokens,
        ),
        timings=_timings(summary.timings),
        placement=pb.Placement(
            prefill_worker=summary.prefill_worker,
            decode_worker=summary.decode_worker,
            kv_bytes=summary.kv_bytes,
            transport=summary.transport,
            attempts=summary.attempts,
        ),
    )


def _timings(timings: Timings) -> common_pb2.Timings:
    return common_pb2.Timings(**asdict(timings), e2e_s=timings.e2e_s)
