"""Runs the engines of one setting side by side, round by round, and collects their times."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil

from benchmarks.lib.environments import PEERS, Unavailable, python_for
from benchmarks.lib.protocol import Child, ChildFailed, Setup
from benchmarks.lib.ratios import LIMIT, REFERENCE, Sample, Setting, is_baton, own
from benchmarks.lib.shapes import ITEMSIZE, WEIGHT_BYTES, read_shape, stored

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.lib.points import Point
    from benchmarks.lib.protocol import Answer

OWN_PROGRAMS = {True: "benchmarks.lib.subject", False: "benchmarks.lib.limits"}  # of Baton, of the limits
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
    limit_s: float = float("inf")  # no round of a setting begins later

    @property
    def kv_tokens(self) -> int:
        """KV capacity for the largest point, with a spare block per sequence."""
        return max(point.positions + max(1, point.batch) * (self.steps + 64) for point in self.points)


@dataclass(frozen=True)
class Where:
    """The model of a setting, the folders of the processes, and the levels of Baton's kernels."""

    model: Path
    cache: Path
    out: Path
    levels: Sequence[str] = ("native",)
    cpu_time: bool = False


class Comparison:
    """The runs of all settings: samples, raw answers, versions, and the reasons for missing ones."""

    def __init__(self, peers: Sequence[str], plan: Plan) -> None:
        self.peers, self.plan = peers, plan
        self.isas: dict[str, str] = {}  # what each process reports of the instructions that it uses
        self.samples: list[Sample] = []
        self.raw: list[Answer] = []
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.loading: dict[str, float] = {}
        self._pythons: dict[str, str] = {}

    def install(self, cache: Path, isa: str = "native") -> None:
        """Make the environments of the peers, built for `isa`. Failures are recorded as missing."""
        for name in self.peers:
            try:
                self._pythons[name] = python_for(name, cache, isa)
            except Unavailable as error:
                self._drop(name, error)
        self.peers = [name for name in self.peers if name in self._pythons]

    def run(self, setting: Setting, where: Where) -> None:
        """Measure Baton and the limits together with as many peers at a time as memory allows."""
        kv_tokens = self.plan.kv_tokens
        setup = Setup(
            str(where.model), setting.dtype, setting.threads, kv_tokens, str(where.cache), cpu_time=where.cpu_time
        )
        fixed, each = memory_needs(where.model, setting.dtype, kv_tokens)
        mine = own_setups(setup, where.levels)
        peers = [name for name in self.peers if setting.dtype in PEERS[name].dtypes]
        room = int((psutil.virtual_memory().available - fixed) // each) - len(mine)  # for peers, in addition to Baton
        if room < 0:
            self.missing[f"{setting.size}, {setting.dtype}, {setting.threads} threads"] = (
                f"needs {(fixed + each) / GIB:.0f} GiB of memory"
            )
            return
        if room < 1 and peers:
            self.missing[f"peers at {setting.size}, {setting.dtype}"] = (
                f"need {(fixed + (len(mine) + 1) * each) / GIB:.0f} GiB of memory"
            )
        for number, group in enumerate(grouped(peers, room)):
            setups = mine | dict.fromkeys((LIMIT, *group), setup)
            self._run_group(setting, setups, number * self.plan.rounds, where.out)

    def _run_group(self, setting: Setting, setups: Mapping[str, Setup], first: int, out: Path) -> None:
        with ExitStack() as stack:
            started = [self._started(name, setup, out, stack) for name, setup in setups.items()]
            children = [child for child in started if child is not None]
            began = time.monotonic()
            for number in range(first, first + self.plan.rounds):
                if number > first and time.monotonic() - began > self.plan.limit_s:
                    return
                turn = number % len(children)
                self._round(setting, number, children[turn:] + children[:turn])

    def _started(self, name: str, setup: Setup, out: Path, stack: ExitStack) -> Child | None:
        program = PEERS[name].program if name in PEERS else OWN_PROGRAMS[is_baton(name)]
        command = [self._pythons.get(name, sys.executable), "-P", "-m", program]
        child = stack.enter_context(Child(name, command, setup, out / f"{name}.log"))
        try:
            child.start(START_S)
        except ChildFailed as error:
            self._drop(f"{name} at {Path(setup.model).name}, {setup.dtype}, {setup.threads} threads", error)
            return None
        self.versions[name] = child.about["version"]
        self.isas[f"{name}, {setup.dtype}"] = child.about["isa"]
        if is_baton(name):
            self.loading[f"{Path(setup.model).name}, {setup.dtype}"] = child.about["load_s"]
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
                    self._drop(
                        f"{child.name} at {setting.size}, {setting.dtype} {point}, {setting.threads} threads", error
                    )
                    continue
                sample = sample_of(setting, child.name, point, number, answer)
                self.samples.append(sample)
                about = {
                    **setting._asdict(),
                    "engine": child.name,
                    "level": child.about.get("level"),
                    "point": str(point),
                }
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


def own_setups(setup: Setup, levels: Sequence[str]) -> dict[str, Setup]:
    """Return Baton's engines: one for each level, and for quantised weights also bf16, which they are compared with."""
    setups = {own(level): replace(setup, level=level) for level in levels}
    if setup.dtype != stored(setup.dtype):
        setups |= {own(level, REFERENCE): replace(setup, level=level, dtype=REFERENCE) for level in levels}
    return setups


def grouped(peers: Sequence[str], room: int) -> list[list[str]]:
    """Return peers in groups of at most `room`. Without room or peers there is one empty group."""
    return [list(peers[i : i + room]) for i in range(0, len(peers), room)] if room > 0 and peers else [[]]


def memory_needs(model: Path, dtype: str, kv_tokens: int) -> tuple[int, int]:
    """Return about how many bytes the limits and the loading of one engine need, and each loaded engine."""
    shape, itemsize = read_shape(model), ITEMSIZE[stored(dtype)]
    weights = int(shape.read_params * WEIGHT_BYTES[dtype])
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
