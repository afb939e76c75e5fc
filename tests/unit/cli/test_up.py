"""What `baton up` and `baton demo` refuse before anything starts, and which processes `baton down` waits for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from typer.testing import CliRunner

from baton.cli import demo
from baton.cli.app import app
from baton.cli.up import wait_ended
from baton.errors import ConfigError
from tests.support.waiting import eventually

UNREAPED = "import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', '']).pid, flush=True)\ninput()"


@pytest.fixture
def zombie() -> Iterator[psutil.Process]:
    """A process that has ended and whose parent has not read its exit code."""
    command = [sys.executable, "-c", UNREAPED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        eventually(lambda: child.status() == psutil.STATUS_ZOMBIE)
        yield child
        parent.communicate("\n")


def test_a_zombie_has_ended(zombie):
    """The timeout is longer than a test may take."""
    assert wait_ended([zombie], 3600.0) == []


def test_a_process_that_runs_on_is_returned(zombie):
    running = psutil.Process(zombie.ppid())
    assert wait_ended([zombie, running], 0.3) == [running]


@pytest.mark.parametrize("command", [["up"], ["up", "--detach"], ["demo"]], ids=" ".join)
def test_a_wrong_cpu_level_is_refused_before_anything_starts(monkeypatch, tmp_path, command):
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.setenv("BATON_CPU_LEVEL", "avx9")
    monkeypatch.setattr(demo, "configure_logging", lambda *_: None)  # it changes this process, in which others log
    done = CliRunner().invoke(app, [*command, "-c", "configs/no-ray.yaml"])
    assert isinstance(done.exception, ConfigError), done.output
    assert str(done.exception) == "BATON_CPU_LEVEL (environment): must be native or none, got 'avx9'"
    assert list(tmp_path.iterdir()) == []
