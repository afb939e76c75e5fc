"""Workers as child processes: starting, ready, ended with a reason, killed, forgotten, stopped."""

import sys

import psutil
import pytest

from baton.cluster.pool import ProcessPlacement
from baton.core import Role
from baton.errors import LedgerError
from tests.support.processes import READY, SILENT
from tests.support.waiting import eventually

DEAD = "import sys; print('no Redis here'); sys.exit(4)"


@pytest.fixture
def placed(tmp_path):
    codes = {"decode-0": READY, "decode-1": SILENT, "decode-2": DEAD}
    placement = ProcessPlacement(lambda worker_id, role: [sys.executable, "-c", codes[worker_id]], tmp_path)
    placement.open()
    yield placement
    placement.stop(0.0)


def seen(placement, worker_id, state):
    return eventually(lambda: (found := placement.look()[worker_id]).state == state and found, within_s=20.0)


def test_each_is_seen_as_it_is(placed):
    assert placed.found() == {}
    for worker_id in ("decode-0", "decode-1", "decode-2"):
        placed.start(worker_id, Role.DECODE)
    ready = seen(placed, "decode-0", "ready")
    assert psutil.pid_exists(ready.pid)
    ended = seen(placed, "decode-2", "ended")
    assert isinstance(ended.error, LedgerError)
    assert "decode-2 ended with exit code 4:\n    no Redis here" in str(ended.error)
    assert placed.look()["decode-1"].state == "starting"


def test_one_that_is_killed_is_not_started_again_by_itself(placed):
    placed.start("decode-0", Role.DECODE)
    before = seen(placed, "decode-0", "ready")
    placed.kill("decode-0")
    ended = seen(placed, "decode-0", "ended")
    assert (ended.pid, "exit code -9" in str(ended.error)) == (None, True)
    placed.forget("decode-0")
    assert placed.look() == {}
    placed.start("decode-0", Role.DECODE)
    assert seen(placed, "decode-0", "ready").pid != before.pid


def test_what_cannot_be_started_is_seen_as_ended(tmp_path):
    placement = ProcessPlacement(lambda worker_id, role: ["/nowhere/at/all"], tmp_path)
    placement.start("decode-0", Role.DECODE)
    assert "was not started" in str(placement.look()["decode-0"].error)
    placement.kill("decode-0")
    placement.stop(0.0)
    placement.forget("decode-0")
    assert placement.look() == {}


def test_none_is_left_when_all_are_stopped(placed):
    placed.start("decode-0", Role.DECODE)
    placed.start("decode-1", Role.DECODE)
    pids = [one.pid for one in placed.look().values()]
    placed.stop(0.0)
    assert not any(psutil.pid_exists(pid) for pid in pids)
