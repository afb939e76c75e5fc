"""`baton status` of a cluster with several routers, which say what the test tells them to."""

import json
import os
import time

import pytest

from baton.cli import status as command
from baton.cluster.state import ClusterState, ProcessId
from baton.core import Incarnation, Role, WorkerInfo, WorkerRef
from baton.errors import NoWorker
from baton.load import BlockCounts, Load
from baton.rpc import convert, reports
from baton.rpc.v1 import admin_pb2
from tests.quiet_admin import QuietAdmin
from tests.support.sessions import BACKEND

NOBODY = "127.0.0.1:1"


class FakeRouter(QuietAdmin):
    """One prefill worker, in this `state`."""

    def __init__(self, name, state="connected"):
        ref = WorkerRef("prefill-0", Incarnation(7, 2), "127.0.0.1:2")
        info = WorkerInfo(ref, Role.PREFILL, BACKEND.fingerprint, "oracle", 64, 10, BACKEND.layout)
        load = reports.load_to_pb(Load(blocks=BlockCounts(10, free=10)))
        worker = admin_pb2.WorkerStatus(info=convert.info_to_pb(info), load=load, state=state)
        self.reply = admin_pb2.StatusReply(name="two", model="m", router_id=name, running=len(name), workers=[worker])

    def Status(self, request, context):
        return self.reply

    def Requests(self, request, context):
        raise NotImplementedError


@pytest.fixture
def status(tmp_path, monkeypatch, serve, capsys):
    """Return the printed status of a cluster with these routers; `None` is one that does not answer."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path))

    def shown(*routers, as_json=False):
        admins = [NOBODY if router is None else serve(router) for router in routers]
        here = ClusterState("two", ProcessId.of(os.getpid()), "x", admins[0], "", "", "", admins=admins)
        monkeypatch.setattr(command, "find_cluster", lambda name: here)
        command.status(None, None, as_json=as_json)
        printed = capsys.readouterr().out
        return json.loads(printed) if as_json else printed

    return shown


def test_each_router_is_shown(status):
    printed = status(FakeRouter("one"), FakeRouter("second", "lost"))
    assert "router one, up 0 s\nrequests: 3 running" in printed
    assert "router second, up 0 s\nrequests: 6 running" in printed
    assert printed.count("127.0.0.1:2 ") == 1, "one table"
    assert "prefill-0@7.2: lost, says router second" in printed


def test_who_takes_deterministic_requests_is_said_once(status):
    router = FakeRouter("one")
    for name, (said, why_not, passes) in {"p1": ("x", "", 2), "d0": ("x", "", 5), "d1": ("", "a GPU", 0)}.items():
        worker = router.reply.workers.add()
        worker.CopyFrom(router.reply.workers[0])
        worker.info.ref.worker_id, worker.info.determinism, worker.info.nondeterminism = name, said, why_not
        worker.load.verify_passes, worker.load.rollbacks, worker.load.recomputed_tokens = passes, 1, 30
    lines = [line for line in status(router).splitlines() if line.startswith("deterministic")]
    assert lines == [
        "deterministic requests: not on prefill-0: they do not say why",
        "deterministic requests: x on p1, d0: 7 verify passes, 2 rollbacks, 60 tokens recomputed",
        "deterministic requests: not on d1: a GPU",
    ]


def test_as_json_the_first_is_what_it_was(status):
    found = status(FakeRouter("one"), FakeRouter("second"), None, as_json=True)
    assert (found["router_id"], found["workers"][0]["state"]) == ("one", "connected")
    assert [router["router_id"] for router in found["other_routers"]] == ["second"]
    assert [router["admin"] for router in found["unreachable_routers"]] == [NOBODY]


def test_one_that_does_not_answer_hides_no_other(status):
    printed = status(None, FakeRouter("second"))
    assert "router second" in printed
    assert f"router at {NOBODY}: cannot be asked: " in printed


def test_none_answers(status):
    with pytest.raises(NoWorker, match=NOBODY):
        status(None, None)


def test_what_the_controller_says_is_shown(status):
    router = FakeRouter("one")
    said = admin_pb2.Control(age_s=7, host="h", outlook="prefill: steady")
    said.plan.MergeFrom(admin_pb2.Plan(prefill=1, decode=2, generation=3, number=9, by="operator", reason="he said so"))
    said.slots.add(worker_id="prefill-0", role="prefill", state="ready", generation=3)
    said.slots.add(worker_id="decode-0", role="decode", state="ready", generation=2)
    said.slots.add(worker_id="decode-1", role="decode", state="failed", generation=3, note="no memory")
    for number in range(7):
        said.decisions.add(age_s=10 - number, kind="start", text=f"number {number}")
    router.reply.control.CopyFrom(said)
    printed = status(router)
    assert "plan 9: 1 prefill, 2 decode, by operator: he said so\n" in printed
    assert "the controller on h has said nothing for 7 s" in printed
    assert "prefill-0: ready" not in printed, "all is well with it"
    assert "decode-0: ready, generation 2 of 3\n" in printed
    assert "decode-1: failed, generation 3 of 3: no memory\n" in printed
    assert "autoscaler: prefill: steady" in printed
    assert "number 1" not in printed
    assert "    15 s ago  start     number 2\n" in printed
    control = status(router, as_json=True)["control"]
    assert (control["plan"]["number"], len(control["decisions"]), control["slots"][2]["note"]) == (9, 7, "no memory")


def test_a_worker_that_drains_is_not_just_connected(status):
    router = FakeRouter("one")
    router.reply.workers[0].load.draining = True
    assert "prefill-0@7.2  prefill  draining" in status(router)


def test_watching_goes_on_until_it_is_interrupted(capsys, monkeypatch):
    pauses = iter([None, None, KeyboardInterrupt])

    def pause(seconds):
        if (end := next(pauses)) is not None:
            raise end

    shown = iter([None, NoWorker("being replaced"), None])

    def show():
        print("shown")
        if (error := next(shown)) is not None:
            raise error

    monkeypatch.setattr(time, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        command.watch(show)
    assert capsys.readouterr().out == "shown\nshown\nbeing replaced\nshown\n"
