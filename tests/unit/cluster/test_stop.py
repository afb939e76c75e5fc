"""Signals: the first drains, the second does not wait, and nohup stays nohup."""

import os
import signal

import pytest

from baton.cluster.stop import SIGNALS, Stop, stop_on_signals
from baton.errors import Cancelled


@pytest.fixture
def handlers():
    # Whoever runs the tests in the background may have told them to ignore some, and that is inherited.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_drains_and_the_second_does_not_wait(handlers, number):
    stop = stop_on_signals()
    stop.check()
    os.kill(os.getpid(), number)
    assert stop.drain.wait(5)
    assert not stop.now.is_set()
    os.kill(os.getpid(), number)
    assert stop.now.wait(5)


def test_an_ignored_signal_stays_ignored(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = stop_on_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert not stop.drain.is_set()


def test_what_is_not_done_yet_is_cancelled():
    stop = Stop()
    stop.drain.set()
    with pytest.raises(Cancelled):
        stop.check()
