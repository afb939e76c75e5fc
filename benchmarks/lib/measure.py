"""Runs the engines of one setting side by side, round by round, and collects their times."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil

from benchmarks.lib.environments import PEERS, Unavailable, python_for
from benchmarks.lib.protocol import Child, ChildFailed, Setup
from benchmarks.lib.ratios import BATON, LIMIT, Sample, Setting
from benchmarks.lib.shapes import ITEMSIZE, read_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.lib.points import Point
    from benchmarks.lib.protocol import Answer

OWN = {LIMIT: "benchmarks.lib.limits", BATON: "benchmarks.lib.subject"}
START_S, ANSWER_S = 1200.0, 900.0
GIB = 1 << 30
RUNTIME_BYTES = 3 * GIB // 2  # memory of an engine beyond weights and KV
LOADING_COPIES = 1.2  # of the weights, during packing; one engine loads at a time


@dataclass(frozen=True)
class Plan:
    """Points to measure in one setting, with `steps` timed decode steps and `repeats` timed prompts per round."""

    points: Sequence[Point]
    rounds: int
    steps: int
    repeats: int

    @property
    def kv_tokens(self) -> int:
        """KV capacity for the largest point, with a spare block per sequence."""
        return max(point.positions + max(1, point.batch) * (self.steps + 64) for point in self.points)


@dataclass(frozen=True)
class Where:
    """The model of a setting, its dtype, and the folders of the processes."""

    model: Path
    dtype: str
    cache: Path
    out: Path


class Comparison:
    """The runs of all settings: samples, raw answers, versions, and the reasons for missing ones."""

    def __init__(self, peers: Sequence[str], plan: Plan) -> None:
        self.peers, self.plan = peers, plan
        self.samples: list[Sample] = []
        self.raw: list[Answer] = []
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self._pythons = dict.fromkeys(OWN, sys.executable)

    def install(self, cache: Path) -> None:
        """Make the environments of the peers. Failures are recorded as missing."""
        for name in self.peers:
            try:
                self._pythons[name] = python_for(name, cache)
            except Unavailable as error:
                self._drop(name, error)
        self.peers = [name for name in self.peers if name in self._pythons]

    def run(self, setting: Setting, where: Where) -> None:
        """Measure Baton and the limits together with as many peers at a time as memory allows."""
        kv_tokens = self.plan.kv_tokens
        setup = Setup(str(where.model), where.dtype, setting.threads, kv_tokens, str(where.cache))
        fixed, each = memory_needs(where.model, where.dtype, kv_tokens)
        room = int((psutil.virtual_memory().available - fixed) // each) - 1  # for peers, in addition to Baton
        if room < 0:
            self.missing[f"{setting.size}, {setting.threads} threads"] = (
                f"needs {(fixed + each) / GIB:.0f} GiB of memory"
            )
            return
        if room < 1 and self.peers:
            self.missing[f"peers at {setting.size}"] = f"need {(fixed + 2 * each) / GIB:.0f} GiB of memory"
        for number, group in enumerate(grouped(self.peers, room)):
            self._run_group(setting, setup, group, number * self.plan.rounds, where.out)

    def _run_group(self, setting: Setting, setup: Setup, group: list[str], first: int, out: Path) -> None:
        with ExitStack() as stack:
            baton = self._started(BATON, setup, out, stack)
            if baton is None:
                return
            others = (self._started(name, setup, out, stack) for name in (LIMIT, *group))
            children = [baton, *(child for child in others if child is not None)]
            for number in range(first, first + self.plan.rounds):
                turn = number % len(children)
                self._round(setting, number, children[turn:] + children[:turn])

    def _started(self, name: str, setup: Setup, out: Path, stack: ExitStack) -> Child | None:
        program = OWN.get(name) or PEERS[name].program
        command = [self._pythons[name], "-P", "-m", program]
        child = stack.enter_context(Child(name, command, setup, out / f"{name}.log"))
        try:
            child.start(START_S)
        except ChildFailed as error:
            self._drop(f"{name} at {Path(setup.model).name}, {setup.threads} threads", error)
            return None
        self.versions[name] = child.about["version"]
        return child

    def _drop(self, what: str, error: Exception) -> None:
        self.missing[what] = str(error)
        print(f"{what}: {error}", file=sys.stderr)

    def _round(self, setting: Setting, number: int, children: list[Child]) -> None:
        for point in self.plan.points:
            for child in filter(lambda child: child.alive, children):
                try:
                    answer = self._asked(child, point)
                except ChildFailed as error:
                    self._drop(f"{child.name} at {setting.size} {point}, {setting.threads} threads", error)
                    continue
                sample = sample_of(setting, child.name, point, number, answer)
                self.samples.append(sample)
                about = {"size": setting.size, "threads": setting.threads, "engine": child.name, "point": str(point)}
                self.raw.append({**about, "round": number, **answer})

    def _asked(self, child: Child, point: Point) -> Answer:
        before, began = busy_seconds(child.pid), time.monotonic()
        if point.batch:
            answer = child.ask("decode", ANSWER_S, batch=point.batch, context=point.tokens, steps=self.plan.steps)
        else:
            answer = child.ask("prefill", ANSWER_S, tokens=point.tokens, repeats=1 + self.plan.repeats)
            answer["seconds"] = answer["seconds"][-self.plan.repeats :]  # the first one warms caches
        answer["other_load"] = round(other_load(before, busy_seconds(child.pid)), 3)
        answer["took_s"] = round(time.monotonic() - began, 1)
        return answer


def sample_of(setting: Setting, engine: str, point: Point, number: int, answer: Answer) -> Sample:
    """Return the medians of one answer."""
    forward = answer.get("forward")
    shares = [inside / whole for inside, whole in zip(forward, answer["seconds"], strict=True)] if forward else []
    return Sample(setting, engine, point, number, median(answer["seconds"]), median(shares) if shares else None)


def grouped(peers: Sequence[str], room: int) -> list[list[str]]:
    """Return peers in groups of at most `room`. Without room or peers there is one empty group."""
    return [list(peers[i : i + room]) for i in range(0, len(peers), room)] if room > 0 and peers else [[]]


def memory_needs(model: Path, dtype: str, kv_tokens: int) -> tuple[int, int]:
    """Return about how many bytes the limits and the loading of one engine need, and each loaded engine."""
    shape, itemsize = read_shape(model), ITEMSIZE[dtype]
    weights = shape.read_params * itemsize
    each = weights + shape.head_params * itemsize + shape.kv_bytes(kv_tokens, itemsize) + RUNTIME_BYTES
    return int(weights * (1 + LOADING_COPIES)), each


def busy_seconds(pid: int) -> tuple[float, float, float]:
    """Return CPU seconds since boot: of the machine, of these in use, and of these by process `pid`."""
    times, own = psutil.cpu_times(), psutil.Process(pid).cpu_times()
    total = sum(times[:8])
    return total, total - times.idle - getattr(times, "iowait", 0.0), own.user + own.system


def other_load(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Return the share of the machine's CPU time outside of the measured process."""
    total, busy, own = (now - then for then, now in zip(before, after, strict=True))
    return min(1.0, max(0.0, busy - own) / total) if total > 0 else 0.0
