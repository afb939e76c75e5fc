"""`baton status` of several routers, and `--census`, with scripted routers and a scripted worker."""

import io
import json
import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import typer
from rich.console import Console

from baton.cli import target
from baton.cli.inspect import block_census as census_command
from baton.cli.inspect import status as command
from baton.cli.inspect.block_census import Problem, problems
from baton.cli.inspect.trace import find as find_trace
from baton.cluster.state_dir import ClusterState, ProcessId
from baton.core import LEFT_OUT, BlockCounts, HandoffId, Incarnation, Load, Role, WorkerRef
from baton.errors import DeadlineExceeded, NoWorker, PermissionDenied
from baton.rpc import convert
from baton.rpc.v1 import admin_pb2, common_pb2, worker_pb2_grpc
from baton.worker.block_census import Census, Held, Holding, count, to_pb
from tests.support.clients import INFO, QuietAdmin

UNREACHABLE = "127.0.0.1:1"


def worker(name="prefill-0", address="127.0.0.1:2", state="connected"):
    info = replace(INFO, ref=WorkerRef(name, Incarnation(7, 2), address), role=Role(name.partition("-")[0]))
    load = convert.load_to_pb(Load(blocks=BlockCounts(10, free=10)))
    return admin_pb2.WorkerStatus(info=convert.info_to_pb(info), load=load, state=state)


class FakeRouter(QuietAdmin):
    def __init__(self, name, *workers):
        self.running = ["a", "b"]
        names = {"name": "two", "model": "m", "router_id": name}
        self.reply = admin_pb2.StatusReply(**names, running=len(name), workers=workers or [worker()])

    def Status(self, request, context):
        return self.reply

    def Requests(self, request, context):
        return admin_pb2.RequestsReply(router_id=self.reply.router_id, request_ids=self.running)


