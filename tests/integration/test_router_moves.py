"""Requests whose decode worker leaves and holds their KV: they move to another one, and nothing is computed again."""

from dataclasses import replace
from typing import Any

import pytest

from baton.core import Role
from baton.rpc.v1 import worker_pb2
from tests.integration.test_router_recovery import answered, attempts_of
from tests.support.in_process_router import FakeWorker, InProcessCluster, at
from tests.support.routers import PROMPT, ids_of, leave, recovered
from tests.support.waiting import until

MOVED = 5  # tokens that the client has when the worker leaves


async def leaving(make, ahead: int = 0, **settings) -> tuple[InProcessCluster, Any]:
    """Start a request that waits for a decode worker while the first one, which leaves, holds its KV. The first one
    decodes `ahead` more tokens until the handoff.
    """
    cluster = await make(**{"decode": 2, **settings})
    first, *others = cluster.decode
    first.preempt_at, first.keeps, first.ahead = [MOVED], True, ahead
    call = await at(cluster, "decoding")
    for each in others:
        each.close("reserve")
    first.draining = True
    first.emit()
    await until(lambda: any(link.view.load.draining for link in cluster.links), "draining")
    first.open("decode")
    await until(lambda: sum(each.count("reserve") for each in others) == 1, "the next attempt")
    return cluster, call


@pytest.mark.parametrize("ahead", [0, 2])
async def test_the_kv_goes_to_the_other_worker(make, ahead):
    cluster, call = await leaving(make, ahead)
    [prefill], [first, second] = cluster.prefill, cluster.decode
    second.open("reserve", "decode")
    events = await answered(cluster, call)
    assert attempts_of(first) == [("reserve", 1), ("repush", 2)]
    assert [message.known_tokens for message in second.reserves] == [len(PROMPT) + MOVED - 1 + ahead]
    assert prefill.count("prefill") == 1
    done = events[-1].completed
    assert (done.placement.prefill_worker, done.placement.decode_worker) == ("decode-0", "decode-1")
    assert (recovered(events), done.placement.attempts) == ([], 2)


async def test_the_kv_goes_to_a_worker_with_the_same_fingerprint_beside_idle_ones_of_another(make):
    """As in the middle of `baton restart` after a change of the model."""
    cluster = await make(decode=2)
    other = FakeWorker(Role.DECODE, "decode-2", 300)
    other.info = replace(other.info, fingerprint="another")
    await cluster.joined(other)
    await until(lambda: sum(link.usable for link in cluster.links) == 4, "connected")
    first, second, _ = cluster.decode
    first.preempt_at, first.keeps = [MOVED], True
    call = await at(cluster, "decoding")
    second.load_fields = {"running": 3, "queued_tokens": 500}
    first.draining = True
    for each in (first, second):
        each.emit()
    loads = [link.view for link in cluster.links]
    await until(lambda: {(view.load.draining, view.load.running) for view in loads} >= {(True, 0), (False, 3)}, "told")
    for each in (first, second):
        each.open("decode")
    events = await answered(cluster, call)
    assert attempts_of(first) == [("reserve", 1), ("repush", 2)]
    assert events[-1].completed.placement.decode_worker == "decode-1"


@pytest.mark.parametrize(("how", "ahead"), [("dies", 0), ("dropped it", 0), ("push fails", 0), ("push fails", 2)])
async def test_without_the_kv_it_is_computed_again(make, how, ahead):
    """A failed move is no failure of the request, which may have one attempt only. Tokens of the move are delivered."""
    cluster, call = await leaving(make, ahead, attempts=1)
    [prefill], [first, second] = cluster.prefill, cluster.decode
    if how == "dies":
        first.close("commit")
    elif how == "push fails":
        first.fail_push = [worker_pb2.Failed(kind="ChannelBroken", message="cut")]
    else:
        first.refuse_once = [worker_pb2.REFUSAL_REASON_STALE]
    second.open("reserve", "decode")
    if how == "dies":
        await until(lambda: first.count("repush") == 1, "repush")
        await first.kill()
    events = await answered(cluster, call)
    assert [list(spec.known) for spec in prefill.specs[1:]] == [ids_of(events)[: MOVED + ahead]]
    assert recovered(events) == []


async def test_the_kv_goes_to_a_third_worker_if_the_second_dies_in_the_middle(make):
    """Tokens that the client got during the move are sent again, and the length that moves stays the same."""
    cluster, call = await leaving(make, 2, decode=3)
    first, *others = cluster.decode
    first.close("commit")
    for each in others:
        each.open("reserve", "decode")
    await until(lambda: first.count("repush") == 1, "the first push")
    taken = next(each for each in others if each.count("reserve"))
    await taken.kill()
    first.open("commit")
    await answered(cluster, call)
    [third] = [each for each in others if each is not taken]
    assert attempts_of(first) == [("reserve", 1), ("repush", 2), ("repush", 3)]
    assert [message.known_tokens for message in third.reserves] == [len(PROMPT) + MOVED - 1 + 2]
    assert cluster.prefill[0].count("prefill") == 1


async def test_it_is_computed_again_if_the_worker_is_gone_before_another_is_free(make):
    cluster, call = await leaving(make)
    first, second = cluster.decode
    second.refuse_once = [worker_pb2.REFUSAL_REASON_NO_ROOM]
    link = cluster.links[-2]
    await first.kill()
    await until(lambda: link.state != "connected", "lost")
    second.open("reserve", "decode")
    await answered(cluster, call)
    assert cluster.prefill[0].count("prefill") == 2


@pytest.mark.parametrize("how", ["leave", "Cancel"])
async def test_a_cancelled_request_frees_it(make, how):
    cluster, call = await leaving(make)
    await leave(cluster, call, how)
    await until(lambda: ("release", 1) in attempts_of(cluster.decode[0]), "release")
    await cluster.nothing_is_left()


async def test_a_worker_that_leaves_alone_need_not_wait(make):
    """No other decode worker is connected, so the KV is of no use."""
    cluster = await make()
    [first] = cluster.decode
    first.preempt_at, first.keeps = [MOVED], True
    call = await at(cluster, "decoding")
    first.draining = True
    first.open("decode")
    await until(lambda: ("release", 1) in attempts_of(first), "release")
    first.draining, first.keeps = False, False
    first.emit()
    await answered(cluster, call)
    assert first.count("repush") == 0
