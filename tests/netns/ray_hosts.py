"""A Ray cluster over hosts that are network namespaces, and `baton up` on the head, which uses it."""

import shutil
from pathlib import Path
from subprocess import Popen

from tests.netns.hosts import Network
from tests.netns.support import PASSWORD, REDIS, Cluster
from tests.support.processes_of_cluster import RayNodes

PORT = 6380
LABEL = "baton.io/pool"
POOLS = [(f"{role}: {{", f"{role}: {{node_labels: {{{LABEL}: {role}}}, ") for role in ("prefill", "decode")]


class HostNodes(RayNodes):
    """One node for each host."""

    def __init__(self, network: Network) -> None:
        head = network["head"].address
        super().__init__(head, PORT, f"redis://:{PASSWORD}@{head}:{REDIS}")
        self._network = network

    def address_of(self, name: str) -> str:
        return self._network[name].address

    def launch(self, name: str, argv: list[str], log: Path) -> Popen:
        return self._network[name].start(argv, log, self.env).popen


class RayHosts(Cluster):
    """One host for the head and one for each pool."""

    def __init__(self, network: Network, folder: Path) -> None:
        head = network["head"]
        super().__init__(head, folder, ("address: none", f'address: "{head.address}:{PORT}"'), *POOLS)
        self._network = network
        self.ray = HostNodes(network)

    def start(self) -> None:
        self.ray.start_head()
        for name in ("prefill", "decode"):
            self.ray.start_node(name, f"--labels={LABEL}={name}")

    def up(self) -> None:
        """Run `baton up` and return when the cluster is ready."""
        env = {**self.ray.env, "BATON_HOME": str(self.folder / "home")}
        self.head.baton("up", "-c", self.config, log=self.folder / "up.log", **env).ready()

    def close(self) -> None:
        for host in self._network.hosts.values():
            host.kill_all()
        shutil.rmtree(self.ray.folder, ignore_errors=True)
