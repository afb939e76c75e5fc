"""Traces of a router, of ended and running requests; the stage times that its clients receive; and its SLO counts."""

import asyncio
import sys
import time
from itertools import pairwise
from typing import Any

import grpc
import pytest
from grpc import aio

from baton.core import Role
from baton.errors import BatonError, ConfigError, InvalidRequest
from baton.rpc.v1 import admin_pb2, common_pb2, worker_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.admin_pb2_grpc import AdminStub
from baton.stages import Stage
from baton.testing import FakeClock
from router.context import RouterSettings, build_context
from router.parsing.generate_request import RequestParser
from router.workers.stream import EventMailbox
from tests.support.in_process_router import FakeWorker, InProcessCluster, at
from tests.support.waiting import until
from tests.unit.test_tracing import PARENT, TRACE, collectors

PLACED = {"prefill": "prefill-0", "decode": "decode-0"}
STAGES = [stage.value for stage in Stage]
SAMPLED, UNSAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-{flags}") for flags in ("01", "00"))


def span(name: str, seconds: float = 0.001, **figures) -> common_pb2.Span:
    attributes = {key: str(value) for key, value in figures.items()}
    return common_pb2.Span(name=name, start_s=time.time() - seconds, duration_s=seconds, attributes=attributes)


def speaks(*workers: FakeWorker, verify_s: float = 0.0) -> None:
    """Make these workers report spans, as real workers do."""

    def add_spans(event):
        kind = event.WhichOneof("event")
        if kind == "pushed":
            event.spans.extend([span("wait"), span("compute", tokens=3), span("push", kv_bytes=100)])
        elif kind == "committed":
            event.spans.extend([span("receive", kv_bytes=100), span("commit")])
        elif kind in {"finish", "preempted"}:
            if kind == "finish":
                event.finish.verify_s = verify_s
            event.spans.extend([span("decode", tokens=7), span("verify", verify_s)])

    for worker in workers:
        worker.before_emit = add_spans


async def trace_of(cluster: InProcessCluster, request_id: str = "") -> admin_pb2.TraceReply:
    async with aio.insecure_channel(cluster.router.admin) as channel:
        return await AdminStub(channel).Trace(admin_pb2.TraceRequest(request_id=request_id))


def spans_of(said, role: str, attempt: int | None = None) -> list[str]:
    return [one.name for one in said.spans if one.role == role and attempt in {None, one.attempt}]


def check_stages(said, timings: common_pb2.Timings | None = None) -> list[common_pb2.Span]:
    """Check that the router's spans are contiguous and sum to the total time."""
    stages = sorted((one for one in said.spans if one.role == "router"), key=lambda one: (one.start_s, one.duration_s))
    assert {one.name for one in stages} <= set(STAGES)
    for one, following in pairwise(stages):
        assert one.start_s + one.duration_s == pytest.approx(following.start_s, abs=1e-6)
    if timings is not None:
        assert sum(one.duration_s for one in stages) == pytest.approx(timings.e2e_s, abs=1e-9)
        for stage in STAGES:
            spent = sum(one.duration_s for one in stages if one.name == stage)
            assert spent == pytest.approx(getattr(timings, f"{stage}_s"), abs=1e-9)
    return stages


async def test_all_spans_of_a_request_come_with_its_answer_if_it_wants_them(cluster):
    speaks(*cluster.workers)
    done = (await cluster.generate(trace=True))[-1].completed
    assert len(done.trace_id) == 32
    check_stages(done, done.timings)
    assert spans_of(done, "router") == ["queue", "route", "reserve", "prefill", "transfer", "decode"]
    assert spans_of(done, "prefill", 1) == ["wait", "compute", "push"]
    assert sorted(spans_of(done, "decode", 1)) == ["commit", "decode", "receive", "verify"]
    assert {one.process for one in done.spans} == {"prefill-0", "decode-0", cluster.router.context.sinks.router_id}
    (route,) = (one for one in done.spans if one.name == "route")
    assert {name: text.split("@")[0] for name, text in route.attributes.items()} == PLACED
    starts = [one.start_s for one in done.spans]
    assert starts == sorted(starts)
    began_s = cluster.router.context.sinks.traces.find("").began_s
    assert starts[0] == began_s, "when it had arrived, and was not read yet"
    assert not (await cluster.generate())[-1].completed.spans, "the request asked for none"


@pytest.mark.parametrize("kept", [2, 0])
async def test_an_operator_asks_for_one_of_the_last(make, kept):
    cluster = await make(traces=kept)
    ended = [await cluster.generate() for _ in range(3)]
    names = [events[0].request_id for events in ended]
    if kept:
        last = await trace_of(cluster)
        assert (last.request_id, last.outcome) == (names[2], "finished")
        assert last.trace_id == ended[2][-1].completed.trace_id
        check_stages(last, ended[2][-1].completed.timings)
        assert (await trace_of(cluster, names[1])).request_id == names[1]
    for name in (names[0], "nobody") if kept else ("",):
        with pytest.raises(aio.AioRpcError, match="nor among the last") as failure:
            await trace_of(cluster, name)
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND


