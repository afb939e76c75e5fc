"""The whole router over real gRPC, with scripted workers in this process. They have no engine and hold any state.

`test_router_recovery.py` has the loss of a worker before the handoff. The last test counts the files of the main path.
"""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import router
from baton import errors
from baton.core import HandoffId, Incarnation, Role
from baton.rpc import convert
from baton.rpc.v1 import common_pb2, worker_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from baton.stages import Stage
from baton.tokenizer import OracleTokenizer
from router.server import SERVICE, serve
from tests.support.in_process_router import STATES, FakeWorker, InProcessCluster, at, event, finish, released, token_at
from tests.support.routers import PROMPT, asked, ids_of, kinds, leave, recovered, refused, right, spied
from tests.support.time_factor import scaled
from tests.support.waiting import at_most, until


def refusal(reason: str) -> int:
    return worker_pb2.RefusalReason.Value(f"REFUSAL_REASON_{reason}")


async def test_one_request_from_accepted_to_completed(cluster):
    prompt = [5] * 40
    events = await cluster.generate(prompt, 8, client_tag="me")
    assert kinds(events)[0] == "accepted"
    assert kinds(events)[-2:] == ["finished", "completed"]
    assert ids_of(events) == right(prompt)
    assert "".join(event.tokens.text for event in events) == "".join(f"<{i}>" for i in range(8)) + "!"
    done = events[-1].completed
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (40, 8)
    assert (done.placement.prefill_worker, done.placement.decode_worker) == ("prefill-0", "decode-0")
    assert (done.placement.kv_bytes, done.placement.transport, done.placement.attempts) == (100, "memory", 1)
    times = done.timings
    assert sum(getattr(times, f"{stage}_s") for stage in Stage) == times.e2e_s
    assert 0 < times.ttft_s < times.e2e_s
    [spec] = cluster.prefill[0].specs
    assert list(spec.prompt) == prompt
    assert spec.sampling.HasField("seed")
    assert cluster.decode[0].kinds == ["reserve"], "D said that it is through: no Release"
    assert cluster.idle


async def test_a_request_that_ends_with_its_first_token(cluster):
    events = await cluster.generate(max_tokens=1)
    done = events[-1].completed
    assert len(ids_of(events)) == 1
    assert done.placement.decode_worker == ""
    assert (done.timings.transfer_s, done.timings.commit_s, done.timings.decode_s) == (0, 0, 0)
    await released(cluster.decode[0])


async def test_a_preempted_request_goes_on_at_the_same_index(cluster):
    cluster.decode[0].preempt_at = [3, 6]
    cluster.decode[0].refuse_once = [refusal("NO_ROOM")]
    cluster.prefill[0].cached = [1, 2, 3]
    events = await cluster.generate([9, 9], 10)
    assert ids_of(events) == right([9, 9], 10)
    assert events[-1].completed.placement.attempts == 4
    assert events[-1].completed.usage.cached_tokens == 1, "later attempts find what the first one left"
    known = [list(spec.known) for spec in cluster.prefill[0].specs]
    assert known == [[], ids_of(events)[:3], ids_of(events)[:6]]
    assert 'baton_recoveries_total{reason="preempted"} 2.0' in await cluster.http("/metrics")
    assert cluster.idle


@pytest.mark.parametrize("reason", ["NO_ROOM", "DRAINING", "FINGERPRINT", "STALE"])
async def test_a_refused_reservation_is_tried_again(cluster, reason):
    cluster.decode[0].refuse_once = [refusal(reason)] * 2
    events = await cluster.generate(max_tokens=3)
    assert (ids_of(events), events[-1].completed.placement.attempts) == (right(PROMPT, 3), 3)
    assert kinds(events)[:2] == ["accepted", "tokens"], "before it was accepted, there is nothing to recover"
    await cluster.nothing_is_left()


FAILURES = [("FINGERPRINT", 3, errors.NoWorker), ("STALE", 3, errors.WorkerLost)]
FINAL = [("TOO_LONG", 1, errors.InvalidRequest), ("INVALID", 1, errors.EngineFault)]  # another attempt cannot help


@pytest.mark.parametrize(("reason", "attempts", "error"), [*FAILURES, *FINAL])
async def test_the_third_refusal_or_a_final_one_ends_the_request(cluster, reason, attempts, error):
    cluster.decode[0].refuse_once = [refusal(reason)] * attempts
    with pytest.raises(error, match="full"):
        await cluster.generate()
    assert cluster.decode[0].count("reserve") == attempts
    await cluster.nothing_is_left()


