"""Factor by which this machine is slower than a quiet reference one. It scales tests' time limits, which end hangs."""

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

VARIABLE = "BATON_TEST_TIME_FACTOR"
MEASURED = "BATON_TEST_TIME_FACTOR_MEASURED"  # the same value if the run measured it, so that child processes see it
REFERENCE_S = 0.026  # minimum of `sample` on an idle AMD EPYC with AVX2 alone, Python 3.11, 2026-11-25
LOWEST, HIGHEST = 1.0, 10.0
SAMPLES, BUDGET_S = 7, 0.3
ROUNDS = 60_000


def sample() -> float:
    """Measure the seconds for a fixed amount of work and the start of a process."""
    began, state = time.perf_counter(), 0
    for number in range(ROUNDS):
        state = (state * 31 + number) & 0xFFFFFFFF
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    return time.perf_counter() - began


def measured(take: Callable[[], float] = sample, budget_s: float = BUDGET_S) -> float:
    """Return the factor: the median of samples over the reference, within limits. Takes at most about `budget_s`."""
    taken = [take()]
    while len(taken) < SAMPLES and sum(taken) + max(taken) <= budget_s:
        taken.append(take())
    return min(max(statistics.median(taken) / REFERENCE_S, LOWEST), HIGHEST)


def time_factor() -> float:
    """Return this run's factor, given or measured once. Child processes, like xdist's workers, inherit it."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = os.environ[MEASURED] = f"{measured():.2f}"
    given = os.environ[VARIABLE]
    try:
        factor = float(given)
    except ValueError:
        factor = math.nan
    if not (math.isfinite(factor) and factor > 0):
        raise pytest.UsageError(f"{VARIABLE} (environment): must be a number above 0, got {given!r}")
    return factor


def scaled(seconds: float) -> float:
    """Return `seconds` scaled for this machine."""
    return seconds * time_factor()


class Deadline:
    """The end of a wait of at most `seconds`, scaled. A machine may have become slower since the run began: it is
    measured again before a wait ends. A factor that the user gave stays.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock, self._began = seconds, clock, clock()
        self._limit_s = scaled(seconds)

    def passed(self) -> bool:
        """Return whether the time is up."""
        if (spent_s := self._clock() - self._began) < self._limit_s:
            return False
        if os.environ.get(MEASURED) == os.environ[VARIABLE]:
            self._limit_s = max(self._limit_s, self._seconds * measured())
        return spent_s >= self._limit_s


def scale_default(config: pytest.Config) -> None:
    """Scale the limit of the configuration file. A limit from an option or the environment stays."""
    default = config.getini("timeout")
    given = config.getoption("timeout", None) is not None or "PYTEST_TIMEOUT" in os.environ
    if default and not given:
        config.option.timeout = scaled(float(default))


def scale_marks(items: list[pytest.Item]) -> None:
    """Scale each test's closest `timeout` mark: its own, its parameters', its class's or its module's."""
    for item in items:
        mark = item.get_closest_marker("timeout")
        if mark is None or not (mark.args or "timeout" in mark.kwargs):
            continue
        options = dict(mark.kwargs)
        limit = mark.args[0] if mark.args else options.pop("timeout")
        item.add_marker(pytest.mark.timeout(scaled(limit), *mark.args[1:], **options), append=False)


def header() -> str:
    """Return the header line with the factor."""
    return f"time limits: x {time_factor():g} (set with {VARIABLE})"
