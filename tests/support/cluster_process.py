"""Real clusters, started as a user starts them: `baton up --detach` in a state folder of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton import Client
from baton.cluster.state import ClusterState, StateFolder
from tests.support.time_factor import scaled
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / ".pytest_cache" / "kernels"
HANDED_OVER = "router.local_prefill=never"  # no decode worker computes a prompt itself while prefill workers are there
FREE_PORTS = tuple(f"router.{listener}=127.0.0.1:0" for listener in ("grpc", "admin", "metrics", "http"))


@dataclass
class Home:
    """A `$BATON_HOME` of its own, and the command line in it."""

    path: Path

    def __post_init__(self) -> None:
        """Kernels are compiled once for all tests: it takes as long as some of them."""
        if self.path.is_dir() and not (self.path / "kernels").exists():
            KERNELS.mkdir(parents=True, exist_ok=True)
            (self.path / "kernels").symlink_to(KERNELS)

    def start(self, *args, **options) -> subprocess.Popen:
        """`baton ARGS` as a running process, its output as text."""
        env = {**os.environ, "BATON_HOME": str(self.path), "NO_COLOR": "1"}
        command = [sys.executable, "-m", "baton", *map(str, args)]
        return subprocess.Popen(
            command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
        )

    def baton(self, *args, timeout=120, check=False, **options):
        """Run `baton ARGS`; the finished process, its output as text."""
        env = {**os.environ, "BATON_HOME": str(self.path), "NO_COLOR": "1"}
        command = [sys.executable, "-m", "baton", *map(str, args)]
        done = subprocess.run(
            command, env=env, cwd=ROOT, timeout=scaled(timeout), capture_output=True, text=True, check=False, **options
        )
        if check:
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done

    def processes(self) -> list[psutil.Process]:
        """All that run in it, by their environment: also what no state file knows (yet), and Ray's."""
        return [process for process in psutil.process_iter() if home_of(process) == str(self.path)]

    @contextmanager
    def swept(self, within_s=10.0):
        """Kill the processes of this home that outlive the block. Raises AssertionError that names them."""
        try:
            yield self
        finally:
            with suppress(AssertionError):
                eventually(lambda: not self.processes(), within_s=within_s)
            left = self._killed()
        assert not left, f"the test left running: {left}"

    def _killed(self) -> list[str]:
        """Kill all processes of this home, repeatedly because a supervisor replaces them. Return what they were."""
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
        return "\n".join(f"== {file}\n{file.read_text()[-3000:]}" for file in sorted(self.path.glob("*/logs/*.log")))

    @contextmanager
    def cluster(self, config="configs/no-ray.yaml", *sets, name=""):
        """A running cluster, named `name` beside others; `down`, and a look at what is left, at the end."""
        sets = (*sets, f"name={name}") if name else sets
        options = [part for item in (*FREE_PORTS, *sets) for part in ("--set", item)]
        self.baton("up", "-c", config, *options, "--detach", check=True)
        running = ClusterProcess(self, name or Path(config).stem)
        pids = running.processes()
        try:
            yield running
        finally:
            pids |= running.processes()
            if running.processes():  # a test may have ended it in its own way
                self.baton("down", "--name", running.name, check=True)
        left = {name: pid for name, pid in pids.items() if psutil.pid_exists(pid) and not is_zombie(pid)}
        assert not left, f"still running after down: {left}"
        folder, kept = self.path / running.name, ["lock", "logs", "up.out"]
        eventually(lambda: sorted(path.name for path in folder.iterdir()) == kept)


@dataclass
class ClusterProcess:
    """A running cluster."""

    home: Home
    name: str

    def state(self) -> ClusterState:
        found = StateFolder(self.name, self.home.path).read_state()
        assert found is not None, self.home.logs()
        return found

    def processes(self) -> dict[str, int]:
        state = StateFolder(self.name, self.home.path).read_state()
        return {} if state is None else {f"{n}:{p.pid}": p.pid for n, p in state.processes.items()}

    def pid(self, process: str) -> int:
        """Return the pid of the named process. Wait for it if the supervisor is replacing the process."""
        return eventually(lambda: self.state().processes.get(process), within_s=30).pid

    def client(self, **options) -> Client:
        state = self.state()
        return Client(state.grpc, admin=state.admin, **{"timeout": scaled(60.0), **options})

    def log(self, process: str) -> str:
        """Return the log of the named process up to now."""
        return (self.home.path / self.name / "logs" / f"{process}.log").read_text()

    def loads(self) -> dict:
        """The last load report of each worker, by worker id."""
        with self.client() as client:
            return {worker.info.ref.worker_id: worker.load for worker in client.cluster().workers}

    def status(self) -> dict:
        return json.loads(self.home.baton("status", "--json", "--name", self.name, check=True).stdout)


def home_of(process: psutil.Process) -> str | None:
    """Return the `$BATON_HOME` of a process, or None if it has none or has ended."""
    try:
        return process.environ().get("BATON_HOME")
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):  # OSError: it is just ending
        return None


def is_zombie(pid: int) -> bool:
    """Whether the process has ended. A zombie has: only its exit code is still to be read by its parent."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
