"""`--show`, the prompt on standard input, and which cluster is meant."""

import io
import os
import sys
from types import SimpleNamespace

import pytest

from baton.cli import up
from baton.cli.generate import Shown, generate
from baton.cluster.state import ClusterState, ProcessId, StateFolder
from baton.errors import InvalidRequest, NoWorker


@pytest.mark.parametrize(
    ("text", "timings", "tokens"),
    [("", False, False), ("timings", True, False), (" tokens , timings,", True, True)],
)
def test_show(text, timings, tokens):
    assert Shown.parse(text, as_json=False) == Shown(timings, tokens, False)


@pytest.mark.parametrize(
    ("text", "says"), [("colors", "'colors' is not one of timings"), ("thoughts", "not built yet")]
)
def test_show_refuses_by_name(text, says):
    with pytest.raises(InvalidRequest, match=says):
        Shown.parse(text, as_json=True)


class Asked(Exception):
    """Ends `generate` as soon as the prompt is known."""


class FakeClient:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def stream(self, prompt, **options):
        raise Asked(prompt)


@pytest.mark.parametrize(("data", "text"), [("Zoë".encode(), "Zoë"), (b"a\xff", "a\udcff")])
def test_a_prompt_on_standard_input_need_not_be_text(monkeypatch, data, text):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    with pytest.raises(Asked) as asked:
        generate(FakeClient(), "-", {}, Shown(False, False, False))  # type: ignore[arg-type]
    assert asked.value.args == (text,)


@pytest.fixture
def clusters(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_HOME", str(tmp_path))

    def add(name, grpc="127.0.0.1:1"):
        folder = StateFolder(name)
        folder.logs.mkdir(parents=True)
        me = ProcessId.of(os.getpid())
        folder.write_state(ClusterState(name, me, grpc, grpc, grpc, "", "none"))

    return add


def test_the_only_cluster_is_meant_when_none_is_named(clusters):
    clusters("a")
    assert up.find_cluster(None).name == "a"
    clusters("b")
    assert up.find_cluster("b").name == "b"
    with pytest.raises(NoWorker, match=r"several clusters are running; say --name with one of: a, b"):
        up.find_cluster(None)
    with pytest.raises(NoWorker, match="no cluster named 'c'"):
        up.find_cluster("c")


def test_a_cluster_that_starts_can_be_ended_but_not_asked(clusters):
    clusters("a", grpc="")
    with pytest.raises(NoWorker, match="'a' is still starting"):
        up.find_cluster("a")
    assert up.find_cluster(None, starting=True).name == "a"
