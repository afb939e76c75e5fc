"""Requests whose worker is lost, or whose push fails, before the handoff.

Another attempt follows. Computed KV is pushed again, not computed again. The client receives each token once. Workers
release everything that no attempt needs. `tests/simulation/test_simulator_recovers_alike.py` has each phase in which
workers die. Without any prefill worker, decode workers compute prompts themselves.
"""

import asyncio
from dataclasses import replace

import pytest

from baton.core import HandoffId, Role
from baton.engine.prefix_cache import BlockHashChain, scope_key
from baton.errors import WorkerLost
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1 import worker_pb2
from baton.stages import Stage
from tests.support.in_process_router import LAYOUT, FakeWorker, InProcessCluster, at, event
from tests.support.routers import PROMPT, ids_of, kinds, leave, recovered, right
from tests.support.time_factor import scaled
from tests.support.waiting import until

ANSWER = right(PROMPT)
HELD = worker_pb2.Failed(kind="ChannelBroken", message="cut", held=True)
MISMATCH = worker_pb2.Failed(kind="DigestMismatch", message="not what was sent")


def attempts_of(worker: FakeWorker, *wanted: str) -> list[tuple[str, int]]:
    """Return the commands that the worker received, with attempts. `wanted` limits the kinds."""
    return [(kind, handoff.attempt) for kind, handoff in worker.commands if not wanted or kind in wanted]


async def answered(cluster: InProcessCluster, call) -> list[pb.GenerateEvent]:
    """Check for the right answer and that nothing is held."""
    events = await cluster.answer(call)
    assert ids_of(events) == ANSWER
    await cluster.nothing_is_left()
    return events


async def finishes(cluster: InProcessCluster, call, *reasons: str) -> pb.Completed:
    """Check for the right answer after losses for these reasons."""
    events = await answered(cluster, call)
    assert recovered(events) == list(enumerate(reasons, 2))
    assert kinds(events)[-2:] == ["finished", "completed"]
    assert events[-1].completed.placement.attempts == len(reasons) + 1
    return events[-1].completed


async def test_a_lost_prefill_worker_is_followed_by_another_one_after_the_answer_to_the_fence(make):
    cluster = await make(prefill=2)
    call = await at(cluster, "prefilling")
    decode, fenced = cluster.decode[0], list[HandoffId]()
    decode.fence = fenced.append
    await cluster.prefill[0].kill()
    await until(lambda: fenced, "fence")
    await asyncio.sleep(0.05)  # time in which a router that does not wait would go on
    assert attempts_of(decode) == [("reserve", 1), ("fence", 1)]
    assert cluster.prefill[1].commands == []
    decode.emit(event(fenced[0], fenced=worker_pb2.Fenced()))
    cluster.prefill[1].open("first")
    done = await finishes(cluster, call, "prefill_lost")
    assert done.placement.prefill_worker == "prefill-1"
    assert attempts_of(cluster.prefill[1]) == [("prefill", 2)]
    metrics = await cluster.http("/metrics")
    assert "baton_fenced_total 1.0" in metrics
    assert 'baton_recoveries_total{reason="prefill_lost"} 1.0' in metrics


@pytest.mark.parametrize(("state", "role"), [("reserving", Role.DECODE), ("prefilling", Role.PREFILL)])
async def test_a_worker_that_drained_before_a_command_came_is_no_failure(make, state, role):
    """The command crossed the orderly end of the stream. It costs no attempt, of which there is only one here."""
    cluster = await make(prefill=2, decode=2, attempts=1)
    call = await at(cluster, state)
    await (cluster.decode if role is Role.DECODE else cluster.prefill)[0].depart()
    for worker in cluster.workers:
        worker.open("reserve", "first")
    events = await answered(cluster, call)
    assert (recovered(events), events[-1].completed.placement.attempts) == ([], 2)


GONE = {role: (role, WorkerLost(f"the {role} worker is gone")) for role in Role}


@pytest.mark.parametrize(
    ("said", "again"),
    [
        ([{"failed": HELD}, GONE[Role.DECODE]], "repush"),
        ([GONE[Role.DECODE], {"failed": HELD}], "repush"),
        ([{"pushed": worker_pb2.Pushed(kv_bytes=1)}, GONE[Role.DECODE]], "prefill"),
        ([GONE[Role.PREFILL], GONE[Role.DECODE]], "prefill"),
        ([GONE[Role.DECODE], GONE[Role.PREFILL]], "prefill"),
    ],
    ids=["P's push failed, D lost", "D lost, P's push failed", "pushed, D lost", "P lost, D lost", "D lost, P lost"],
)
async def test_whatever_is_heard_of_both_in_one_breath(make, said, again):
    """P saw the broken channel before the router saw the broken stream, so its push failed and its KV waits. Or P
    received the commit of a decode worker that was lost before it reported the commit to the router.
    """
    cluster = await make(decode=2)
    call = await at(cluster, "transferring")
    [prefill] = cluster.prefill
    handoff = prefill.handoff
    if again == "prefill":
        prefill._drop(handoff)
    cluster.hears(*((Role.PREFILL, event(handoff, **one)) if isinstance(one, dict) else one for one in said))
    await until(lambda: len(attempts_of(prefill, "prefill", "repush")) == 2, "the next attempt")
    prefill.open("commit")
    await finishes(cluster, call, "decode_lost")
    assert attempts_of(prefill, "prefill", "repush") == [("prefill", 1), (again, 2)]


