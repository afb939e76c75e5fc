"""A controller and its workers as actors of a Ray cluster with three nodes, some of which die. Processes are real."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from baton.ledger.embedded_redis import EmbeddedRedis
from tests.support.cluster_process import LEASE_S, ROOT, ClusterProcess, is_zombie
from tests.support.load import Job, Load, oracle_answer
from tests.support.processes_of_cluster import RayNodes
from tests.support.time_factor import scaled
from tests.support.waiting import eventually

HEAD = "127.0.0.2"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


class LoopbackNodes(RayNodes):
    """Nodes at 127.0.0.2 and the following addresses."""

    def __init__(self, redis_url: str) -> None:
        with socket.create_server((HEAD, 0)) as probe:
            super().__init__(HEAD, probe.getsockname()[1], redis_url)
        self.redis_url = redis_url
        self.env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
        self._hosts: dict[str, str] = {}

    def address_of(self, name: str) -> str:
        return self._hosts.setdefault(name, f"127.0.0.{2 + len(self._hosts)}")

    def launch(self, name: str, argv: list[str], log: Path) -> subprocess.Popen:
        with log.open("wb") as output:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            return subprocess.Popen(argv, env=os.environ | self.env, start_new_session=True, **streams)

    def actors(self, name: str) -> dict[int, str]:
        """Return the node's Ray actors: their titles in `ps`, by pid."""
        found = {}
        for process in psutil.Process(self.nodes[name].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline()).strip()
                if title.startswith("ray::") and "Actor" in title and not is_zombie(process.pid):
                    found[process.pid] = title
        return found

    def no_actors(self) -> bool:
        return not any(self.actors(name) for name in self.nodes)

    def logs(self) -> str:
        files = sorted(self.folder.glob("session_*/logs/worker-*.err"))
        return "".join(f"\n== {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def stop(self) -> None:
        for name in reversed(list(self.nodes)):
            self.kill(name)
        try:  # a process that a node was just starting ends without it
            eventually(lambda: not self.left(), "all processes of Ray have ended", within_s=30)
        finally:
            for one in self.left():
                one.kill()
            shutil.rmtree(self.folder, ignore_errors=True)

    def left(self) -> list[psutil.Process]:
        ours = str(self.folder)
        return [one for one in psutil.process_iter(["cmdline"]) if ours in " ".join(one.info["cmdline"] or ())]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    store = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"), password="secret-of-redis")
    running = LoopbackNodes(store.url)
    try:
        running.start_head()
        running.start_node("prefill", "--labels=role=prefill", "--num-gpus=2")
        running.start_node("decode", "--labels=role=decode")
        yield running
    finally:
        running.stop()
        store.stop()


class Many:
    """The cluster of one test. Labels place its workers on nodes."""

    def __init__(self, nodes, folder, lease_s=LEASE_S):
        self.nodes = nodes
        self.file = folder / "many.yaml"
        self.file.write_text(f"""
name: many
model: {{path: oracle}}
redis: {{url: "{nodes.redis_url}"}}
ray: {{address: "{nodes.address}"}}
router: {{grpc: "127.0.0.1:0", metrics: "127.0.0.1:0"}}
prefill: {{device: cpu, threads: 1, kv_memory: 8MiB, node_labels: {{role: prefill}}}}
decode: {{device: cpu, threads: 1, kv_memory: 8MiB, node_labels: {{role: decode}}}}
ledger: {{lease_s: {lease_s}, heartbeat_s: 0.5}}
""")

    def baton(self, *args):
        """Run `baton controller ARGS` and return its output."""
        command = [sys.executable, "-m", "baton", "controller", "-c", str(self.file), *args]
        env, limit_s = os.environ | self.nodes.env, scaled(120)
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
        assert done.returncode == 0, done.stdout + done.stderr + self.nodes.logs()
        return done.stdout

    def report(self):
        with redis.Redis.from_url(self.nodes.redis_url) as client:
            said = client.get("baton:many:control")
        return json.loads(said) if said else {"slots": []}

    def pids(self):
        """Return the pids of prefill-0 and decode-0 when both are ready."""
        eventually(lambda: self._states() == {"prefill-0": "ready", "decode-0": "ready"}, within_s=120)
        (prefill,), (decode,) = self.nodes.actors("prefill"), self.nodes.actors("decode")
        return prefill, decode

    def _states(self):
        return {slot["worker_id"]: slot["state"] for slot in self.report()["slots"]}

    def replaced(self, name, pid):
        """Wait until the node's only actor is another process and the old one has ended."""
        eventually(lambda: len(now := self.nodes.actors(name)) == 1 and pid not in now, within_s=120)
        assert is_zombie(pid)

    def controller(self):
        """Return the controller's pid."""
        return eventually(lambda: list(self.nodes.actors("head")), within_s=120)[0]


@pytest.fixture
def many(nodes, tmp_path):
    running = Many(nodes, tmp_path, lease_s=scaled(6))  # a frozen worker is missed after one and a half leases
    running.baton()
    yield running
    running.baton("--stop")
    eventually(nodes.no_actors, within_s=60)


@pytest.mark.sample(1, of="a Ray cluster of three nodes")
def test_workers_and_their_controller_are_kept(many):
    _workers_are_placed_by_label_and_replaced(many)
    _a_controller_that_is_started_again_takes_over_what_runs(many)


def _workers_are_placed_by_label_and_replaced(many):
    """A killed worker is replaced, and so is a frozen one, which Ray does not detect."""
    prefill, decode = many.pids()
    os.kill(decode, signal.SIGKILL)
    many.replaced("decode", decode)
    os.kill(prefill, signal.SIGSTOP)
    many.replaced("prefill", prefill)
    many.pids()
    kinds = [decision["kind"] for decision in many.report()["decisions"]]
    assert kinds.count("replace") == 2, many.report()


def _a_controller_that_is_started_again_takes_over_what_runs(many):
    before, controller = many.pids(), many.controller()
    many.baton()
    assert many.controller() == controller, "the same config: nothing is changed"
    os.kill(controller, signal.SIGKILL)
    many.replaced("head", controller)
    assert many.pids() == before
    many.file.write_text(many.file.read_text() + "slo: {itl_ms: 77}\n")
    controller = many.controller()
    many.baton()
    many.replaced("head", controller)
    assert many.pids() == before
    os.kill(before[1], signal.SIGKILL)
    many.replaced("decode", before[1])


@pytest.mark.sample(1, of="a Ray cluster of three nodes")
def test_a_head_that_is_started_again(nodes, home, tmp_path, monkeypatch):
    """The same workers serve requests while the head is away. The controller then runs on the new head."""
    many = Many(nodes, tmp_path)
    prompt, options = list(b"served meanwhile"), {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    small = Job(prompt, options, oracle_answer(prompt, **options))
    for name, value in nodes.env.items():
        monkeypatch.setenv(name, value)
    with home.cluster(many.file) as cluster:
        before, controller = many.pids(), many.controller()
        with Load(cluster, [small], 4, clients=1, loyal=True) as load:
            nodes.kill("head")
            nodes.start_head()
            assert many.controller() != controller
            assert many.pids() == before
            eventually(lambda: cluster.pid("controller"), within_s=120)
            load.settle()
        os.kill(before[1], signal.SIGKILL)
        many.replaced("decode", before[1])
        assert many.pids()[0] == before[0]
    assert nodes.no_actors(), "`down` returns when all are gone"


@pytest.mark.sample(1, of="a Ray cluster of three nodes")
def test_what_cannot_live_without_an_embedded_redis_ends_with_it(nodes, home, tmp_path, monkeypatch):
    many = Many(nodes, tmp_path)
    for name, value in nodes.env.items():
        monkeypatch.setenv(name, value)
    done = home.baton("up", "-c", many.file, "--set", "decode.kv_memory=1KiB")
    assert done.returncode == 3, done.stderr
    assert "kv_memory" in done.stderr
    assert nodes.no_actors()
    home.baton("up", "-c", many.file, "--set", "redis.url=embedded", "--detach", check=True)
    assert all(nodes.actors(name) for name in nodes.nodes)
    os.kill(ClusterProcess(home, "many").state().supervisor.pid, signal.SIGKILL)
    eventually(nodes.no_actors, within_s=60)
