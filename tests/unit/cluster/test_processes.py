"""Supervision of real child processes and of workers; signals; and the state folder of a cluster."""

import errno
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import uuid
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from baton.cluster.backend_process import (
    BACKOFF_S,
    READY_FD,
    Child,
    ProcessPlacement,
    ProcessSpec,
    StartError,
    report_ready,
    stop_all,
    tail,
)
from baton.cluster.gpus import VISIBLE, GpuAssignment
from baton.cluster.signals import SIGNALS, Stop, stop_on_signals
from baton.cluster.state_dir import ClusterState, ProcessId, StateFolder, running_clusters
from baton.config import ClusterConfig
from baton.core import Role
from baton.errors import BatonError, Cancelled, ConfigError, LedgerError, NoWorker
from baton.testing import FakeClock
from tests.support.processes import READY, SILENT, fill_disk
from tests.support.time_factor import scaled
from tests.support.waiting import eventually

NO_GPUS = GpuAssignment(ClusterConfig(), ())


@pytest.fixture
def child(tmp_path):
    made = []

    def make(code, clock=None, **options):
        command = [sys.executable, "-c", code]
        made.append(Child(ProcessSpec("child", command, tmp_path / "child.log", **options), clock))
        made[-1].start()
        return made[-1]

    yield make
    stop_all(made, 0.0)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; print('cannot find the thing'); sys.exit(3)", r"(?s)exit code 3.*cannot find the thing"),
        pytest.param(SILENT, r"was silent for 0\.2 s", marks=pytest.mark.slow),
    ],
    ids=["dead", "silent"],
)
def test_a_child_that_does_not_become_ready_is_reported(child, code, says):
    it = child(code, ready_timeout_s=0.2 if code == SILENT else 60.0)
    with pytest.raises(BatonError, match=says) as ended:
        it.wait_ready(Stop())
    assert type(ended.value) is (StartError if code == SILENT else ConfigError)


def test_told_to_stop_while_a_child_starts(child):
    stop = Stop()
    it = child(SILENT)
    threading.Timer(0.1, stop.drain.set).start()
    with pytest.raises(Cancelled):
        it.wait_ready(stop)


def test_a_child_says_when_it_is_ready_and_does_not_inherit_keys_of_the_cluster_file(child, monkeypatch):
    """The child reads these keys in the file, in which the supervisor has set its own ports and Redis."""
    monkeypatch.setenv("BATON__REDIS__URL", "embedded")
    monkeypatch.setenv("BATON_HOME", "/kept")
    code = "import os; from baton.cluster.backend_process import report_ready; report_ready(dict(os.environ));" + SILENT
    it = child(code, env={"BATON__A": "given"})
    env = it.wait_ready(Stop())
    assert "BATON__REDIS__URL" not in env
    assert (env["BATON__A"], env["BATON_HOME"]) == ("given", "/kept")
    assert psutil.pid_exists(it.pid)
    stop_all([it], 5.0)
    assert it.pid is None


def dies(it, clock):
    os.kill(it.pid, signal.SIGKILL)
    it._process.wait(scaled(10))
    assert not it.poll()
    clock.advance(BACKOFF_S[0])
    assert it.poll()


def test_a_dead_child_is_replaced_after_its_backoff(child):
    clock = FakeClock()
    it = child(READY, clock)
    it.wait_ready(Stop())
    first = it.pid
    dies(it, clock)
    assert it.wait_ready(Stop()) == {"port": 5}
    assert (it.pid != first, it.restarts) == (True, 1)


@pytest.mark.parametrize("hangs", [True, False])
def test_a_replacement_that_hangs_as_it_starts_is_replaced_too(child, tmp_path, hangs):
    clock, marker = FakeClock(), tmp_path / "first"
    code = f"import os, time; new = not os.path.exists({str(marker)!r}); open({str(marker)!r}, 'w').close()\n"
    it = child(code + f"if new or not {hangs}: exec({READY!r})\ntime.sleep(60)", clock, ready_timeout_s=20.0)
    it.wait_ready(Stop())
    dies(it, clock)
    second = it._process
    while not hangs and it._ready_fd is not None:
        it.poll()  # until it is ready
    clock.advance(20.1)
    assert not it.poll()
    assert (second.wait(scaled(10)) if hangs else second.poll()) == (-signal.SIGKILL if hangs else None)