async def test_a_fence_that_comes_after_the_commit_lets_the_request_go_on(cluster):
    prefill, decode = cluster.prefill[0], cluster.decode[0]

    def committed_already(handoff: HandoffId) -> None:
        decode.commit(handoff, prefill.specs[0])
        decode.emit(event(handoff, committed=worker_pb2.Committed(kv_bytes=100, transport="memory")))

    decode.fence = committed_already
    call = await at(cluster, "transferring")
    await prefill.kill()
    assert len(ids_of(await cluster.answer(call))) == 8
    assert decode.count("fence") == 1
    assert 'baton_transfer_bytes_total{transport="memory"} 100.0' in await cluster.http("/metrics")  # counted once


@pytest.mark.parametrize("kind", ["EngineFault", "DeadlineExceeded"])
@pytest.mark.parametrize("role", list(Role))
async def test_a_failure_that_the_next_attempt_would_meet_again_ends_the_request(cluster, role, kind):
    call = await at(cluster, "transferring")
    worker = {Role.PREFILL: cluster.prefill[0], Role.DECODE: cluster.decode[0]}[role]
    worker.emit(event(worker.handoff, failed=worker_pb2.Failed(kind=kind, message="because")))
    with pytest.raises(getattr(errors, kind), match="because"):
        await cluster.answer(call)
    assert cluster.decode[0].count("fence") == (role is Role.PREFILL)
    await released(*cluster.workers)
    await cluster.nothing_is_left()


async def test_what_a_worker_says_late_is_no_failure(cluster):
    """Its answer to a fence may come after the commit, and its last words come after the end."""
    call = await at(cluster, "decoding")
    handoff = cluster.decode[0].handoff
    tokens = convert.tokens_to_pb([token_at(PROMPT, index) for index in range(1, 8)])
    fenced = event(handoff, fenced=worker_pb2.Fenced())
    last_words = (event(handoff, tokens=tokens), finish(handoff), errors.WorkerLost("and gone"))
    cluster.hears(*((Role.DECODE, said) for said in (fenced, *last_words)))
    events = await cluster.answer(call)
    assert (len(ids_of(events)), recovered(events)) == (8, [])
    assert "baton_fenced_total 0.0" in await cluster.http("/metrics")


async def test_a_new_incarnation_takes_the_place_of_a_dead_one(cluster):
    await cluster.decode.pop().kill()
    await cluster.joined(FakeWorker(Role.DECODE, "decode-0", 299))
    assert len(ids_of(await cluster.generate())) == 8
    assert [link.info.ref.incarnation.counter for link in cluster.links] == [100, 299]


async def test_another_incarnation_at_the_same_address_is_not_the_worker(make):
    cluster = await make(queue_max_wait_s=0.3)
    stale = replace(cluster.infos[1], ref=replace(cluster.infos[1].ref, incarnation=Incarnation(1, 1)))
    cluster.infos = [cluster.infos[0], stale]
    await until(lambda: [link.state for link in cluster.links if link.info.ref == stale.ref] == ["lost"], "refused")


async def test_a_worker_without_a_lease_gets_nothing_new_but_finishes_what_it_has(make):
    cluster = await make(queue_max_wait_s=0.2)
    call = await at(cluster, "decoding")
    cluster.infos = [cluster.prefill[0].info]
    await until(lambda: not cluster.router.context.pool.has_pair(), "retired")
    with pytest.raises(errors.NoWorker):
        await cluster.generate()
    cluster.decode[0].open("decode")
    assert len(ids_of(await cluster.answer(call))) == 8
    cluster.infos = [worker.info for worker in cluster.workers]
    await until(cluster.router.context.pool.has_pair, "back")
    assert len(ids_of(await cluster.generate())) == 8


async def test_new_requests_are_served_while_the_ledger_is_away(cluster, monkeypatch):
    source = AsyncMock(side_effect=errors.LedgerError("away"))
    monkeypatch.setattr(cluster.router.context.pool, "_source", source)
    await until(lambda: source.await_count > 1, "two failed looks")
    assert len(ids_of(await cluster.generate())) == 8


async def test_a_worker_that_says_nothing_is_lost(make):
    cluster = await make(worker_silence_s=scaled(0.5))
    call = await at(cluster, "decoding")
    await until(lambda: any(link.state == "lost" for link in cluster.links), "lost")
    await until(cluster.router.context.pool.has_pair, "connected again")
    cluster.decode[0].open("decode")
    assert len(ids_of(await cluster.answer(call))) == 8
    assert len(ids_of(await cluster.generate())) == 8


