"""Clients for `test_failures_at_states.py`: they never stop asking, and know each token before it comes."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass

from baton.core import Sampling, SequenceSpec
from baton.engine.oracle import OracleBackend
from baton.errors import NoWorker, Overloaded, WorkerLost

PATIENCE_S = 90.0  # what takes longer hangs
CLIENTS = 6
TOLERATED = (WorkerLost, NoWorker, Overloaded)


def until(what, look, within_s=PATIENCE_S):
    """`look()` as soon as it is true."""
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"not so within {within_s:g} s: {what}"
        time.sleep(0.005)
    return found


@dataclass(frozen=True)
class Job:
    """A request and its answer."""

    prompt: list[int]
    options: dict
    answer: tuple[int, ...]


def draw_jobs(rng, number=12):
    """Some have their beginnings in common. A prompt takes many steps, an answer some tenths of a second."""
    oracle, jobs = OracleBackend(), list[Job]()
    shared = [rng.randrange(256) for _ in range(96)]
    for _ in range(number):
        prompt = shared[: rng.choice([0, 32, 96])] + [rng.randrange(256) for _ in range(rng.randrange(120, 280))]
        options = {"max_tokens": rng.randrange(20, 120), "temperature": rng.choice([0.0, 0.8]), "ignore_eos": True}
        options["seed"] = rng.randrange(2**63)
        answer = oracle.expected(SequenceSpec(tuple(prompt), Sampling(**options)))
        jobs.append(Job(prompt, options, tuple(answer)))
    return jobs


class Load:
    """Clients that stream one request after the other for as long as the block runs, and then come to an end.

    A request may fail because a worker is lost, or because there is none; whatever else is wrong is in `faults`: a
    token that is not the oracle's, another error, and what took longer than `PATIENCE_S`, which is no error of ours.
    """

    def __init__(self, cluster, jobs, seed):
        self.outcomes: Counter[str] = Counter()
        self.faults = []
        self._cluster = cluster
        self._jobs = jobs
        self._seed = seed
        self._numbers = itertools.count(1)
        self._running = {}  # the number of its request, by client
        self._whole = []  # numbers of requests that were answered
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(CLIENTS)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind, *_):
        self._over.set()
        for thread in self._threads:
            thread.join(0 if kind else 2 * PATIENCE_S)
        print(f"load: {dict(self.outcomes)} {self.faults}")
        if kind is None:
            assert not any(thread.is_alive() for thread in self._threads), "clients hang"
            assert self.faults == []

    def settle(self, answers=1):
        """Wait until all that runs now has ended, and so many later requests are answered. True, to be waited for."""
        running = set(self._running.values())
        until("what ran has ended", lambda: not running & set(self._running.values()), 2 * PATIENCE_S)
        last = next(self._numbers)
        until(f"{answers} more answers", lambda: self.faults or sum(n > last for n in list(self._whole)) >= answers)
        assert self.faults == []

    def _client(self, client):
        rng = random.Random(f"{self._seed} {client}")
        with self._cluster.client(max_retries=0, timeout=PATIENCE_S) as connection:
            while not self._over.is_set():
                number = self._running[client] = next(self._numbers)
                outcome = self._request(connection, rng, number)
                self.outcomes[outcome] += 1
                if outcome == "whole":
                    self._whole.append(number)
        del self._running[client]

    def _request(self, connection, rng, number):
        job, scope = rng.choice(self._jobs), rng.choice(["", f"{number}", f"{number}"])  # mostly, nothing is cached
        enough = rng.choice([len(job.answer)] * 7 + [rng.randrange(1, 20)])
        try:
            with connection.stream(job.prompt, cache_scope=scope, **job.options) as stream:
                return self._read(stream, job, enough)
        except TOLERATED as error:
            return type(error).__name__
        except Exception as error:  # noqa: BLE001  (the boundary of this thread)
            self.faults.append(f"request {number}: {error!r}")
            return "fault"

    def _read(self, stream, job, enough):
        """Take so many tokens, or all of them with what follows the last."""
        came = 0
        for delta in stream:
            came += len(delta.tokens)
            if delta.tokens != job.answer[came - len(delta.tokens) : came]:
                self.faults.append(f"{delta} ends at token {came} of {job}")
            if enough <= came < len(job.answer):
                return "left"
        if came != len(job.answer):
            self.faults.append(f"{came} tokens came of {job}")
        return "whole"
