"""Several routers at one address that share only Redis: each serves, and each resumes the others' streams."""

import json
import random
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection, IncompleteRead

import grpc
import openai
import pytest

from baton import Client
from baton.errors import BatonError
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from baton.tokenizer import OracleTokenizer
from tests.support.load import Load, Streams, draw_jobs, oracle_answer
from tests.support.time_factor import scaled
from tests.support.waiting import eventually, until_interrupted

pytestmark = pytest.mark.slow
SETS = ("model.path=oracle", "router.replicas=2")
LONG = {"max_tokens": 800, "temperature": 0, "ignore_eos": True}
STREAMS = 12


def statuses(cluster):
    found = []
    for admin in cluster.state().admins:
        with Client(cluster.state().grpc, admin=admin, timeout=scaled(30)) as client:
            found.append(client.cluster())
    return found


def streams(cluster):
    return Streams(cluster, [f"stream {number}" for number in range(STREAMS)], max_retries=100, **LONG)


def right(body):
    """Return the oracle's text."""
    options = {"max_tokens": body["max_tokens"], "temperature": 0.0, "ignore_eos": True}
    return OracleTokenizer().decode(oracle_answer(body["prompt"].encode(), **options))


def kill_the_busiest(cluster):
    """Kill the router with the most requests, and return when it is replaced and both serve."""
    running = [status.running for status in statuses(cluster)]
    name = ("router", "router-1")[running.index(max(running))]
    pid = cluster.kill(name)
    return lambda: (cluster.wait_replaced(name, pid), eventually(lambda: both_serve(cluster), within_s=60))


def read_events(answer, events, begun):
    """Add the whole events of a stream. Wait for `begun` after the fifth."""
    event = b""
    for line in answer:
        event += line
        if line == b"\n":
            events.append(event.decode().splitlines())
            event = b""
            if len(events) == 5:
                begun.wait(scaled(60))


class Narrow(HTTPConnection):
    """A connection with a small receive buffer, so that a client that waits holds its router up."""

    def connect(self):
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.sock.settimeout(self.timeout)
        self.sock.connect((self.host, self.port))


def returning(address, body, begun):
    """Return the events of a stream, and the number of breaks. After a break, come back with `Last-Event-ID`."""
    events, breaks = list[list[str]](), -1
    while not events or events[-1][1] != "data: [DONE]":
        headers, breaks = {"content-type": "application/json", "accept": "text/event-stream"}, breaks + 1
        headers |= {"last-event-id": events[-1][0].removeprefix("id: ")} if events else {}
        with suppress(IncompleteRead, ConnectionError), closing(Narrow(address, timeout=scaled(60))) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            read_events(answer, events, begun)
    return events, breaks


def both_serve(cluster):
    with suppress(BatonError):  # not yet
        return all(cluster.state().admins) and len(statuses(cluster)) == 2


def test_both_serve_at_one_address(cluster):
    assert len(set(cluster.state().admins)) == 2
    before = [status.accepted for status in statuses(cluster)]
    asked = streams(cluster)
    after = [status.accepted for status in statuses(cluster)]
    census = cluster.home.baton("status", "--census", "--name", cluster.name)
    assert len(asked.answers()) == STREAMS
    assert census.returncode == 0, census.stdout
    assert sum(after) - sum(before) == STREAMS
    assert asked.resumed == 0


def test_connections_spread(cluster):
    request = pb.GenerateRequest(text="hello", sampling=common_pb2.Sampling(max_tokens=1))
    own = [("grpc.use_local_subchannel_pool", 1)]  # otherwise equal channels of one process share a connection
    for _ in range(24):
        with grpc.insecure_channel(cluster.state().grpc, options=own) as channel:
            list(InferenceStub(channel).Generate(request, timeout=scaled(60)))
    assert all(status.finished for status in statuses(cluster)), "one had nothing to do"
    shown = cluster.status()
    assert shown["finished"] + shown["other_routers"][0]["finished"] >= 24


