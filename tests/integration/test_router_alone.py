"""Decode workers that compute prompts themselves, since no prefill worker is left."""

from __future__ import annotations

import pytest

from baton.errors import EngineFault
from baton.rpc.v1 import worker_pb2
from tests.support.in_process_router import at
from tests.support.routers import PROMPT, ids_of, kinds, recovered, right
from tests.support.waiting import until

ANSWER = right(PROMPT)


async def test_without_a_prefill_worker_a_decode_worker_does_it_all(make):
    cluster = await make(prefill=0)
    events = await cluster.generate()
    assert ids_of(events) == ANSWER
    assert kinds(events)[0] == "accepted"
    assert cluster.decode[0].kinds == ["reserve", "prefill"]
    placement = events[-1].completed.placement
    assert (placement.prefill_worker, placement.decode_worker, placement.kv_bytes) == ("decode-0", "decode-0", 0)
    [worker] = (await cluster.status()).workers
    assert worker.note == "no prefill worker is there: it computes prompts itself"
    assert "200 OK" in await cluster.http("/ready")
    await cluster.nothing_is_left()


async def test_its_stages_sum_up_and_its_cache_counts(make):
    cluster = await make(prefill=0)
    cluster.decode[0].cached_here = 2
    done = (await cluster.generate())[-1].completed
    stages = ("queue_s", "route_s", "reserve_s", "prefill_s", "transfer_s", "commit_s", "decode_s")
    spent = sum(getattr(done.timings, stage) for stage in stages)
    assert spent == pytest.approx(done.timings.e2e_s, abs=1e-9)
    assert done.timings.transfer_s + done.timings.commit_s < 1e-3, "nothing is handed over"
    assert 0.0 < done.timings.ttft_s < done.timings.e2e_s
    assert done.usage.cached_tokens == 2


@pytest.mark.parametrize("reason", ["NO_ROOM", "DRAINING", "STALE"])
async def test_where_the_reserve_is_refused_so_is_the_prompt_and_nobody_minds(make, reason):
    """Another worker is asked, or the same one again: it is told both, and says no to both."""
    cluster = await make(prefill=0, decode=2)
    for worker in cluster.decode:
        worker.refuse_once = [getattr(worker_pb2, f"REFUSAL_REASON_{reason}")]
    if reason == "DRAINING":
        cluster.decode[1].refuse_once = []
    assert ids_of(await cluster.generate()) == ANSWER
    assert sum(len(worker.specs) for worker in cluster.decode) == 1, "computed once"
    await cluster.nothing_is_left()


async def test_who_dies_before_it_answers_may_have_died_of_the_prompt(make):
    """It is told of it with the Reserve: its answer may be lost with it, and a third worker must not be."""
    cluster = await make(prefill=0, decode=3)
    for worker in cluster.decode:
        worker.close("reserve")
    call = cluster.call()
    for _ in range(2):
        await until(lambda: any(worker.alive and worker.count("prefill") for worker in cluster.decode), "told of both")
        [victim] = [worker for worker in cluster.decode if worker.alive and worker.commands]
        await victim.kill()
    with pytest.raises(EngineFault, match="2 workers were lost while they computed this request"):
        await cluster.answer(call)
    [last] = [worker for worker in cluster.decode if worker.alive]
    assert last.commands == []
    await cluster.nothing_is_left()


async def test_a_prefill_worker_that_dies_is_done_without(make):
    cluster = await make()
    call = await at(cluster, "prefilling")
    await cluster.prefill[0].kill()
    cluster.decode[0].open(*cluster.decode[0].gates)
    events = await cluster.answer(call)
    assert ids_of(events) == ANSWER
    assert cluster.decode[0].kinds[-2:] == ["reserve", "prefill"]
    await cluster.nothing_is_left()


async def test_one_that_comes_back_is_used_again(make):
    cluster = await make()
    cluster.infos = [cluster.decode[0].info]
    await until(lambda: not cluster.router.floor.pool.has_pair(), "retired")
    await cluster.generate()
    cluster.infos = [worker.info for worker in cluster.workers]
    await until(cluster.router.floor.pool.has_pair, "back")
    await cluster.generate()
    assert cluster.prefill[0].kinds == ["prefill"]


async def test_a_decode_worker_that_dies_of_it_is_followed_by_another_one(make):
    cluster = await make(prefill=0, decode=2)
    for worker in cluster.decode:
        worker.close("decode")
    call = cluster.call()
    await until(lambda: any(worker.specs for worker in cluster.decode), "decoding")
    [first] = [worker for worker in cluster.decode if worker.specs]
    [second] = [worker for worker in cluster.decode if worker is not first]
    await until(lambda: cluster.router.floor.running, "running")
    await first.kill()
    second.open("decode")
    events = await cluster.answer(call)
    assert ids_of(events) == ANSWER
    assert [reason for _, reason in recovered(events)] == ["decode_lost"]
    await cluster.nothing_is_left()


@pytest.mark.parametrize("at_index", [2, 5])
async def test_one_that_runs_full_hands_back_and_is_asked_again(make, at_index):
    cluster = await make(prefill=0)
    cluster.decode[0].preempt_at = [at_index]
    events = await cluster.generate()
    assert ids_of(events) == ANSWER
    assert list(cluster.decode[0].specs[1].known) == ANSWER[:at_index]
    await cluster.nothing_is_left()


async def test_leaving_releases_it(make):
    cluster = await make(prefill=0)
    cluster.decode[0].close("decode")
    call = cluster.call()
    await until(lambda: cluster.decode[0].specs, "decoding")
    call.cancel()
    await until(lambda: cluster.decode[0].count("release") == 1, "released")
    await cluster.nothing_is_left()