async def test_a_worker_that_talks_but_has_no_lease_is_lost_in_the_end(make):
    cluster = await make(worker_silence_s=scaled(1.0), queue_max_wait_s=0.2)
    call = await at(cluster, "decoding")
    cluster.infos = [cluster.prefill[0].info]
    talking = asyncio.create_task(talk(cluster.workers))
    with pytest.raises(errors.NoWorker, match=r"waited 0\.2 s"):
        await cluster.answer(call)
    assert [link.info.role for link in cluster.links] == [Role.PREFILL]
    talking.cancel()


async def test_a_link_outlives_a_writer_that_breaks(cluster):
    for link in cluster.links:
        link._commands.append("no command")
        link._wake.set()
        await until(lambda: link.state == "lost", "noticed")  # noqa: B023
    await until(cluster.router.context.pool.has_pair, "connected again")
    assert len(ids_of(await cluster.generate())) == 8


async def test_releases_wait_until_the_worker_is_connected_again(cluster, monkeypatch):
    """A message has at most MESSAGE_BYTES. Other commands are dropped, and so are the oldest releases of too many."""
    decode, link, info = cluster.decode[0], cluster.links[1], cluster.decode[0].info
    names = [convert.handoff_to_pb(HandoffId("r", attempt)) for attempt in range(1, 7)]
    release = worker_pb2.RouterCommand(release=worker_pb2.Release(handoff=names[0]))
    monkeypatch.setattr("baton.rpc.message_size.MESSAGE_BYTES", 2 * release.ByteSize())
    monkeypatch.setattr("router.workers.stream._MOST_LATE", 5)
    heard: list[list[int]] = []

    async def read(messages: Any) -> None:
        async for message in messages:
            heard.append([command.release.handoff.attempt for command in message.commands])

    decode.info, decode._read = cluster.prefill[0].info, read  # the router accepts no welcome of another worker
    decode._queue.put_nowait(None)
    await until(lambda: link.state == "lost", "cut off")
    for name in names:
        link.send(fence=worker_pb2.Fence(handoff=name))
        link.send(release=worker_pb2.Release(handoff=name))
    await link._write(Mock(write=AsyncMock(side_effect=asyncio.InvalidStateError)))  # the connection ends once more
    decode.info = info
    await until(lambda: [6] in heard, "connected again")
    assert [attempts for attempts in heard if attempts != [0]] == [[2, 3], [4, 5], [6]], "[0] is the hello"


@pytest.mark.parametrize(("tokenizer", "fits"), [(OracleTokenizer().identity(), True), ("another", False)])
async def test_a_router_compares_its_tokenizer_with_those_of_workers(cluster, tokenizer, fits):
    info = cluster.decode[0].info
    newer = replace(info.ref, incarnation=Incarnation(info.ref.incarnation.epoch + 1, 1))
    cluster.infos = [replace(info, ref=newer, tokenizer=tokenizer)]
    links = cluster.router.context.pool._links
    await until(lambda: newer in links, "seen")
    assert links[newer].foreign is not fits


async def test_a_request_releases_its_old_attempt_before_it_reserves_again(cluster):
    call = await at(cluster, "decoding")
    cluster.decode[0]._queue.put_nowait(None)
    await until(lambda: cluster.decode[0].count("reserve") == 2, "the next attempt")
    cluster.decode[0].open("decode")
    assert len(ids_of(await cluster.answer(call))) == 8
    kinds = [(kind, handoff.attempt) for kind, handoff in cluster.decode[0].commands]
    assert kinds == [("reserve", 1), ("release", 1), ("reserve", 2)]


async def talk(workers: list[FakeWorker]) -> None:
    while True:
        for worker in workers:
            worker.emit()
        await asyncio.sleep(0.1)


class Endless:
    """A round that never ends by itself."""

    def __init__(self, *_):
        self.asked, self.held = 0, []

    def holds(self):
        self.asked += 1  # once for each message
        return True

    def later(self, mailbox):
        self.held.append(mailbox)