@pytest.fixture
def status(tmp_path, monkeypatch, serve, capsys):
    """Return the printed status of a cluster with these routers; `None` is one that does not answer."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path))

    def shown(*routers, as_json=False):
        admins = [UNREACHABLE if router is None else serve(router) for router in routers]
        here = ClusterState("two", ProcessId.of(os.getpid()), "x", admins[0], "", "", "", admins=admins)
        monkeypatch.setattr(target, "find_cluster", lambda name: here)
        command.status(as_json=as_json)
        printed = capsys.readouterr().out
        return json.loads(printed) if as_json else printed

    return shown


def test_each_router_is_shown_and_one_that_does_not_answer_hides_no_other(status):
    routers = FakeRouter("one"), FakeRouter("second", worker(state="lost")), None
    printed = status(*routers)
    assert "router one, up 0 s\nrequests: 3 running" in printed
    assert "router second, up 0 s\nrequests: 6 running" in printed
    assert printed.count("127.0.0.1:2 ") == 1, "one table"
    assert "prefill-0@7.2: lost at router second" in printed
    assert f"router at {UNREACHABLE}: no answer: " in printed
    found = status(*routers, as_json=True)
    assert (found["router_id"], found["workers"][0]["state"]) == ("one", "connected")
    assert [router["router_id"] for router in found["other_routers"]] == ["second"]
    assert [router["admin"] for router in found["unreachable_routers"]] == [UNREACHABLE]
    assert "router second" in status(None, FakeRouter("second"))
    with pytest.raises(NoWorker, match=UNREACHABLE):
        status(None, None)


def test_what_a_worker_computes_with_is_in_its_row(status):
    router = FakeRouter("one")
    (one,) = router.reply.workers
    one.info.cpu_level, one.info.layout.dtype, one.info.quantize = "avx512-vnni", "bfloat16", "int8"
    assert " avx512-vnni bfloat16 int8 " in status(router)
    (found,) = status(router, as_json=True)["workers"]
    info = found["info"]
    assert (info["cpu_level"], info["layout"]["dtype"], info["quantize"]) == ("avx512-vnni", "bfloat16", "int8")
    one.info.quantize = "none"
    assert " avx512-vnni bfloat16  " in status(router)
    one.info.backend = "transformers 5.23.0"
    assert " avx512-vnni bfloat16 transformers 5.23.0 " in status(router)


def test_who_takes_deterministic_requests_is_said_once(status):
    router = FakeRouter("one")
    for name, (said, why_not, passes) in {"p1": ("x", "", 2), "d0": ("x", "", 5), "d1": ("", "a GPU", 0)}.items():
        added = router.reply.workers.add()
        added.CopyFrom(worker())
        added.info.ref.worker_id, added.info.determinism, added.info.nondeterminism = name, said, why_not
        added.load.verify_passes, added.load.rollbacks, added.load.recomputed_tokens = passes, 1, 30
    lines = [line for line in status(router).splitlines() if line.startswith("deterministic")]
    assert lines == [
        "deterministic requests: not on prefill-0: no reason reported",
        "deterministic requests: x on p1, d0: 7 verify passes, 2 rollbacks, 60 tokens recomputed",
        "deterministic requests: not on d1: a GPU",
    ]


def test_proposals_and_their_accepted_share_have_a_line(status):
    router = FakeRouter("one")
    assert "speculation" not in status(router)
    router.reply.workers[0].load.speculated_tokens, router.reply.workers[0].load.accepted_tokens = 40, 30
    assert "speculation on prefill-0: 40 tokens proposed, 30 accepted (75%)" in status(router).splitlines()


def test_a_worker_with_slower_channels_has_a_line_with_the_reasons(status):
    reasons = [common_pb2.LeftOut(transport="shm", reason="reach"), common_pb2.LeftOut(transport="nccl", reason="new")]
    channels = [("d0", "gloo", reasons), ("d1", "gloo", reasons), ("d2", "shm", [])]
    router = FakeRouter("one")
    for peer, taken, left_out in channels:
        router.reply.workers[0].load.channels.add(peer=peer, transport=taken, left_out=left_out)
    lines = [line for line in status(router).splitlines() if line.startswith("prefill-0 sends")]
    assert lines == [
        f"prefill-0 sends over gloo to d0, d1; not over shm: {LEFT_OUT['reach']}; not over nccl: {LEFT_OUT['unknown']}"
    ]
    found = status(router, as_json=True)["workers"][0]["load"]["channels"]
    assert [[one["reason"] for one in channel["left_out"]] for channel in found] == [["reach", "unknown"]] * 2 + [[]]


def test_what_the_controller_says_is_shown(status):
    router = FakeRouter("one")
    router.reply.workers[0].load.draining = True
    said = admin_pb2.Control(age_s=7, host="h", outlook="prefill: steady")
    said.plan.MergeFrom(admin_pb2.Plan(prefill=1, decode=2, generation=3, number=9, by="operator", reason="he said so"))
    said.slots.add(worker_id="prefill-0", role="prefill", state="ready", generation=3)
    said.slots.add(worker_id="decode-0", role="decode", state="ready", generation=2)
    said.slots.add(worker_id="decode-1", role="decode", state="failed", generation=3, note="no memory")
    for number in range(7):
        said.decisions.add(age_s=10 - number, kind="start", text=f"number {number}")
    router.reply.control.CopyFrom(said)
    printed = status(router)
    for part in (
        "prefill-0@7.2  prefill  draining",
        "plan 9: 1 prefill, 2 decode, by operator: he said so\n",
        "the controller on h has sent no report for 7 s",
        "decode-0: ready, generation 2 of 3\n",
        "decode-1: failed, generation 3 of 3: no memory\n",
        "autoscaler: prefill: steady",
        "    15 s ago  start     number 2\n",
    ):
        assert part in printed
    assert "prefill-0: ready" not in printed, "all is well with it"
    assert "number 1" not in printed
    control = status(router, as_json=True)["control"]
    assert (control["plan"]["number"], len(control["decisions"]), control["slots"][2]["note"]) == (9, 7, "no memory")


DEAD = 'exit code -9:\n{"event": "model_loading"}\n{"event": "kernels_torch"}'


def test_a_dead_worker_has_one_line(status):
    router = FakeRouter("one")
    said = admin_pb2.Control(age_s=1)
    said.slots.add(worker_id="decode-0", state="failed", note=DEAD)
    said.decisions.add(age_s=1, kind="replace", text=f"decode-0: {DEAD}")
    router.reply.control.CopyFrom(said)
    router.reply.workers[0].note = DEAD
    printed = status(router)
    assert "model_loading" not in printed
    assert "decode-0: failed, generation 0 of 0: exit code -9\n" in printed
    assert "replace   decode-0: exit code -9\n" in printed


@pytest.mark.parametrize(("terminal", "shown"), [(True, "  5 s ago  plan: one two\n    three\n"), (False, "")])
def test_a_terminal_breaks_lines_between_words(monkeypatch, capsys, terminal, shown):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "26")
    command._line(line := "  5 s ago  plan: one two three")
    assert capsys.readouterr().out == (shown or f"{line}\n")


@pytest.mark.parametrize(("width", "hidden"), [(300, 0), (100, 4), (62, 8), (40, 8)])
def test_the_table_fits_the_terminal(width, hidden):
    row = dict.fromkeys(command.COLUMNS, "seven..") | {"worker": "prefill-0@1795798880227824.1"}
    console = Console(width=width, file=(out := io.StringIO()))
    table, found = command.fitting([row, row], console)
    console.print(table)
    lines = out.getvalue().splitlines()
    assert found == hidden
    assert all(len(line.rstrip()) <= width for line in lines)
    assert width == 40 or len(lines) == 3, "no row is wrapped"
    assert ("@" in lines[1]) == (width == 300)


def test_watching_goes_on_until_it_is_interrupted(capsys, monkeypatch):
    show = Mock(side_effect=[None, NoWorker("being replaced"), DeadlineExceeded("slow")])
    monkeypatch.setattr(time, "sleep", Mock(side_effect=[None, None, KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        command.repeat(show)
    assert (show.call_count, capsys.readouterr()) == (3, ("", "being replaced\nslow\n")), "stdout has only the status"
    with pytest.raises(PermissionDenied):
        command.repeat(Mock(side_effect=PermissionDenied("an admin's token is required")))
    with pytest.raises(typer.BadParameter, match="--census: must be without --watch"):
        command.status(census=True, watch=True)


def test_without_an_id_the_trace_is_that_of_the_request_that_ended_last(monkeypatch):
    def reply(name: str, *times: tuple[float, float]) -> admin_pb2.TraceReply:
        spans = [common_pb2.Span(name="decode", start_s=start, duration_s=took) for start, took in times]
        return admin_pb2.TraceReply(request_id=name, spans=spans)

    replies = {"a": reply("short", (5, 1)), "b": reply("long", (0, 29), (29, 1)), "c": reply("none")}
    admins = SimpleNamespace(started=[*replies], call=lambda admin, method: replies[admin])
    monkeypatch.setattr("baton.cli.target.Admins.find", lambda *_: admins)
    assert find_trace("", None, None, None).request_id == "long"


# --- the census: unaccounted blocks and handoffs

D = WorkerRef("decode-0", Incarnation(7, 2), "127.0.0.1:2")


def held(request, state="decoding", router="router-a", blocks=3):
    return Held(HandoffId(request, 1), state, router, blocks, blocks)


def test_what_is_held_belongs_to_a_request_that_runs():
    runs = held("a"), held("b", "reserved")
    unknown = held("x", "pushing"), held("y", "queued", blocks=0)
    handoffs = *runs, *unknown, held("a", router="router-b", blocks=1), held("b", router="")
    owned = sum(entry.counted for entry in handoffs)
    census = Census(D, BlockCounts(owned + 10, free=10, owned=owned), handoffs)
    said = problems([census], {"router-a": {"a", "b"}})
    assert [str(problem) for problem in said] == [
        f"{D}: x/1 is pushing with 3 blocks, and router router-a does not run it",
        f"{D}: y/1 is queued with 0 blocks, and router router-a does not run it",
        f"{D}: a/1 is decoding with 1 block, and router router-b was not asked",
        f"{D}: b/1 is decoding with 3 blocks, and no router requested it",
    ]


def test_blocks_that_nobody_holds():
    lost = Census(D, BlockCounts(10, free=7, owned=2, reserved=1), (held("a", blocks=2),))
    twice = Census(D, BlockCounts(10, free=9, owned=1), (held("a", blocks=2),))
    assert [problem.text for problem in problems([lost, twice], {"router-a": {"a"}})] == [
        "1 block that no handoff holds",
        "1 block that a handoff holds but the ledger counts as free",
    ]


def test_problems_are_the_same_if_they_are_about_the_same():
    """A problem is reported only if a second look finds an equal one, whatever its details."""
    assert Problem("w", HandoffId("a", 1), "with 3 blocks") == Problem("w", HandoffId("a", 1), "with 4 blocks")
    assert Problem("w", HandoffId("a", 1), "") != Problem("w", HandoffId("a", 2), "")
    assert Problem("w", None, "") != Problem("v", None, "")


class Cluster(FakeRouter, worker_pb2_grpc.WorkerServicer):
    """Each census of its worker returns the next list of held handoffs. The last one stays."""

    def __init__(self):
        super().__init__("router-a")
        self.counts = BlockCounts(10, free=5, owned=5)
        self.looks = [[Holding(HandoffId("a", 1), "decoding", [0, 1, 2, 3, 4], "router-a")]]

    def Connect(self, requests, context):
        raise NotImplementedError

    def Census(self, request, context):
        taken = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return to_pb(count(D, self.counts, taken))


@pytest.fixture
def cluster():
    return Cluster()


@pytest.fixture
def census(cluster, monkeypatch, serve, capsys):
    """Return the exit code of a census and its output."""
    monkeypatch.setattr(census_command, "PAUSE_S", 0.0)
    address = serve(cluster)
    cluster.reply.workers[0].CopyFrom(worker("decode-0", address))

    def run(*others, as_json=False):
        try:
            census_command.print_census(None, ",".join([address, *map(serve, others)]), as_json=as_json)
        except typer.Exit as ended:
            return ended.exit_code, capsys.readouterr().out
        return 0, capsys.readouterr().out

    return run


def test_all_is_accounted_for(cluster, census):
    all_held = "decode-0@7.2: 5 of 10 blocks held: 1 decoding (5 blocks)\n"
    assert census() == (0, all_held)
    late = Holding(HandoffId("old", 1), "decoding", [], "router-a")
    cluster.looks.insert(0, [*cluster.looks[0], late])
    assert census() == (0, all_held), "a release that was on its way is no leak"
    cluster.looks, cluster.counts = [[]], BlockCounts(10, free=4, cached=6)
    assert census() == (0, "decode-0@7.2: 0 of 10 blocks held: no handoff\n")


def test_what_is_unaccounted_for_is_printed_and_an_exit_code(cluster, census):
    cluster.counts = BlockCounts(10, free=3, owned=7)
    cluster.reply.workers.append(worker("decode-1", UNREACHABLE))
    code, printed = census()
    assert code == 1
    assert "decode-0@7.2: 2 blocks that no handoff holds\n" in printed
    assert "decode-1: no answer:" in printed


def test_handoffs_of_a_router_that_was_not_asked_are_no_loss(cluster, census):
    other = FakeRouter("router-b")
    cluster.looks[0].append(Holding(HandoffId("b", 1), "decoding", [], "router-b"))
    all_held = "decode-0@7.2: 5 of 10 blocks held: 2 decoding (5 blocks)\n"
    note = "not checked: router router-b was not asked, or has ended; name all routers in --target"
    assert census() == (2, f"{all_held}{note}\n")
    assert json.loads(census(as_json=True)[1])["not_checked"] == [note]
    assert census(other) == (0, all_held)
    other.running = []
    code, printed = census(other)
    assert (code, "router router-b does not run it" in printed) == (1, True)


def test_a_census_as_json(cluster, census):
    cluster.running = []
    code, printed = census(as_json=True)
    found = json.loads(printed)
    assert (code, found["workers"][0]["held"][0]["blocks"]) == (1, 5)
    assert found["problems"] == ["decode-0@7.2: a/1 is decoding with 5 blocks, and router router-a does not run it"]
