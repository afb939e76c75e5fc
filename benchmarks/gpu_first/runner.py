"""Runs the steps of a first run on a GPU, each in a process of its own, and collects their results.

A step that fails, hangs or spoils its CUDA context ends alone. Its whole process group is killed by the group's id.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from benchmarks.gpu_first.child import run_step
from benchmarks.gpu_first.steps import Step
from benchmarks.lib.protocol import python_path

ROOT = Path(__file__).resolve().parents[2]
FACTS = ("device", "driver", "capability", "torch", "triton", "cuda", "nccl")
LAST_LINES = 12  # of the output of a failed step
PROCESSES = multiprocessing.get_context("forkserver")  # imports torch once; the server never uses CUDA
DRY_FACTOR = 4.0  # a dry run may share a slow machine with other tests
LEAST_S = 5.0  # less time is not worth the start of a step


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one step. `status`: PASS, FAIL or SKIP. `reason` is empty after a PASS.

    `seconds` are those of the clock, `cpu_s` those of all processors, for the process and those that it waited for.
    """

    step: int
    name: str
    status: str
    figure: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_s: float = 0.0
    reason: str = ""

    def line(self) -> str:
        """Return the line for people."""
        return f"{self.status}  {self.step:>2} {self.name}  {self.figure or self.reason}  ({self.seconds:.1f} s)"

    def entry(self) -> dict[str, Any]:
        """Return the entry for programs."""
        return asdict(self)


@dataclass(slots=True)
class Run:
    """One run. `facts` has the device and the versions, from the first step that found them. `logs` gets all output."""

    dry: bool
    budget_s: float
    logs: Path | None = None
    facts: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(FACTS))
    results: list[Result] = field(default_factory=list)

    def all(self, steps: Sequence[Step]) -> None:
        """Run the steps in order and print a line for each."""
        deadline = time.monotonic() + self.budget_s
        for step in steps:
            result = self._one(step, deadline - time.monotonic())
            self.results.append(result)
            print(result.line(), flush=True)
            if self.dry:
                print(f"       not shown by a dry run: {step.unshown}", flush=True)

    @property
    def failed(self) -> bool:
        return any(result.status == "FAIL" for result in self.results)

    def counts(self) -> Counter[str]:
        """Return the number of steps by status."""
        return Counter(result.status for result in self.results)

    def report(self) -> dict[str, Any]:
        """Return the whole run for programs."""
        head = {"benchmark": "gpu-first", "date": datetime.now(UTC).isoformat(timespec="seconds"), "dry": self.dry}
        seconds = round(sum(result.seconds for result in self.results), 1)
        return {**head, **self.facts, "seconds": seconds, "steps": [result.entry() for result in self.results]}

    def _one(self, step: Step, left_s: float) -> Result:
        if left_s < LEAST_S:
            return Result(step.number, step.name, "SKIP", reason=f"the budget of {self.budget_s:g} s is used up")
        began = time.monotonic()
        limit_s = step.limit_s * (DRY_FACTOR if self.dry else 1.0)
        answer = answer_of(step, min(limit_s, left_s), dry=self.dry, logs=self.logs)
        known = {name: value for name, value in answer.pop("facts", {}).items() if self.facts.get(name) is None}
        self.facts |= known
        return Result(step.number, step.name, seconds=round(time.monotonic() - began, 1), **answer)


def answer_of(step: Step, limit_s: float, *, dry: bool, logs: Path | None = None) -> dict[str, Any]:
    """Run one step in a new process. Return the fields of its `Result`, and `facts`. `logs` gets its output."""
    with tempfile.TemporaryDirectory(prefix="baton-gpu-first-") as folder:
        out, log = Path(folder) / "answer.json", Path(folder) / "step.log"
        arguments = step.module, str(out), str(log), environment(dry=dry)
        PROCESSES.set_forkserver_preload(["torch", "benchmarks.gpu_first.child"])
        process = PROCESSES.Process(target=run_step, args=arguments, kwargs={"dry": dry})
        process.start()
        process.join(limit_s)
        code = process.exitcode
        _kill(process)
        if logs is not None and log.exists():
            shutil.copy(log, logs / f"step-{step.number}.log")
        if out.exists():
            answer: dict[str, Any] = json.loads(out.read_text())
            return answer
        if code is None:
            return {"status": "FAIL", "reason": f"killed: no result within {limit_s:.0f} s. {last_lines(log)}"}
        return {"status": "FAIL", "reason": f"the process ended {ending(code)} without a result. {last_lines(log)}"}


def ending(code: int) -> str:
    """Return how a process with this exit code ended."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def last_lines(log: Path) -> str:
    """Return the last lines of a step's output as one line."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"Last output: {' | '.join(lines[-LAST_LINES:])}" if lines else "It printed nothing."


def _kill(process: ForkServerProcess) -> None:
    """End the process, if it still runs, and all that it started."""
    with contextlib.suppress(ProcessLookupError):  # the group is gone, or was not made yet
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()
    process.join()


def environment(*, dry: bool) -> dict[str, str]:
    """Return the variables of a step. A dry run sees no GPU, and Triton interprets kernels."""
    changed = {"PYTHONPATH": python_path(ROOT), "PYTHONUNBUFFERED": "1"}
    if dry:
        changed |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    else:
        home = Path(os.environ.get("BATON_HOME") or Path.home() / ".baton").expanduser()
        changed["TRITON_CACHE_DIR"] = os.environ.get("TRITON_CACHE_DIR") or str(home / "kernels" / "triton")
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, **changed}