async def test_refused_failed_cancelled_and_running_ones_too(cluster):
    with pytest.raises(InvalidRequest):
        await cluster.generate(n=0)
    refused = await trace_of(cluster)
    assert (refused.outcome, len(refused.spans)) == ("refused", 0)
    call = await at(cluster, "transferring")
    (running,) = cluster.router.context.running
    said = await trace_of(cluster, running.name)
    assert said.outcome == "running"
    assert [one.name for one in check_stages(said)] == ["queue", "route", "reserve", "prefill", "transfer"]
    call.cancel()
    await until(lambda: not cluster.router.context.running, "cancelled")
    said = await trace_of(cluster, running.name)
    assert said.outcome == "cancelled"
    assert check_stages(said)[-1].attributes["error"] == "Cancelled"


async def test_a_worker_that_is_lost_shows_as_two_attempts(make):
    cluster = await make(decode=2)
    speaks(*cluster.workers)
    call = cluster.call(trace=True)
    for worker in cluster.decode:
        worker.close("decode")
    await until(lambda: cluster.handed_over, "decoding, as far as the router knows")
    (holding,) = (worker for worker in cluster.decode if worker.committed)
    await holding.kill()
    for worker in cluster.decode:
        worker.open("decode")
    done = (await cluster.answer(call))[-1].completed
    assert done.placement.attempts == 2
    stages = check_stages(done, done.timings)
    first = [one for one in stages if one.attempt == 1]
    assert (first[-1].attributes["ended"], first[-1].attributes["error"]) == ("decode_lost", "WorkerLost")
    second = [one.name for one in stages if one.attempt == 2]
    assert second[:3] == ["route", "reserve", "prefill"]
    assert second[-1] == "decode"
    assert [one.attempt for one in stages if one.name == "queue"] == [0, 0]
    lost = [one for one in done.spans if one.process == holding.info.ref.worker_id]
    assert {one.name for one in lost} == {"receive", "commit"}, "what it had not said went with it"
    assert spans_of(done, "prefill", 1) == spans_of(done, "prefill", 2) == ["wait", "compute", "push"]


async def test_verify_passes_are_a_stage_of_every_attempt(cluster):
    speaks(cluster.decode[0], verify_s=0.003)
    cluster.decode[0].preempt_at = [3]
    cluster.decode[0].hold(2)
    call = cluster.call(trace=True)
    await until(lambda: cluster.handed_over, "decoding")
    await asyncio.sleep(0.02)  # time for the verify passes
    cluster.decode[0].open("hold")
    done = (await cluster.answer(call))[-1].completed
    check_stages(done, done.timings)
    assert done.timings.verify_s >= 0.003 - 1e-9, "of the first attempt, which ended by being preempted"
    assert done.timings.decode_s > 0
    passed = [one for one in done.spans if one.role == "router" and one.name == "verify"]
    assert passed[0].attempt == 1
    assert passed[0].duration_s == pytest.approx(0.003, abs=1e-6)


def holds_pushed(worker: FakeWorker) -> list[worker_pb2.WorkerEvent]:
    """Hold back the worker's reports of its pushes and return them."""
    emit, late = worker.emit, list[worker_pb2.WorkerEvent]()

    def rest(*events):
        late.extend(event for event in events if event.HasField("pushed"))
        emit(*(event for event in events if not event.HasField("pushed")))

    worker.emit = rest  # type: ignore[method-assign]
    return late


async def test_what_a_prefill_worker_says_after_the_end_is_not_lost(cluster):
    speaks(cluster.prefill[0])
    spoken, late = cluster.prefill[0].emit, holds_pushed(cluster.prefill[0])
    await cluster.generate()
    said = await trace_of(cluster)
    assert not spans_of(said, "prefill")
    spoken(worker_pb2.WorkerEvent(handoff=late[0].handoff, tokens=worker_pb2.OutputTokens()))  # D's may come first
    spoken(*late)
    kept = cluster.router.context.sinks.traces.find("")
    await until(lambda: any(one.role == "prefill" for one in kept.spans()), "said late")
    said = await trace_of(cluster)
    assert spans_of(said, "prefill", 1) == ["wait", "compute", "push"]
    spoken(*late)  # no request listens for more
    await cluster.generate()
    assert len(spans_of(await trace_of(cluster, said.request_id), "prefill")) == 3


async def test_what_a_prefill_worker_says_while_the_last_tokens_are_handed_on_is_not_lost(cluster, monkeypatch):
    late, drain = holds_pushed(cluster.prefill[0]), EventMailbox.drain

    async def and_then(self):
        items = await drain(self)
        if any(isinstance(item, worker_pb2.WorkerEvent) and item.HasField("finish") for _, item in items):
            late[0].spans.extend([span("compute")])
            self.put(Role.PREFILL, late[0])
        return items

    monkeypatch.setattr(EventMailbox, "drain", and_then)
    await cluster.generate()
    assert spans_of(await trace_of(cluster), "prefill", 1) == ["compute"]


