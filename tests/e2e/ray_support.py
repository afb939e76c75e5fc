"""A Ray of several nodes on this machine, each with a loopback address of its own, as if it were a host."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from baton.ledger.embedded import EmbeddedRedis
from tests.support.cluster_process import is_zombie
from tests.support.waiting import eventually

STARTED = "Ray runtime started."


@dataclass
class RayNodes:
    """Processes of `ray start`, each the parent of its node's. The head remembers in `redis` what it must."""

    redis: EmbeddedRedis
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="bt-ray-")))  # short: it holds sockets
    nodes: dict[str, subprocess.Popen] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        with socket.create_server(("127.0.0.2", 0)) as probe:
            self.port = probe.getsockname()[1]
        store = urlsplit(self.redis.url)
        self.password = store.password
        self.env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "t" * 32,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
            "RAY_REDIS_ADDRESS": f"{store.hostname}:{store.port}",
            "RAY_external_storage_namespace": "test",
        }

    @property
    def address(self):
        return f"127.0.0.2:{self.port}"

    def start_head(self):
        (self.folder / "ray_current_cluster").unlink(missing_ok=True)  # of one that was killed
        store = ("--redis-username=default", f"--redis-password={self.password}")
        where = ("--head", f"--port={self.port}", f"--temp-dir={self.folder}")
        self._start("head", *where, *store, "--include-dashboard=false")

    def start_node(self, name, *args):
        self._start(name, f"--address={self.address}", *args)

    def _start(self, name, *args):
        host = self.hosts.setdefault(name, f"127.0.0.{2 + len(self.hosts)}")
        log = self.folder / f"{name}.out"
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={host}"]
        sizes = ("--num-cpus=4", "--object-store-memory=80000000")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *sizes, *args],
                env=os.environ | self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.nodes[name] = process
        eventually(lambda: STARTED in log.read_text() or process.poll() is not None, within_s=60)
        assert process.poll() is None, log.read_text()

    def kill(self, name):
        """As the power of a host fails."""
        process = self.nodes.pop(name)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(10)
        psutil.wait_procs(family, timeout=10)

    def actors(self, name):
        """Processes on that node that Ray made actors of, by pid, with what `ps` shows of them."""
        found = {}
        for process in psutil.Process(self.nodes[name].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline()).strip()
                if title.startswith("ray::") and "Actor" in title and not is_zombie(process.pid):
                    found[process.pid] = title
        return found

    def logs(self):
        files = sorted(self.folder.glob("session_*/logs/worker-*.err"))
        return "".join(f"\n== {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def stop(self):
        for name in reversed(list(self.nodes)):
            self.kill(name)
        ours = str(self.folder)
        left = [one for one in psutil.process_iter(["cmdline"]) if ours in " ".join(one.info["cmdline"] or ())]
        for one in left:
            one.kill()
        shutil.rmtree(self.folder)
        assert not left
