"""The soak's plan, and its checker, which finds each planted fault and nothing in a right run."""

import math
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from benchmarks.faults.check import THOUGHTS, Answer, Part, Record, check, leaks
from benchmarks.faults.home import NAME, Field
from benchmarks.faults.plan import KINDS, plan
from benchmarks.faults.strikes import STRIKES

RIGHT = Answer((7, 8, 9, 10), "abcd", "length")
IDLE = {"total": 4, "free": 4, "reserved": 0, "owned": 0, "cached": 0, "quarantined": 0}


def record(number=0, *parts, end="whole", began=0.0, ended=9.0, **changes):
    parts = parts or (Part(1.0, 0, 0, (7, 8), "ab"), Part(5.0, 0, 2, (9, 10), "cd"))
    fields = {"answers": {0: RIGHT}, "finishes": {0: "length"}, "detail": "", "api": "grpc", **changes}
    return Record(number, "greedy", began=began, parts=list(parts), end=end, ended=ended, **fields)


def rules(*records):
    return [finding.rule for finding in check(records)]


def test_pieces_deal_all_kinds_evenly_and_can_be_repeated():
    faults = [fault for piece in range(3) for fault in plan(5, piece, len(KINDS))]
    assert faults == plan(5, 0, 3 * len(KINDS))
    assert set(Counter(fault.kind for fault in faults).values()) == {3}
    assert plan(6, 0, 26) != plan(5, 0, 26)
    assert set(STRIKES) == set(KINDS)


def test_a_right_run_has_no_findings():
    left = record(1, Part(1.0, 0, 0, (7,), "a"), end="left", finishes={})
    http = record(2, Part(1.0, 0, 0, (), "ab"), Part(2.0, 0, 0, (), "cd"), api="http")
    lost = record(3, Part(1.0, 0, 0, (7,), "a"), end="WorkerLost", finishes={})
    cause = record(4, end="EngineFault", detail="2 workers were lost while they computed this request")
    in_stream = record(5, Part(1.0, 0, 0, (), "ab"), api="http", end="HTTP worker_lost")
    assert check([record(), left, http, lost, cause, in_stream]) == []


@pytest.mark.parametrize(
    ("planted", "rule"),
    [
        (record(0, Part(1.0, 0, 0, (7, 8), "ab"), Part(2.0, 0, 2, (9, 11), "cd")), "wrong"),
        (record(0, Part(1.0, 0, 0, (7, 11), "ab"), end="WorkerLost"), "wrong"),
        (record(0, Part(1.0, 0, 0, (7, 8, 9, 10), "abcx")), "wrong"),
        (record(0, Part(1.0, 0, 0, (), "ax"), api="http", end="left"), "wrong"),
        (record(finishes={0: "eos"}), "wrong"),
        (record(0, Part(1.0, 0, 0, (7, 8), "ab"), Part(2.0, 0, 1, (8, 9, 10), "cd")), "lost_or_repeated"),
        (record(0, Part(1.0, 0, 0, (7,), "ab"), Part(2.0, 0, 2, (9, 10), "cd")), "lost_or_repeated"),
        (record(0, Part(1.0, 0, 0, (7, 8, 9), "abcd")), "lost_or_repeated"),
        (record(0, Part(1.0, 0, 0, (), "abc"), api="http"), "lost_or_repeated"),
        (
            record(answers={0: RIGHT, THOUGHTS: Answer((3,), "", "")}, finishes={0: "length", THOUGHTS: ""}),
            "lost_or_repeated",
        ),
        (record(end="EngineFault", detail="token 3 is missing"), "lost_or_repeated"),
        (record(end="EngineFault", detail="internal error; see the server's log"), "untyped"),
        (record(end="", ended=math.inf), "hung"),
        (record(ended=91.0), "hung"),
        (record(end="HTTP 500"), "untyped"),
        (record(end="DeadlineExceeded"), "untyped"),
        (record(1), "unended"),
    ],
)
def test_the_checker_finds_a_planted(planted, rule):
    assert rules(planted) == [rule]


def test_a_request_with_two_endings_is_found():
    assert rules(record(0), record(0)) == ["unended"]


def test_blocks_of_an_idle_cluster_leak():
    held = {"state": "decoding", "counted": 2, "blocks": 2}
    lost = {"worker": "d", "blocks": IDLE | {"free": 1, "owned": 3}, "held": [held]}
    parked = {
        "worker": "e",
        "blocks": IDLE | {"free": 3, "owned": 1},
        "held": [held | {"state": "parked", "counted": 1}],
    }
    assert leaks({"workers": [lost, parked], "problems": ["p"]}) == (3, ["p"])


def test_processes_files_and_segments_that_are_left_are_found(tmp_path, monkeypatch):
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr("benchmarks.faults.home.SEGMENTS", tmp_path / "shm")
    monkeypatch.setattr("benchmarks.faults.home.GONE_S", 0.0)
    monkeypatch.setenv("BATON_SOAK_NAMESPACE", "1")
    field = Field(tmp_path, tmp_path / "history", "oracle", ray=False, control=False)
    monkeypatch.setattr(field.home, "baton", lambda *args: SimpleNamespace(returncode=0))
    (tmp_path / NAME / "logs").mkdir(parents=True)
    (tmp_path / NAME / "state.json").touch()
    (tmp_path / "shm" / "segment").touch()
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, env=os.environ | {"BATON_HOME": str(tmp_path)}, stdin=subprocess.PIPE) as process:
        left = field.down()
        assert process.wait() == -9
    assert (left["files"], left["segments"]) == (["state.json"], ["segment"])
    assert [name.split(":")[0] for name in left["processes"]] == [str(process.pid)]
