"""A router's metrics listener while it serves: clients cannot increase the number of series."""

import asyncio
import json
import random
from dataclasses import replace
from typing import cast

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from baton.control_plane import Slot
from baton.core import Role
from baton.errors import BatonError
from baton.ledger.control_state import ControlReport, ControlState, Decision, RouterReport
from baton.rpc.v1 import inference_pb2 as pb
from router import server
from tests.integration.access_support import bearer, token_file
from tests.integration.gateway_support import raw
from tests.support.plans import first_plan
from tests.support.routers import asked
from tools.metric_docs import LABELS, values

TEXT = "zebra"  # part of every text from clients


async def series(cluster):
    """Return each sample's name and labels."""
    _, _, text = await raw(cluster.router.metrics, "GET", "/metrics")
    found = [sample for family in parse_text(text.decode()) for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))) for sample in found}


def said(rng: random.Random) -> dict:
    """Return a client's request with at most one fault."""
    odd = f"{TEXT}-{rng.random()}"
    return rng.choice(
        [
            {"cache_scope": odd},
            {"client_tag": odd, "priority": rng.randint(-100, 100)},
            {"model": odd},
            {"idempotency_key": odd, "n": 2},
            {"deterministic": True},
            {"max_tokens": -1},
            {"max_tokens": 10**6},
            {"logprobs": 10**6},
            {"constraint": pb.Constraint(regex="(" + odd)},
            {"prompt": [rng.randrange(200) for _ in range(rng.randint(1, 40))], "max_tokens": rng.randint(1, 20)},
            {"prompt": [10**6]},
            {"timeout": 1e-6},
        ]
    )


async def load(cluster, rng, rounds):
    """Send ten concurrent requests, `rounds` times."""
    for _ in range(rounds):
        calls = [cluster.generate(**said(rng)) for _ in range(10)]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(one, list | BatonError) for one in ended)


async def test_series_are_bounded_whatever_clients_say(make):
    cluster = await make(prefill=2, decode=2, queue_max_requests=4)
    rng = random.Random(11)
    before = len(await series(cluster))
    await load(cluster, rng, 6)
    resume = pb.ResumeRequest(request_id=TEXT * 60, request=pb.GenerateRequest(text="x"))
    with pytest.raises(BatonError):
        await cluster.answer(cluster.stub.Resume(resume))
    middle = await series(cluster)
    await load(cluster, rng, 12)
    last = await series(cluster)
    new = last - middle
    assert len(last) < before + 2 * 40, "a few error classes, each with the time of its first"
    assert {name for name, _ in new} <= {"baton_refusals_total", "baton_refusals_created"}
    for name, labels in last:
        for label, value in labels:
            assert TEXT not in value, name
            allowed = values(name, label)
            assert isinstance(allowed, str) or value in allowed, (name, label, value)
    outcomes = {value for name, labels in last for label, value in labels if name == "baton_refusals_total"}
    assert {"InvalidRequest", "UnknownModel"} <= outcomes


async def test_an_exemplar_names_a_request(cluster):
    (accepted, *_, last) = await cluster.generate()
    _, _, text = await raw(cluster.router.metrics, "GET", "/metrics", accept="application/openmetrics-text")
    samples = [sample for family in parse_openmetrics(text.decode()) for sample in family.samples]
    named = {sample.name: sample.exemplar.labels for sample in samples if sample.exemplar}
    (found,) = {tuple(sorted(labels.items())) for labels in named.values()}
    ours = ("ttft", "e2e", "queue", "prefill", "tpot", "itl", "generation", "stage")
    theirs = (
        *("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"),
        *("request_time_per_output_token", "time_per_output_token", "inter_token_latency", "request_decode_time"),
    )
    names = [*(f"baton_{name}" for name in ours), *(f"vllm:{name}" for name in theirs)]
    assert set(named) == {f"{name}_seconds_bucket" for name in names}
    assert found == (("request_id", accepted.request_id), ("trace_id", last.completed.trace_id))