def test_too_many_deaths_in_a_row_are_an_error(child):
    clock = FakeClock()
    it = child("raise SystemExit(1)", clock, max_restarts=2)

    for _ in range(4):  # two restarts, each after its backoff
        it._process.wait(scaled(10))
        it.poll()
        clock.advance(max(BACKOFF_S))
    it._process.wait(scaled(10))
    with pytest.raises(StartError, match="died 3 times in a row"):
        it.poll()


def test_a_child_that_cannot_be_started_again_is_tried_like_one_that_dies(child, tmp_path):
    """A lack of free processes may be temporary."""
    clock = FakeClock()
    it = child("pass", clock, max_restarts=3)
    it.wait(scaled(10.0))
    program, it.spec = it.spec.argv[0], replace(it.spec, argv=[str(tmp_path / "none")])
    files = len(list(Path("/proc/self/fd").iterdir()))
    for backoff in BACKOFF_S[:2]:
        assert not it.poll()
        clock.advance(backoff)
        assert not it.poll()
    assert len(list(Path("/proc/self/fd").iterdir())) <= files
    it.spec = replace(it.spec, argv=[program, "-c", "pass"])
    assert not it.poll()
    clock.advance(BACKOFF_S[2])
    assert it.poll()
    assert it.restarts == 1
    it.wait(scaled(10.0))
    with pytest.raises(StartError, match="died 4 times in a row"):
        it.poll()


def test_without_a_writable_log_a_process_is_replaced_all_the_same(child, tmp_path):
    clock = FakeClock()
    it = child("import os; os.write(1, b'lost')", clock)
    it.wait(scaled(10.0))
    (tmp_path / "child.log").unlink()
    (tmp_path / "child.log").mkdir()
    assert not it.poll()
    clock.advance(BACKOFF_S[0])
    assert it.poll()
    assert it._process.wait(scaled(10)) == 0
    placement = ProcessPlacement(lambda worker_id, role: [sys.executable, "-c", ""], tmp_path, NO_GPUS)
    placement._served = True  # as after the start of the cluster
    (tmp_path / "decode-0.log").mkdir()
    placement.start("decode-0", Role.DECODE)
    assert placement._children["decode-0"]._process is not None
    placement.stop(10.0)


def test_a_log_that_cannot_be_written_is_named_with_the_variable_that_moves_it(tmp_path):
    (tmp_path / "decode-0.log").mkdir()
    expected = f"BATON_HOME: cannot write to {tmp_path}/decode-0.log: Is a directory"
    with pytest.raises(ConfigError) as refused:
        Child(ProcessSpec("child", [sys.executable], tmp_path / "decode-0.log")).start()
    assert str(refused.value) == expected
    placement = ProcessPlacement(lambda worker_id, role: [sys.executable], tmp_path, NO_GPUS)
    placement.start("decode-0", Role.DECODE)
    error = placement.look()["decode-0"].error
    assert isinstance(error, ConfigError)
    assert str(error) == expected


def test_a_child_that_ignores_sigterm_is_killed(child):
    it = child("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + READY)
    it.wait_ready(Stop())
    pid = it.pid
    stop_all([it], 0.1)
    assert not psutil.pid_exists(pid)


def test_tail_of_a_log(tmp_path):
    file = tmp_path / "x.log"
    assert "no log" in tail(file)
    file.write_text("\n".join(map(str, range(100))))
    assert tail(file, 2) == "    98\n    99"
    file.write_text('{"event": "config"}\nbaton: ConfigError: a\nbaton: ConfigError: b\nc\n')
    assert tail(file) == "    baton: ConfigError: b\n    c"
    usual = '{"event": "model_loading", "percent": 0, "level": "info", "timestamp": "x"}\n'
    file.write_text(usual * 2)
    assert tail(file) == f"    {usual.strip()}", "the last one, if there is nothing else"
    file.write_text(f"old\n{usual * 6}killed\n{usual}" * 9)
    assert tail(file, 4) == "    killed"
    file.write_text('{"config": {"level": "info"}, "level": "error"}\n')
    assert tail(file) == f"    {file.read_text().strip()}"


@pytest.mark.parametrize(
    ("free", "says"), [(10**6, ""), (0, ", because the disk of {} is full")], ids=["space", "full"]
)
def test_tail_of_an_empty_log_names_a_full_disk(tmp_path, monkeypatch, free, says):
    (file := tmp_path / "x.log").touch()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Mock(free=free))
    assert tail(file) == f"    (its log is empty{says.format(file)})"


