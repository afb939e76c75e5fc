"""Decode workers that compute prompts themselves because no prefill worker is left."""

import pytest

from baton.rpc.v1 import worker_pb2
from baton.stages import Stage
from tests.support.in_process_router import at
from tests.support.routers import PROMPT, ids_of, kinds, right
from tests.support.waiting import until

ANSWER = right(PROMPT)


async def test_without_a_prefill_worker_a_decode_worker_does_it_all(make):
    cluster = await make(prefill=0)
    cluster.decode[0].cached_here = 2
    events = await cluster.generate()
    assert ids_of(events) == ANSWER
    assert kinds(events)[0] == "accepted"
    assert cluster.decode[0].kinds == ["reserve", "prefill"]
    done = events[-1].completed
    assert sum(getattr(done.timings, f"{stage}_s") for stage in Stage) == pytest.approx(done.timings.e2e_s, abs=1e-9)
    assert (done.timings.transfer_s, done.timings.commit_s) == (0, 0), "nothing is handed over"
    assert 0.0 < done.timings.ttft_s < done.timings.e2e_s
    assert done.usage.cached_tokens == 2
    placement = done.placement
    assert (placement.prefill_worker, placement.decode_worker, placement.kv_bytes) == ("decode-0", "decode-0", 0)
    [worker] = (await cluster.status()).workers
    assert worker.note == "no prefill worker takes requests: it computes prompts itself"
    assert "200 OK" in await cluster.http("/ready")
    await cluster.nothing_is_left()


@pytest.mark.parametrize("reason", ["NO_ROOM", "DRAINING", "STALE"])
async def test_where_the_reserve_is_refused_so_is_the_prompt_and_nobody_minds(make, reason):
    cluster = await make(prefill=0, decode=2)
    for worker in cluster.decode:
        worker.refuse_once = [getattr(worker_pb2, f"REFUSAL_REASON_{reason}")]
    if reason == "DRAINING":
        cluster.decode[1].refuse_once = []
    assert ids_of(await cluster.generate()) == ANSWER
    assert sum(len(worker.specs) for worker in cluster.decode) == 1, "computed once"
    await cluster.nothing_is_left()


async def test_a_prefill_worker_that_dies_is_done_without(cluster):
    call = await at(cluster, "prefilling")
    await cluster.prefill[0].kill()
    cluster.decode[0].open(*cluster.decode[0].gates)
    events = await cluster.answer(call)
    assert ids_of(events) == ANSWER
    assert cluster.decode[0].kinds[-2:] == ["reserve", "prefill"]
    await cluster.nothing_is_left()


async def test_leaving_releases_it(make):
    cluster = await make(prefill=0)
    cluster.decode[0].close("decode")
    call = cluster.call()
    await until(lambda: cluster.decode[0].specs, "decoding")
    call.cancel()
    await until(lambda: cluster.decode[0].count("release") == 1, "released")
    await cluster.nothing_is_left()