@pytest.mark.parametrize("silent", ["reserve", "fence"])
async def test_a_decode_worker_that_does_not_answer_is_lost(make, silent, monkeypatch):
    monkeypatch.setattr("router.request.attempt._ANSWER_S", scaled(1.0))
    cluster = await make()
    [prefill], [decode] = cluster.prefill, cluster.decode
    if silent == "reserve":
        decode.close("reserve")
    else:
        decode.fence = lambda handoff: None
        prefill.fail_push = [HELD]
    call = cluster.call()
    await until(lambda: decode.count("reserve") == 2, "the next attempt")
    decode.open("reserve")
    events = await answered(cluster, call)
    assert recovered(events) == ([(2, "decode_lost")] if silent == "fence" else [])
    assert prefill.count("prefill") == 1


@pytest.mark.parametrize(
    ("fails", "refused", "told"),
    [
        ([HELD], [], ["repush"]),
        ([HELD, HELD], [], ["repush", "repush"]),
        ([HELD], [worker_pb2.REFUSAL_REASON_FINGERPRINT], ["repush", "prefill"]),
        ([MISMATCH], [], ["prefill"]),
    ],
    ids=["once", "twice", "refused", "changed on the way"],
)
async def test_a_push_that_failed_is_pushed_again_when_the_attempt_is_fenced(cluster, fails, refused, told):
    """The prompt is computed again if the held KV is missing or corrupt."""
    [prefill], [decode] = cluster.prefill, cluster.decode
    prefill.fail_push, prefill.refuse_once = [*fails], [*refused]
    await finishes(cluster, cluster.call(), *["prefill_lost"] * len(told))
    assert attempts_of(prefill, "prefill", "repush") == list(zip(["prefill", *told], (1, 2, 3), strict=False))
    named = [command.repush.held.attempt for command in prefill.messages_in if command.HasField("repush")]
    assert named == list(range(1, 1 + told.count("repush")))
    assert attempts_of(decode)[:4] == [("reserve", 1), ("fence", 1), ("release", 1), ("reserve", 2)]
    assert [list(spec.known) for spec in prefill.specs[1:]] == [ANSWER[:1]] * told.count("prefill")
    assert f"baton_digest_mismatch_total {fails.count(MISMATCH):.1f}" in await cluster.http("/metrics")


async def test_a_push_that_failed_after_the_commit_does_not_outlive_a_preemption(cluster):
    """It failed for its sender alone. The next attempt starts from the client's tokens, not from the waiting KV."""
    [prefill], [decode] = cluster.prefill, cluster.decode
    decode.preempt_at = [3]
    decode.close("decode")
    call = await at(cluster, "transferring")
    decode.commit(prefill.handoff, prefill.specs[0])
    await until(lambda: cluster.handed_over, "handed over")
    prefill.emit(event(prefill.handoff, failed=HELD))
    await until(lambda: not prefill._queue.qsize(), "said")
    prefill.open("commit")
    prefill._drop(prefill.handoff)
    decode.open("decode")
    await answered(cluster, call)
    assert attempts_of(prefill, "prefill", "repush") == [("prefill", 1), ("prefill", 2)]
    assert list(prefill.specs[1].known) == ANSWER[:3]
    assert ("release", 1) in attempts_of(prefill)
    assert decode.count("fence") == 0


@pytest.mark.parametrize("attempts", [1, 2, 3])
async def test_too_many_failures_end_the_request_and_free_what_waits(make, attempts):
    cluster = await make(attempts=attempts)
    cluster.prefill[0].fail_push = [HELD] * 5
    with pytest.raises(WorkerLost, match="ChannelBroken: cut"):
        await cluster.generate()
    await cluster.nothing_is_left()
    assert cluster.decode[0].count("reserve") == attempts
    assert ("release", attempts) in attempts_of(cluster.prefill[0])
    assert cluster.router.context.sinks.outcomes["failed"] == 1