def test_no_call_fails_while_one_is_told_to_stop(cluster):
    with Load(cluster, draw_jobs(random.Random(6)), 6, clients=4, loyal=True) as load:
        load.settle(20)
        cluster.wait_replaced("router", cluster.kill("router", signal.SIGTERM))
        eventually(lambda: both_serve(cluster), within_s=60)
        load.settle()


def test_one_goes_on_for_the_other(cluster):
    asked = streams(cluster)
    pid = cluster.kill("router-1")
    answers = asked.answers()
    with cluster.client(max_retries=100) as client:
        for number in (0, STREAMS - 1):
            assert client.generate(f"stream {number}", **LONG).tokens == answers[number].tokens
    cluster.wait_replaced("router-1", pid)
    eventually(lambda: both_serve(cluster), within_s=60)
    eventually(cluster.all_free)
    assert cluster.home.baton("status", "--census", "--name", cluster.name, check=True)


@pytest.mark.parametrize("count", [16, pytest.param(64, marks=pytest.mark.chaos)])
def test_streams_through_a_gateway_outlive_a_router(cluster, tmp_path, count):
    """Its clients are unchanged, and no token is lost or repeated."""

    def read(client, number, begun):
        body = {"prompt": f"stream {number}", "max_tokens": 1500, "temperature": 0}
        stream = client.completions.create(**body, model="oracle", stream=True, extra_body={"ignore_eos": True})
        texts = [next(stream).choices[0].text for _ in range(5)]
        begun.wait(scaled(120))
        assert "".join(texts + [chunk.choices[0].text for chunk in stream]) == right(body)

    def attempt():
        begun, parked = threading.Barrier(count + 1), cluster.log("decode-0").count("handoff_parked")
        reading = [pool.submit(read, client, number, begun) for number in range(count)]
        begun.wait(scaled(120))
        replaced = kill_the_busiest(cluster)
        for one in reading:
            one.result(scaled(300))  # 64 streams take 100 s on two cores
        replaced()
        return cluster.log("decode-0").count("handoff_parked") - parked >= count / 2

    gateway = cluster.home.gateway(cluster.state().grpc, tmp_path / "log")
    with gateway as (_, address), ThreadPoolExecutor(count) as pool:
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=scaled(60))
        until_interrupted(attempt)


def test_clients_come_back_to_another_router(cluster):
    """No token is lost or repeated, and events have the ids that follow."""
    bodies = [{"prompt": f"stream {number}", "max_tokens": 1500, "temperature": 0} for number in range(STREAMS)]
    asked = [{**body, "ignore_eos": True, "stream": True, "logprobs": 5} for body in bodies]

    def attempt():
        begun = threading.Barrier(STREAMS + 1)
        with ThreadPoolExecutor(STREAMS) as pool:
            reading = [pool.submit(returning, cluster.state().http, body, begun) for body in asked]
            begun.wait(scaled(60))
            replaced = kill_the_busiest(cluster)
            ends = [one.result(scaled(60)) for one in reading]
        for (events, _), body in zip(ends, bodies, strict=True):
            as_one_request(events, body)
        replaced()
        return sum(breaks for _, breaks in ends) >= STREAMS / 2

    until_interrupted(attempt)
    eventually(cluster.all_free)


def as_one_request(events, body):
    """Check the ids and the text of a stream that was read over several connections."""
    ids, datas = zip(*(event[:2] for event in events), strict=True)
    assert {one.split(":")[1] for one in ids} == {ids[0].split(":")[1]}, "one request"
    places = [*(f"{index}.0" for index in range(1, len(ids))), f"{len(ids) - 1}.1"]
    assert [one.split(":")[2] for one in ids] == places
    chunks = [json.loads(data.removeprefix("data: ")) for data in datas[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == right(body)
    assert len({chunk["created"] for chunk in chunks}) == 1
