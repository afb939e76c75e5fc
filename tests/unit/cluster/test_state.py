"""The state folder: one cluster per name, private files, and no trust in what a killed one left behind."""

import os
import stat
import subprocess
import sys

import pytest

from baton.cluster.state import ClusterState, ProcessId, StateFolder, running_clusters


def state(name="a", pid=None):
    me = ProcessId.of(pid or os.getpid())
    return ClusterState(
        name, me, "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:4", "redis://:secret@127.0.0.1:3/0", "none", {"router": me}
    )


@pytest.fixture
def folder(tmp_path):
    made = StateFolder("a", tmp_path)
    made.acquire()
    return made


def test_state_round_trip_and_privacy(folder, tmp_path):
    folder.write_state(state())
    assert folder.read_state() == state()
    assert [found.name for found in running_clusters(tmp_path)] == ["a"]
    for file in (tmp_path / "a").glob("*.json"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    folder.release()
    assert folder.read_state() is None
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["lock", "logs"]


def test_the_state_of_a_dead_supervisor_does_not_count(folder):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder.write_state(state(pid=process.pid))
    assert folder.read_state() is not None
    process.communicate(b"\n", timeout=10)
    assert folder.read_state() is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"name": "a"}'])
def test_a_damaged_state_file_is_no_cluster(folder, tmp_path, damage):
    (tmp_path / "a" / "state.json").write_text(damage)
    assert folder.read_state() is None


def test_what_a_killed_cluster_left_goes_when_the_name_is_taken_again(folder, tmp_path):
    scratch = folder.scratch()
    (scratch / "session").mkdir()
    folder.write_state(state())
    folder.write_private(folder.config, "redis: {url: secret}")
    folder._lock.close()  # the kernel does this for a killed process
    again = StateFolder("a", tmp_path)
    again.acquire()
    assert not scratch.exists()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["lock", "logs"]
    own = again.scratch()
    again.release()
    assert not own.exists()