DEAD = "import sys; print('no Redis here'); sys.exit(4)"


@pytest.fixture
def placed(tmp_path):
    codes = {"decode-0": READY, "decode-1": SILENT, "decode-2": DEAD}
    placement = ProcessPlacement(lambda worker_id, role: [sys.executable, "-c", codes[worker_id]], tmp_path, NO_GPUS)
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


def test_one_that_is_killed_is_not_started_again_by_itself_and_none_is_left_in_the_end(placed):
    placed.start("decode-0", Role.DECODE)
    before = seen(placed, "decode-0", "ready")
    placed.kill("decode-0")
    ended = seen(placed, "decode-0", "ended")
    assert (ended.pid, "exit code -9" in str(ended.error)) == (None, True)
    placed.forget("decode-0")
    assert placed.look() == {}
    placed.start("decode-0", Role.DECODE)
    placed.start("decode-1", Role.DECODE)
    assert seen(placed, "decode-0", "ready").pid != before.pid
    pids = [one.pid for one in placed.look().values()]
    placed.stop(0.0)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_what_cannot_be_started_is_seen_as_ended(tmp_path):
    placement = ProcessPlacement(lambda worker_id, role: ["/nowhere/at/all"], tmp_path, NO_GPUS)
    placement.start("decode-0", Role.DECODE)
    assert "was not started" in str(placement.look()["decode-0"].error)
    placement.kill("decode-0")
    placement.forget("decode-0")
    assert placement.look() == {}


SHOWS = f"import os; print(os.environ.get({VISIBLE!r}), flush=True)" + READY


@pytest.fixture
def on_gpus(tmp_path):
    """A function that starts workers on GPUs whose logs show what they see, and returns the placement."""
    made = []

    def make(gpus, *worker_ids, **devices):
        pools = {name: {"device": device} for name, device in devices.items()}
        table = GpuAssignment(ClusterConfig.model_validate({"ray": {"address": "none"}, **pools}), gpus)
        made.append(ProcessPlacement(lambda worker_id, role: [sys.executable, "-c", SHOWS], tmp_path, table))
        for worker_id in worker_ids:
            made[-1].start(worker_id, Role(worker_id.partition("-")[0]))
        return made[-1]

    yield make
    for placement in made:
        placement.stop(0.0)


def test_each_worker_process_sees_its_own_gpus_alone(on_gpus, tmp_path):
    placement = on_gpus(("GPU-a", "MIG-b"), "prefill-0", "decode-0", prefill="cuda", decode="cuda")
    assert [seen(placement, name, "ready").error for name in ("prefill-0", "decode-0")] == [None, None]
    assert [(tmp_path / f"{name}.log").read_text() for name in ("prefill-0", "decode-0")] == ["GPU-a\n", "MIG-b\n"]
    placement = on_gpus(("0",), "prefill-1", "decode-1", prefill="cuda:0", decode="cuda:0")
    assert [seen(placement, name, "ready").error for name in ("prefill-1", "decode-1")] == [None, None]
    assert [(tmp_path / f"{name}.log").read_text() for name in ("prefill-1", "decode-1")] == ["0\n", "0\n"]