@pytest.mark.parametrize("tokens", [False, True])
async def test_a_listener_whose_metrics_need_no_token_names_no_request(make, tmp_path, tokens):
    cluster = await make(http="127.0.0.1:0", tokens=token_file(tmp_path / "tokens") if tokens else None)
    (accepted, *_) = await cluster.answer(cluster.stub.Generate(asked(), metadata=bearer("alice") if tokens else None))
    _, _, text = await raw(cluster.router.http, "GET", "/metrics", accept="application/openmetrics-text")
    assert b"baton_ttft_seconds_bucket" in text
    assert (accepted.request_id.encode() in text) is not tokens


async def test_what_requests_took_is_counted(cluster):
    cluster.prefill[0].cached = [2]
    one, two = await cluster.generate(max_tokens=5), await cluster.generate(max_tokens=3, n=2)
    read = cluster.router.context.sinks.metrics.registry.get_sample_value
    whole = sum(events[-1].completed.timings.e2e_s for events in (one, two))
    assert read("baton_e2e_seconds_sum") == pytest.approx(whole, abs=1e-9), "until the last choice has ended"
    tokens = [read(f"baton_{kind}_tokens_total") for kind in ("prompt", "cached", "output")]
    assert tokens == [6, 2, 5 + 6]
    assert read("baton_finished_choices_total", {"reason": "length"}) == 3
    assert read("baton_tpot_seconds_count") == 2
    labels = {"model_name": "oracle", "engine": "0"}
    assert read("vllm:generation_tokens_total", labels) == 11
    assert read("vllm:request_success_total", {**labels, "finished_reason": "length"}) == 3
    sums = [read("baton_stage_seconds_sum", {"stage": stage}) for stage in LABELS["stage"]]
    assert sum(sums) == pytest.approx(read("baton_e2e_seconds_sum"), rel=1e-3)


async def test_targets_are_the_router_and_its_workers_that_serve_any(make):
    cluster = await make(decode=2)
    link = next(link for link in cluster.router.context.pool.links if link.info.ref.worker_id == "decode-1")
    link.view.info = replace(link.info, metrics="10.0.0.7:9101")
    _, _, text = await raw(cluster.router.metrics, "GET", "/targets")
    router = {"baton": "test", "component": "router", "process": cluster.router.context.sinks.router_id}
    worker = {"baton": "test", "component": "worker", "process": "decode-1"}
    targets = (router, cluster.router.metrics), (worker, "10.0.0.7:9101")
    assert json.loads(text) == [{"labels": labels, "targets": [address]} for labels, address in targets]


class FakeBoard:
    def __init__(self):
        slot = Slot("decode-0", Role.DECODE, "failed", 0, 4, "")
        plan, decision = first_plan(1, 2), Decision(at=5.0, kind="plan", text="")
        self.report: ControlReport | None = ControlReport(plan=plan, at=5.0, slots=(slot,), decisions=(decision,))

    async def control(self):
        return self.report

    async def routers(self):
        return [RouterReport(router_id="other", metrics="10.0.0.8:9100"), RouterReport(router_id="old")]


async def test_other_routers_and_the_controller_are_asked_for_at_a_scrape(make):
    context, board = (router := (await make()).router).context, FakeBoard()
    asked = cast("ControlState", board)
    found = await server.targets(context, asked, lambda: router.metrics_at)
    assert sorted(str(target["targets"]) for target in found) == ["['10.0.0.8:9100']", f"['{router.metrics_at}']"]
    read = context.sinks.metrics.registry.get_sample_value
    await server.update_control_metrics(context, asked)
    assert read("baton_slots", {"role": "decode", "state": "failed"}) == 1
    assert read("baton_slot_restarts", {"role": "decode"}) == 4
    board.report = None
    await server.update_control_metrics(context, asked)
    assert read("baton_slots", {"role": "decode", "state": "failed"}) is None


async def test_both_listeners_ask_the_controller_before_they_are_read(make, monkeypatch):
    async def look(context, board):
        await scraped_look(context, cast("ControlState", FakeBoard()))

    scraped_look = server.update_control_metrics
    monkeypatch.setattr("router.server.update_control_metrics", look)
    cluster = await make(http="127.0.0.1:0")
    _, _, body = await raw(cluster.router.http, "GET", "/metrics")
    assert b'baton_planned_workers{role="decode"} 2.0' in body
