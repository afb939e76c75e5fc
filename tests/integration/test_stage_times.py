"""The stages of a request against clocks that are not the router's: of its client, and of what it waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from baton.rpc.v1 import common_pb2
from baton.stages import Stage
from router.parse import parse
from tests.support.in_process_router import FakeWorker, InProcessCluster
from tests.support.waiting import until

HELD_S = 0.1  # time that there is to be counted; far more than is lost on the way to the client and back
CLAIMED_S = 0.03  # what the decode worker says of its commit, and of verify passes; of what it was held
SPENT = [f"{stage.value}_s" for stage in Stage]


async def held(gate: asyncio.Event) -> tuple[float, float]:
    """From when on, and how long, until it was opened."""
    begun = time.perf_counter()
    await asyncio.sleep(HELD_S)
    spent = time.perf_counter() - begun
    gate.set()
    return begun, spent


def claims(decode: FakeWorker) -> None:
    """The decode worker says how long its commit took, and its verify passes."""
    emit = decode.emit

    def timed(*events):
        for event in events:
            if event.HasField("committed"):
                event.committed.commit_s = CLAIMED_S
            elif event.HasField("finish"):
                event.finish.verify_s = CLAIMED_S
        emit(*events)

    decode.emit = timed  # type: ignore[method-assign]


async def passed(call, index: int) -> None:
    """Until the client has the token with this index."""
    async for event in call:
        if event.HasField("tokens") and getattr(event.tokens, "from") + len(event.tokens.ids) > index:
            return


class Held:
    """One request, held once in each stage; when it began to be, and for how long, by stage."""

    def __init__(self, cluster: InProcessCluster, reading: asyncio.Event, read: asyncio.Event) -> None:
        self._prefill, self._decode = cluster.prefill[0], cluster.decode[0]
        self._reading, self._read = reading, read
        self.spent: dict[str, tuple[float, float]] = {}
        for gate in (self._prefill.gates["first"], self._prefill.gates["commit"]):
            gate.clear()
        for gate in (self._decode.gates["reserve"], self._decode.gates["hold"]):
            gate.clear()
        self._decode.hold_at = 2
        claims(self._decode)

    async def through(self, call) -> None:
        """Each hold begins when something shows that the stage has begun, and ends before anything can end it."""
        await self._reading.wait()
        self.spent["queue"] = await held(self._read)
        await until(lambda: self._decode.count("reserve"), "reserving")
        self.spent["reserve"] = await held(self._decode.gates["reserve"])
        await until(lambda: self._prefill.specs, "prefilling")
        self.spent["prefill"] = await held(self._prefill.gates["first"])
        await passed(call, 0)
        self.spent["transfer"] = await held(self._prefill.gates["commit"])
        await passed(call, 1)
        self.spent["decode"] = await held(self._decode.gates["hold"])


@pytest.fixture
def holding(monkeypatch) -> Callable[[InProcessCluster], Held]:
    """What is to come of a cluster's next request, which is held while it is read, too."""
    reading, read = asyncio.Event(), asyncio.Event()

    async def held_back(*args, **options):
        reading.set()
        await read.wait()
        return await parse(*args, **options)

    monkeypatch.setattr("router.service.parse", held_back)
    return lambda cluster: Held(cluster, reading, read)


async def test_stages_are_the_time_that_the_client_and_the_workers_saw(make, holding):
    cluster = await make()
    story = holding(cluster)
    begun = time.perf_counter()
    call = cluster.call(max_tokens=4)
    await story.through(call)
    done = (await cluster.answer(call))[-1].completed
    wall_s = time.perf_counter() - begun
    check(done.timings, story, wall_s)


def check(timings: common_pb2.Timings, story: Held, wall_s: float) -> None:
    """Each stage holds what was held in it, and all together the time from the first such moment to the last, and no
    more than the client waited.
    """
    spent = {name: getattr(timings, name) for name in SPENT}
    parts = {"transfer": ("transfer_s", "commit_s"), "decode": ("decode_s", "verify_s")}
    for stage, (_, least_s) in story.spent.items():
        assert sum(spent[name] for name in parts.get(stage, (f"{stage}_s",))) >= least_s, stage
    assert (spent["commit_s"], spent["verify_s"]) == (pytest.approx(CLAIMED_S), pytest.approx(CLAIMED_S))
    starts_and_ends = [moment for begun, held_s in story.spent.values() for moment in (begun, begun + held_s)]
    assert max(starts_and_ends) - min(starts_and_ends) <= sum(spent.values()) <= wall_s
    assert timings.e2e_s == pytest.approx(sum(spent.values()), abs=1e-9)
