"""Two hosts, every role started by hand: the path of KV, its duration, and the effects of a cut link."""

import signal
import time
from contextlib import contextmanager

import pytest

from tests.netns.hosts import Network
from tests.netns.support import LEASE_S, Plain, census, draw_jobs, handed_over, long_prompt
from tests.support.load import Streams, until

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.xdist_group("two_hosts")]
CAP_MBIT = 20
SHORT_S = 2.0  # gRPC gives a connection up after a ping of 5 s without an answer, on a slow machine, too
MBIT = 1e6 / 8  # bytes per second


@pytest.fixture(scope="module")
def network():
    with Network("a", "b") as made:
        yield made


@pytest.fixture(scope="module")
def cluster(network, tmp_path_factory):
    """The router, Redis, a prefill worker on a, and a decode worker on b."""
    a, b = network["a"], network["b"]
    made = Plain(a, tmp_path_factory.mktemp("hosts"))
    started = [made.start_worker(a, "prefill-0"), made.start_worker(b, "decode-0")]
    for process in (made.router, *started):
        process.ready()
    made.wait_connected("prefill-0", "decode-0")
    return made


def test_each_is_told_by_the_address_of_its_host(network, cluster):
    a, b = network["a"].address, network["b"].address
    assert cluster.router.said["grpc"] == "0.0.0.0:50051"
    assert cluster.router.said["advertised"]["grpc"] == f"{a}:50051"
    assert cluster.workers["prefill-0"].said["address"].rpartition(":")[0] == a, "by its interface"
    assert cluster.workers["decode-0"].said["address"].rpartition(":")[0] == b, "by its way to Redis"


def test_kv_goes_over_the_link_and_no_faster_than_it_is(network, cluster):
    handed_over(cluster, long_prompt(0))  # builds the channel
    before = network["a"].sent()
    fast, done = handed_over(cluster, long_prompt(1))
    assert done.placement.transport == "gloo"
    assert 1e6 < done.placement.kv_bytes < network["a"].sent() - before < 1.5 * done.placement.kv_bytes
    network["a"].cap(CAP_MBIT)
    try:
        slow, capped = handed_over(cluster, long_prompt(2))
        right = capped.choices[0].tokens
    finally:
        network["a"].uncap()
    least = capped.placement.kv_bytes / (CAP_MBIT * MBIT)
    print(f"{capped.placement.kv_bytes} bytes: {fast:.2f} s, {slow:.2f} s at {CAP_MBIT} Mbit/s, which take {least:.2f}")
    assert slow > 0.9 * least
    with cluster.client() as client:
        again = client.generate(long_prompt(2), max_tokens=4, temperature=0, ignore_eos=True, cache_scope="again")
    assert again.choices[0].tokens == right
    census(cluster.admin)


def streams(cluster, jobs):
    """Start streams that are all in their decode phase."""
    running = Streams(cluster, [job.prompt for job in jobs], tokens=21, max_retries=2, **jobs[0].options)
    assert not running.ends, "the cut comes in their middle"
    return running


def outcomes(running, jobs):
    """Return for each stream whether its tokens are right, and its attempts."""
    pairs = zip(running.answers(), jobs, strict=True)
    return [(answer.tokens == job.answer, answer.placement.attempts) for answer, job in pairs]


def cut_for(host, seconds):
    host.cut()
    time.sleep(seconds)  # the tested duration
    host.restore()


@contextmanager
def frozen(process):
    process.popen.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.popen.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def jobs(cluster):
    return draw_jobs(cluster, 6, prompt=100, tokens=1900)


def test_a_cut_shorter_than_a_lease_only_takes_its_time(network, cluster, jobs):
    pid = cluster.workers["decode-0"].pid
    running = streams(cluster, jobs)
    cut_for(network["b"], min(LEASE_S / 4, SHORT_S))
    assert outcomes(running, jobs) == [(True, 1)] * len(jobs)
    assert (cluster.workers["decode-0"].pid, cluster.workers["decode-0"].popen.poll()) == (pid, None)
    census(cluster.admin)


def test_a_long_cut_moves_streams_to_another_host(network, cluster, jobs):
    """No stream loses a token. The worker that was cut off keeps running and is found again."""
    cut_off = cluster.workers["decode-0"]
    other = cluster.start_worker(network["a"], "decode-1")
    other.ready()
    with frozen(other):  # all streams begin on the worker that is cut off later; the other one comes soon
        cluster.wait_connected("prefill-0", "decode-0")
        running = streams(cluster, jobs)
    cluster.wait_connected("prefill-0", "decode-0", "decode-1")
    assert not running.ends, "the cut comes in their middle"
    network["b"].cut()
    try:
        begun = time.monotonic()
        until("the router has missed it", lambda: "decode-0" not in cluster.connected())
        missed = time.monotonic() - begun
        ends = outcomes(running, jobs)
    finally:
        network["b"].restore()
    begun = time.monotonic()
    cluster.wait_connected("prefill-0", "decode-0", "decode-1")
    print(f"missed after {missed:.1f} s, found again after {time.monotonic() - begun:.1f} s")
    assert ends == [(True, 2)] * len(jobs)
    assert cut_off.popen.poll() is None
    census(cluster.admin)
    assert cluster.workers.pop("decode-1").end() == 0
    with cluster.client() as client:
        done = client.generate(jobs[0].prompt, **jobs[0].options | {"max_tokens": 4})
    assert done.placement.decode_worker == "decode-0", "it serves again"


def test_kv_takes_another_network_than_requests(network, cluster):
    a, b = network["a"], network["b"]
    a.cable(b)
    for process in cluster.workers.values():
        process.end()
    started = [("prefill", a), ("decode", b)]
    for role, host in started:
        sets = f"{role}.advertise={host.address}", f"{role}.interface=eth1"
        assert cluster.start_worker(host, f"{role}-9", *sets).ready()["address"].startswith(f"{host.address}:")
    cluster.wait_connected("prefill-9", "decode-9")
    before = a.sent("eth0"), a.sent("eth1")
    _, done = handed_over(cluster, long_prompt(3))
    slow, fast = a.sent("eth0") - before[0], a.sent("eth1") - before[1]
    print(f"{done.placement.kv_bytes} bytes of KV: {slow} bytes left by eth0, {fast} by eth1")
    assert fast > done.placement.kv_bytes > 20 * slow
