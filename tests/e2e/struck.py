"""A stream during which one of its processes is killed or frozen."""

import os
import signal
from contextlib import suppress
from typing import Any

from baton.client.types import Completion, Delta
from tests.support.cluster_process import ClusterProcess


def read(stream: Any, tokens: int) -> list[Delta]:
    """Read deltas until the stream has so many tokens in total."""
    deltas = list[Delta]()
    while len(stream.tokens) < tokens:
        deltas.append(next(stream))
    return deltas


Told = tuple[list[Delta], Completion]  # all deltas of a stream, and its answer


def struck(cluster: ClusterProcess, stream: Any, victim: str, after: int, *, freeze: bool = False) -> Told | None:
    """Read a stream and strike its `victim`, a process's name or a role with a busy worker, after so many tokens. The
    victim is killed, or frozen until the end. Return None if the stream ended before that.
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
            with suppress(ProcessLookupError):  # a frozen process may have been replaced by now
                os.kill(pid, signal.SIGCONT)
    if freeze and answer.placement.attempts == 1:
        return None  # all tokens were already sent: the router did not lose the worker
    cluster.wait_replaced(name, pid)
    return deltas, answer
