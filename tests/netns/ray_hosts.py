"""A Ray over hosts that are network namespaces, and `baton up` on the head, which uses it."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

import psutil

from tests.netns.support import PASSWORD, REDIS, Cluster, eventually

PORT = 6380
STARTED = "Ray runtime started."
LABEL = "baton.io/pool"
SIZES = ("--num-cpus=4", "--object-store-memory=80000000")
POOLS = [(f"{role}: {{", f"{role}: {{node_labels: {{{LABEL}: {role}}}, ") for role in ("prefill", "decode")]


class RayHosts(Cluster):
    """The head's GCS remembers in Redis what it must, so that another one can go on."""

    def __init__(self, network, folder):
        head = network["head"]
        super().__init__(head, folder, ("address: none", f'address: "{head.address}:{PORT}"'), *POOLS)
        self._network = network
        self._scratch = Path(tempfile.mkdtemp(prefix="bt-ray-"))  # short: it holds sockets
        self._env = {
            "BATON_HOME": str(folder / "home"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "t" * 32,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_REDIS_ADDRESS": f"{head.address}:{REDIS}",
            "RAY_external_storage_namespace": "hosts",
        }
        self._nodes = {}

    def start_head(self):
        (self._scratch / "ray_current_cluster").unlink(missing_ok=True)  # of one that was killed
        store = ("--redis-username=default", f"--redis-password={PASSWORD}")
        where = ("--head", f"--port={PORT}", f"--temp-dir={self._scratch}", "--include-dashboard=false")
        self._start(self.head, *where, *store)

    def start_node(self, name):
        """A host for workers of the pool of that name."""
        self._start(self._network[name], f"--address={self.head.address}:{PORT}", f"--labels={LABEL}={name}")

    def _start(self, host, *args):
        log = self.folder / f"ray-{host.name}.out"
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        self._nodes[host.name] = node = host.start(
            [*command, f"--node-ip-address={host.address}", *SIZES, *args], log, self._env
        )
        eventually("Ray runs", lambda: STARTED in log.read_text() or node.popen.poll() is not None, 60)
        assert node.popen.poll() is None, log.read_text()

    def kill_head(self):
        """All that Ray has on the head, the controller with it; not Redis, and not the router."""
        node = self._nodes.pop("head")
        family = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        node.popen.wait(10)
        psutil.wait_procs(family, timeout=10)

    def up(self):
        """`baton up`, as soon as the cluster is ready."""
        process = self.head.baton("up", "-c", self.config, log=self.folder / "up.log", **self._env)
        process.ready()
        return process

    def control(self):
        return self.status().control

    def close(self):
        for host in self._network.hosts.values():
            host.kill_all()
        shutil.rmtree(self._scratch, ignore_errors=True)
