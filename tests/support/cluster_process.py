"""Real clusters, started with `baton up --detach` in the test's own state folder."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton import Client
from baton.cli.cluster.launch import down
from baton.cli.inspect.block_census import look
from baton.cli.target import Admins
from baton.cluster.state_dir import ClusterState, ProcessId, StateFolder
from tests.support.compiled_kernels import share_kernels
from tests.support.time_factor import scaled
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
HANDED_OVER = "router.local_prefill=never"  # decode workers compute no prompts while prefill workers exist
LEASE_S = 30
PATIENT = (f"ledger.lease_s={LEASE_S}", "router.queue.max_wait_s=120")
FREE_PORTS = tuple(f"router.{listener}=127.0.0.1:0" for listener in ("grpc", "admin", "metrics", "http"))


@dataclass(eq=False)
class Home:
    """A separate `$BATON_HOME` and the command line in it."""

    path: Path

    def __post_init__(self) -> None:
        if self.path.is_dir():
            share_kernels(self.path)

    def _here(self) -> dict[str, Any]:
        env = {**os.environ, "BATON_HOME": str(self.path), "NO_COLOR": "1"}
        return {"env": env, "cwd": ROOT, "text": True, "stdout": subprocess.PIPE}

    def start(self, *args, heeds: signal.Signals | None = None) -> subprocess.Popen:
        """Start `baton ARGS`. Its output is text. It handles the signal `heeds` even under nohup."""
        prefix = [] if heeds is None else ["env", f"--default-signal={heeds.name.removeprefix('SIG')}"]
        return subprocess.Popen([*prefix, *command(*args)], **self._here(), stderr=subprocess.STDOUT)

    @contextmanager
    def gateway(self, target: str, log: Path) -> Iterator[tuple[subprocess.Popen, str]]:
        """Run `baton gateway` in front of `target`, and yield the process and its address. Its events are in `log`."""
        options = ("--set", "router.http=127.0.0.1:0", "--set", "log.format=json")
        process = self.start("gateway", "-c", "configs/no-ray.yaml", "--target", target, "--log", log, *options)

        def started() -> list[str]:
            assert process.poll() is None, process.communicate()[0]
            lines = log.read_text().split("\n")[:-1] if log.exists() else []
            return [line for line in lines if '"gateway_started"' in line]

        try:
            (line,) = eventually(started, "the gateway has started", within_s=60)
            yield process, json.loads(line)["http"]
        finally:
            process.kill()
            process.wait()

    def baton(
        self, *args: object, timeout: float = 200, check: bool = False, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run `baton ARGS` and return the finished process. Its output is text."""
        options |= {"stderr": subprocess.PIPE, "timeout": scaled(timeout)}
        done = subprocess.run(command(*args), check=False, **self._here(), **options)
        if check:
            assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done

    def processes(self) -> list[psutil.Process]:
        """Find all processes of this home by their environment, including Ray's and those in no state file."""
        return [process for process in psutil.process_iter() if home_of(process) == str(self.path)]

    @contextmanager
    def swept(self, within_s=30.0):
        """Kill the processes of this home that outlive the block. Raises AssertionError with their command lines."""
        try:
            yield self
        finally:
            with suppress(AssertionError):
                eventually(lambda: not self.processes(), within_s=within_s)
            left = self.kill_all()
        assert not left, f"the test left running: {left}"

    def kill_all(self) -> list[str]:
        """Kill all processes of this home, repeatedly because supervisors replace them. Return their command lines."""
        names: set[str] = set()
        while left := self.processes():
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    names.add(f"{process.pid}: {' '.join(process.cmdline())}")
                    process.kill()
            with suppress(AssertionError):
                eventually(lambda: not self.processes(), within_s=1.0)
        return sorted(names)

    def logs(self) -> str:
        """Return the ends of all logs, also of those that are being written or removed."""
        texts = []
        for file in sorted(self.path.glob("*/logs/*.log")):
            with suppress(OSError):
                texts.append(f"== {file}\n{file.read_text(errors='replace')[-3000:]}")
        return "\n".join(texts)

    @contextmanager
    def cluster(self, config="configs/no-ray.yaml", *sets, name=""):
        """Run a cluster, `name` if there are several. Then stop it, and check that nothing is left. Its leases outlast
        a machine that stalls, and requests wait for workers that start slowly. A test of frozen processes sets others.
        """
        sets = (*PATIENT, *sets, *[f"name={name}"] * bool(name))
        options = [part for item in (*FREE_PORTS, *sets) for part in ("--set", item)]
        self.baton("up", "-c", config, *options, "--detach", check=True)
        running = ClusterProcess(self, name or Path(config).stem)
        started = set(running.processes().values())
        try:
            yield running
        finally:
            started |= set(running.processes().values())
            if running.processes():  # the test may have ended it already
                self._down(running.name)
        left = [process for identity in started if (process := identity.process())]
        assert not left, f"still running after down: {left}"
        folder, kept = self.path / running.name, ["lock", "logs", "up.out"]
        eventually(lambda: sorted(path.name for path in folder.iterdir()) == kept)

    def _down(self, name: str) -> None:
        """Do what `baton down` does in this process: a command takes 0.6 s of processor time for its imports."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("BATON_HOME", str(self.path))
            down(name)


@dataclass
class ClusterProcess:
    """A running cluster."""

    home: Home
    name: str

    def state(self) -> ClusterState:
        found = StateFolder(self.name, self.home.path).read_state()
        assert found is not None, self.home.logs()
        return found

    def processes(self) -> dict[str, ProcessId]:
        """Return the processes by name, without the supervisor. Unlike ids, identities are not reused."""
        state = StateFolder(self.name, self.home.path).read_state()
        return {} if state is None else state.processes

    def pid(self, process: str) -> int:
        """Return the pid of the named process. Wait for it if the supervisor is replacing the process."""

        def running() -> ProcessId | None:
            found = self.state().processes.get(process)
            return found if found and found.process() else None

        return eventually(running, f"{process} runs", within_s=60).pid

    def kill(self, process: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send the signal to the named process. Return its pid."""
        pid = self.pid(process)
        os.kill(pid, number)
        return pid

    def wait_replaced(self, process: str, pid: int, within_s: float = 60.0) -> None:
        eventually(lambda: self.pid(process) != pid, f"another {process} runs", within_s=within_s)

    def client(self, **options) -> Client:
        state = self.state()
        return Client(state.grpc, admin=state.admin, **{"timeout": scaled(60.0), **options})

    def log(self, process: str) -> str:
        """Return the log of the named process up to now."""
        return (self.home.path / self.name / "logs" / f"{process}.log").read_text()

    def loads(self) -> dict:
        """Return the last load report of each worker, by worker id."""
        with self.client() as client:
            return {worker.info.ref.worker_id: worker.load for worker in client.cluster().workers}

    def connected(self) -> dict[str, Any]:
        """Return the workers that the router is connected to, by worker id."""
        with self.client() as client:
            return {one.info.ref.worker_id: one for one in client.cluster().workers if one.state == "connected"}

    def busy(self, role: str) -> str:
        """Return the id of the first worker of that role with requests, or an empty string."""
        found = [name for name, one in self.connected().items() if one.info.role == role and one.dispatched]
        return found[0] if found else ""

    def all_free(self) -> dict | None:
        """Return the loads of all workers, or None while any worker runs a request or holds a block."""
        loads = self.loads()
        return None if any(one.running or one.blocks.available < one.blocks.total for one in loads.values()) else loads

    def nothing_is_held(self, workers: int) -> bool:
        """Check that exactly `workers` workers take part in a census, which finds no held block and no problem."""
        censuses, problems = look(Admins([self.state().admin]))
        return len(censuses) == workers and not problems and not any(census.held for census in censuses)

    def status(self) -> dict:
        return json.loads(self.home.baton("status", "--json", "--name", self.name, check=True).stdout)


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "baton", *map(str, args)]


def home_of(process: psutil.Process) -> str | None:
    """Return the `$BATON_HOME` of a process, or None if it has none or has ended."""
    try:
        return process.environ().get("BATON_HOME")
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):  # OSError: the process is just ending
        return None


def is_zombie(pid: int) -> bool:
    """Return whether the process has ended. A zombie has: only its parent must still read the exit code."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
