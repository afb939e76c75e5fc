"""SIGKILL of each process of a running cluster: typed errors, a replacement, and no leftovers."""

import os
import signal

import pytest
from openai import OpenAI

from baton.errors import BatonError, NoWorker, WorkerLost
from tests.support.cluster_process import FREE_PORTS, HANDED_OVER, ClusterProcess
from tests.support.load import Streams, oracle_answer, read
from tests.support.time_factor import scaled
from tests.support.waiting import eventually, until_interrupted

pytestmark = pytest.mark.slow
SETS = (HANDED_OVER, "model.path=oracle", "router.queue.max_wait_s=60", "decode.speculation=ngram")
LONG = {"max_tokens": 600, "temperature": 0, "ignore_eos": True}
LONGER = LONG | {"max_tokens": 1900}  # it must not have ended when the signal arrives


def serves(cluster):
    try:
        with cluster.client(timeout=scaled(10)) as client:
            return client.generate("hello", max_tokens=5, temperature=0).tokens
    except BatonError:
        return None


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["decode-0", "prefill-0", "router", "redis"])
def test_a_killed_process_is_replaced(cluster, name):
    right = eventually(lambda: serves(cluster), within_s=60)
    streams = Streams(cluster, [f"request {number}" for number in range(8)], tokens=2, **LONG)
    pid = cluster.kill(name)
    if name == "router":
        lost = [end for end in streams.join() if isinstance(end, BaseException)]  # others may have ended before
        assert {type(error) for error in lost} <= {WorkerLost, NoWorker}
    else:  # no other process decodes; the successor continues the decode worker's output
        answers = streams.answers()
        assert {len(answer.tokens) for answer in answers} == {600}
        with cluster.client() as client:
            for number in (0, 1):
                assert client.generate(f"request {number}", **LONG).tokens == answers[number].tokens
    eventually(lambda: serves(cluster), within_s=60)
    assert serves(cluster) == right
    cluster.wait_replaced(name, pid)
    eventually(cluster.all_free, within_s=30)


def test_an_answer_with_accepted_proposals_survives_the_death_of_its_decode_worker(cluster):
    """The oracle's answer is computed without speculation. Two likely letters make a text that repeats itself."""
    sampling = {"max_tokens": 600, "temperature": 0.7, "seed": 5, "ignore_eos": True}
    right = oracle_answer(b"repeated", **sampling, logit_bias=((97, 12.0), (98, 12.0)))
    eventually(lambda: serves(cluster), within_s=60)
    bias = {97: 12.0, 98: 12.0}
    with cluster.client() as client, client.stream("repeated", **sampling, logit_bias=bias) as stream:
        read(stream, 50)
        pid = cluster.kill("decode-0")
        answer = stream.collect()
    assert tuple(answer.tokens) == right
    cluster.wait_replaced("decode-0", pid)

    def speculated():
        load = cluster.loads().get("decode-0")
        return load and load.accepted_tokens > 0 and load

    load = eventually(speculated, "the replacement's report", within_s=60)
    assert load.accepted_tokens < load.speculated_tokens
    eventually(cluster.all_free, within_s=30)


def test_a_stream_survives_its_router(cluster):
    """The SDK resumes the stream at the router's replacement. The decode worker has continued it since."""
    eventually(lambda: serves(cluster), within_s=60)
    with cluster.client() as client:
        expected = client.generate("a survivor", **LONG)
    http = cluster.state().http

    def attempt():
        with cluster.client(max_retries=100) as client, client.stream("a survivor", **LONG) as stream:
            read(stream, 50)
            pid = cluster.kill("router")
            answer = stream.collect()
        assert answer.tokens == expected.tokens
        assert answer.text == expected.text
        cluster.wait_replaced("router", pid)
        computed = (answer.placement.prefill_worker, answer.placement.decode_worker) != ("", "decode-0")
        assert not (stream.resumed and computed), answer.placement
        return stream.resumed > 0

    until_interrupted(attempt)
    eventually(cluster.all_free, within_s=30)
    with OpenAI(base_url=f"http://{http}/v1", api_key="none", max_retries=8, timeout=scaled(30)) as openai:
        (model,) = openai.models.list()
    assert model.id == "oracle", "HTTP is served at the same address, too"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
def test_a_worker_that_is_told_to_stop_hands_over(cluster, name):
    """SIGTERM loses nothing, no attempt counts as failed, and the next worker continues."""
    eventually(lambda: serves(cluster), within_s=60)
    with cluster.client() as client:
        expected = client.generate("handed over", **LONGER)

    def attempt():
        with cluster.client(max_retries=0) as client, client.stream("handed over", **LONGER) as stream:
            read(stream, 50)
            pid = cluster.kill(name, signal.SIGTERM)
            answer = stream.collect()
        assert (answer.tokens, answer.text) == (expected.tokens, expected.text)
        cluster.wait_replaced(name, pid)
        lines = [line for line in cluster.log("router").splitlines() if answer.request_id in line]
        assert "_lost" not in "".join(lines)
        return any('"attempt": 1, "reason": "preempted"' in line for line in lines)

    if name == "decode-0":
        until_interrupted(attempt)
    else:
        assert not attempt()
    eventually(cluster.all_free, within_s=30)


def test_a_killed_supervisor_takes_all_with_it_and_one_sigint_drains(module_home):
    config = "configs/no-ray.yaml"
    options = [part for item in (*FREE_PORTS, "model.path=oracle", "name=orphans") for part in ("--set", item)]
    module_home.baton("up", "-c", config, *options, "--detach", check=True)
    orphans = ClusterProcess(module_home, "orphans")
    state = orphans.state()
    assert len(state.processes) == 4
    os.kill(state.supervisor.pid, signal.SIGKILL)
    eventually(lambda: not any(identity.process() for identity in state.processes.values()), within_s=30)
    done = module_home.baton("status", "--name", "orphans")
    assert done.returncode == 4
    # A new cluster may have the killed one's name, despite its leftovers.
    with module_home.cluster(config, HANDED_OVER, "model.path=oracle", name="orphans") as again:
        assert serves(again)
        _one_sigint_drains(again)


def _one_sigint_drains(running):
    """The running request finishes, then everything ends."""
    with running.client(max_retries=0) as client:
        processes = running.processes()
        with client.stream("hello", max_tokens=200, temperature=0, ignore_eos=True) as stream:
            next(stream)
            os.kill(running.state().supervisor.pid, signal.SIGINT)
            assert 1 + sum(len(delta.tokens) for delta in stream) == 200
        eventually(lambda: not running.processes(), within_s=60)  # the state is deleted last
        assert not any(identity.process() for identity in processes.values())
