"""`baton pull`, and what `baton up` does with a model: fetch it once before all others, show how far it is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from baton.cluster.backend_process import PARENT, POLL_S, die_with_parent, tail
from baton.cluster.signals import Stop
from baton.config import ClusterConfig
from baton.config.values import HUB_PREFIX
from baton.errors import BatonError, ConfigError
from baton.model_hub import model_folder, pinned

COMMAND = ("-m", "baton", "pull")
SHOWN_S = 1.0
FILE_CLOCK_S = 0.1  # files get their times from a clock that is behind by up to a tick
CLEAR = "\r\x1b[K"


def pull(model: str) -> None:
    """Download what is missing of a model from the Hub, and print its folder. Raises ConfigError, CheckpointError."""
    die_with_parent()
    if not model.startswith(HUB_PREFIX):
        raise ConfigError(f"{model}: only a name such as hf:Qwen/Qwen3-0.6B can be downloaded")
    typer.echo(model_folder(model))


def fetched(config: ClusterConfig, stop: Stop) -> ClusterConfig:
    """The config with a model from the Hub downloaded, and named by its commit: all parts then take the same.

    The download is a process of its own, since nothing else of it can be ended at once. It says on stderr how far it
    is, and what is wrong; then typer.Exit has its exit code. Raises Cancelled.
    """
    path = config.model.path
    if not path.startswith(HUB_PREFIX):
        return config
    env = os.environ | {PARENT: str(os.getpid())}
    with subprocess.Popen(
        [sys.executable, *COMMAND, path], stdout=subprocess.PIPE, text=True, env=env, process_group=0
    ) as process:
        try:
            while process.poll() is None:
                stop.check()
                stop.drain.wait(POLL_S)
        except BatonError:
            process.kill()
            raise
        output = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise typer.Exit(process.returncode)
    name = pinned(path, Path(output.strip()))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": name})})


@contextmanager
def shown_loading(logs: Path) -> Iterator[Callable[[], None]]:
    """On a terminal, one line on stderr with how far each worker is, until the block ends or calls what it is given."""
    done, began = threading.Event(), time.time() - FILE_CLOCK_S

    def show() -> None:
        while not done.wait(SHOWN_S):
            if shares := loading(logs, began):
                sys.stderr.write(f"{CLEAR}loading: {', '.join(shares)}")
                sys.stderr.flush()

    def end() -> None:
        if not done.is_set():
            done.set()
            thread.join()
            sys.stderr.write(CLEAR)

    thread = threading.Thread(target=show, name="loading", daemon=True)
    if not sys.stderr.isatty():
        done.set()
    else:
        thread.start()
    try:
        yield end
    finally:
        end()


def loading(logs: Path, since: float) -> list[str]:
    """How far each worker says that it is, by its log's last line, in logs written `since` (seconds of the epoch)."""
    shares = []
    for path in sorted(logs.glob("*.log")):
        try:
            line = json.loads(tail(path, 1)) if path.stat().st_mtime >= since else {}
        except (OSError, ValueError):  # another format, or half a line
            continue
        if isinstance(line, dict) and line.get("event") in {"model_loading", "model_loaded"}:
            shares.append(f"{path.stem} {line.get('percent', 100)} %")
    return shares
