"""`baton status --census` against a router and a worker that say what the test tells them to."""

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import typer

from baton.cli import census as command
from baton.core import HandoffId, Incarnation, Role, WorkerInfo, WorkerRef
from baton.load import BlockCounts
from baton.rpc import convert
from baton.rpc.v1 import admin_pb2, admin_pb2_grpc, worker_pb2_grpc
from baton.worker.census import Holding, count, to_pb
from tests.quiet_admin import QuietAdmin
from tests.support.sessions import BACKEND


class Cluster(QuietAdmin, worker_pb2_grpc.WorkerServicer):
    """Each look at its worker takes the next list of what is held; the last one stays."""

    def __init__(self):
        self.running = ["a", "b"]
        self.counts = BlockCounts(10, free=5, owned=5)
        self.looks = [[Holding(HandoffId("a", 1), "decoding", [0, 1, 2, 3, 4], "router-a")]]
        self.workers = []
        self.address = ""

    def Connect(self, requests, context):
        raise NotImplementedError

    def Status(self, request, context):
        workers = [admin_pb2.WorkerStatus(info=convert.info_to_pb(info)) for info in self.workers]
        return admin_pb2.StatusReply(router_id="router-a", workers=workers)

    def Requests(self, request, context):
        return admin_pb2.RequestsReply(router_id="router-a", request_ids=self.running)

    def Census(self, request, context):
        held = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return to_pb(count(self.workers[0].ref, self.counts, held))

    def worker(self, name, address):
        ref = WorkerRef(name, Incarnation(7, 2), address)
        self.workers.append(WorkerInfo(ref, Role.DECODE, BACKEND.fingerprint, "oracle", 64, 10, BACKEND.layout))


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(command, "PAUSE_S", 0.0)
    made, server = Cluster(), grpc.server(ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServicer_to_server(made, server)
    worker_pb2_grpc.add_WorkerServicer_to_server(made, server)
    made.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    made.worker("decode-0", made.address)
    server.start()
    yield made
    server.stop(None).wait()


def run(cluster, capsys, *, as_json=False):
    """The exit code, and what was printed."""
    try:
        command.census(None, cluster.address, as_json=as_json)
    except typer.Exit as ended:
        return ended.exit_code, capsys.readouterr().out
    return 0, capsys.readouterr().out


def test_all_is_accounted_for(cluster, capsys):
    code, printed = run(cluster, capsys)
    assert (code, printed) == (0, "decode-0@7.2: 5 of 10 blocks held: 1 decoding (5 blocks)\n")


def test_a_worker_that_holds_nothing(cluster, capsys):
    cluster.looks, cluster.counts = [[]], BlockCounts(10, free=4, cached=6)
    assert run(cluster, capsys) == (0, "decode-0@7.2: 0 of 10 blocks held: by nobody\n")


def test_a_leak_is_named(cluster, capsys):
    cluster.running = ["b"]
    code, printed = run(cluster, capsys)
    assert code == 1
    assert "decode-0@7.2: a/1 is decoding with 5 blocks, and router-a does not run it" in printed


def test_a_release_that_was_on_its_way_is_no_leak(cluster, capsys):
    late = Holding(HandoffId("old", 1), "decoding", [], "router-a")
    cluster.looks.insert(0, [*cluster.looks[0], late])
    assert run(cluster, capsys)[0] == 0


def test_blocks_that_nobody_holds(cluster, capsys):
    cluster.counts = BlockCounts(10, free=3, owned=7)
    code, printed = run(cluster, capsys)
    assert (code, "decode-0@7.2: 2 blocks that no handoff holds" in printed) == (1, True)


def test_a_worker_that_does_not_answer(cluster, capsys):
    cluster.worker("decode-1", "127.0.0.1:1")
    code, printed = run(cluster, capsys)
    assert (code, "decode-1: cannot be asked:" in printed) == (1, True)


def test_as_json(cluster, capsys):
    cluster.running = []
    code, printed = run(cluster, capsys, as_json=True)
    found = json.loads(printed)
    assert (code, len(found["problems"]), found["workers"][0]["held"][0]["blocks"]) == (1, 1, 5)
