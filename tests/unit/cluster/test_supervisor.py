"""The life of a cluster with fake workers, a fake Redis, and a real but idle router process."""

import asyncio
import errno
import os
import signal
import socket
import stat
import sys
import threading
from unittest.mock import Mock

import psutil
import pytest
import yaml

from baton.cluster import launcher
from baton.cluster.backend_process import StartError
from baton.cluster.launcher import SupervisedRedis, Supervisor
from baton.cluster.signals import Stop
from baton.cluster.state_dir import StateFolder
from baton.config import ClusterConfig
from baton.core import BlockCounts, Role
from baton.errors import BatonError, Cancelled, LedgerError
from baton.ledger.embedded_redis import EmbeddedRedis
from baton.metrics import Metrics, MetricsServer
from baton.testing import FakeClock
from tests.support.processes import fill_disk
from tests.support.time_factor import scaled
from tests.support.waiting import eventually

ROUTER = """
import json, os, sys, time, yaml
from pathlib import Path
fails = Path(sys.argv[1]).with_name("router-fails-once")
if fails.exists():
    fails.unlink()
    sys.exit("as it was told")
while Path(sys.argv[1]).with_name("router-is-slow").exists():
    time.sleep(0.05)
given = yaml.safe_load(Path(sys.argv[1]).read_text())["router"]
bound = {key: value.replace(":0", ":4711") for key, value in given.items()}
told = {key: value.replace("127.0.0.1", "router.example") for key, value in bound.items()}
os.write(int(os.environ["BATON_READY_FD"]), json.dumps({**bound, "advertised": told}).encode() + b"\\n")
time.sleep(60)
"""


log: list[str] = []


class FakeRedis:
    url, pid = "redis://:secret@127.0.0.1:1/0", None

    def __init__(self, folder):
        log.append("redis starts")

    def poll(self):
        pass

    def stop(self):
        log.append("redis stops")


class FakeWorkers:
    size = 3
    failure = None
    mode = url = redis_url = router_at_stop = None

    def __init__(self, folder):
        self.folder = folder
        self.found = {"decode-0": 2**22 + 1}  # no process: beyond the largest process id
        self.waiting, self.polled = threading.Event(), threading.Event()

    def start(self, redis_url):
        log.append("workers start")
        self.redis_url = redis_url
        self.mode = stat.S_IMODE(self.folder.config.stat().st_mode)
        self.url = yaml.safe_load(self.folder.config.read_text())["redis"]["url"]

    def wait_ready(self, stop):
        log.append("workers ready")
        self.waiting.set()
        if self.failure:
            raise self.failure

    def poll(self):
        self.polled.set()

    def pids(self):
        return self.found

    def stop(self, grace_s):
        log.append("workers stop")
        state = self.folder.read_state()
        router = state.processes.get("router") if state else None
        self.router_at_stop = router.process() if router else None


class Run:
    """A supervisor on its own thread, as on the main thread of `baton up`."""

    def __init__(self, tmp_path):
        self.folder = StateFolder("test", tmp_path)
        self.workers = FakeWorkers(self.folder)
        self.stop = Stop()
        self.ready = threading.Event()
        self.state = self.error = None
        router = {"grpc": "127.0.0.1:0", "admin": "127.0.0.1:0", "metrics": "127.0.0.1:0"}
        config = ClusterConfig.model_validate({"name": "test", "router": router, "decode": {"replicas": 2}})
        command = [sys.executable, "-c", ROUTER, str(self.folder.config)]
        self.supervisor = Supervisor(config, self.folder, self.workers, command)
        self.thread = threading.Thread(target=self._main)

    def _main(self):
        try:
            self.supervisor.run(self.stop, self._ready)
        except BatonError as error:
            self.error = error

    def _ready(self, state):
        log.append("ready")
        self.state = state
        self.ready.set()

    def start(self, until="ready"):
        self.thread.start()
        assert (self.ready if until == "ready" else self.workers.waiting).wait(scaled(30)), self.error
        return self

    def end(self):
        self.stop.drain.set()
        self.thread.join(scaled(30))
        assert not self.thread.is_alive()


