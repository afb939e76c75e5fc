"""A cluster of plain processes in the foreground, so that it ends with the step that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from baton.cluster.state_dir import ClusterState, StateFolder
from benchmarks.gpu_first.at import DEMO, At, WrongResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[2]
NAME = "gpu-first"
UP_S, DOWN_S = 150.0, 30.0
LAST_LINES = 60  # of each log file after a failure
PROMPT, TEXT = "The color of dog", " can vary widely"
SMALL = (  # few kernel variants to warm
    "model.max_model_len=1024",
    "prefill.max_batched_tokens=256",
    "decode.max_batched_tokens=256",
    "prefill.max_running=8",
    "decode.max_running=8",
    "prefill.kv_memory=64MiB",
    "decode.kv_memory=64MiB",
    "log.level=warning",
    *(f"router.{listener}=127.0.0.1:0" for listener in ("grpc", "admin", "metrics", "http")),
)


@contextlib.contextmanager
def running(at: At, *sets: str) -> Iterator[ClusterState]:
    """Run one prefill and one decode worker, both on the device, until the end of the context. `sets` are KEY=VALUE.

    Raises WrongResult with the last output if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="baton-gpu-first-") as home:
        command = [sys.executable, "-m", "baton", "up", "-c", "configs/no-ray.yaml", *options(at, *sets)]
        variables = {**os.environ, "BATON_HOME": home}
        log = Path(home) / "up.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=output)
        try:
            yield _ready(process, log, StateFolder(NAME, Path(home)))
        except BaseException:
            print_logs(Path(home))
            raise
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DOWN_S)
            process.kill()
            process.wait()


def print_logs(folder: Path) -> None:
    """Print the last lines of each log file below a folder, for the log of the step."""
    for path in sorted(folder.rglob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
        print(f"--- {path.relative_to(folder)}", *lines, sep="\n", flush=True)


def options(at: At, *sets: str) -> list[str]:
    """Return the options of `baton up` and of a worker that joins its cluster."""
    device = str(at.device)
    placed = (f"model.path={DEMO}", f"prefill.device={device}", f"decode.device={device}", f"name={NAME}")
    return [part for item in (*placed, *SMALL, *sets) for part in ("--set", item)]


@contextlib.contextmanager
def joined(
    at: At, state: ClusterState, name: str, *sets: str, environ: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run one more decode worker in the same cluster and on the same device, and kill it at the end."""
    command = [sys.executable, "-m", "baton", "decode-worker", "-c", "configs/no-ray.yaml", "--id", name]
    variables = {**os.environ, "BATON__REDIS__URL": state.redis_url, **environ}
    process = subprocess.Popen([*command, *options(at, *sets)], cwd=ROOT, env=variables, stdout=sys.stderr)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _ready(process: subprocess.Popen[bytes], log: Path, folder: StateFolder) -> ClusterState:
    deadline = time.monotonic() + UP_S
    while "is ready" not in (text := log.read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise WrongResult(f"the cluster did not start: {' | '.join(text.splitlines()[-8:])}")
        time.sleep(0.1)
    state = folder.read_state()
    if state is None:
        raise WrongResult("the cluster has no state file")
    return state
