"""A worker on a thread of its host process: start, failure, stop, and its own end."""

import asyncio
import threading
from functools import partial
from typing import Any

import pytest

from baton.errors import Cancelled, ConfigError, EngineFault
from baton.worker import process
from baton.worker.process import HostedWorker, run_worker_process
from tests.support.sessions import D
from tests.support.time_factor import scaled

NO_SETTINGS: Any = ({}, {}, None)  # unused settings, factories and role


class Exits:
    """Starts workers and records the exit codes with which they would end the process."""

    def __init__(self):
        self.codes = []
        self.called = threading.Event()

    def worker(self, run):
        return HostedWorker(run, exit_process=self)

    def __call__(self, code):
        self.codes.append(code)
        self.called.set()


@pytest.fixture
def exits():
    return Exits()


@pytest.fixture
def hosted(exits, monkeypatch):
    def start(serve):
        monkeypatch.setattr(process, "serve", lambda settings, factories, role, stop, ready: serve(stop, ready))
        return exits.worker(partial(run_worker_process, *NO_SETTINGS))

    return start


def test_what_kept_it_from_starting_is_raised_by_ready(exits):
    def run(stop, ready):
        raise ConfigError("model.path: missing")

    worker = exits.worker(run)
    with pytest.raises(ConfigError, match=r"model\.path"):
        worker.ready()
    worker.stop()
    stopped = exits.worker(lambda stop, ready: stop.wait(scaled(10)))
    stopped.stop()
    with pytest.raises(Cancelled):
        stopped.ready()
    assert exits.codes == []


@pytest.mark.parametrize("error", [EngineFault("the engine thread failed"), RuntimeError("a bug"), None])
def test_a_worker_that_ends_by_itself_ends_the_process(exits, hosted, error):
    """`run_worker_process` must not make its own end look like a requested stop."""
    go_on = threading.Event()

    async def serve(stop, ready):
        ready(D)
        await asyncio.to_thread(go_on.wait, scaled(10))
        if error is not None:
            raise error

    worker = hosted(serve)
    worker.ready()
    go_on.set()
    assert exits.called.wait(scaled(10))
    assert exits.codes == [0 if error is None else 1]  # 0: it has drained
    worker.stop()


def test_ready_tells_which_it_is_and_a_stop_ends_it_without_ending_the_process(exits, hosted):
    async def serve(stop, ready):
        ready(D)
        await stop.wait()

    worker = hosted(serve)
    assert worker.ready() == D
    worker.stop()
    assert not worker._thread.is_alive()
    assert exits.codes == []