def test_a_worker_waits_for_a_gpu_until_another_process_has_ended(on_gpus, tmp_path):
    placement = on_gpus(("4", "5"), "prefill-0", "decode-0", "decode-1", "decode-2", prefill="cuda", decode="cuda")
    pid = seen(placement, "decode-0", "ready").pid
    waits = placement.look()["decode-1"]
    assert (waits.state, waits.pid, str(waits.error)) == ("starting", None, "decode-1 waits for free GPUs")
    placement.kill("decode-2")
    assert isinstance(placement.look()["decode-2"].error, NoWorker)
    placement.forget("decode-2")
    placement.kill("decode-0")
    seen(placement, "decode-0", "ended")
    assert placement.look()["decode-1"].pid is None, "its supervisor may start it again at once"
    placement.forget("decode-0")
    assert not psutil.pid_exists(pid)
    seen(placement, "decode-1", "ready")
    assert (tmp_path / "decode-1.log").read_text() == "5\n"


@pytest.fixture
def handlers():
    # A shell that runs the tests in the background may ignore some signals, and processes inherit that.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_drains_and_the_second_does_not_wait(handlers, number):
    stop = stop_on_signals()
    stop.check()
    os.kill(os.getpid(), number)
    assert stop.drain.wait(scaled(5))
    assert not stop.now.is_set()
    with pytest.raises(Cancelled):  # the start is not complete
        stop.check()
    os.kill(os.getpid(), number)
    assert stop.now.wait(scaled(5))


@pytest.mark.parametrize("event", ["drain", "now"])
def test_a_signal_during_a_wait_of_its_own_thread_does_not_block(handlers, event):
    """The handler may run while `wait` holds the lock of the event. A plain event would wait for itself without end."""
    program = (
        "import signal; from baton.cluster.signals import stop_on_signals; stop = stop_on_signals()\n"
        f"count = {1 if event == 'drain' else 2}\n"
        f"with stop.{event}._cond:\n"
        "    for _ in range(count): signal.raise_signal(signal.SIGTERM)\n"
        f"assert stop.{event}.wait(0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=scaled(30))


def test_a_child_that_is_ready_runs_on_without_the_process_that_waited():
    """`up --detach` may have been killed while a model was loaded."""
    reader, writer = os.pipe()
    os.close(reader)
    report_ready({"pid": 1}, {READY_FD: str(writer)})
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writer)


def test_an_ignored_signal_stays_ignored(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = stop_on_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert not stop.drain.is_set()


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
    process.communicate(b"\n", timeout=scaled(10))
    assert folder.read_state() is None


def test_a_step_of_the_clock_ends_no_cluster_in_our_eyes(folder, monkeypatch):
    folder.write_state(state())
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: 0.0)  # the system computes it from the clock
    assert folder.read_state() == state()


@pytest.mark.parametrize("later", ["another process of this boot", "the same numbers after a boot"])
def test_a_process_with_the_id_of_the_supervisor_is_not_the_supervisor(folder, later):
    boot, ticks = ProcessId.of(os.getpid()).started.split()
    started = f"{boot} {int(ticks) + 1}" if later.startswith("another") else f"{uuid.UUID(int=1)} {ticks}"
    folder.write_state(replace(state(), supervisor=ProcessId(os.getpid(), started)))
    assert folder.read_state() is None


def damages(seed):
    """Yield changes of a state file, and whether it can still be read."""
    drawn = random.Random(seed)
    for share in [0.0, *(drawn.random() for _ in range(20))]:
        yield lambda file, share=share: os.truncate(file, int(share * file.stat().st_size)), False
    yield lambda file: (file.unlink(), file.mkdir()), False
    yield Path.unlink, False
    yield lambda file: file.write_bytes(drawn.randbytes(700)), False
    yield lambda file: changed(file, supervisor={"pid": 1, "started": 1.5}), False  # of an older version
    yield lambda file: changed(file, supervisor={"pid": -1, "started": "x 1"}), None
    yield lambda file: changed(file, newer={"a": [1]}), True
    yield lambda file: changed(file, name="b"), None  # a copy of another cluster's


