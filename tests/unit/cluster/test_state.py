"""The state folder: one cluster per name, private files, and no trust in what a killed one left behind."""

import os
import stat
import subprocess
import sys

import pytest

from baton.cluster.state import ClusterState, ProcessId, StateFolder, running_clusters
from baton.errors import ConfigError


def state(name="a", pid=None):
    me = ProcessId.of(pid or os.getpid())
    return ClusterState(
        name, me, "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:4", "redis://:secret@127.0.0.1:3/0", "none", {"router": me}
    )


def test_state_round_trip_and_privacy(tmp_path):
    folder = StateFolder("a", tmp_path)
    folder.acquire()
    folder.write_state(state())
    assert folder.read_state() == state()
    assert [found.name for found in running_clusters(tmp_path)] == ["a"]
    for file in (tmp_path / "a").glob("*.json"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    folder.release()
    assert folder.read_state() is None
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["lock", "logs"]


def test_a_name_is_taken_once(tmp_path):
    first, second = StateFolder("a", tmp_path), StateFolder("a", tmp_path)
    first.acquire()
    with pytest.raises(ConfigError, match="a cluster named 'a' is running"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_the_state_of_a_dead_supervisor_does_not_count(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder = StateFolder("a", tmp_path)
    folder.acquire()
    folder.write_state(state(pid=process.pid))
    assert folder.read_state() is not None
    process.communicate(b"\n", timeout=10)
    assert folder.read_state() is None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"name": "a"}'])
def test_a_damaged_state_file_is_no_cluster(tmp_path, damage):
    folder = StateFolder("a", tmp_path)
    folder.acquire()
    (tmp_path / "a" / "state.json").write_text(damage)
    assert folder.read_state() is None


def test_what_a_killed_cluster_left_goes_when_the_name_is_taken_again(tmp_path):
    killed = StateFolder("a", tmp_path)
    killed.acquire()
    scratch = killed.scratch()
    (scratch / "session").mkdir()
    killed.write_state(state())
    killed.write_private(killed.config, "redis: {url: secret}")
    assert killed._lock is not None
    killed._lock.close()  # the kernel does this for a killed process
    again = StateFolder("a", tmp_path)
    again.acquire()
    assert not scratch.exists()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["lock", "logs"]
    own = again.scratch()
    again.release()
    assert not own.exists()


def test_an_unwritable_home_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="BATON_HOME"):
        StateFolder("a", tmp_path / "file").acquire()
