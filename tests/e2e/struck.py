"""A stream, and what happens to it when a process that carries it dies or stands still."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any

from baton.client.types import Completion, Delta
from tests.support.cluster_process import ClusterProcess


def read(stream: Any, tokens: int) -> list[Delta]:
    """The next deltas, until so many tokens have come in all."""
    deltas = list[Delta]()
    while len(stream.tokens) < tokens:
        deltas.append(next(stream))
    return deltas


Told = tuple[list[Delta], Completion]  # all that a stream said


def struck(cluster: ClusterProcess, stream: Any, victim: str, after: int, *, freeze: bool = False) -> Told | None:
    """Read a stream. When so many tokens have come, `victim` is killed, or frozen until the end: the process of that
    name, or the worker of that role that has requests. None: the stream was over by then.
    """
    with stream:
        deltas = read(stream, min(after, 1))
        name = cluster.busy(victim) if victim in {"prefill", "decode"} else victim
        if not name:
            return None
        deltas += read(stream, after)
        pid = cluster.kill(name, signal.SIGSTOP if freeze else signal.SIGKILL)
        try:
            deltas += stream
            answer = stream.collect()
        finally:
            with suppress(ProcessLookupError):  # a frozen one may be replaced, and gone, by now
                os.kill(pid, signal.SIGCONT)
    if freeze and answer.placement.attempts == 1:
        return None  # all of it was under way already: the router has not missed the worker
    cluster.wait_replaced(name, pid)
    return deltas, answer