def changed(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("runs", [True, False])
def test_a_damaged_state_file_is_lost_if_its_cluster_runs_and_otherwise_is_nothing(tmp_path, seed, runs):
    owner = ProcessId.of(os.getpid()) if runs else ProcessId(os.getpid(), "before 1")
    for number, (damage, readable) in enumerate(damages(seed)):
        folder = StateFolder("a", tmp_path / str(number))
        folder.acquire()
        folder.write_state(replace(state(), supervisor=owner))
        changed(folder.path / "lock", started=owner.started)
        assert folder.state_kept()
        damage(folder.path / "state.json")
        assert not folder.state_kept()
        found = folder.read_state()
        assert bool(found) == (runs and readable is not None)
        assert found is None or (found.lost, found.supervisor) == (not readable, owner)
        if not folder._state.is_dir():
            folder.release()
            continue
        with pytest.raises(ConfigError, match=r"cannot write to .*/state\.json: Is a directory"):
            folder.write_state(state())


def test_only_the_process_that_has_the_name_is_named_in_its_lock(folder, tmp_path):
    before = (tmp_path / "a" / "lock").read_text()
    again = StateFolder("a", tmp_path)
    with pytest.raises(ConfigError, match=r"'a' is running; `baton down --name a` stops it"):
        again.acquire()
    assert (tmp_path / "a" / "lock").read_text() == before != ""
    os.truncate(tmp_path / "a" / "lock", 0)  # as earlier versions wrote it
    with pytest.raises(ConfigError, match=r"'a' is running; end its `baton up`"):
        again.acquire()


def test_folders_of_another_user(folder, tmp_path, monkeypatch):
    folder.write_state(state())
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)  # a test may run as root
        with pytest.raises(ConfigError, match=r"^BATON_HOME: cannot write to .*/b/logs: Permission denied$"):
            StateFolder("b", tmp_path).acquire()
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError(errno.EACCES, "no", "state.json")))
    assert running_clusters(tmp_path) == []
    with pytest.raises(PermissionError):
        running_clusters(tmp_path, strict=True)


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


def test_a_full_disk_is_an_error_with_file_reason_and_variable(folder, monkeypatch):
    refusal = r"^BATON_HOME: cannot write to .*/a/(state.json|cluster.yaml): No space left on device$"
    with monkeypatch.context() as patch:
        fill_disk(patch)
        for write in (lambda: folder.write_state(state()), lambda: folder.write_private(folder.config, "a: b")):
            with pytest.raises(ConfigError, match=refusal):
                write()
    assert folder.read_state().lost
    folder.write_state(state())
    assert folder.read_state() == state()


def begin(folder):
    folder.acquire()
    folder.scratch()


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/where/it/failed")


def test_a_draft_that_was_not_completed_takes_no_space(folder, monkeypatch):
    monkeypatch.setattr(Path, "replace", no_space)
    with pytest.raises(ConfigError, match="No space left"):
        folder.write_state(state())
    assert sorted(path.name for path in folder.path.iterdir()) == ["lock", "logs"]


@pytest.mark.parametrize(
    ("patched", "says"),
    [
        ((Path, "mkdir"), r"^BATON_HOME: cannot write to /where/it/failed: No space left on device$"),
        ((Path, "unlink"), r"^BATON_HOME: cannot write to /where/it/failed: No space left on device$"),
        ((tempfile, "mkdtemp"), r"^TMPDIR: cannot create /where/it/failed: No space left on device$"),
        ((Path, "symlink_to"), r"^BATON_HOME: cannot write to /where/it/failed: No space left on device$"),
    ],
    ids=["folder", "old files", "scratch", "link to scratch"],
)
def test_folders_that_cannot_be_made_are_errors_too(tmp_path, monkeypatch, patched, says):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    made, again = StateFolder("b", tmp_path), StateFolder("b", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(*patched, no_space)
        with pytest.raises(ConfigError, match=says):
            begin(made)
    assert list(temporary.iterdir()) == []
    if patched == (Path, "unlink"):
        begin(again)  # a failed start leaves no lock
        again.release()
    made.release()  # raises nothing, whatever is left


def test_a_disk_that_became_read_only_does_not_disturb_a_stop(tmp_path, monkeypatch):
    folder, again = StateFolder("b", tmp_path), StateFolder("b", tmp_path)
    begin(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
        patch.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
        folder.release()
    begin(again)
    again.release()
