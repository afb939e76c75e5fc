"""Child processes: start, wait until ready, notice death, restart with backoff, stop.

A child first calls `die_with_parent`, and reports readiness by one JSON line (`report_ready`). It dies with the thread
that started it (PR_SET_PDEATHSIG), so that no child survives a SIGKILL of the supervisor. Therefore call `start` and
`poll` from a thread that lives as long as the cluster. `ProcessPlacement` runs workers so (`ray.address: none`).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import structlog

from baton.clock import Clock, SystemClock
from baton.cluster.gpus import VISIBLE, GpuAssignment
from baton.cluster.interfaces import Seen
from baton.cluster.signals import Stop
from baton.cluster.state_dir import writing
from baton.config.loading import ENV_PREFIX
from baton.core import Role
from baton.errors import BatonError, ConfigError, LedgerError, NoWorker

READY_FD = "BATON_READY_FD"
PARENT = "BATON_PARENT_PID"
PR_SET_PDEATHSIG = 1
LOG_TAIL_LINES = 6
FULL_BYTES = 4096  # a file system with less space is full
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
STABLE_S = 30.0
START_TIMEOUT_S = 600.0  # a large model loads for minutes; death and stop are noticed immediately
POLL_S = 0.1

log = structlog.get_logger(__name__)
_LIBC = ctypes.CDLL(None, use_errno=True)


class StartError(BatonError):
    """A process did not become ready. The text holds the end of its log."""


# Errors by exit code of a child, so that its supervisor ends with the same code.
EXIT_KINDS: dict[int, type[BatonError]] = {3: ConfigError, 4: LedgerError}


def die_with_parent(environ: Mapping[str, str] = os.environ) -> None:
    """Have the kernel kill this child by SIGKILL when its supervisor ends. The child calls this first."""
    parent = environ.get(PARENT)
    if parent is None:
        return
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        raise SystemExit(1)  # the supervisor ended before the prctl


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to run. `max_restarts` limits consecutive deaths, without `STABLE_S` of life between them. The process
    gets this environment without config keys (`BATON__A__B`), which its config file already contains, and `env`.
    """

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    ready_timeout_s: float = START_TIMEOUT_S
    max_restarts: int = 10
    new_session: bool = False


