import pytest

from baton.clock import FakeClock
from router.drain import Drain


def draining(over_s=10.0, *, waiting=True):
    clock = FakeClock()
    drain = Drain(clock, over_s)
    drain.watch(waiting=waiting)
    return clock, drain


def run(drain, clock, times, gap_s, tokens=10):
    for _ in range(times):
        clock.advance(gap_s)
        drain.served(tokens)


def test_nothing_is_known_until_enough_was_served_while_somebody_waited():
    clock, drain = draining(waiting=False)
    run(drain, clock, 20, 0.1)  # nobody waits
    assert not drain.measured
    drain.watch(waiting=True)
    run(drain, clock, 7, 0.1)
    assert (drain.measured, drain.requests_per_s, drain.tokens_per_s) == (False, 0.0, 0.0)
    run(drain, clock, 4, 0.1)
    assert drain.requests_per_s == pytest.approx(10)
    assert drain.tokens_per_s == pytest.approx(100)


def test_time_in_which_nobody_waits_does_not_count():
    clock, drain = draining(waiting=False)
    for _ in range(30):
        drain.watch(waiting=True)
        run(drain, clock, 1, 0.1)
        drain.watch(waiting=False)
        clock.advance(3.0)
    assert drain.requests_per_s == pytest.approx(10)


@pytest.mark.parametrize("rate", [0.5, 5.0, 2000.0])
def test_it_follows_the_last_seconds_or_the_last_requests(rate):
    clock, drain = draining()
    run(drain, clock, 200, 4 / rate)
    run(drain, clock, max(round(rate * 20), 130), 1 / rate, tokens=30)
    assert drain.requests_per_s == pytest.approx(rate, rel=0.1)
    assert drain.tokens_per_s == pytest.approx(30 * rate, rel=0.1)


def test_a_standstill_shows_while_it_lasts_and_is_soon_forgotten():
    clock, drain = draining(2.0)
    run(drain, clock, 100, 0.01)
    clock.advance(100)
    assert drain.requests_per_s < 1
    run(drain, clock, 100, 0.01)
    assert drain.requests_per_s > 25


def test_waiting_in_vain_is_time_too():
    clock, drain = draining()
    run(drain, clock, 10, 0.1)
    before = drain.requests_per_s
    clock.advance(5)
    drain.watch(waiting=False)
    assert drain.requests_per_s < before / 3