async def test_only_failures_are_counted(make):
    cluster = await make(attempts=1)
    cluster.decode[0].refuse_once = [worker_pb2.REFUSAL_REASON_NO_ROOM] * 4
    cluster.decode[0].preempt_at = [2, 3, 5]
    events = await answered(cluster, cluster.call())
    assert (recovered(events), events[-1].completed.placement.attempts) == ([], 8)
    one_more = await make(attempts=2)
    one_more.decode[0].refuse_once = [worker_pb2.REFUSAL_REASON_NO_ROOM] * 4
    one_more.prefill[0].fail_push = [HELD]
    assert recovered(await one_more.generate()) == [(6, "prefill_lost")]


async def waiting_with_kv(cluster: InProcessCluster, state: str):
    """Start a request whose decode worker is lost and whose KV is held at `prefill[0]`, and hold it in `state`."""
    prefill, second = cluster.prefill[0], cluster.decode[1]
    if state == "fencing":
        call = await at(cluster, "transferring")
        cluster.decode[0].fence = lambda handoff: None  # type: ignore[method-assign]
        prefill.emit(event(prefill.handoff, failed=HELD))
        await until(lambda: cluster.decode[0].count("fence") == 1, state)
        return call
    call = await at(cluster, "prefilling" if state == "repushed" else "transferring")
    if state == "queued":
        cluster.infos = [info for info in cluster.infos if info.ref.worker_id != "decode-1"]
        retired = cluster.links[-1]
        await until(lambda: not retired.usable, "retired")
    if state in {"queued", "reserving"}:
        second.close("reserve")
    await cluster.decode[0].kill()
    reached = {
        "queued": lambda: cluster.waits(1),
        "reserving": lambda: second.count("reserve") == 1,
        "repushed": lambda: prefill.count("repush") == 1,
        "repushed, computed": lambda: prefill.count("repush") == prefill.said_twice == 1,
    }
    await until(reached[state], state)
    assert prefill._work, "it holds the KV"
    return call


@pytest.mark.parametrize("state", ["fencing", "queued", "reserving", "repushed", "repushed, computed"])
@pytest.mark.parametrize("how", ["leave", "Cancel"])
async def test_cancel_frees_what_is_held_in_every_state(make, state, how):
    cluster = await make(decode=2)
    call = await waiting_with_kv(cluster, state)
    await leave(cluster, call, how)
    await until(lambda: cluster.prefill[0].count("release"), "release to the prefill worker")
    last = {"fencing": cluster.decode[0], "queued": None}.get(state, cluster.decode[1])
    if last is not None:
        await until(lambda: last.count("release") == 1, "release to the decode worker")
    await cluster.nothing_is_left()
    await until(lambda: cluster.router.context.sinks.outcomes["cancelled"] == 1, "counted")


@pytest.mark.parametrize("how", ["dies", "loses its lease"])
async def test_a_prefill_worker_that_goes_while_its_kv_waits(make, how):
    cluster = await make(prefill=2, decode=2)
    call = await waiting_with_kv(cluster, "queued")
    first, second = cluster.prefill
    link = cluster.links[0]
    if how == "dies":
        await first.kill()
        await until(lambda: link.state != "connected", how)
    else:
        cluster.infos = [info for info in cluster.infos if info.ref.worker_id != "prefill-0"]
        await until(lambda: not link.usable, how)
    cluster.infos = [second.info, cluster.decode[1].info]
    second.open("commit")
    cluster.decode[1].open("reserve")
    await finishes(cluster, call, "decode_lost")
    assert attempts_of(second) == [("prefill", 2)]
    assert list(second.specs[0].known) == ANSWER[:1]
    assert first.count("repush") == 0
    assert first.count("release") == (how == "loses its lease")


async def test_the_worker_that_holds_the_kv_is_taken_though_another_one_is_idle(make):
    cluster = await make(prefill=2, decode=2)
    call = await at(cluster, "transferring")
    prefill, second = cluster.prefill[0], cluster.decode[1]
    second.refuse_once = [worker_pb2.REFUSAL_REASON_NO_ROOM]
    cluster.links[0].view.queued_tokens += 1000  # a policy would not choose it
    await cluster.decode[0].kill()
    await until(lambda: prefill.count("repush") == 1, "repush")
    cluster.links[0].view.queued_tokens -= 1000
    prefill.open("commit")
    await answered(cluster, call)
    assert attempts_of(prefill, "prefill", "repush") == [("prefill", 1), ("repush", 3)]
    assert cluster.prefill[1].commands == []


