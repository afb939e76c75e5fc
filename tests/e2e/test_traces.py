"""The times of a real cluster's request: in its answer, in a file, in the terminal."""

import json
import time

import grpc
import pytest

from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from baton.stages import Stage
from tests.support.time_factor import scaled
from tests.support.waiting import eventually
from tests.unit.test_tracing import PARENT, TRACE, WAIT_S, check, complete

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("oracle")]
OFF_S = scaled(0.05)  # two clocks of one host are read one after the other; a busy machine pauses in between
STAGES = [stage.value for stage in Stage]


@pytest.fixture
def cluster(oracle_cluster):
    return oracle_cluster


def within(inner, outer) -> bool:
    return inner.start_s >= outer.start_s - OFF_S and inner.end_s <= outer.end_s + OFF_S


def test_the_spans_of_all_processes_lie_within_each_other(cluster):
    with cluster.client() as client:
        client.generate("warm", max_tokens=4)  # builds the channel
        begun = time.perf_counter()
        answer = client.generate("hello there " * 20, max_tokens=40, ignore_eos=True, deterministic=True, trace=True)
        wall_s = time.perf_counter() - begun
    assert len(answer.trace_id) == 32
    stages = [span for span in answer.trace if span.role == "router"]
    for stage in STAGES:
        spent = sum(span.duration_s for span in stages if span.name == stage)
        assert spent == pytest.approx(getattr(answer.timings, f"{stage}_s"), abs=1e-9)
    assert sum(span.duration_s for span in stages) == pytest.approx(answer.timings.e2e_s, abs=1e-9)
    assert answer.timings.verify_s > 0, "each token is verified here"
    found = {(span.role, span.name): span for span in answer.trace}
    assert {name for role, name in found if role == "prefill"} == {"wait", "compute", "push"}
    assert {name for role, name in found if role == "decode"} == {"receive", "commit", "decode", "verify"}
    assert found["prefill", "compute"].process == answer.placement.prefill_worker
    assert found["decode", "decode"].process == answer.placement.decode_worker
    assert within(found["prefill", "compute"], found["router", "prefill"])
    assert within(found["decode", "receive"], found["prefill", "push"])
    assert within(found["decode", "verify"], found["decode", "decode"])
    assert found["decode", "decode"].end_s <= stages[-1].end_s + OFF_S
    assert found["prefill", "compute"].end_s <= found["decode", "commit"].start_s + OFF_S
    for end in (found["prefill", "push"], found["decode", "receive"]):
        moved = (int(end.attributes["kv_bytes"]), end.attributes["transport"])
        assert moved == (answer.placement.kv_bytes, answer.placement.transport)
    worked_s = found["prefill", "compute"].duration_s + found["decode", "decode"].duration_s  # these do not overlap
    assert worked_s <= sum(span.duration_s for span in stages) <= wall_s, "by the clocks of workers and of the client"


def test_a_collector_gets_one_trace_of_all_processes(cluster, collected):
    request = pb.GenerateRequest(text="hello " * 20, sampling=common_pb2.Sampling(max_tokens=8))
    traced = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
    wanted = {(cluster.name, f"baton-{part}") for part in ("router", "prefill", "decode")}
    with grpc.insecure_channel(cluster.state().grpc) as channel:
        generate = InferenceStub(channel).Generate
        list(generate(request, timeout=scaled(60)))

        def all_came():
            """Return whether each role has sent spans. A busy prefill worker may report its push too late for one."""
            list(generate(request, metadata=traced, timeout=scaled(60)))
            assert collected[0].got.acquire(timeout=WAIT_S)
            return wanted == {(one["service.namespace"], one["service.name"]) for one, _ in [*collected[0].spans]}

        eventually(all_came, within_s=60)
    assert {span.trace_id.hex() for _, span in collected[0].spans} == {TRACE}


def test_the_commands_show_it_and_write_files(cluster, tmp_path):
    out, again = tmp_path / "out.json", tmp_path / "again.json"
    args = ("generate", "hello", "--name", cluster.name, "--max-tokens", 8, "--json")
    answer = json.loads(cluster.home.baton(*args, "--trace", out, check=True).stdout)
    trace = json.loads(out.read_text())
    check(trace)
    assert trace["otherData"]["trace_id"] == answer["trace_id"]
    router = [e for e in complete(trace) if e["cat"] == "router"]
    assert sum(e["dur"] for e in router) == pytest.approx(answer["timings"]["e2e_s"] * 1e6, abs=len(router))

    def later():
        """Return the trace when the prefill worker has reported its push, which the answer does not wait for."""
        named = cluster.home.baton("trace", answer["request_id"], "--name", cluster.name, "--out", again, check=True)
        return named if "push" in named.stdout else None

    named = eventually(later, within_s=30)
    assert len({e["pid"] for e in complete(json.loads(again.read_text()))}) == 3
    assert answer["request_id"] in named.stdout
    for word in ("compute", "push", "receive", "decode-", "prefill-0", "█"):
        assert word in named.stdout
    check(json.loads(again.read_text()))
    last = json.loads(cluster.home.baton("trace", "--name", cluster.name, "--json", check=True).stdout)
    assert (last["request_id"], last["outcome"]) == (answer["request_id"], "finished")
    unknown = cluster.home.baton("trace", "nobody", "--name", cluster.name)
    assert unknown.returncode == 2
    assert "'nobody' is neither running nor among the last" in unknown.stderr
