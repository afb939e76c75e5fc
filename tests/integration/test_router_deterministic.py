"""Deterministic requests at a router: placement, reported fingerprints, and the workers that may continue them."""

import asyncio

import pytest

from baton.core import Role, Sampling, TokenLogprobs
from baton.engine.prefix_cache import BlockHashChain, scope_key
from baton.errors import InvalidRequest, NoWorker
from router.audit_digest import Delivered, audit_digest
from tests.support.in_process_router import LAYOUT, FakeWorker
from tests.support.routers import asked, ids_of, kinds, right
from tests.support.waiting import until

PROMPT = list(range(1, 41))
ANSWER = right(PROMPT)
ALL_X = dict.fromkeys(("prefill-0", "prefill-1", "decode-0", "decode-1"), "x")


def digest_of(*answers, temperature=1.0, seed=5):
    asked_for = Sampling(max_tokens=8, temperature=temperature, seed=seed)
    return audit_digest(PROMPT, asked_for, [Delivered(ids) for ids in answers])


def request(**fields):
    return asked(PROMPT, **{"deterministic": True, "sampling": {"seed": 5}, **fields})


async def ask(cluster, **fields):
    return await cluster.answer(cluster.stub.Generate(request(**fields)))


async def resume(cluster, *received, fingerprint="", **fields):
    return await cluster.resume(request(**fields), *received, fingerprint=fingerprint)


async def test_what_its_client_is_told(make):
    cluster = await make(bits=ALL_X)
    events = await ask(cluster)
    assert ids_of(events) == ANSWER
    assert events[0].accepted.system_fingerprint == "x"
    done = events[-1].completed
    assert (done.system_fingerprint, done.usage.audit_digest) == ("x", digest_of(ANSWER))
    assert (await ask(cluster, n=2))[-1].completed.usage.audit_digest == digest_of(ANSWER, ANSWER)
    greedy = [await ask(cluster, sampling={"temperature": 0.0}) for _ in range(2)]
    digests = {events[-1].completed.usage.audit_digest for events in greedy}
    assert digests == {digest_of(ANSWER, temperature=0.0)}, "nothing is drawn: no seed, no other digest"
    assert all(spec.deterministic for worker in cluster.prefill for spec in worker.specs)
    metrics = await cluster.http("/metrics")
    assert 'baton_deterministic_requests_total{outcome="finished"} 4.0' in metrics
    assert 'baton_verify_passes_total{worker="decode-0"} 0.0' in metrics
    await cluster.nothing_is_left()


async def test_others_are_told_the_fingerprint_if_both_workers_say_the_same(make):
    for bits, said in ((ALL_X, "x"), ({"prefill-0": "x", "decode-0": "y"}, ""), ({"decode-0": "x"}, "")):
        cluster = await make(bits=bits)
        events = await ask(cluster, deterministic=False)
        assert (events[0].accepted.system_fingerprint, events[-1].completed.system_fingerprint) == (said, said)
        assert not events[-1].completed.usage.audit_digest
    infos = {worker.info.ref.worker_id: worker.info for worker in (await cluster.status()).workers}
    assert (infos["decode-0"].determinism, infos["decode-0"].nondeterminism) == ("x", "")
    assert (infos["prefill-0"].determinism, infos["prefill-0"].nondeterminism) == ("", "prefill workers cannot")


async def test_names_of_its_blocks_are_its_own_and_only_of_its_prompt(make):
    cluster = await make(bits=ALL_X)
    await ask(cluster)
    await ask(cluster, deterministic=False)
    await resume(cluster, [1] * 40, fingerprint="x", max_tokens=64)  # 80 tokens are known, 40 of them are output
    for reserved, marked in zip(cluster.decode[0].reserves, (True, False, True), strict=True):
        chain = BlockHashChain(scope_key("fp", "", marked), PROMPT, LAYOUT.block_size)
        assert list(reserved.prefix) == [chain.digest(0), chain.digest(1)]


async def test_after_the_death_of_its_worker_it_goes_on_with_one_of_its_kind_only(make):
    cluster = await make(decode=2, bits=ALL_X | {"decode-1": "y"})
    cluster.decode[0].hold(4)
    waits = asyncio.create_task(ask(cluster))
    await until(lambda: cluster.handed_over, "decoding")
    await cluster.decode[0].kill()
    assert ids_of(await ask(cluster, deterministic=False)) == ANSWER, "another one is served by decode-1"
    assert not waits.done()
    assert [spec.deterministic for spec in cluster.prefill[0].specs] == [True, False]
    _, other = cluster.decode
    cluster.decode = [other]
    third = FakeWorker(Role.DECODE, "decode-2", 300)
    third.says("x")
    await cluster.joined(third)
    events = await waits
    assert ids_of(events) == ANSWER
    assert "recovered" in kinds(events)
    done = events[-1].completed
    assert (done.placement.decode_worker, done.system_fingerprint) == ("decode-2", "x")
    assert done.usage.audit_digest == digest_of(ANSWER)
    assert other.count("reserve") == 1
    await cluster.nothing_is_left()


@pytest.mark.parametrize(("fingerprint", "decode"), [("x", "decode-0"), ("y", "decode-1")])
async def test_a_resumed_one_goes_on_with_workers_of_its_kind(make, fingerprint, decode):
    cluster = await make(prefill=2, decode=2, bits=ALL_X | {"prefill-1": "y", "decode-1": "y"})
    events = await resume(cluster, ANSWER[:3], fingerprint=fingerprint)
    assert ids_of(events, 3) == ANSWER[3:]
    done = events[-1].completed
    assert (done.placement.decode_worker, done.system_fingerprint) == (decode, fingerprint)
    assert done.usage.audit_digest == digest_of(ANSWER), "of all that was delivered, also by another router"


async def test_logprobs_are_part_of_the_digest(make):
    cluster = await make(bits=ALL_X)
    for worker in cluster.workers:
        worker.scored = True
    events = await ask(cluster, logprobs=0, sampling={"temperature": 0.0})
    sampled = Sampling(max_tokens=8, temperature=0.0, logprobs=0)
    scores = [TokenLogprobs(-0.25 * index) for index in range(8)]
    assert events[-1].completed.usage.audit_digest == audit_digest(PROMPT, sampled, [Delivered(ANSWER, scores)])
    events = await resume(cluster, ANSWER[:3], fingerprint="x", logprobs=0)
    assert not events[-1].completed.usage.audit_digest, "those that another router said are not known"


async def test_one_that_cannot_go_on_as_it_began_does_not_go_on(make):
    cluster = await make(bits=ALL_X, queue_max_wait_s=0.1)
    with pytest.raises(NoWorker, match="no decode worker with the system fingerprint z that computes"):
        await resume(cluster, ANSWER[:3], fingerprint="z")
    with pytest.raises(InvalidRequest, match="system_fingerprint: must be that of the stream"):
        await resume(cluster, ANSWER[:3])
    with pytest.raises(InvalidRequest, match="system_fingerprint: at most 128 characters, got 129"):
        await resume(cluster, ANSWER[:3], fingerprint="z" * 129)
    assert not cluster.prefill[0].specs
    assert ids_of(await resume(cluster)) == ANSWER, "nothing was said yet: anybody may begin"
    assert ids_of(await resume(cluster, fingerprint="z", deterministic=False)) == ANSWER
