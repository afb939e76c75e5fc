"""Hooks for all tests: the run's seed, printed so that a failing run can be repeated, and hypothesis settings.

A test's time limit is 300 s (`timeout` in pyproject.toml); it only ends tests that hang. `@pytest.mark.timeout(600)`
raises it for one test. `tests/support/time_factor.py` scales both on slow machines.
"""

import gc
import os
import random
import signal
import subprocess
from collections.abc import Generator

import hypothesis
import pytest

from tests.support import grouping, sampling, time_factor

SEED_VARIABLE = "BATON_TEST_SEED"
CHECKED = ("tests/unit/", "tests/guards/")
CI_SEED = 20_240_229  # fixed: a merge must not fail because of another run's inputs

# Threads that wait for others sleep. By default each of a cluster's processes would spin on all cores, while the others
# need them: a step of two threads then takes twenty times as much CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
MACHINES = [hypothesis.HealthCheck.too_slow]  # drawing inputs is slow on slow machines
hypothesis.settings.register_profile("baton", deadline=None, print_blob=True, suppress_health_check=MACHINES)
hypothesis.settings.load_profile("baton")
gc.disable()  # until all is collected: modules and tests are no garbage


def run_seed() -> int:
    """Return this run's seed: the configured one, a fixed one in CI, or a random one. xdist's workers inherit it."""
    default = CI_SEED if os.environ.get("CI") else random.SystemRandom().randrange(2**31)
    return int(os.environ.setdefault(SEED_VARIABLE, str(default)))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Pass the seed to hypothesis before its plugin reads the option. Restore SIGINT: a shell that starts a run in the
    background ignores it, and all processes that tests start would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    time_factor.scale_default(config)
    if config.pluginmanager.hasplugin("xdist"):  # which defines the mark
        config.pluginmanager.register(grouping)
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(run_seed())
    if not hasattr(config, "workerinput"):  # xdist's workers print nothing
        config.pluginmanager.register(Failures(config))


def pytest_ignore_collect(collection_path, config: pytest.Config) -> bool | None:
    """Import no file without slow tests under `--after-check`, which leaves out all of its tests."""
    name = os.path.relpath(collection_path, config.rootpath)
    checked = config.getoption("after_check") and name.startswith(CHECKED) and "/test_" in name
    return True if checked and "mark.slow" not in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Let collections of garbage skip what exists before the first test."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--after-check` leaves out the tests that `make check` has run before, `--sample` all but a share of matrices."""
    parser.addoption("--after-check", action="store_true", help="leave out the tests of `make check`")
    parser.addoption("--sample", action="store_true", help="of tests with the mark `sample`, run only a drawn share")


@pytest.hookimpl(trylast=True)  # after `-m`, so that the share is one of the selected cases
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scale the time limits of marks. `--after-check` deselects the fast tests of tests/unit and tests/guards."""
    time_factor.scale_marks(items)
    if config.getoption("after_check"):
        fast = [item for item in items if item.nodeid.startswith(CHECKED) and not item.get_closest_marker("slow")]
        _leave_out(config, items, fast)
    if config.getoption("sample"):
        _leave_out(config, items, sampling.left_out(items, sampling.drawn_by(run_seed())))


def _leave_out(config: pytest.Config, items: list[pytest.Item], some: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=some)
    left_out = set(some)
    items[:] = [item for item in items if item not in left_out]


class Failures:
    """Prints each failure immediately, because a run that is stopped early prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print one line after the dots."""
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            last = report.longreprtext.strip().splitlines()[-1:]
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}): {' '.join(last)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the output of a process that did not end in time or failed: the text of its exception leaves it out."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, subprocess.TimeoutExpired | subprocess.CalledProcessError):
        for name, output in (("stdout", error.stdout), ("stderr", error.stderr)):
            text = output.decode(errors="replace") if isinstance(output, bytes) else output
            report.sections.append((f"{name} of the process", text or ""))
    return report


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line for each reason to skip, with the number of tests and the first of them."""
    skipped: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid)
    for reason, tests in sorted(skipped.items()):
        terminalreporter.write_line(f"SKIPPED {len(tests)}: {reason} (first: {tests[0]})")


def pytest_report_header() -> list[str]:
    """Return the header lines that say how to repeat this run."""
    drawn = sampling.drawn_by(run_seed())
    seeds = f"seed: {run_seed()} (repeat with {SEED_VARIABLE}={run_seed()})"
    return [seeds, f"sample: {drawn} (with --sample; repeat with {sampling.VARIABLE}={drawn})", time_factor.header()]


@pytest.fixture(scope="session")
def seed() -> int:
    """The seed of this run, for tests that draw their own inputs: `random.Random(seed)`."""
    return run_seed()
