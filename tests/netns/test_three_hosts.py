"""Three hosts: the router and Redis, a prefill host and a decode host. Roles are started by hand.

A continuous load of clients as users have them, with the SDK's defaults, sees no failed request and no other token,
whatever is done to the hosts meanwhile.
"""

import time

import pytest

from tests.netns.hosts import Network
from tests.netns.support import LEASE_S, Load, Plain, census, draw_jobs

pytestmark = [pytest.mark.netns, pytest.mark.serial, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def network():
    with Network("head", "prefill", "decode") as made:
        yield made


@pytest.fixture(scope="module")
def cluster(network, tmp_path_factory):
    made = Plain(network["head"], tmp_path_factory.mktemp("hosts"))
    ids = [f"{role}-0" for role in ("prefill", "decode")]
    for process in [made.router, *(made.start_worker(network[one.partition("-")[0]], one) for one in ids)]:
        process.ready()
    made.wait_connected(*ids)
    return made


@pytest.fixture(scope="module")
def jobs(cluster):
    return draw_jobs(cluster)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_host_that_is_cut_off_and_comes_back_fails_no_request(network, cluster, jobs, name):
    with Load(cluster, jobs) as load:
        load.settle()
        network[name].cut()
        time.sleep(1.5 * LEASE_S)  # what is tested is this time
        network[name].restore()
        begun = time.monotonic()
        cluster.wait_connected("prefill-0", "decode-0")
        load.settle()
        print(f"{name}: back after {time.monotonic() - begun:.1f} s")
    assert load.failed == []
    census(cluster.admin)


def test_all_workers_are_replaced_one_by_one_and_no_request_fails(network, cluster, jobs):
    here = ["prefill-0", "decode-0"]
    with Load(cluster, jobs) as load:
        load.settle()
        for number, old in enumerate(list(here)):
            role = old.partition("-")[0]
            new = f"{role}-1"
            cluster.start_worker(network[role], new).ready()
            cluster.wait_connected(*here, new)
            begun = time.monotonic()
            assert cluster.workers[old].end() == 0
            here[number] = new
            cluster.wait_connected(*here)
            print(f"{old} left in {time.monotonic() - begun:.1f} s")
            load.settle()
    assert load.failed == []
    census(cluster.admin)
