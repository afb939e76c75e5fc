"""A cluster whose roles are started by hand on separate hosts, and requests for it."""

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from redis import Redis
from redis.exceptions import RedisError

from baton import Client
from baton.ledger.embedded_redis import server_binary
from tests.netns.hosts import ROOT, command
from tests.support.load import PATIENCE_S, Job, until
from tests.support.time_factor import scaled

GRPC, ADMIN, METRICS, REDIS, WORKER = 50051, 50052, 9100, 6379, 7000
PASSWORD = "netns"
LEASE_S = scaled(10.0)  # a worker that is cut off waits for half of it in its calls to Redis
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
transfer: {{transport: gloo, frame_deadline_s: {LEASE_S}}}
security: {{allow_insecure: true}}
"""


def start_redis(host, folder):
    """Start a Redis that other hosts can reach. Waits until it answers."""
    limits = ("--maxmemory-policy", "noeviction", "--save", "", "--appendonly", "no", "--dir", folder)
    argv = (server_binary(), "--bind", "0.0.0.0", "--port", REDIS, "--requirepass", PASSWORD, *limits)
    process = host.start(argv, folder / "redis.log")
    client = Redis(host.address, REDIS, password=PASSWORD, socket_timeout=scaled(1))

    def answers():
        try:
            return client.ping()
        except (OSError, RedisError):
            return process.popen.poll() is not None

    until("Redis answers", answers, 60)
    client.close()
    assert process.popen.poll() is None, process.log.read_text()
    return process


class Cluster:
    """A cluster file, and a Redis on `head`, the router's host."""

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
        return Client(self.address, admin=self.admin, **{"timeout": scaled(PATIENCE_S), **options})

    def status(self):
        with self.client() as client:
            return client.cluster()

    def connected(self):
        """Return the ids of workers that the router is connected to."""
        return {one.info.ref.worker_id for one in self.status().workers if one.state == "connected"}

    def wait_connected(self, *ids):
        until(f"the router has found {ids}", lambda: self.connected() == set(ids))


class Plain(Cluster):
    """Roles as plain processes, each started by hand."""

    def __init__(self, head, folder, *changes):
        super().__init__(head, folder, *changes)
        self.workers = {}
        self.router = head.baton("router", "-c", self.config, log=folder / "router.log")

    def start_worker(self, host, worker_id, *sets):
        """Start a worker and return its process. Its `.ready()` waits."""
        role = worker_id.partition("-")[0]
        options = [word for one in sets for word in ("--set", one)]
        argv = (f"{role}-worker", "-c", self.config, "--id", worker_id, *options)
        self.workers[worker_id] = process = host.baton(*argv, log=self.folder / f"{worker_id}.log")
        return process


def census(admin):
    """Fail with the problems if a worker holds blocks without a running request."""
    print(command(sys.executable, "-m", "baton", "status", "--census", "--target", admin))


def draw_jobs(cluster, number=6, prompt=200, tokens=150):
    """Return requests with their correct answers."""
    rng, options = random.Random(number), {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    prompts = [[rng.randrange(1, 2048) for _ in range(prompt)] for _ in range(number)]
    with cluster.client() as client, ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda ids: client.generate(ids, **options).tokens, prompts))
    return [Job(ids, options, answer) for ids, answer in zip(prompts, answers, strict=True)]


def long_prompt(seed, length=1800):
    rng = random.Random(seed)
    return [rng.randrange(1, 2048) for _ in range(length)]


def handed_over(cluster, prompt):
    """Return the seconds until the decode worker's first token, and the answer."""
    with cluster.client() as client, client.stream(prompt, max_tokens=4, temperature=0, ignore_eos=True) as stream:
        begun = time.monotonic()
        while len(stream.tokens) < 2:
            next(stream)
        return time.monotonic() - begun, stream.collect()
