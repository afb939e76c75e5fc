"""A cluster of plain processes for a benchmark."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from baton.cluster.state_dir import ClusterState, StateFolder
from benchmarks.lib.protocol import ROOT, python_path

FREE_PORTS = tuple(f"router.{listener}=127.0.0.1:0" for listener in ("grpc", "admin", "metrics", "http"))


@contextlib.contextmanager
def cluster(name: str, *sets: str) -> Iterator[ClusterState]:
    """Run a cluster on the oracle engine and free ports, until the end of the context or SIGTERM. `sets` are KEY=VALUE
    (`baton up`).
    """
    with _ended_in_order(), tempfile.TemporaryDirectory(prefix=f"baton-{name}-") as home:
        env = {**os.environ, "BATON_HOME": home, "PYTHONPATH": python_path(ROOT)}
        baton = [sys.executable, "-m", "baton"]
        options = [
            part for item in ("model.path=oracle", *FREE_PORTS, *sets, f"name={name}") for part in ("--set", item)
        ]
        up = [*baton, "up", "-c", "configs/no-ray.yaml", *options, "--detach"]
        subprocess.run(up, env=env, cwd=ROOT, check=True, stdout=sys.stderr)
        with _run_at_the_end([*baton, "down", "--name", name], env):
            state = StateFolder(name, Path(home)).read_state()
            if state is None:
                raise RuntimeError("the cluster is gone")
            yield state


@contextlib.contextmanager
def _run_at_the_end(command: list[str], env: dict[str, str]) -> Iterator[None]:
    """Run `command` after the block, even if this process is killed in it: a child waits for the end of its input.
    Raises CalledProcessError.
    """
    waiting = ["sh", "-c", 'cat > /dev/null; exec "$@"', "sh", *command]
    child = subprocess.Popen(
        waiting, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True
    )
    try:
        yield
    finally:
        child.communicate()
        if child.returncode:
            raise subprocess.CalledProcessError(child.returncode, command)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, because an immediate end would leave started processes running."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
