"""A cluster of plain processes that a benchmark starts for itself."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from baton.cluster.state import ClusterState, StateFolder
from benchmarks.lib.protocol import ROOT


@contextlib.contextmanager
def cluster(name: str, *sets: str) -> Iterator[ClusterState]:
    """A running cluster of this name on the oracle engine, gone at the end. `sets` are KEY=VALUE, as for `baton up`."""
    with tempfile.TemporaryDirectory(prefix=f"baton-{name}-") as home:
        env = {**os.environ, "BATON_HOME": home, "PYTHONPATH": str(ROOT)}
        baton = [sys.executable, "-m", "baton"]
        options = [part for item in ("model.path=oracle", *sets, f"name={name}") for part in ("--set", item)]
        up = [*baton, "up", "-c", "configs/no-ray.yaml", *options, "--detach"]
        subprocess.run(up, env=env, cwd=ROOT, check=True, stdout=sys.stderr)
        try:
            state = StateFolder(name, Path(home)).read_state()
            if state is None:
                raise RuntimeError("the cluster is gone")
            yield state
        finally:
            subprocess.run([*baton, "down", "--name", name], env=env, cwd=ROOT, check=True, stdout=sys.stderr)
