"""A multi-node Ray for tests. Each node is a blocking `ray start`."""

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.support.time_factor import scaled
from tests.support.waiting import eventually

STARTED = "Ray runtime started."
STARTS = 3  # Ray's own limit of 30 s is fixed: ray/_private/node.py of 2.60, `raylet_start_wait_time_s`
STARTS_WITHIN_S = 120.0
RECONNECT_S = 300  # Ray ends a node without a head after 60 s, and a slow start of a head takes longer
SIZES = ("--num-cpus=4", "--object-store-memory=80000000")


class RayNodes:
    """Processes of `ray start`, each the parent of its node's processes. The head keeps its state in Redis."""

    def __init__(self, head: str, port: int, redis_url: str) -> None:
        store = urlsplit(redis_url)
        self.folder = Path(tempfile.mkdtemp(prefix="bt-ray-"))  # short because socket paths are limited
        self.nodes: dict[str, subprocess.Popen] = {}
        self.address, self._port, self._password = f"{head}:{port}", port, store.password
        self.env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "t" * 32,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_REDIS_ADDRESS": f"{store.hostname}:{store.port}",
            "RAY_external_storage_namespace": "test",
            "RAY_gcs_rpc_server_reconnect_timeout_s": f"{RECONNECT_S}",
        }

    def address_of(self, name: str) -> str:
        raise NotImplementedError

    def launch(self, name: str, argv: list[str], log: Path) -> subprocess.Popen:
        """Start `argv` on the host of that node, with its output in `log`."""
        raise NotImplementedError

    def start_head(self) -> None:
        (self.folder / "ray_current_cluster").unlink(missing_ok=True)  # left by a killed head
        store = ("--redis-username=default", f"--redis-password={self._password}")
        where = ("--head", f"--port={self._port}", f"--temp-dir={self.folder}")
        self._start("head", *where, *store, "--include-dashboard=false")

    def start_node(self, name: str, *args: str) -> None:
        self._start(name, f"--address={self.address}", *args)

    def _start(self, name: str, *args: str) -> None:
        log = self.folder / f"{name}.out"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *SIZES, *args]
        for _ in range(STARTS):
            log.unlink(missing_ok=True)
            process = self.launch(name, [*command, f"--node-ip-address={self.address_of(name)}"], log)
            self.nodes[name] = process
            family = _family_at_start(process, log)
            if process.poll() is None:
                break
            _kill(family)  # a raylet may come up late, and a driver would choose it
            print(f"{name} did not start:", log.read_text())
        assert process.poll() is None, log.read_text()

    def kill(self, name: str) -> None:
        """Kill a node's processes, like a power failure of its host."""
        process = self.nodes.pop(name)
        _kill([psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)])
        process.wait(scaled(10))


def _family_at_start(process: subprocess.Popen, log: Path) -> list[psutil.Process]:
    """Wait until `ray start` reports success or ends. Return the processes that it has started by then."""
    family: dict[int, psutil.Process] = {}

    def started() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            family.update((one.pid, one) for one in psutil.Process(process.pid).children(recursive=True))
        return STARTED in log.read_text() or process.poll() is not None

    eventually(started, f"{STARTED} in {log}", within_s=STARTS_WITHIN_S)
    return list(family.values())


def _kill(processes: list[psutil.Process]) -> None:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(processes, timeout=scaled(10))
