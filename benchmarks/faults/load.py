"""Clients of a soak: threads that send one request after the other over gRPC and HTTP, and record all that arrives."""

from __future__ import annotations

import http.client
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from baton import Client
from baton.client.types import Delta
from baton.errors import BatonError, DeadlineExceeded
from benchmarks.faults.check import PATIENCE_S, THOUGHTS, Answer, Part, Record
from benchmarks.faults.jobs import OVER_HTTP, Job

TIMEOUT_S = PATIENCE_S - 10
DEADLINE_S = 0.3  # of a request with the feature "deadline"
SLOW_S = 0.02  # pause of a slow reader after each delta
PAUSE_S = 0.1
BACKOFF_S = 1.0  # after an error
FINISHES = {"eos": "stop", "stop_token": "stop", "stop_string": "stop", "length": "length"}


class Load:
    """Clients that are busy during the block. `records` has all requests, in the order of their numbers."""

    def __init__(self, grpc: str, http: str, jobs: Sequence[Job], seed: str, clients: int, *, control: bool) -> None:
        self.records: list[Record] = []
        self.answers = 0  # ended requests
        self._jobs, self._seed, self._control = jobs, seed, control
        self._grpc, self._http = grpc, http
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._leaving = 0.0  # streams that began before that time are to be left
        over_grpc = max(clients * 3 // 4, 1)
        calls: list[Callable[[random.Random], None]] = [self._over_grpc] * over_grpc
        calls += [self._over_http] * (clients - over_grpc)
        self._threads = [
            threading.Thread(target=self._client, args=(n, call), daemon=True) for n, call in enumerate(calls)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        deadline = time.monotonic() + PATIENCE_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def wait(self, answers: int, within_s: float) -> bool:
        """Wait for so many more answers and then for a token. Return whether they came."""
        with self._changed:
            goal = self.answers + answers
            return self._changed.wait_for(lambda: self.answers >= goal, within_s) and self._changed.wait(within_s)

    def leave_all(self) -> None:
        """Let all clients leave the streams that they read now."""
        self._leaving = time.monotonic()

    def _client(self, number: int, call: Callable[[random.Random], None]) -> None:
        rng = random.Random(f"{self._seed} client {number}")
        while not self._over.wait(rng.expovariate(1 / PAUSE_S)):
            call(rng)

    def _begin(self, job: Job, api: str) -> Record:
        with self._lock:
            record = Record(next(self._numbers), job.feature, api, job.answers, time.monotonic())
            self.records.append(record)
        return record

    def _end(self, record: Record, end: str, detail: str = "") -> None:
        record.end, record.detail, record.ended = end, detail, time.monotonic()
        with self._changed:
            self.answers += 1
            self._changed.notify_all()

    def _part(self, record: Record, part: Part) -> None:
        record.parts.append(part)
        with self._changed:
            self._changed.notify_all()

    def _leaves(self, record: Record, enough: int) -> bool:
        return record.began < self._leaving or len(record.parts) >= enough

    def _over_grpc(self, rng: random.Random) -> None:
        job = rng.choice(self._jobs)
        record = self._begin(job, "grpc")
        enough = rng.randrange(1, 20) if job.feature == "cancel" else 1 << 30
        timeout = DEADLINE_S if job.feature == "deadline" else TIMEOUT_S
        more = {"cache_scope": rng.choice(["", f"{record.number}"]), "resumable_s": 0.0 if self._control else 15.0}
        try:
            with Client(self._grpc, max_retries=0 if self._control else 20) as client:
                self._end(record, self._read(client, job, record, timeout, enough, **more))
        except DeadlineExceeded as error:
            self._end(record, "deadline" if job.feature == "deadline" else "DeadlineExceeded", str(error))
        except Exception as error:  # noqa: BLE001 - the boundary of this thread
            self._end(record, type(error).__name__ if isinstance(error, BatonError) else repr(error), str(error))
            self._over.wait(BACKOFF_S)

    def _read(self, client: Client, job: Job, record: Record, timeout: float, enough: int, **more: object) -> str:
        with job.send(client, timeout, **more) as stream:
            for delta in stream:
                for part in _parts(delta, record):
                    self._part(record, part)
                if self._leaves(record, enough):
                    return "left"
                if job.feature == "slow reader":
                    time.sleep(SLOW_S)
            whole = stream.collect()
        record.finishes |= {n: str(choice.finish_reason) for n, choice in enumerate(whole.choices)}
        return "whole"

    def _over_http(self, rng: random.Random) -> None:
        job = rng.choice([job for job in self._jobs if job.feature in OVER_HTTP])
        record = self._begin(job, "http")
        record.answers = {n: _http_answer(answer) for n, answer in job.answers.items()}
        enough = rng.randrange(1, 20) if job.feature == "cancel" else 1 << 30
        try:
            with closing(http.client.HTTPConnection(self._http, timeout=TIMEOUT_S)) as connection:
                body = json.dumps({"prompt": job.prompt, "stream": True, **job.options})
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                self._end(record, *self._read_http(connection.getresponse(), record, enough))
        except TimeoutError as error:
            self._end(record, "DeadlineExceeded", str(error))
        except (OSError, http.client.HTTPException) as error:
            self._end(record, "ConnectionLost", repr(error))
            self._over.wait(BACKOFF_S)
        except Exception as error:  # noqa: BLE001 - the boundary of this thread
            self._end(record, repr(error))

    def _read_http(self, response: http.client.HTTPResponse, record: Record, enough: int) -> tuple[str, str]:
        if response.status != 200:
            return f"HTTP {response.status}", response.read().decode(errors="replace")
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                return "whole", ""
            event = json.loads(data) if data.startswith("{") else {"choices": []}
            if "error" in event:
                return f"HTTP {event['error'].get('code') or event['error'].get('type')}", data
            for choice in event["choices"]:
                self._part(record, Part(time.monotonic(), choice["index"], 0, (), choice["text"]))
                if choice.get("finish_reason"):
                    record.finishes[choice["index"]] = choice["finish_reason"]
            if self._leaves(record, enough):
                return "left", ""
        return "ConnectionLost", "the stream ended without [DONE]"


def _parts(delta: Delta, record: Record) -> Iterator[Part]:
    now = time.monotonic()
    if delta.tokens or delta.text:
        start = delta.start if delta.tokens else sum(len(p.tokens) for p in record.parts if p.choice == delta.choice)
        yield Part(now, delta.choice, start, delta.tokens, delta.text)
    if THOUGHTS in record.answers:
        for thought in delta.thoughts:
            start = sum(len(part.tokens) for part in record.parts if part.choice == THOUGHTS)
            yield Part(now, THOUGHTS, start, tuple(thought.token_ids), "")


def _http_answer(answer: Answer) -> Answer:
    return replace(answer, finish=FINISHES[answer.finish])