async def test_tokens_that_are_held_back_leave_as_one_message_with_the_end_at_the_latest(make, monkeypatch):
    monkeypatch.setattr("router.workers.stream.WakeupBatcher", Endless)
    cluster = await make()
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    at_prefill, at_decode = (link._rounds for link in cluster.links)
    decode.hold(6)
    decode.close("decode")
    answer = asyncio.create_task(cluster.answer(cluster.call([1, 2, 3], 8)))
    await until(lambda: prefill.kinds and prefill.holds_nothing, "the prompt is handed over")
    await until(lambda: at_prefill.asked == 1 + prefill.messages, "and that is heard")
    await until(lambda: cluster.handed_over, "from the decode worker as well")
    [(mailbox, _)] = cluster.links[1].mailboxes.values()
    await until(lambda: not (mailbox._items or mailbox._reader.done()), "the first token was sent on")
    decode.open("decode")
    await until(lambda: len(at_decode.held) == 5, "tokens 1 to 5 are held back")
    at_decode.held[0].wake()
    at_decode.held[0].wake()  # no more is held back
    decode.open("hold")
    events = await answer
    numbers = [list(range(getattr(e.tokens, "from"), getattr(e.tokens, "from") + len(e.tokens.ids))) for e in events]
    assert [found for found in numbers if found] == [[0], [1, 2, 3, 4, 5], [6, 7]]
    assert ids_of(events) == right(PROMPT)


@pytest.mark.parametrize(
    ("thinks", "said", "times", "words"),
    [
        (0, {"tokens": worker_pb2.OutputTokens(ids=[1, 2], texts=["x"])}, 1, "sent an invalid message"),
        (0, {"pushed": worker_pb2.Pushed()}, 1000, "more than 24 messages"),
        (4, {"thoughts": worker_pb2.OutputThoughts(thoughts=[common_pb2.TokenIds()])}, 1000, "more than 28 messages"),
    ],
    ids=["unreadable", "more than a request can produce", "endless thoughts"],
)
async def test_what_a_worker_cannot_mean_is_its_fault(make, thinks, said, times, words):
    cluster = await make(thinks=thinks)
    call = await at(cluster, "decoding")
    decode = cluster.decode[0]
    decode.emit(*[event(decode.handoff, **said)] * times)
    with pytest.raises(errors.EngineFault, match=words):
        await cluster.answer(call)
    await released(*cluster.workers)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("how", ["leave", "Cancel"])
async def test_cancel_releases_both_workers_in_every_state(cluster, state, how):
    call = await at(cluster, state)
    await leave(cluster, call, how)
    await released(*cluster.workers)
    assert cluster.idle
    await until(lambda: cluster.router.context.sinks.outcomes["cancelled"] == 1, "counted")


@pytest.mark.parametrize("state", STATES)
async def test_the_callers_deadline_holds_in_every_state(make, state):
    cluster = await make(max_request_s=scaled(1.0))  # the state is reached before
    with pytest.raises(errors.DeadlineExceeded):
        await cluster.answer(await at(cluster, state))
    await released(*cluster.workers)
    assert cluster.idle


async def test_a_grpc_deadline_is_carried(cluster):
    cluster.decode[0].close("decode")
    answer = asyncio.create_task(cluster.generate(timeout=scaled(1.0)))
    running, outcomes = cluster.router.context.running, cluster.router.context.sinks.outcomes
    await until(lambda: len(running) == 1, "it arrives before")
    assert all(0 < call.within_s < scaled(2.0) for call in running)  # gRPC rounds it
    with pytest.raises(errors.DeadlineExceeded):
        await answer
    # The client's deadline is earlier by the time that the call took to arrive, so its end may look like any other.
    await until(lambda: cluster.idle and outcomes["failed"] + outcomes["cancelled"] == 1, "released and counted")


async def test_the_decode_workers_message_may_overtake_the_prefill_workers(cluster):
    cluster.prefill[0].close("first")
    cluster.prefill[0].commit_first = True
    events = await cluster.generate()
    assert ids_of(events) == right(PROMPT)
    cluster.prefill[0].open("first")  # no attempt listens to the late witness
    assert len(ids_of(await cluster.generate())) == 8


