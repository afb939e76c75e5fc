"""Requests whose decode worker leaves and holds their KV: they move to another one, and nothing is computed again."""

from typing import Any

import pytest

from baton.rpc.v1 import worker_pb2
from tests.integration.test_router_recovery import answered, attempts_of
from tests.support.in_process_router import InProcessCluster, at
from tests.support.routers import PROMPT, ids_of, leave, recovered
from tests.support.waiting import until

MOVED = 5  # tokens that the client has when the worker leaves


async def leaving(make, **settings) -> tuple[InProcessCluster, Any]:
    """Start a request that waits for a decode worker while the first one, which leaves, holds its KV."""
    cluster = await make(**{"decode": 2, **settings})
    first, second = cluster.decode[0], cluster.decode[-1]
    first.preempt_at, first.keeps = [MOVED], True
    call = await at(cluster, "decoding")
    second.close("reserve")
    first.draining = True
    first.emit()
    await until(lambda: cluster.links[-2].view.load.draining, "draining")
    first.open("decode")
    await until(lambda: second.count("reserve") == 1, "the next attempt")
    return cluster, call


async def test_the_kv_goes_to_the_other_worker(make):
    cluster, call = await leaving(make)
    [prefill], [first, second] = cluster.prefill, cluster.decode
    second.open("reserve", "decode")
    events = await answered(cluster, call)
    assert attempts_of(first) == [("reserve", 1), ("repush", 2)]
    assert [message.known_tokens for message in second.reserves] == [len(PROMPT) + MOVED - 1]
    assert prefill.count("prefill") == 1
    done = events[-1].completed
    assert (done.placement.prefill_worker, done.placement.decode_worker) == ("decode-0", "decode-1")
    assert (recovered(events), done.placement.attempts) == ([], 2)


@pytest.mark.parametrize("how", ["dies", "dropped it", "push fails"])
async def test_without_the_kv_it_is_computed_again(make, how):
    """A failed move is no failure of the request, which may have one attempt only."""
    cluster, call = await leaving(make, attempts=1)
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
    assert [list(spec.known) for spec in prefill.specs[1:]] == [ids_of(events)[:MOVED]]
    assert recovered(events) == []


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
