"""`baton status --census`: what is unaccounted for, at a router and a worker that say what the test has them say."""

import json

import pytest
import typer

from baton.cli import census as command
from baton.cli.census import Problem, problems
from baton.core import HandoffId, Incarnation, Role, WorkerInfo, WorkerRef
from baton.load import BlockCounts
from baton.rpc import convert
from baton.rpc.v1 import admin_pb2, worker_pb2_grpc
from baton.worker.census import Census, Held, Holding, count, to_pb
from tests.quiet_admin import QuietAdmin
from tests.support.sessions import BACKEND

D = WorkerRef("decode-0", Incarnation(7, 2), "127.0.0.1:2")
RUNNING = {"router-a": {"a", "b"}}


def census(*held, free=10):
    owned = sum(entry.counted for entry in held)
    return Census(D, BlockCounts(owned + free, free=free, owned=owned), held)


def held(request, state="decoding", router="router-a", blocks=3):
    return Held(HandoffId(request, 1), state, router, blocks, blocks)


HELD = {
    "what runs": ([held("a"), held("b", "reserved")], []),
    "an unknown request": (
        [held("a"), held("x", "pushing")],
        ["x/1 is pushing with 3 blocks, and router-a does not run it"],
    ),
    "a handoff without blocks would answer for ever": (
        [held("x", "queued", blocks=0)],
        ["x/1 is queued with 0 blocks, and router-a does not run it"],
    ),
    "whose router is gone": (
        [held("a", router="router-b", blocks=1), held("b", router="")],
        [
            "a/1 is decoding with 1 block, and router-b is not the router that was asked",
            "b/1 is decoding with 3 blocks, and nobody wants it",
        ],
    ),
}


@pytest.mark.parametrize("case", HELD)
def test_what_is_held_belongs_to_a_request_that_runs(case):
    handoffs, found = HELD[case]
    assert [str(problem) for problem in problems([census(*handoffs)], RUNNING)] == [f"{D}: {text}" for text in found]


def test_blocks_that_nobody_holds():
    lost = Census(D, BlockCounts(10, free=7, owned=2, reserved=1), (held("a", blocks=2),))
    twice = Census(D, BlockCounts(10, free=9, owned=1), (held("a", blocks=2),))
    assert [problem.text for problem in problems([lost, twice], RUNNING)] == [
        "1 block that no handoff holds",
        "1 block that a handoff holds and the ledger calls free",
    ]


def test_problems_are_the_same_if_they_are_about_the_same():
    """So that what was only on its way is not reported: it is gone by the second look."""
    assert Problem("w", HandoffId("a", 1), "with 3 blocks") == Problem("w", HandoffId("a", 1), "with 4 blocks")
    assert Problem("w", HandoffId("a", 1), "") != Problem("w", HandoffId("a", 2), "")
    assert Problem("w", None, "") != Problem("v", None, "")


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
        taken = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return to_pb(count(self.workers[0].ref, self.counts, taken))

    def worker(self, name, address):
        ref = WorkerRef(name, Incarnation(7, 2), address)
        self.workers.append(WorkerInfo(ref, Role.DECODE, BACKEND.fingerprint, "oracle", 64, 10, BACKEND.layout))


@pytest.fixture
def cluster(monkeypatch, serve):
    monkeypatch.setattr(command, "PAUSE_S", 0.0)
    made = Cluster()
    made.address = serve(made)
    made.worker("decode-0", made.address)
    return made


def run(cluster, capsys, *, as_json=False):
    """The exit code, and what was printed."""
    try:
        command.census(None, cluster.address, as_json=as_json)
    except typer.Exit as ended:
        return ended.exit_code, capsys.readouterr().out
    return 0, capsys.readouterr().out


def test_all_is_accounted_for(cluster, capsys):
    all_held = "decode-0@7.2: 5 of 10 blocks held: 1 decoding (5 blocks)\n"
    assert run(cluster, capsys) == (0, all_held)
    late = Holding(HandoffId("old", 1), "decoding", [], "router-a")
    cluster.looks.insert(0, [*cluster.looks[0], late])
    assert run(cluster, capsys) == (0, all_held), "a release that was on its way is no leak"
    cluster.looks, cluster.counts = [[]], BlockCounts(10, free=4, cached=6)
    assert run(cluster, capsys) == (0, "decode-0@7.2: 0 of 10 blocks held: by nobody\n")


def test_what_is_unaccounted_for_is_printed_and_an_exit_code(cluster, capsys):
    cluster.counts = BlockCounts(10, free=3, owned=7)
    cluster.worker("decode-1", "127.0.0.1:1")
    code, printed = run(cluster, capsys)
    assert code == 1
    assert "decode-0@7.2: 2 blocks that no handoff holds\n" in printed
    assert "decode-1: cannot be asked:" in printed


def test_as_json(cluster, capsys):
    cluster.running = []
    code, printed = run(cluster, capsys, as_json=True)
    found = json.loads(printed)
    assert (code, found["workers"][0]["held"][0]["blocks"]) == (1, 5)
    assert found["problems"] == ["decode-0@7.2: a/1 is decoding with 5 blocks, and router-a does not run it"]