async def test_a_slow_reader_blocks_nobody_and_is_given_up(make):
    cluster = await make(client_stall_s=1.0)
    for link in cluster.links:
        link.view.info = replace(link.view.info, max_model_len=10**6)
    async with aio.insecure_channel(cluster.router.grpc, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        slow = InferenceStub(channel).Generate(asked(max_tokens=20_000))
        await until(lambda: cluster.decode[0].messages > 100, "it streams")
        for _ in range(5):
            assert len(ids_of(await cluster.generate(max_tokens=20))) == 20
        await until(lambda: cluster.router.context.sinks.outcomes["cancelled"] == 1, "given up", 40)
        assert cluster.idle
        with pytest.raises(errors.Cancelled, match="did not read for 1 s"):
            await cluster.answer(slow)


async def test_no_worker(make):
    cluster = await make(decode=0, queue_max_wait_s=0.1)
    why = r"waited 0\.1 s: no decode worker is connected, and prefill workers do not decode"
    with pytest.raises(errors.NoWorker, match=why):
        await cluster.generate()
    assert (await cluster.status()).refused == 1


async def test_a_chat_without_a_length_waits_for_the_context_of_a_worker(make):
    """Otherwise its answer would end after the 16 tokens that other prompts have by default."""
    cluster = await make(worker_silence_s=scaled(0.5), queue_max_wait_s=scaled(20.0))
    cluster.infos = []
    await until(lambda: not cluster.links, "dropped")
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hello")])
    request = pb.GenerateRequest(chat=chat, sampling=common_pb2.Sampling(min_tokens=20))
    answer = asyncio.create_task(cluster.answer(cluster.stub.Generate(request)))
    await until(lambda: len(cluster.router.context.running) == 1, "it waits")
    cluster.infos = [worker.info for worker in cluster.workers]
    # The worker that connects first may compute the prompt: a decode worker too, if it is alone.
    specs = await until(lambda: [spec for worker in cluster.workers for spec in worker.specs], "placed")
    spec = specs[-1]
    assert (spec.sampling.max_tokens, spec.sampling.min_tokens) == (2048 - len(spec.prompt), 20)
    answer.cancel()


@pytest.mark.parametrize(("known", "field"), [(19, "sampling.max_tokens"), (20, "prompt")])
async def test_a_request_beyond_the_context_of_a_worker_that_came_later_is_named(make, known, field):
    cluster = await make(worker_silence_s=scaled(0.5), queue_max_wait_s=scaled(20.0))
    cluster.infos = []
    for worker in cluster.workers:
        worker.info = replace(worker.info, max_model_len=20)
    await until(lambda: not cluster.links, "no worker is known")
    cluster.decode[0].refuse_once = [refusal("TOO_LONG")]
    answer = asyncio.create_task(cluster.generate(list(range(known)), 30))
    await until(lambda: len(cluster.router.context.running) == 1, "it waits")
    cluster.infos = [worker.info for worker in cluster.workers]
    with pytest.raises(errors.InvalidRequest) as caught:
        await answer
    assert [each.field for each in caught.value.violations] == [field]


async def test_a_chat_without_a_length_is_refused_where_no_worker_is_known(make):
    cluster = await make(prefill=0, decode=0, queue_max_wait_s=0.1)
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hello")])
    with pytest.raises(errors.NoWorker, match=r"waited 0\.1 s: no worker is known"):
        await cluster.answer(cluster.stub.Generate(pb.GenerateRequest(chat=chat)))


async def test_errors_are_named(cluster):
    with pytest.raises(errors.UnknownModel, match="this router serves 'oracle'"):
        await cluster.generate(model="gpt")
    with pytest.raises(errors.InvalidRequest, match="n: must be at least 1") as caught:
        await cluster.generate(n=0, priority=101, logprobs=21)
    assert [v.field for v in caught.value.violations] == ["n", "priority", "sampling.logprobs"]
    with pytest.raises(errors.InvalidRequest, match="2048"):
        await cluster.generate([1] * 2048)
    assert not (await cluster.stub.Cancel(pb.CancelRequest(request_id="none"))).found
    with pytest.raises(errors.InvalidRequest, match="request: must be the request that began the stream"):
        await cluster.answer(cluster.stub.Resume(pb.ResumeRequest(request_id="x")))
    with pytest.raises(errors.InvalidRequest, match="too large"):
        await cluster.answer(cluster.stub.Generate(pb.GenerateRequest(text="x" * 10_000_000)))


async def test_tokenize_detokenize_and_models(cluster):
    ids = (await cluster.stub.Tokenize(pb.TokenizeRequest(text="Zoë"))).ids
    assert (await cluster.stub.Detokenize(pb.DetokenizeRequest(ids=ids))).text == "Zoë"
    pieces = (await cluster.stub.Detokenize(pb.DetokenizeRequest(ids=[104, 0xC3, 256, 999], pieces=True))).pieces
    assert [(piece.bytes, piece.special) for piece in pieces] == [(b"h", False), (b"\xc3", False), *[(b"", True)] * 2]
    [model] = (await cluster.stub.ListModels(pb.ListModelsRequest())).models
    assert (model.id, model.max_model_len, model.vocab_size) == ("oracle", 2048, 257)
    with refused(errors.InvalidRequest):
        await cluster.stub.Detokenize(pb.DetokenizeRequest(ids=[999]))
    with refused(errors.UnknownModel):
        await cluster.stub.Tokenize(pb.TokenizeRequest(text="x", model="gpt"))


async def test_a_conversation_becomes_a_prompt(cluster):
    turns = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Zoë?")])
    text = "user: Zoë?\nassistant:"
    assert bytes((await cluster.stub.Tokenize(pb.TokenizeRequest(chat=turns))).ids).decode() == text
    events = await cluster.answer(cluster.stub.Generate(pb.GenerateRequest(chat=turns)))
    assert kinds(events)[-1] == "completed"
    [spec] = cluster.prefill[0].specs
    assert bytes(spec.prompt).decode() == text
    turns.messages[0].role = ""
    with refused(errors.InvalidRequest, r"chat.messages\[0\].role"):
        await cluster.stub.Tokenize(pb.TokenizeRequest(chat=turns))


async def health_is(cluster: InProcessCluster, service: str, wanted: int):
    stub: Any = health_pb2_grpc.HealthStub(cluster.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=service))
    async with at_most(10):
        await anext(reply async for reply in watch if reply.status == wanted)
    watch.cancel()


