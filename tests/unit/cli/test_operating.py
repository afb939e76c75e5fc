"""`baton scale`, `drain` and `restart` as somebody types them; what they say to a router is tested in test_board.py."""

import json

import pytest
from typer.testing import CliRunner

from baton.cli import operate
from baton.cli.app import app
from baton.rpc.v1 import admin_pb2


class Said(operate.Operator):
    """Notes what is asked."""

    def scale(self, sizes):
        asked.append(sizes)
        return admin_pb2.Plan(prefill=sizes.get("prefill", 7), decode=sizes.get("decode", 8), number=3)

    def restart(self):
        return admin_pb2.Plan(generation=5, number=4)

    def drain(self, worker_id):
        return f"{worker_id}@1.2"

    def wait_settled(self, number, seconds):
        asked.append((number, seconds))

    def wait_gone(self, process, seconds):
        asked.append((process, seconds))


asked: list[object] = []


@pytest.fixture(autouse=True)
def operator(monkeypatch):
    asked.clear()
    monkeypatch.setattr(operate, "Operator", Said)


def run(*words):
    return CliRunner().invoke(app, [*words, "--target", "127.0.0.1:1"])


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["prefill=2"], {"prefill": 2}),
        (["decode=3", "prefill=1"], {"decode": 3, "prefill": 1}),
    ],
)
def test_sizes_are_said(words, sizes):
    result = run("scale", *words)
    assert result.exit_code == 0, result.output
    assert asked == [sizes]
    assert " prefill, " in result.output
    assert "baton status" in result.output


@pytest.mark.parametrize("words", ["prefill", "prefill=x", "prefill=-1", "router=2", "decode=1 decode=2", "=1"])
def test_what_is_no_size_is_named_and_nobody_is_asked(words):
    result = run("scale", *words.split())
    assert result.exit_code == 2
    assert "prefill=N" in result.output
    assert asked == []


def test_nothing_to_scale_is_a_mistake():
    assert run("scale").exit_code == 2


def test_waiting_is_asked_for(tmp_path):
    result = run("scale", "prefill=2", "--wait", "30", "--json")
    assert json.loads(result.output) == {"prefill": 2, "decode": 8, "done": True}
    assert asked == [{"prefill": 2}, (3, 30.0)]
    asked.clear()
    assert "prefill-0@1.2 drains: done" in run("drain", "prefill-0", "--wait", "5").output
    assert asked == [("prefill-0@1.2", 5.0)]
    asked.clear()
    assert json.loads(run("restart", "--json").output) == {"generation": 5, "done": False}
    assert asked == []