@pytest.fixture
def run(tmp_path, monkeypatch):
    log.clear()
    monkeypatch.setattr(launcher, "SupervisedRedis", FakeRedis)
    monkeypatch.setattr(launcher, "POLL_S", 0.02)
    monkeypatch.setattr(launcher, "router_serves", lambda *asked: asked == ("127.0.0.1:4711", 3))
    made = Run(tmp_path)
    yield made
    if made.thread.is_alive():
        made.end()


def left(run):
    return sorted(path.name for path in run.folder.path.iterdir())


def test_start_and_stop_are_in_order_and_leave_only_logs(run):
    run.start()
    router = run.state.processes["router"].process()
    assert set(run.state.processes) == {"router"}  # the fake workers have no processes
    assert run.state.grpc == "router.example:4711"
    listens = yaml.safe_load(run.folder.config.read_text())["router"]["grpc"]
    assert listens == "127.0.0.1:4711", "where another router will listen, whatever address others use"
    assert (run.workers.mode, run.workers.url) == (0o600, FakeRedis.url)
    assert run.workers.redis_url == FakeRedis.url
    assert run.workers.polled.wait(scaled(10))
    run.end()
    assert run.error is None
    assert log == ["redis starts", "workers start", "workers ready", "ready", "workers stop", "redis stops"]
    assert run.workers.router_at_stop is None
    assert not router.is_running()
    assert left(run) == ["lock", "logs"]


def ends(run, error):
    run.thread.join(scaled(30))
    assert not run.thread.is_alive()
    assert isinstance(run.error, error)
    assert not run.ready.is_set()
    assert log[-2:] == ["workers stop", "redis stops"]
    assert left(run) == ["lock", "logs"]
    run.folder.acquire()  # the name is free again
    run.folder.release()


def test_a_worker_that_does_not_start_ends_all(run):
    run.workers.failure = StartError("decode-0 ended")
    ends(run.start(until="waiting"), StartError)


def test_a_router_that_finds_no_workers_is_a_failed_start(run, monkeypatch):
    monkeypatch.setattr(launcher, "router_serves", lambda metrics, workers: False)
    monkeypatch.setattr(launcher, "SERVING_S", 0.1)
    ends(run.start(until="waiting"), StartError)
    assert "did not find all 3 workers" in str(run.error)


def test_a_router_that_dies_before_it_finds_workers_is_a_failed_start(run, monkeypatch):
    def dies(metrics, workers):
        os.kill(run.supervisor._router.pid, signal.SIGKILL)
        run.supervisor._router._process.wait()

    monkeypatch.setattr(launcher, "router_serves", dies)
    ends(run.start(until="waiting"), StartError)
    assert "router ended with exit code -9" in str(run.error)


def test_told_to_stop_before_anything_starts(run):
    run.stop.drain.set()
    run.thread.start()
    run.end()
    assert isinstance(run.error, Cancelled)
    assert "workers start" not in log


@pytest.mark.slow
def test_a_router_that_died_comes_back_at_the_same_address_though_its_first_start_fails(run):
    marker, router = run.folder.config.with_name("router-fails-once"), run.start().supervisor._router
    marker.touch()
    old = run.folder.read_state()
    os.kill(old.processes["router"].pid, signal.SIGKILL)

    def back():
        state = run.folder.read_state()
        found = state.processes.get("router")
        return found and (router.restarts, router.pid) == (2, found.pid) and state

    new = eventually(back, within_s=20)
    assert (new.grpc, new.admin, new.metrics) == (old.grpc, old.admin, old.metrics)
    run.end()
    assert run.error is None


