"""Clients that keep a cluster busy during a test and check their answers, also when its processes are struck."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from baton import Client
from baton.client.types import Completion, Delta
from baton.core import Sampling, SequenceSpec
from baton.engine.oracle import OracleBackend
from baton.errors import BatonError, NoWorker, Overloaded, WorkerLost
from tests.support.cluster_process import ClusterProcess
from tests.support.time_factor import scaled
from tests.support.waiting import eventually

ORACLE = OracleBackend()
PATIENCE_S = 90.0  # a request that takes longer counts as hung
TOLERATED = (WorkerLost, NoWorker, Overloaded)


def until(what: str, look: Callable[[], Any], within_s: float = PATIENCE_S) -> Any:
    """Wait until `look()` is true and return it."""
    return eventually(look, what, within_s=within_s, every_s=0.005)


@dataclass(frozen=True)
class Job:
    """A request and its answer."""

    prompt: list[int]
    options: dict[str, Any]
    answer: tuple[int, ...]


def oracle_answer(prompt: Sequence[int], **sampling: Any) -> tuple[int, ...]:
    """Return the oracle's answer to the prompt."""
    return tuple(ORACLE.expected(SequenceSpec(tuple(prompt), Sampling(**sampling))))


def draw_jobs(rng: random.Random, number: int = 12) -> list[Job]:
    """Draw requests for the oracle. Some share a prefix; prompts take many steps, answers some tenths of a second."""
    jobs = list[Job]()
    shared = [rng.randrange(256) for _ in range(96)]
    for _ in range(number):
        prompt = shared[: rng.choice([0, 32, 96])] + [rng.randrange(256) for _ in range(rng.randrange(120, 280))]
        options: dict[str, Any] = {"max_tokens": rng.randrange(20, 120), "temperature": rng.choice([0.0, 0.8])}
        options |= {"ignore_eos": True, "seed": rng.randrange(2**63)}
        jobs.append(Job(prompt, options, oracle_answer(prompt, **options)))
    return jobs


