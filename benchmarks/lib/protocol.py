"""Protocol between a measured process and its parent: one JSON object per line, over stdin and stdout.

    parent: {"command": "decode", "batch": 4, ...}  ──>  child: {"seconds": [...]} or {"error": "..."}

The child's first line describes it, once it is loaded. Idle children are stopped (SIGSTOP), so that their spinning
threads do not slow down the measured one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Answer = dict[str, Any]
    Handler = Callable[..., Answer]

ROOT = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1
CLOCK_VARIABLE = "BATON_BENCH_CLOCK"  # of measured processes
KILL_S = 10.0  # for a killed process to end


class ChildFailed(Exception):
    """A measured process ended, answered with an error, or was too slow."""


@dataclass(frozen=True)
class Setup:
    """Configuration of a measured process. `kv_tokens`: KV capacity; `cache`: folder for converted models; `ranks`:
    processes of a worker that hands over; `level`: BATON_CPU_LEVEL of the process; `cpu_time`: see `clock`.
    """

    model: str
    dtype: str
    threads: int
    kv_tokens: int
    cache: str
    ranks: int = 1
    level: str = "native"
    cpu_time: bool = False


def clock() -> float:
    """Return seconds, with `Setup.cpu_time` of this process's CPU time, which excludes waits for a core."""
    return time.process_time() if os.environ.get(CLOCK_VARIABLE) == "cpu" else time.perf_counter()


def serve(load: Callable[[Setup], tuple[Answer, Mapping[str, Handler]]]) -> None:
    """Run a measured process: load, describe it, and answer until stdin ends."""
    if sys.platform == "linux":  # a stopped process would outlive a killed parent
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps output of libraries out of the answers
    about, handlers = load(Setup(**json.loads(sys.argv[1])))
    print(json.dumps(about), file=answers)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line), handlers)), file=answers)


def _answer(request: Answer, handlers: Mapping[str, Handler]) -> Answer:
    try:
        return handlers[request.pop("command")](**request)
    except Exception as error:  # noqa: BLE001 - process boundary: the parent handles the error
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


class Child:
    """One measured process, from the parent's side. As a context manager it kills the process at the end."""

    def __init__(self, name: str, command: list[str], setup: Setup, log: Path) -> None:
        self.name, self._log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as stderr:
            self._process = subprocess.Popen(
                [*command, json.dumps(asdict(setup))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=_environment(setup),
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.about: Answer = {}

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def start(self, timeout_s: float) -> None:
        """Wait until it is loaded, then stop it. Raises ChildFailed."""
        self.about = self._read(timeout_s)
        self._signal(signal.SIGSTOP)

    def ask(self, command: str, timeout_s: float, **arguments: object) -> Answer:
        """Continue it, send a command, and stop it again after the answer. Raises ChildFailed."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._read(timeout_s)
        except BrokenPipeError:
            raise self._failure("ended") from None
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise ChildFailed(f"{self.name}: {answer['error']}")
        return answer

    def _read(self, timeout_s: float) -> Answer:
        stdout, began = self._process.stdout, time.monotonic()
        assert stdout is not None
        if not select.select([stdout], [], [], timeout_s)[0]:
            raise self._failure(f"no answer within {time.monotonic() - began:.0f} s")
        line = stdout.readline()
        if not line:
            raise self._failure("ended")
        answer: Answer = json.loads(line)
        return answer

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def _failure(self, what: str) -> ChildFailed:
        self._signal(signal.SIGKILL)  # prevents a late answer from matching the next request
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return ChildFailed(
            f"{self.name}: {what}; last line of {self._log}: {lines[-1].strip() if lines else '(empty)'}"
        )

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def python_path(*folders: Path) -> str:
    """Return PYTHONPATH for a process: the folders, then those that this process's own PYTHONPATH names."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def _environment(setup: Setup) -> dict[str, str]:
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {
        **os.environ,
        "PYTHONPATH": python_path(ROOT),
        "PYTHONUNBUFFERED": "1",
        **dict.fromkeys(variables, str(setup.threads)),
        CLOCK_VARIABLE: "cpu" if setup.cpu_time else "wall",
        **({} if setup.level == "native" else {"BATON_CPU_LEVEL": setup.level}),
    }