class Child:
    """One supervised process."""

    def __init__(self, spec: ProcessSpec, clock: Clock | None = None) -> None:
        self.spec = spec
        self.restarts = 0
        self.ready: dict[str, object] = {}
        self._clock = clock or SystemClock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_fd: int | None = None
        self._born = 0.0
        self._retry_at: float | None = None
        self._in_a_row = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def code(self) -> int | None:
        """The exit code, or None before its end."""
        return None if self._process is None else self._process.poll()

    @property
    def starting(self) -> bool:
        """Whether it was started and has not reported readiness, as far as this was looked at."""
        return self._ready_fd is not None

    def start(self, *, logged: bool = True) -> None:
        """Start the process and do not wait. If its log cannot be written, raises ConfigError if it must be `logged`;
        else its output is lost. Raises StartError.
        """
        try:
            with self._output(logged=logged) as output:
                self._spawn(output)
        except OSError as error:  # no such program, no memory or too many processes
            raise StartError(f"{self.spec.name} was not started: {error}") from None

    def _output(self, *, logged: bool) -> IO[bytes]:
        try:
            with writing(self.spec.log):
                return self.spec.log.open("ab")
        except ConfigError as error:
            if logged:
                raise
            log.warning("process_log_lost", name=self.spec.name, error=str(error))
            return Path(os.devnull).open("ab")

    def _spawn(self, output: IO[bytes]) -> None:
        read_fd, write_fd = os.pipe()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        env = {**inherited, **self.spec.env, READY_FD: str(write_fd), PARENT: str(os.getpid())}
        try:
            self._process = subprocess.Popen(
                list(self.spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                pass_fds=(write_fd,),
                start_new_session=self.spec.new_session,
                # Ctrl-C reaches the supervisor alone, which stops its children in order.
                process_group=None if self.spec.new_session else 0,
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        self._close_ready()
        self._ready_fd = read_fd
        self._born, self._retry_at = self._clock.monotonic(), None

    def wait_ready(self, stop: Stop) -> dict[str, object]:
        """Return the facts that the child reported when ready. Raises Cancelled, or the error of `failure`."""
        fd, self._ready_fd = self._ready_fd, None
        if fd is None:
            raise StartError(f"{self.spec.name}: was not started")
        try:
            line = _read_line(fd, self.spec.ready_timeout_s, stop)
        finally:
            os.close(fd)
        if not line:
            raise self.failure()
        self.ready = json.loads(line)
        return self.ready

    def is_ready(self) -> bool:
        """Return whether the child has reported readiness. Does not wait."""
        self._hear_ready()
        return bool(self.ready)

    def _hear_ready(self) -> None:
        """Take the report of readiness if it is there. Facts of an earlier start stay if the child ended instead."""
        if self._ready_fd is not None and select.select([self._ready_fd], [], [], 0)[0]:
            line = os.read(self._ready_fd, 4096)  # one write, or nothing if the child ended
            self._close_ready()
            self.ready = json.loads(line) if line else self.ready

    def failure(self) -> BatonError:
        """Return the error why it ended or is silent, of the type that its exit code stands for."""
        assert self._process is not None
        try:
            code: int | None = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        what = f"ended with exit code {code}" if code is not None else f"was silent for {self.spec.ready_timeout_s:g} s"
        text = f"{self.spec.name} {what}:\n{tail(self.spec.log)}"
        kind = EXIT_KINDS.get(code or 0)
        return kind(text) if kind else StartError(text)

    def poll(self) -> bool:
        """Restart the process if it died and its backoff is over. Returns whether a new one was started. A restarted
        process that is not ready in time is killed. Raises StartError after too many consecutive deaths.
        """
        if self._process is None:
            return False
        if self._process.poll() is None:
            self._expect_ready(self._process)
            return False
        now = self._clock.monotonic()
        if self._retry_at is None:
            self._in_a_row = 1 if now - self._born > STABLE_S else self._in_a_row + 1
            if self._in_a_row > self.spec.max_restarts:
                raise StartError(f"{self.spec.name} died {self._in_a_row} times in a row:\n{tail(self.spec.log)}")
            self._retry_at = now + BACKOFF_S[min(self._in_a_row, len(BACKOFF_S)) - 1]
            log.warning("process_died", name=self.spec.name, code=self._process.returncode, restarts=self.restarts)
        if now < self._retry_at:
            return False
        try:
            self.start(logged=False)  # a running cluster does not end because its disk is full or read-only
        except BatonError as error:  # no memory or too many processes, which may pass
            log.warning("process_not_started", name=self.spec.name, error=str(error))
            self._born, self._retry_at = now, None  # as if it had died immediately
            return False
        self.restarts += 1
        return True

    def _expect_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a restarted process that is not ready in time. No caller waits for it, so other children are served."""
        self._hear_ready()
        if self._ready_fd is not None and self._clock.monotonic() - self._born > self.spec.ready_timeout_s:
            log.warning("process_silent", name=self.spec.name, seconds=self.spec.ready_timeout_s)
            self._close_ready()
            process.kill()

    def terminate(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has ended, and kill it after `timeout_s`."""
        self._close_ready()
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close_ready(self) -> None:
        if self._ready_fd is not None:
            os.close(self._ready_fd)
            self._ready_fd = None


def _read_line(fd: int, timeout_s: float, stop: Stop) -> bytes:
    """Read up to a newline. Returns no bytes if the writer ended or was silent for `timeout_s`. Raises Cancelled."""
    clock, text = SystemClock(), b""
    deadline = clock.monotonic() + timeout_s
    while not text.endswith(b"\n"):
        stop.check()
        left = deadline - clock.monotonic()
        if left <= 0:
            return b""
        if not select.select([fd], [], [], min(left, POLL_S))[0]:
            continue
        piece = os.read(fd, 4096)
        if not piece:
            return b""
        text += piece
    return text


def stop_all(children: Sequence[Child], grace_s: float) -> None:
    """Send SIGTERM to all children, and SIGKILL to those that are left after `grace_s`."""
    clock = SystemClock()
    for child in children:
        child.terminate()
    deadline = clock.monotonic() + grace_s
    for child in children:
        child.wait(deadline - clock.monotonic())


def tail(path: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return a log's last lines, indented for an error message; from the process's own last error on, if it has one.
    Events of level info and debug are left out, unless there is nothing else.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "    (no log)"
    written = text.strip().splitlines()[-lines:]
    last = [line for line in written if not _usual(line)] or written[-1:]
    words = [number for number, line in enumerate(last) if line.startswith("baton: ")]
    if not last:
        full = shutil.disk_usage(path.parent).free < FULL_BYTES
        reason = f", because the disk of {path} is full" if full else ""
        return f"    (its log is empty{reason})"
    return "\n".join(f"    {line}" for line in last[words[-1] if words else 0 :])


def _usual(line: str) -> bool:
    """Return whether a line is an event in JSON of level info or debug."""
    try:
        event = json.loads(line)
    except ValueError:
        return False
    return isinstance(event, dict) and event.get("level") in {"info", "debug"}


def report_ready(facts: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> None:
    """Report to the supervisor, if there is one, that this child is ready."""
    fd = environ.get(READY_FD)
    if fd is None:
        return
    with suppress(BrokenPipeError), os.fdopen(int(fd), "wb") as pipe:  # `up --detach` may have been killed
        pipe.write(json.dumps(dict(facts)).encode() + b"\n")


class ProcessPlacement:
    """A `Placement` of child processes. `command` returns the argv of a worker. Without enough free GPUs, a worker
    waits until others have ended.
    """

    def __init__(self, command: Callable[[str, Role], Sequence[str]], logs: Path, gpus: GpuAssignment) -> None:
        self._command = command
        self._logs = logs
        self._gpus = gpus
        self._waiting: dict[str, Role] = {}
        self._children: dict[str, Child] = {}
        self._ended: dict[str, Seen] = {}
        self._served = False  # a worker was ready, so later ones are replacements

    def open(self) -> None:
        pass

    def found(self) -> Mapping[str, Role]:
        return {}

    def start(self, worker_id: str, role: Role) -> None:
        gpus = self._gpus.take(worker_id, role)
        if gpus is None:
            self._waiting[worker_id] = role
            return
        self._waiting.pop(worker_id, None)
        argv, env = self._command(worker_id, role), {VISIBLE: ",".join(gpus)} if gpus else {}
        self._children[worker_id] = Child(ProcessSpec(worker_id, argv, self._logs / f"{worker_id}.log", env))
        try:
            self._children[worker_id].start(logged=not self._served)
        except BatonError as error:
            self._ended[worker_id] = Seen("ended", error=error)

    def look(self) -> Mapping[str, Seen]:
        for worker_id, role in list(self._waiting.items()):
            self.start(worker_id, role)
        waits = {name: Seen("starting", error=NoWorker(f"{name} waits for free GPUs")) for name in self._waiting}
        seen = {worker_id: self._look(worker_id, child) for worker_id, child in self._children.items()}
        return waits | seen | self._ended

    def _look(self, worker_id: str, child: Child) -> Seen:
        if worker_id not in self._ended:
            if (pid := child.pid) is not None:
                self._served |= (ready := child.is_ready())
                return Seen("ready" if ready else "starting", pid)
            self._ended[worker_id] = Seen("ended", error=child.failure())
        return self._ended[worker_id]

    def kill(self, worker_id: str) -> None:
        if self._waiting.pop(worker_id, None) is not None:
            self._ended[worker_id] = Seen("ended", error=NoWorker(f"{worker_id} found no free GPUs"))
        if worker_id in self._children:
            self._children[worker_id].kill()

    def forget(self, worker_id: str) -> None:
        if worker_id in self._children:
            self._children.pop(worker_id).wait(0.0)
        self._ended.pop(worker_id, None)
        self._gpus.give_back(worker_id)

    def stop(self, grace_s: float) -> None:
        self._waiting.clear()
        stop_all(list(self._children.values()), grace_s)