def test_while_a_router_starts_again_the_other_parts_are_watched(run):
    marker, router = run.folder.config.with_name("router-is-slow"), run.start().supervisor._router
    marker.touch()
    os.kill(router.pid, signal.SIGKILL)
    eventually(lambda: router.restarts == 1 and router.pid is not None)
    polls(run)
    assert router.ready["grpc"] == "127.0.0.1:4711"  # of its earlier life, for the state file
    assert "router" not in run.folder.read_state().processes
    marker.unlink()
    eventually(lambda: router._ready_fd is None)
    assert router.pid is not None
    run.end()
    assert run.error is None


def polls(run, times=3):
    for _ in range(times):
        run.workers.polled.clear()
        assert run.workers.polled.wait(scaled(30))


def test_a_full_disk_does_not_end_a_running_cluster_and_the_state_is_written_later(run, monkeypatch, caplog):
    run.start()
    with monkeypatch.context() as patch:
        fill_disk(patch)
        run.workers.found = {"decode-1": os.getpid()}
        polls(run)
    state = eventually(lambda: (found := run.folder.read_state()) and "decode-1" in found.processes and found)
    assert state.processes["decode-1"].pid == os.getpid()
    polls(run)
    (warning,) = [one.getMessage() for one in caplog.records if one.name == launcher.__name__]
    assert warning.startswith(f"BATON_HOME: cannot write to {run.folder.path}/state.json: No space left on device")
    run.end()
    assert run.error is None


def test_a_state_file_that_was_damaged_is_written_again(run):
    run.start()
    before = run.folder.read_state()
    (run.folder.path / "state.json").write_text("{")
    assert eventually(lambda: run.folder.read_state() == before)
    run.end()


def test_a_process_that_ends_while_it_is_looked_at_is_no_trouble(run, monkeypatch):
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: True)
    assert run.supervisor._processes() == {}


def test_a_redis_that_the_system_does_not_start_is_a_ledger_error(tmp_path, monkeypatch):
    refused = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    monkeypatch.setattr(EmbeddedRedis, "start", Mock(side_effect=refused))
    with pytest.raises(LedgerError, match=r"embedded Redis was not started: .*temporarily unavailable"):
        SupervisedRedis(tmp_path)


def kill(redis):
    os.kill(redis.pid, signal.SIGKILL)
    eventually(lambda: redis.pid is None)


@pytest.mark.slow
def test_redis_is_started_again_at_the_same_address_until_its_port_is_somebody_elses_for_long(tmp_path, request):
    clock = FakeClock()
    kept = SupervisedRedis(tmp_path, clock)
    request.addfinalizer(kept.stop)
    url, pid, port = kept.url, kept.pid, kept._server.port
    kept.poll()
    assert kept.pid == pid
    kill(kept)
    kept.poll()
    assert kept.pid not in {None, pid}
    kill(kept)
    with socket.create_server(("127.0.0.1", port)):
        kept.poll()
        clock.advance(1.0)
        kept.poll()
    assert kept.pid is None
    clock.advance(1.0)
    kept.poll()
    assert (kept.pid is not None, kept.url) == (True, url)
    kill(kept)
    with socket.create_server(("127.0.0.1", port)):
        kept.poll()
        clock.advance(120.0)
        with pytest.raises(LedgerError, match="is in use"):
            kept.poll()


@pytest.mark.parametrize(("connected", "serves"), [(1, False), (2, True)])
async def test_a_router_serves_when_it_is_connected_to_all_workers(connected, serves):
    metrics = Metrics("c", "1")
    metrics.watch_blocks(lambda: {Role.PREFILL: [BlockCounts(1)], Role.DECODE: [BlockCounts(1)] * (connected - 1)})
    server = MetricsServer(metrics.registry)
    address = await server.start("127.0.0.1:0")
    try:
        assert await asyncio.to_thread(launcher.router_serves, address, 2) is serves
    finally:
        await server.stop()
    assert not launcher.router_serves("127.0.0.1:1", 0), "nothing listens there"
