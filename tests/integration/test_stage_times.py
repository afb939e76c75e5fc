"""Stage times of a request that is held in each stage: the client receives the hold times."""

from __future__ import annotations

import asyncio

import pytest

from baton.rpc.v1 import worker_pb2
from baton.testing import FakeClock
from router.parsing.generate_request import RequestParser
from tests.support.waiting import until

HELD_S = {"queue": 0.125, "reserve": 0.25, "prefill": 0.375, "transfer": 0.5, "decode": 0.625}
CLAIMED_S = 0.0625  # the reported part of the hold time for the commit, and for verify passes


def claim(event: worker_pb2.WorkerEvent) -> None:
    """Set the times of the commit and of verify passes that a decode worker reports."""
    if event.HasField("committed"):
        event.committed.commit_s = CLAIMED_S
    elif event.HasField("finish"):
        event.finish.verify_s = CLAIMED_S


async def passed(call, index: int) -> bool:
    """Wait until the client has the token with this index."""
    async for event in call:
        if event.HasField("tokens") and getattr(event.tokens, "from") + len(event.tokens.ids) > index:
            return True
    return False


async def test_stages_are_the_time_that_the_client_waited_for_each(make, monkeypatch):
    """Each hold begins after the stage has visibly begun, and ends before anything can end the stage."""
    clock, reading, read = FakeClock(), asyncio.Event(), asyncio.Event()
    parse = RequestParser.parse

    async def held_back(*args, **options):
        reading.set()
        await read.wait()
        return await parse(*args, **options)

    monkeypatch.setattr("router.server.SystemClock", lambda: clock)
    monkeypatch.setattr(RequestParser, "parse", held_back)
    cluster = await make()
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    prefill.close("first", "commit")
    decode.close("reserve")
    decode.hold(2)
    decode.before_emit = claim
    call = cluster.call(max_tokens=4)
    for stage, begun, gate in (
        ("queue", reading.is_set, read),
        ("reserve", lambda: decode.count("reserve"), decode.gates["reserve"]),
        ("prefill", lambda: prefill.specs, prefill.gates["first"]),
        ("transfer", lambda: passed(call, 0), prefill.gates["commit"]),
        ("decode", lambda: passed(call, 1), decode.gates["hold"]),
    ):
        await until(begun, stage)
        clock.advance(HELD_S[stage])
        gate.set()
    timings = (await cluster.answer(call))[-1].completed.timings
    transfer_s, decode_s = HELD_S["transfer"] - CLAIMED_S, HELD_S["decode"] - CLAIMED_S
    wanted = HELD_S | {"transfer": transfer_s, "commit": CLAIMED_S, "decode": decode_s, "verify": CLAIMED_S}
    spent = {stage: getattr(timings, f"{stage}_s") for stage in wanted}
    assert spent == pytest.approx(wanted)
    assert timings.e2e_s == pytest.approx(sum(HELD_S.values())), "and in no other stage"
    assert timings.ttft_s == pytest.approx(sum(HELD_S[stage] for stage in ("queue", "reserve", "prefill")))
