"""Several routers at one address that share only Redis: each serves, and each resumes the others' streams."""

import random
import signal

import grpc
import pytest

from baton import Client
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from tests.support.load import Load, Streams, draw_jobs
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow
SETS = ("model.path=oracle", "router.replicas=2")
LONG = {"max_tokens": 800, "temperature": 0, "ignore_eos": True}
STREAMS = 12


def statuses(cluster):
    found = []
    for admin in cluster.state().admins:
        with Client(cluster.state().grpc, admin=admin, timeout=10) as client:
            found.append(client.cluster())
    return found


def streams(cluster):
    return Streams(cluster, [f"stream {number}" for number in range(STREAMS)], max_retries=10, **LONG)


def both_serve(cluster):
    return all(cluster.state().admins) and len(statuses(cluster)) == 2


def test_both_serve_at_one_address(cluster):
    assert len(set(cluster.state().admins)) == 2
    asked = streams(cluster)
    running = [status.running for status in statuses(cluster)]
    census = cluster.home.baton("status", "--census", "--name", cluster.name)
    assert len(asked.answers()) == STREAMS
    assert census.returncode == 0, census.stdout
    assert sum(running) == STREAMS
    assert asked.resumed == 0


def test_connections_spread(cluster):
    request = pb.GenerateRequest(text="hello", sampling=common_pb2.Sampling(max_tokens=1))
    own = [("grpc.use_local_subchannel_pool", 1)]  # otherwise equal channels of one process share a connection
    for _ in range(24):
        with grpc.insecure_channel(cluster.state().grpc, options=own) as channel:
            list(InferenceStub(channel).Generate(request, timeout=10))
    assert all(status.finished for status in statuses(cluster)), "one had nothing to do"
    shown = cluster.status()
    assert shown["finished"] + shown["other_routers"][0]["finished"] >= 24


def test_no_call_fails_while_one_is_told_to_stop(cluster):
    with Load(cluster, draw_jobs(random.Random(6)), 6, clients=4, loyal=True) as load:
        load.settle(20)
        cluster.wait_replaced("router", cluster.kill("router", signal.SIGTERM))
        eventually(lambda: both_serve(cluster), within_s=30)
        load.settle()


def test_one_goes_on_for_the_other(cluster):
    asked = streams(cluster)
    pid = cluster.kill("router-1")
    answers = asked.answers()
    with cluster.client(max_retries=10) as client:
        for number in (0, STREAMS - 1):
            assert client.generate(f"stream {number}", **LONG).tokens == answers[number].tokens
    cluster.wait_replaced("router-1", pid)
    eventually(lambda: both_serve(cluster), within_s=30)
    eventually(cluster.all_free)
    assert cluster.home.baton("status", "--census", "--name", cluster.name, check=True)
