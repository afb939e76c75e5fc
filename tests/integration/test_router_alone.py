"""Decode workers that compute prompts themselves, since no prefill worker is left."""

from __future__ import annotations

import pytest

from tests.integration.router_support import Cluster, at, clusters, expected, ids_of, kinds, until

PROMPT = [1, 2, 3]
ANSWER = [expected(PROMPT, index) for index in range(8)]


@pytest.fixture
async def make():
    async with clusters() as build:
        yield build


def commands(cluster: Cluster, number: int = 0) -> list[str]:
    return [kind for kind, _ in cluster.decode[number].commands]


async def test_without_a_prefill_worker_a_decode_worker_does_it_all(make):
    cluster = await make(prefill=0)
    events = await cluster.generate()
    assert ids_of(events) == ANSWER
    assert kinds(events)[0] == "accepted"
    assert commands(cluster) == ["reserve", "prefill"]
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


async def test_a_prefill_worker_that_dies_is_done_without(make):
    cluster = await make()
    call = await at(cluster, "prefilling")
    await cluster.prefill[0].kill()
    for gate in cluster.decode[0].gates.values():
        gate.set()
    events = await cluster.answer(call)
    assert ids_of(events) == ANSWER
    assert commands(cluster)[-2:] == ["reserve", "prefill"]
    await cluster.nothing_is_left()


async def test_one_that_comes_back_is_used_again(make):
    cluster = await make()
    cluster.infos = [cluster.decode[0].info]
    await until(lambda: not cluster.router.floor.pool.has_pair(), "retired")
    await cluster.generate()
    cluster.infos = [worker.info for worker in cluster.workers]
    await until(cluster.router.floor.pool.has_pair, "back")
    await cluster.generate()
    assert [kind for kind, _ in cluster.prefill[0].commands] == ["prefill"]


async def test_a_decode_worker_that_dies_of_it_is_followed_by_another_one(make):
    cluster = await make(prefill=0, decode=2)
    for worker in cluster.decode:
        worker.gates["decode"].clear()
    call = cluster.call()
    await until(lambda: any(worker.specs for worker in cluster.decode), "decoding")
    [first] = [worker for worker in cluster.decode if worker.specs]
    [second] = [worker for worker in cluster.decode if worker is not first]
    await until(lambda: cluster.router.floor.running, "running")
    await first.kill()
    second.gates["decode"].set()
    events = await cluster.answer(call)
    assert ids_of(events) == ANSWER
    assert [event.recovered.reason for event in events if event.HasField("recovered")] == ["decode_lost"]
    await cluster.nothing_is_left()


@pytest.mark.parametrize("at_index", [2, 5])
async def test_one_that_runs_full_hands_back_and_is_asked_again(make, at_index):
    cluster = await make(prefill=0)
    cluster.decode[0].preempt_at = [at_index]
    events = await cluster.generate()
    assert ids_of(events) == ANSWER
    assert list(cluster.decode[0].specs[1].known) == ANSWER[:at_index]
    await cluster.nothing_is_left()


async def test_several_at_once_are_spread(make):
    cluster = await make(prefill=0, decode=2)
    for worker in cluster.decode:
        worker.gates["decode"].clear()
    calls = [cluster.call() for _ in range(6)]
    await until(lambda: sum(len(worker.specs) for worker in cluster.decode) == 6, "all are under way")
    assert [len(worker.specs) for worker in cluster.decode] == [3, 3]
    for worker in cluster.decode:
        worker.gates["decode"].set()
    for call in calls:
        assert ids_of(await cluster.answer(call)) == ANSWER
    await cluster.nothing_is_left()


async def test_leaving_releases_it(make):
    cluster = await make(prefill=0)
    cluster.decode[0].gates["decode"].clear()
    call = cluster.call()
    await until(lambda: cluster.decode[0].specs, "decoding")
    call.cancel()
    await until(lambda: cluster.decode[0].count("release") == 1, "released")
    await cluster.nothing_is_left()