async def test_an_answer_does_not_move_to_a_worker_whose_context_it_may_exceed_beside_one_with_room(make):
    """The small worker joined after the request had been accepted."""
    cluster = await make(decode=2)
    call = await at(cluster, "decoding")
    first, second = cluster.decode
    small = FakeWorker(Role.DECODE, "decode-2", 300)
    small.info = replace(small.info, max_model_len=len(PROMPT) + len(ANSWER) - 1)
    await cluster.joined(small)
    second.load_fields = {"running": 3}
    second.emit()
    await until(lambda: {link.view.load.running for link in cluster.links if link.usable} == {0, 3}, "told")
    await until(lambda: sum(link.usable for link in cluster.links) == 4, "connected")
    second.open("decode")
    await first.kill()
    done = await finishes(cluster, call, "decode_lost")
    assert done.placement.decode_worker == "decode-1"
    cluster.infos = [worker.info for worker in cluster.workers if worker not in (first, second)]
    await second.kill()
    await until(lambda: sum(link.usable for link in cluster.links) == 2, "only the small one is left")
    assert len(ids_of(await cluster.generate(max_tokens=2))) == 2, "all are small"


async def test_kv_on_a_worker_with_a_short_context_is_taken_though_a_longer_one_has_joined(make):
    cluster = await make(decode=2)

    async def joined(name: str, counter: int, length: int) -> FakeWorker:
        worker = FakeWorker(Role.PREFILL, name, counter)
        worker.info = replace(worker.info, max_model_len=length)
        worker.peers = cluster.prefill[0].peers
        cluster.prefill.append(await worker.start())
        cluster.infos = [each.info for each in cluster.workers if each.alive]
        await until(lambda: any(link.usable and link.info.ref == worker.info.ref for link in cluster.links), name)
        return worker

    call = await at(cluster, "prefilling")
    small = await joined("prefill-1", 150, len(PROMPT) + len(ANSWER) - 1)
    small.close("commit")
    await cluster.prefill[0].kill()
    await until(lambda: small.count("prefill") == 1, "the small one computes it, because no other can")
    await joined("prefill-2", 151, 2048)
    taken = next(each for each in cluster.decode if ("reserve", 2) in attempts_of(each))
    await taken.kill()
    await until(lambda: small.count("repush") == 1, "repush")
    small.open("commit")
    events = await cluster.answer(call)
    assert ids_of(events) == ANSWER
    assert cluster.prefill[2].commands == []


async def test_a_reserve_names_the_full_blocks_of_what_is_known(cluster):
    prompt = list(range(40))
    cluster.decode[0].preempt_at = [30]
    await cluster.answer(cluster.call(prompt, 40, cache_scope="mine"))
    for message, tokens in zip(cluster.decode[0].reserves, (prompt, prompt + right(prompt, 30)), strict=True):
        chain = BlockHashChain(scope_key("fp", "mine"), tokens, LAYOUT.block_size)
        assert message.known_tokens == len(tokens)
        assert list(message.prefix) == [chain.digest(block) for block in range(len(tokens) // LAYOUT.block_size)]


async def test_what_a_decode_worker_has_is_skipped_by_the_push_to_it(make):
    cluster = await make(decode=2)
    for decode, cached in zip(cluster.decode, (16, 32), strict=True):
        decode.cached_here = cached
    prefill = cluster.prefill[0]
    prefill.close("commit")
    call = cluster.call([5] * 40, 8)
    await until(lambda: prefill.specs, "prefilling")
    await cluster.decode[0].kill()
    prefill.open("commit")
    events = await cluster.answer(call)
    assert ids_of(events) == right([5] * 40)
    assert [command.prefill.skip for command in prefill.messages_in if command.HasField("prefill")] == [16]
    repushed = [command.repush for command in prefill.messages_in if command.HasField("repush")]
    assert [(message.skip, message.to.worker_id) for message in repushed] == [(32, "decode-1")]
    assert events[-1].completed.usage.cached_tokens == 0, "it was computed, only not moved"


async def test_every_attempt_has_what_is_left_of_the_time(make):
    cluster = await make(max_request_s=30.0)
    cluster.prefill[0].fail_push = [HELD]
    await cluster.generate()
    messages = [getattr(c, c.WhichOneof("command") or "") for w in cluster.workers for c in w.messages_in]
    left = [message.deadline_s for message in messages if hasattr(message, "deadline_s")]
    assert len(left) == 4
    assert all(0 < seconds <= 30.0 for seconds in left)


# --- decode workers that compute prompts themselves, because no prefill worker is left


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


async def test_a_decode_worker_alone_that_fences_for_another_router_is_lost(make):
    cluster = await make(prefill=0)
    [decode] = cluster.decode
    decode.hold(0)
    decode.close("first")
    call = cluster.call()
    await until(lambda: decode.count("prefill") == 1, "it computes alone")
    decode.fence(decode.handoff)
    decode.open("hold", "first")
    events = await answered(cluster, call)
    assert recovered(events) == [(2, "prefill_lost")]