async def test_health_reflection_status_and_metrics(cluster):
    await cluster.generate()
    for service in ("", SERVICE):
        await health_is(cluster, service, health_pb2.HealthCheckResponse.SERVING)
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(cluster.channel)
    stream = stub.ServerReflectionInfo(iter([listing]))
    names = {service.name async for reply in stream for service in reply.list_services_response.service}
    assert SERVICE in names
    status = await cluster.status()
    assert (status.name, status.accepted, status.finished, status.running) == ("test", 1, 1, 0)
    assert [worker.state for worker in status.workers] == ["connected", "connected"]
    metrics = await cluster.http("/metrics")
    for line in ('requests_total{outcome="finished"} 1.0', 'kv_blocks{role="decode",state="free"} 4000.0'):
        assert f"baton_{line}" in metrics
    assert "200 OK" in await cluster.http("/ready")


async def test_health_follows_the_workers(cluster):
    await cluster.decode[0].kill()
    await until(lambda: not cluster.router.context.pool.can_serve(), "noticed")
    assert "503" in await cluster.http("/ready")
    assert "200 OK" in await cluster.http("/health")
    await health_is(cluster, SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)


async def test_stop_ends_what_does_not_finish_within_the_grace(cluster):
    call = await at(cluster, "decoding")
    commands = spied(cluster)
    stopping = asyncio.create_task(cluster.router.stop(grace_s=0.05))
    with pytest.raises(errors.NoWorker, match="stopping"):
        await cluster.answer(call)
    await stopping
    assert commands.count("decode-0 release") == 1


async def test_what_is_wrong_with_the_settings_is_named(cluster):
    good = cluster.settings
    for wrong, words in (
        (replace(good, policy="best"), "router.policy: 'best' is not one of"),
        (replace(good, grpc=cluster.router.grpc), "^router.grpc: cannot listen on .* in use"),
        (replace(good, admin=cluster.router.grpc), "^router.admin: cannot listen on .* in use"),
        (replace(good, metrics=cluster.router.metrics), "^router.metrics: cannot listen on"),
    ):
        with pytest.raises(errors.ConfigError, match=words):
            await serve(wrong, cluster.source, OracleTokenizer())


# --- the files that a plain Generate enters

MOST = 28  # files; a reader of the request path opens all of them
ROUTER = str(Path(router.__file__).parent) + "/"
BACKGROUND = {"health", "live", "worker pool"}  # tasks of the router that run without a request


async def test_a_generate_enters_few_files(cluster):
    await cluster.generate()  # the first one fills caches
    entered = set[str]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(ROUTER):
            task = asyncio.current_task()
            if task is None or task.get_name() not in BACKGROUND:
                entered.add(path.removeprefix(ROUTER))

    sys.setprofile(profile)
    try:
        events = await cluster.generate()
        await cluster.nothing_is_left()
    finally:
        sys.setprofile(None)
    assert events[-1].HasField("completed")
    assert {"service.py", "request/lifecycle.py", "admission/admission.py", "workers/stream.py"} <= entered
    assert len(entered) <= MOST, f"{len(entered)} files, at most {MOST}: {', '.join(sorted(entered))}"
