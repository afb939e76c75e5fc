"""A cluster over three hosts, placed by Ray: a head, a prefill host, a decode host. Clients with the SDK's defaults see
no failed request and no wrong token, whatever happens to the hosts.
"""

import shutil
import sys
import time
from pathlib import Path
from subprocess import Popen

import pytest

from tests.netns.hosts import Network, command
from tests.netns.support import LEASE_S, PASSWORD, REDIS, Cluster, census, draw_jobs
from tests.support.load import Load, until
from tests.support.processes_of_cluster import RayNodes

pytestmark = [pytest.mark.netns, pytest.mark.chaos, pytest.mark.timeout(420)]  # leases of real time
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


@pytest.fixture
def network():
    with Network("head", "prefill", "decode") as made:
        yield made


@pytest.fixture
def cluster(network, tmp_path):
    made = RayHosts(network, tmp_path)
    try:
        measured("Ray", made.start)
        measured("the cluster", made.up)
        yield made
    finally:
        made.close()


def baton(cluster, *argv):
    """Run an operator's command from another host."""
    command(sys.executable, "-m", "baton", *argv, "--target", cluster.admin)


def settled(cluster, since=0.0):
    """Return the controller's report when the workers are as planned. It must be newer than `since` (monotonic)."""

    def look():
        found = cluster.status().control
        fresh = found is not None and time.monotonic() - found.age_s > since
        return fresh and found.settled and {slot.worker_id for slot in found.slots} == cluster.connected() and found

    return until("the cluster is what the plan says", look)


def addresses(cluster):
    return {one.info.ref.worker_id: one.info.ref.address.rpartition(":")[0] for one in cluster.status().workers}


def incarnations(cluster):
    return {str(one.info.ref) for one in cluster.status().workers}


def measured(what, act):
    begun = time.monotonic()
    done = act()
    print(f"{what}: {time.monotonic() - begun:.1f} s")
    return done


def cut_off(network, cluster, name, leases, *, stays):
    """Cut a host's link for so many leases, then wait for its worker or its replacement."""
    before = incarnations(cluster)
    network[name].cut()
    time.sleep(leases * LEASE_S)  # the tested duration
    network[name].restore()
    begun = time.monotonic()

    def back():
        return settled(cluster, begun) and (incarnations(cluster) == before) is stays

    measured(f"back after {leases} leases, {name}", lambda: until("its worker is there", back))


def test_hosts_are_cut_off_pools_scaled_the_head_restarted_and_no_request_fails(network, cluster):
    settled(cluster)
    assert addresses(cluster) == {f"{name}-0": network[name].address for name in ("prefill", "decode")}
    jobs = draw_jobs(cluster)
    with Load(cluster, jobs, 0, loyal=True) as load:
        load.settle(4)
        cut_off(network, cluster, "decode", 1.2, stays=True)
        load.settle(4)
        cut_off(network, cluster, "prefill", 2.5, stays=False)  # after one and a half it counts as frozen
        load.settle(4)
        baton(cluster, "scale", "prefill=1", "decode=2")
        found = measured("from 1 to 2 decode workers", lambda: settled(cluster, time.monotonic()))
        assert sum(slot.role == "decode" for slot in found.slots) == 2
        before = incarnations(cluster)
        cluster.ray.kill("head")  # all of Ray there, including the controller, but not Redis and the router
        load.settle(4)  # without Ray
        measured("the head", cluster.ray.start_head)
        measured("its controller", lambda: settled(cluster, time.monotonic()))
        assert incarnations(cluster) == before
        load.settle(4)
        baton(cluster, "scale", "prefill=1", "decode=1")
        measured("from 2 to 1 decode workers", lambda: settled(cluster, time.monotonic()))
        load.settle(4)
    census(cluster.admin)