class Load:
    """Clients that stream one request after the other while the block runs.

    `outcomes` counts whole answers, streams that the client left, and `TOLERATED` errors. `faults` has the rest: wrong
    tokens, other errors, and answers that took longer than `PATIENCE_S`. `loyal` clients leave no stream and retry with
    the SDK's defaults.
    """

    def __init__(
        self,
        cluster: Any,
        jobs: Sequence[Job],
        seed: int,
        *,
        clients: int = 4,
        loyal: bool = False,
        pause_s: float = 0.2,
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        self._cluster = cluster
        self._jobs = jobs
        self._seed = seed
        self._loyal = loyal
        self._pause_s = pause_s
        self._numbers = itertools.count(1)
        self._running: dict[int, int] = {}  # number of the current request, by client
        self._whole: list[int] = []  # numbers of answered requests
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(0 if kind else scaled(2 * PATIENCE_S))
        print(f"load: {dict(self.outcomes)} {self.faults}")
        if kind is None:
            assert not any(thread.is_alive() for thread in self._threads), "clients hang"
            assert self.faults == []

    def settle(self, answers: int = 1) -> None:
        """Wait until all current requests have ended and `answers` later ones are answered."""
        running = set(self._running.values())
        until("what ran has ended", lambda: not running & set(self._running.values()), 2 * PATIENCE_S)
        last = next(self._numbers)
        until(f"{answers} more answers", lambda: self.faults or sum(n > last for n in list(self._whole)) >= answers)
        assert self.faults == []

    def _client(self, client: int) -> None:
        rng = random.Random(f"{self._seed} {client}")
        options = {} if self._loyal else {"max_retries": 0}
        with self._cluster.client(timeout=scaled(PATIENCE_S), **options) as connection:
            while not self._over.is_set():
                number = self._running[client] = next(self._numbers)
                outcome = self._request(connection, rng, number)
                self.outcomes[outcome] += 1
                if outcome == "whole":
                    self._whole.append(number)
                self._over.wait(rng.expovariate(1 / self._pause_s) if self._pause_s else 0)
        del self._running[client]

    def _request(self, connection: Client, rng: random.Random, number: int) -> str:
        job, scope = rng.choice(self._jobs), rng.choice(["", f"{number}", f"{number}"])  # mostly, nothing is cached
        whole = len(job.answer)
        enough = whole if self._loyal else rng.choice([whole] * 7 + [rng.randrange(1, 20)])
        begun = time.monotonic()
        try:
            with connection.stream(job.prompt, cache_scope=scope, **job.options) as stream:
                return self._read(stream, job, enough)
        except Exception as error:  # noqa: BLE001  (the boundary of this thread)
            if isinstance(error, TOLERATED) and not self._loyal:
                return type(error).__name__
            self.faults.append(f"request {number} after {time.monotonic() - begun:.1f} s: {error!r}")
            return "fault"

    def _read(self, stream: Any, job: Job, enough: int) -> str:
        """Read `enough` tokens, or the whole stream."""
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


class Streams:
    """One concurrent stream for each prompt, each read by a thread. All are running after construction."""

    def __init__(
        self, cluster: Any, prompts: Sequence[Any], *, tokens: int = 5, max_retries: int = 0, **options: Any
    ) -> None:
        self.ends: dict[int, Completion | BaseException] = {}
        self.resumed = 0
        self._tokens, self._retries, self._options = tokens, max_retries, options
        self._under_way = threading.Barrier(len(prompts) + 1, timeout=scaled(PATIENCE_S))
        self._threads = [
            threading.Thread(target=self._read, args=(cluster, number, prompt), daemon=True)
            for number, prompt in enumerate(prompts)
        ]
        for thread in self._threads:
            thread.start()
        self._under_way.wait()

    def _read(self, cluster: Any, number: int, prompt: Any) -> None:
        running = False
        try:
            with cluster.client(max_retries=self._retries) as client, client.stream(prompt, **self._options) as stream:
                while len(stream.tokens) < self._tokens:
                    next(stream)
                self._under_way.wait()
                running = True
                self.ends[number] = stream.collect()
                self.resumed += stream.resumed
        except (BatonError, threading.BrokenBarrierError) as error:
            self.ends[number] = error
            if not running:  # later, an abort would also fail threads that have not yet woken up from the barrier
                self._under_way.abort()

    def join(self) -> list[Completion | BaseException]:
        """Return each answer or error, in the order of the prompts."""
        for thread in self._threads:
            thread.join(scaled(PATIENCE_S))
        assert len(self.ends) == len(self._threads), "a stream hangs"
        return [self.ends[number] for number in range(len(self._threads))]

    def answers(self) -> list[Completion]:
        """Return the answers. Raises the first error."""
        found = list[Completion]()
        for end in self.join():
            if isinstance(end, BaseException):
                raise end
            found.append(end)
        return found


def read(stream: Any, tokens: int) -> list[Delta]:
    """Read deltas until the stream has so many tokens in total."""
    deltas = list[Delta]()
    while len(stream.tokens) < tokens:
        deltas.append(next(stream))
    return deltas


Told = tuple[list[Delta], Completion]  # all deltas of a stream, and its answer


def struck(cluster: ClusterProcess, stream: Any, victim: str, after: int, *, freeze: bool = False) -> Told | None:
    """Read a stream and strike its `victim`, a process's name or a role with a busy worker, after so many tokens. The
    victim is killed, or frozen until it is replaced: another one may finish the stream before its lease ends. Return
    None if the stream ended before that.
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
            if freeze and answer.placement.attempts == 1:
                return None  # all tokens were already sent: the router did not lose the worker
            cluster.wait_replaced(name, pid)
        finally:
            with suppress(ProcessLookupError):  # it may have been replaced by now
                os.kill(pid, signal.SIGCONT)
    return deltas, answer