async def test_spans_that_cannot_be_are_left_out(cluster):
    def nonsense(event):
        if event.HasField("pushed"):
            bad = [common_pb2.Span(name="x", start_s=float("nan")), common_pb2.Span(name="x", duration_s=-1.0)]
            event.spans.extend([*bad, span("push"), *(span("many") for _ in range(1000))])

    cluster.prefill[0].before_emit = nonsense
    done = (await cluster.generate(trace=True))[-1].completed
    names = spans_of(done, "prefill")
    assert "x" not in names
    assert "push" in names
    assert len(names) == 256, "the rest is left out"


async def test_a_collector_gets_one_trace_of_all_processes_and_none_of_the_text(make):
    with collectors() as (collector, address):
        cluster = await make(otlp=address)
        speaks(*cluster.workers)
        secret = "text-that-nobody-else-may-see"
        request = pb.GenerateRequest(text=secret, sampling=common_pb2.Sampling(max_tokens=4), client_tag=secret)
        [*_, last] = await cluster.answer(cluster.stub.Generate(request, metadata=(SAMPLED,)))
        await cluster.answer(cluster.stub.Generate(request, metadata=(UNSAMPLED,)))
        await cluster.router.stop(0)
    assert last.completed.trace_id == TRACE
    ids = {one.trace_id.hex() for _, one in collector.spans}
    assert ids == {TRACE}, "what its caller did not sample is not exported"
    (root,), (attempt,) = collector.named("baton-router", "request"), collector.named("baton-router", "attempt")
    assert (root.parent_span_id.hex(), attempt.parent_span_id) == (PARENT, root.span_id)
    for service, name in (("router", "prefill"), ("prefill", "push"), ("decode", "receive"), ("decode", "decode")):
        (found,) = collector.named(f"baton-{service}", name)
        assert found.parent_span_id == attempt.span_id
    assert secret not in str(collector.spans)
    assert "<0>" not in str(collector.spans), "nor what was answered"


async def test_without_its_libraries_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.delitem(sys.modules, "baton.tracing.otlp")
    settings: Any = RouterSettings(name="test", model="oracle", otlp="http://127.0.0.1:1"), asyncio.Future, FakeClock()
    with pytest.raises(ConfigError, match=r"^tracing\.otlp: .* not installed: pip install 'baton-serve\[otel\]'"):
        build_context(*settings)


async def test_choices_have_tracks_of_their_own(cluster):
    speaks(*cluster.workers)
    done = (await cluster.generate(trace=True, n=2))[-1].completed
    for choice in (0, 1):
        mine = admin_pb2.TraceReply(spans=[one for one in done.spans if one.choice == choice])
        check_stages(mine)
        assert spans_of(mine, "prefill") == ["wait", "compute", "push"]
    first = [one for one in done.spans if (one.role, one.choice) == ("router", 0) and one.name in STAGES[:4]]
    assert done.timings.ttft_s == pytest.approx(sum(one.duration_s for one in first)), "the second begins after it"
    (request_id,) = cluster.router.context.sinks.traces._kept
    assert (await trace_of(cluster, f"{request_id}.1")).trace_id == done.trace_id, "as logs and tables call a choice"


async def test_logs_name_the_trace(capsys, cluster):
    def logged(event: str) -> list[str]:
        return [line for line in "".join(capsys.readouterr()).splitlines() if event in line]

    done = (await cluster.generate(trace=True))[-1].completed
    lines = logged(done.trace_id)
    assert any("request_accepted" in line for line in lines)
    (finished,) = (line for line in lines if "request_finished" in line)
    assert "spans" not in finished
    with pytest.raises(BatonError):
        await cluster.generate(n=0)
    (refused,) = logged("request_refused")
    assert "trace_id" in refused


# --- times

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


def slo_counts(cluster):
    """Return the number of requests that met the SLO, and of those that did not."""
    read = cluster.router.context.sinks.metrics.registry.get_sample_value
    return tuple(read("baton_slo_total", {"met": met}) or 0.0 for met in ("true", "false"))


@pytest.mark.parametrize(
    ("ttft_s", "itl_s", "asked", "met"),
    [
        (100.0, 100.0, {"max_tokens": 6}, True),
        (1e-9, 100.0, {"max_tokens": 6}, False),
        (100.0, 1e-9, {"max_tokens": 6}, False),
        (100.0, 1e-9, {"max_tokens": 1}, True),  # one token has no interval
        (100.0, 100.0, {"max_tokens": 4, "n": 3}, True),  # a request of several choices counts once
    ],
)
async def test_both_bounds_of_the_slo_count(make, ttft_s, itl_s, asked, met):
    cluster = await make(slo_ttft_s=ttft_s, slo_itl_s=itl_s)
    await cluster.generate(**asked)
    assert slo_counts(cluster) == (float(met), float(not met))


async def test_what_does_not_finish_does_not_count_for_the_slo(cluster):
    call = cluster.call()
    await anext(aiter(call))
    call.cancel()
    await cluster.nothing_is_left()
    assert slo_counts(cluster) == (0.0, 0.0)
