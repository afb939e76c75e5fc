"""When tokens are delayed and for how long, with a simulated clock and processor."""

from unittest.mock import Mock

import pytest

from router.workers import stream_timers
from router.workers.stream_timers import LONGEST_S, WakeupBatcher


class Machine:
    """The loop's clock and timers, and the processor time of its thread."""

    def __init__(self):
        self.now, self.used, self.timers = 100.0, 7.0, []

    def time(self):
        return self.now

    def cpu(self):
        return self.used

    def call_at(self, when, what):
        self.timers.append((when, what))

    def run(self, seconds, busy):
        self.now, self.used = self.now + seconds, self.used + busy * seconds
        due = [timer for timer in self.timers if timer[0] <= self.now]
        self.timers = [timer for timer in self.timers if timer[0] > self.now]
        for _, what in due:
            what()


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def paced(machine):
    return WakeupBatcher(machine, machine.cpu)


def after(machine, paced, looks, busy):
    """Return the round lengths after each of `looks` looks."""
    lengths = []
    for _ in range(looks):
        machine.run(stream_timers._MEASURE_S * 1.01, busy)
        paced.holds()
        lengths.append(paced.length_s)
    return lengths


@pytest.mark.parametrize("busy", [0.0, 0.3, 0.49])
def test_who_has_time_to_spare_holds_nothing_back(machine, paced, busy):
    for _ in range(1000):
        machine.run(0.003, busy)
        assert not paced.holds()
    assert not machine.timers


def test_rounds_grow_while_there_is_no_time_to_spare_up_to_the_longest_and_end_after_a_silence(machine, paced):
    lengths = after(machine, paced, 10, 1.0)
    assert lengths[:3] == pytest.approx([0.002, 0.004, 0.008])
    assert lengths[-1] == LONGEST_S
    machine.run(60.0, 0.001)
    assert not paced.holds()
    assert not paced.holds()


def test_rounds_stay_as_they_are_at_half_of_the_time_and_end_below_it(machine, paced):
    [*_, length] = after(machine, paced, 3, 1.0)
    assert after(machine, paced, 5, 0.5) == pytest.approx([length] * 5)
    assert after(machine, paced, 4, 0.2) == pytest.approx([length * 0.4, length * 0.16, 0.0, 0.0])
    assert not paced.holds()


def woken(boxes):
    return [box.wake.call_count for box in boxes]


def test_what_comes_within_a_round_is_woken_once_at_its_end_and_another_round_begins(machine, paced):
    after(machine, paced, 10, 1.0)
    boxes = [Mock(), Mock()]
    machine.run(LONGEST_S, 1.0)
    assert not paced.holds()  # the last round is over: this is sent immediately
    for _ in range(3):
        machine.run(0.004, 1.0)
        assert paced.holds()
        for box in boxes:
            paced.later(box)
    assert woken(boxes) == [0, 0]
    machine.run(LONGEST_S - 0.012, 1.0)
    assert woken(boxes) == [1, 1]
    machine.run(0.001, 1.0)
    assert paced.holds()
    paced.later(boxes[0])
    machine.run(LONGEST_S, 1.0)
    assert woken(boxes) == [2, 1]
    machine.run(LONGEST_S, 1.0)
    assert not paced.holds()
    assert woken(boxes) == [2, 1]


def test_the_processor_is_asked_now_and_then_only(machine):
    cpu = Mock(return_value=0.0)
    paced = WakeupBatcher(machine, cpu)
    for _ in range(1000):
        machine.run(0.001, 1.0)
        paced.holds()
    assert cpu.call_count <= 1 + 1.0 / stream_timers._MEASURE_S
