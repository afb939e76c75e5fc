"""Step 10: a killed worker, and one whose kernel traps. Each ends within its lease, and its requests finish elsewhere.

Two decode workers share the GPU: that of the cluster, and one that joins it. The latter imports
`trap/sitecustomize.py` at its start, because it is on the path of Python.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from baton.client import Client
from benchmarks.gpu_first.at import At, Outcome, require
from benchmarks.gpu_first.clusters import PROMPT, ROOT, UP_S, joined, running
from benchmarks.lib.protocol import python_path

LEASE_S = 5.0
PATIENCE_S = 60.0
STREAMS = 4
TRAP = Path(__file__).with_name("trap")


def run(at: At) -> Outcome:
    """Run streams, end one of the two decode workers in the middle, and compare all answers with undisturbed ones."""
    sets = (f"ledger.lease_s={LEASE_S:g}", "ledger.heartbeat_s=0.2")
    environ = {"PYTHONPATH": python_path(TRAP, ROOT), "BATON_TRAP": "raise" if at.dry else "device"}
    with (
        running(at, *sets) as state,
        Client(state.grpc, admin=state.admin) as client,
        joined(at, state, "joined", *sets, environ=environ) as worker,
    ):
        expected, _ = _answer(client, at.size(600, 300), threading.Semaphore())
        victim = psutil.Process(state.processes["decode-0"].pid)
        killed_s, moved = _disturbed(client, victim, signal.SIGKILL, expected)
        trapped_s, too = _disturbed(client, psutil.Process(worker.pid), signal.SIGUSR2, expected)
    # On a slow machine, a dry run's process may need longer than its lease.
    late = [seconds for seconds in (killed_s, trapped_s) if seconds >= at.size(LEASE_S, PATIENCE_S)]
    require(not late, f"a worker ran for {late} s after its end was due; its lease is {LEASE_S:g} s")
    figures = {"trapped_s": round(trapped_s, 2), "killed_s": round(killed_s, 2), "streams": 2 * STREAMS}
    figures["moved"] = moved + too
    text = f"trapped worker ended after {trapped_s:.1f} s, killed one after {killed_s:.1f} s (lease {LEASE_S:g} s)"
    finished = f"all {2 * STREAMS} streams finished with the right tokens, {moved + too} of them elsewhere"
    return Outcome(f"{text}; {finished}", figures)


def _answer(client: Client, tokens: int, started: threading.Semaphore) -> tuple[tuple[int, ...], int]:
    """Return the tokens of one stream, and its attempts. `started` is released with the first token."""
    with client.stream(PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True) as stream:
        next(stream)
        started.release()
        for _ in stream:
            pass
        return stream.tokens, stream.placement.attempts if stream.placement else 0


def _disturbed(
    client: Client, victim: psutil.Process, number: signal.Signals, expected: tuple[int, ...]
) -> tuple[float, int]:
    """Return the seconds from the signal to the end of the worker, and the number of streams that it moved."""
    _wait_for_all(client)
    with ThreadPoolExecutor(STREAMS) as pool:
        started = threading.Semaphore(0)
        answers = [pool.submit(_answer, client, len(expected), started) for _ in range(STREAMS)]
        for _ in answers:
            require(started.acquire(timeout=UP_S), "a stream has no first token")
        began = time.monotonic()
        os.kill(victim.pid, number)
        gone, _ = psutil.wait_procs([victim], timeout=PATIENCE_S)
        seconds = time.monotonic() - began
        found = [answer.result() for answer in answers]
    require(bool(gone), f"after {number.name}, the worker still runs after {seconds:.0f} s")
    wrong = sum(tokens != expected for tokens, _ in found)
    require(not wrong, f"after {number.name}, {wrong} of {STREAMS} streams have other tokens")
    return seconds, sum(attempts > 1 for _, attempts in found)


def _wait_for_all(client: Client) -> None:
    """Wait for all three workers, so that another one is left to finish the requests."""
    deadline = time.monotonic() + UP_S
    while (states := [worker.state for worker in client.cluster().workers]).count("connected") < 3:
        require(time.monotonic() < deadline, f"three workers are not connected within {UP_S:g} s: {states}")
        time.sleep(0.1)
