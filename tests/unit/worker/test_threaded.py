"""A worker on a thread of somebody's process: ready, failing, stopped, and ending by itself."""

import asyncio
import threading
from functools import partial
from typing import Any

import pytest

from baton.errors import Cancelled, ConfigError, EngineFault
from baton.worker import host
from baton.worker.host import run_worker
from baton.worker.threaded import HostedWorker
from tests.unit.worker.support import D

NO_SETTINGS: Any = ({}, {}, None)  # settings, factories and a role that nobody looks at


class Exit:
    def __init__(self):
        self.codes = []
        self.called = threading.Event()

    def __call__(self, code):
        self.codes.append(code)
        self.called.set()


@pytest.fixture
def exit_process():
    return Exit()


def until_stopped(stop, ready):
    ready(D)
    stop.wait(10)


def never_ready(stop, ready):
    stop.wait(10)


def test_ready_tells_who_it_is_and_stop_ends_it_without_ending_the_process(exit_process):
    worker = HostedWorker(until_stopped, exit_process=exit_process)
    assert worker.ready() == D
    worker.stop()
    assert not worker._thread.is_alive()
    assert exit_process.codes == []


def test_what_kept_it_from_starting_is_raised_by_ready(exit_process):
    def run(stop, ready):
        raise ConfigError("model.path: missing")

    worker = HostedWorker(run, exit_process=exit_process)
    with pytest.raises(ConfigError, match=r"model\.path"):
        worker.ready()
    worker.stop()
    assert exit_process.codes == []


def test_a_stop_before_it_was_ready_is_cancelled(exit_process):
    worker = HostedWorker(never_ready, exit_process=exit_process)
    worker.stop()
    with pytest.raises(Cancelled):
        worker.ready()
    assert exit_process.codes == []


@pytest.mark.parametrize("error", [EngineFault("the engine thread failed"), RuntimeError("a bug"), None])
def test_a_worker_that_ends_by_itself_ends_the_process(exit_process, error):
    go_on = threading.Event()

    def run(stop, ready):
        ready(D)
        go_on.wait(10)
        if error is not None:
            raise error

    worker = HostedWorker(run, exit_process=exit_process)
    worker.ready()
    go_on.set()
    assert exit_process.called.wait(10)
    assert exit_process.codes == [0 if error is None else 1]  # 0: it has drained


def test_so_does_a_host_that_fails(exit_process, monkeypatch):
    """`run_worker` must not make its own end look like a stop that was asked for."""

    go_on = threading.Event()

    async def serve(settings, factories, role, stop, ready):
        ready(D)
        await asyncio.to_thread(go_on.wait, 10)
        raise EngineFault("the engine thread failed")

    monkeypatch.setattr(host, "serve", serve)
    worker = HostedWorker(partial(run_worker, *NO_SETTINGS), exit_process=exit_process)
    worker.ready()
    go_on.set()
    assert exit_process.called.wait(10)
    assert exit_process.codes == [1]
    worker.stop()


def test_a_host_that_is_asked_to_stop_just_ends(exit_process, monkeypatch):
    async def serve(settings, factories, role, stop, ready):
        ready(D)
        await stop.wait()

    monkeypatch.setattr(host, "serve", serve)
    worker = HostedWorker(partial(run_worker, *NO_SETTINGS), exit_process=exit_process)
    worker.ready()
    worker.stop()
    assert not worker._thread.is_alive()
    assert exit_process.codes == []
