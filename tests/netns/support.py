"""A cluster of roles that are started by hand on hosts of their own, and clients that never stop asking it."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from redis import Redis
from redis.exceptions import RedisError

from baton import Client
from baton.ledger.embedded import server_binary
from tests.netns.hosts import ROOT, command

GRPC, ADMIN, METRICS, REDIS, WORKER = 50051, 50052, 9100, 6379, 7000
PASSWORD = "netns"
LEASE_S = 4.0
PATIENCE_S = 90.0  # what takes longer hangs
CONFIG = f"""
name: hosts
model: {{path: {ROOT}/models/demo, max_model_len: 2048}}
ray: {{address: none}}
redis: {{url: "redis://:{PASSWORD}@HEAD:{REDIS}/0"}}
router: {{grpc: "0.0.0.0:{GRPC}", admin: "0.0.0.0:{ADMIN}", metrics: "0.0.0.0:{METRICS}", interface: eth0,
  local_prefill: never, queue: {{max_wait_s: 60}}}}
prefill: {{device: cpu, threads: 1, kv_memory: 24MiB, listen: "0.0.0.0:0", interface: eth0}}
decode: {{device: cpu, threads: 1, kv_memory: 24MiB, listen: "0.0.0.0:0"}}
ledger: {{lease_s: {LEASE_S}, heartbeat_s: 0.5}}
transfer: {{transport: gloo, frame_deadline_s: 4}}
security: {{allow_insecure: true}}
"""


def eventually(what, look, within_s=PATIENCE_S):
    """`look()` as soon as it is true. For states that other processes reach by themselves."""
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"not so within {within_s:g} s: {what}"
        time.sleep(0.02)
    return found


def start_redis(host, folder):
    """A Redis that other hosts reach. Waits until it answers."""
    limits = ("--maxmemory-policy", "noeviction", "--save", "", "--appendonly", "no", "--dir", folder)
    argv = (server_binary(), "--bind", "0.0.0.0", "--port", REDIS, "--requirepass", PASSWORD, *limits)
    process = host.start(argv, folder / "redis.log")
    client = Redis(host.address, REDIS, password=PASSWORD, socket_timeout=1)

    def answers():
        try:
            return client.ping()
        except (OSError, RedisError):
            return process.popen.poll() is not None

    eventually("Redis answers", answers, 15)
    client.close()
    assert process.popen.poll() is None, process.log.read_text()
    return process


class Cluster:
    """Its cluster file, and a Redis on `head`, where its router is to be."""

    def __init__(self, head, folder, *changes):
        self.head, self.folder = head, folder
        self.config = folder / "hosts.yaml"
        text = CONFIG.replace("HEAD", head.address)
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        self.config.write_text(text)
        self.address, self.admin = f"{head.address}:{GRPC}", f"{head.address}:{ADMIN}"
        start_redis(head, folder)

    def client(self, **options):
        return Client(self.address, admin=self.admin, **{"timeout": PATIENCE_S, **options})

    def status(self):
        with self.client() as client:
            return client.cluster()

    def connected(self):
        """The ids of workers that the router has a stream to."""
        return {one.info.ref.worker_id for one in self.status().workers if one.state == "connected"}

    def wait_connected(self, *ids):
        eventually(f"the router has found {ids}", lambda: self.connected() == set(ids))


class Plain(Cluster):
    """Roles as plain processes, each started by hand."""

    def __init__(self, head, folder):
        super().__init__(head, folder)
        self.workers = {}
        self.router = head.baton("router", "-c", self.config, log=folder / "router.log")

    def start_worker(self, host, worker_id, *sets):
        """Begin to start it; `.ready()` of what is returned waits."""
        role = worker_id.partition("-")[0]
        options = [word for one in sets for word in ("--set", one)]
        argv = (f"{role}-worker", "-c", self.config, "--id", worker_id, *options)
        self.workers[worker_id] = process = host.baton(*argv, log=self.folder / f"{worker_id}.log")
        return process


def census(admin):
    """Fails with what is wrong if a worker holds blocks that belong to no request that runs."""
    print(command(sys.executable, "-m", "baton", "status", "--census", "--target", admin))


class Load:
    """Clients with the SDK's defaults that stream one request after the other for as long as the block runs.

    `failed` has what users would have seen fail, and each token that is not the one that came without any fault.
    """

    def __init__(self, cluster, jobs, clients=4, **options):
        self.failed, self.whole, self.slowest = [], 0, 0.0
        self.attempts: Counter[int] = Counter()
        self._cluster, self._jobs, self._options = cluster, jobs, options
        self._numbers = itertools.count()
        self._running = {}  # number of its request, by client
        self._over, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind, *_):
        self._over.set()
        for thread in self._threads:
            thread.join(0 if kind else 2 * PATIENCE_S)
        print(f"load: {self.whole} whole, slowest {self.slowest:.1f} s, attempts {dict(self.attempts)}, {self.failed}")
        if kind is None:
            assert not any(thread.is_alive() for thread in self._threads), "clients hang"

    def settle(self, answers=4):
        """Wait until all that runs now has ended, and so many more have been answered."""
        running, before = set(self._running.values()), self.whole
        eventually("what ran has ended", lambda: not running & set(self._running.values()))
        eventually(f"{answers} more answers", lambda: self.failed or self.whole >= before + answers)

    def _client(self, client):
        rng = random.Random(client)
        with self._cluster.client(**self._options) as connection:
            while not self._over.is_set():
                number = self._running[client] = next(self._numbers)
                self._request(connection, rng.choice(self._jobs), number)
            del self._running[client]

    def _request(self, connection, job, number):
        prompt, options, answer = job
        begun = time.monotonic()
        try:
            with connection.stream(prompt, cache_scope=f"{number}", **options) as stream:
                done = stream.collect()
        except Exception as error:  # noqa: BLE001  (the boundary of this thread)
            self.failed.append(f"request {number} after {time.monotonic() - begun:.1f} s: {error!r}")
            return
        with self._lock:
            self.whole += 1
            self.slowest = max(self.slowest, time.monotonic() - begun)
            self.attempts[done.placement.attempts] += 1
        if done.choices[0].tokens != answer:
            self.failed.append(f"request {number}: other tokens than without a fault: {done.choices[0].tokens}")


def draw_jobs(cluster, number=6, prompt=200, tokens=150):
    """Prompts with the answers that come when nothing is wrong."""
    rng, options = random.Random(number), {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    prompts = [[rng.randrange(1, 2048) for _ in range(prompt)] for _ in range(number)]
    with cluster.client() as client, ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda ids: client.generate(ids, **options).choices[0].tokens, prompts))
    return [(ids, options, answer) for ids, answer in zip(prompts, answers, strict=True)]
