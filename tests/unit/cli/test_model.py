"""A model is fetched once before a cluster starts, and a terminal shows the progress of loading."""

import io
import json
import sys
import threading

import pytest

from baton.cli.cluster import launch
from baton.cli.cluster.launch import fetched, loading, shown_loading
from baton.cluster.signals import Stop
from baton.config import ClusterConfig
from baton.errors import Cancelled
from tests.support.waiting import eventually
from tests.unit.test_hub import COMMIT, snapshot


def config(path):
    return ClusterConfig.model_validate({"model": {"path": path}})


@pytest.mark.parametrize("path", ["oracle", "models/demo"])
def test_folders_are_left_alone(path):
    assert fetched(config(path), Stop()) == config(path)


@pytest.mark.slow
def test_a_model_of_the_hub_is_pinned_to_its_commit_and_keeps_its_name(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    snapshot(tmp_path)
    found = fetched(config("hf:org/tiny"), Stop())
    assert (found.model.path, found.model.name) == (f"hf:org/tiny@{COMMIT}", "org/tiny")
    assert fetched(found, Stop()) == found


def test_a_download_ends_when_told_to(monkeypatch):
    """The process that downloads is replaced by one that never ends."""
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    monkeypatch.setattr(launch, "COMMAND", ("-c", "exec sleep 1000"))
    stop = Stop()
    threading.Timer(0.2, stop.drain.set).start()
    with pytest.raises(Cancelled):
        fetched(config("hf:org/tiny"), stop)


def write_log(folder, name, *events):
    (folder / f"{name}.log").write_text("\n".join(json.dumps(event) for event in events))


def test_logs_say_how_far_each_worker_is(tmp_path):
    write_log(tmp_path, "decode-0", {"event": "config"}, {"event": "model_loading", "percent": 40})
    write_log(tmp_path, "prefill-0", {"event": "model_loading", "percent": 40}, {"event": "model_loaded"})
    write_log(tmp_path, "prefill-1", {"event": "config"})
    (tmp_path / "prefill-2.log").write_text('{"event": "model_lo')
    (tmp_path / "prefill-3.log").write_text("[1]")
    assert loading(tmp_path, since=0) == ["decode-0 40 %", "prefill-0 100 %"]
    assert loading(tmp_path, since=2e10) == []  # of an earlier run
    assert loading(tmp_path / "none", since=0) == []


def test_a_terminal_shows_one_line_and_clears_it(monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "SHOWN_S", 0.01)
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    with shown_loading(tmp_path) as shown:
        write_log(tmp_path, "decode-0", {"event": "model_loading", "percent": 40})
        eventually(lambda: "loading: decode-0 40 %" in terminal.getvalue())
        shown()
        before = terminal.getvalue()
    assert terminal.getvalue() == before  # cleared once
    assert before.endswith(launch.CLEAR)
    assert "\n" not in before


def test_no_terminal_no_line(monkeypatch, tmp_path):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with shown_loading(tmp_path):
        assert not [thread for thread in threading.enumerate() if thread.name == "loading"]
    assert stderr.getvalue() == ""
