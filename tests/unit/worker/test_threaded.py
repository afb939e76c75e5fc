"""A worker on a thread of its host process: start, failure, stop, and its own end."""

import asyncio
import threading
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from baton.errors import Cancelled, ConfigError, EngineFault
from baton.worker import process
from baton.worker.process import HostedWorker, run_worker_process
from tests.support.sessions import D
from tests.support.time_factor import scaled
from tests.support.waiting import eventually

NO_SETTINGS: Any = ({}, {}, None)  # unused settings, factories and role


@pytest.fixture
def exits():
    """Records the exit codes with which workers would end the process."""
    return Mock()


@pytest.fixture
def hosted(exits, monkeypatch):
    def start(serve):
        monkeypatch.setattr(process, "serve", lambda settings, factories, role, stop, ready: serve(stop, ready))
        return HostedWorker(partial(run_worker_process, *NO_SETTINGS), exit_process=exits)

    return start


def test_what_kept_it_from_starting_is_raised_by_ready(exits):
    def fails(stop, ready):
        raise ConfigError("model.path: missing")

    def waits(stop, ready):
        stop.wait(scaled(10))

    worker = HostedWorker(fails, exit_process=exits)
    with pytest.raises(ConfigError, match=r"model\.path"):
        worker.ready()
    worker.stop()
    stopped = HostedWorker(waits, exit_process=exits)
    stopped.stop()
    with pytest.raises(Cancelled):
        stopped.ready()
    exits.assert_not_called()


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
    eventually(lambda: exits.called)
    exits.assert_called_once_with(0 if error is None else 1)  # 0: it has drained
    worker.stop()


def test_ready_tells_which_it_is_and_a_stop_ends_it_without_ending_the_process(exits, hosted):
    async def serve(stop, ready):
        ready(D)
        await stop.wait()

    worker = hosted(serve)
    assert worker.ready() == D
    worker.stop()
    assert not worker._thread.is_alive()
    exits.assert_not_called()
