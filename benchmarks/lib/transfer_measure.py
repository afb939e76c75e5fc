"""Common parts of all transfer measurements: plan, processes and results."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, TypeVar

import psutil

from benchmarks.lib.protocol import Child, Setup
from benchmarks.lib.shapes import ITEMSIZE, read_shape
from benchmarks.lib.transfer_figures import FrameTimes, Moved, Prompt
from kvtransfer.handoff import TransferSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from benchmarks.lib.protocol import Answer

P = TypeVar("P")
T = TypeVar("T")
START_S, ANSWER_S = 600.0, 300.0
DTYPE = "bf16"
DEFAULTS = TransferSettings()
GPU_DEVICES = {"cuda_ipc": ("cuda:0", "cuda:0"), "nccl": ("cuda:0", "cuda:1")}  # sender, receiver


@dataclass(frozen=True)
class Plan:
    """Points to measure. `prompts`: lengths in tokens; `small`: length of the prompt with a timed whole handoff."""

    sizes: Sequence[int]
    rounds: int
    prompts: Sequence[int]
    prompt_rounds: int
    transports: Sequence[str] = ("gloo", "shm")
    small: int = 128


@dataclass(frozen=True)
class Where:
    """The models (of the 1.1 B and the 15 M shape), and the folders of the processes."""

    large: Path
    small: Path
    cache: Path
    out: Path
    ranks: int = 1

    def child(self, module: str, model: Path, kv_tokens: int) -> Child:
        """Return a single-threaded process that runs `benchmarks.lib.<module>`, not started yet."""
        setup = Setup(str(model), DTYPE, 1, kv_tokens, str(self.cache), self.ranks)
        command = [sys.executable, "-P", "-m", f"benchmarks.lib.{module}"]
        return Child(module, command, setup, self.out / f"{module}.log")


@dataclass
class Results:
    """All measurements, the raw answers, and the reasons for missing ones."""

    moved: list[Moved] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    timeline: list[FrameTimes] = field(default_factory=list)
    slowed: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # (ratio, bytes per second) by load
    sweeps: dict[str, list[dict[str, object]]] = field(default_factory=dict)  # rows by title
    raw: list[Answer] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def drop(self, what: str, error: Exception) -> None:
        """Record the reason for a missing measurement."""
        self.missing[what] = str(error)
        print(f"{what}: {error}", file=sys.stderr, flush=True)


def ask(child: Child, command: str, **arguments: object) -> Answer:
    """Return the child's answer, with `other_load`: CPU share of all other processes. Raises ChildFailed."""
    before = _busy(child.pid)
    answer = child.ask(command, ANSWER_S, **arguments)
    total, busy, own = (now - then for then, now in zip(before, _busy(child.pid), strict=True))
    answer["other_load"] = round(min(1.0, max(0.0, busy - own) / total) if total > 0 else 0.0, 3)
    return answer


def schedule(rounds: int, points: Iterable[P], ways: Sequence[T]) -> Iterator[tuple[int, P, T]]:
    """Yield each point over each way, round by round. The first way rotates."""
    for number, point in product(range(rounds), list(points)):
        turn = number % max(1, len(ways))
        yield from ((number, point, way) for way in (*ways[turn:], *ways[:turn]))


def token_bytes(model: Path) -> int:
    """Return the KV bytes per token."""
    return read_shape(model).kv_bytes(1, ITEMSIZE[DTYPE])


def _busy(pid: int) -> tuple[float, float, float]:
    """Return CPU seconds since boot: of the machine, of these in use, and of these by `pid` and its children."""
    times, parent = psutil.cpu_times(), psutil.Process(pid)
    own = sum(sum(process.cpu_times()[:2]) for process in [parent, *parent.children(recursive=True)])
    total = sum(times[:8])
    return total, total - times.idle - getattr(times, "iowait", 0.0), own
