"""Workers that are told to drain, or to be of the other role, under load: nobody notices."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import pytest

from baton import Client
from baton.cli.census import look
from baton.clock import SystemClock
from baton.cluster.processes import PARENT, READY_FD
from baton.core import Role
from baton.ledger.board import Board, Order
from baton.ledger.embedded import EmbeddedRedis
from baton.ledger.ledger import Ledger
from tests.e2e.failures_load import Load, draw_jobs
from tools.history_check import check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
THERE_AND_BACK = (
    ("prefill-1", Role.DECODE),
    ("prefill-1", Role.PREFILL),
    ("decode-1", Role.PREFILL),
    ("decode-1", Role.DECODE),
)
WITHIN_S = 60.0
CONFIG = """
name: roles
model: {{path: oracle, max_model_len: 512}}
redis: {{url: '{redis}'}}
ray: {{address: none}}
history: {folder}/history
router: {{grpc: '127.0.0.1:0', admin: '127.0.0.1:0', metrics: '127.0.0.1:0', local_prefill: {local}}}
prefill: {{device: cpu, threads: 1, kv_memory: 1MiB}}
decode: {{device: cpu, threads: 1, kv_memory: 1MiB}}
ledger: {{lease_s: 3.0, heartbeat_s: 0.2}}
"""


class Process:
    """A role as a plain process; `ready` is what it said when it was."""

    def __init__(self, folder, *argv, log):
        self.log = folder / f"{log}.log"
        read_fd, write_fd = os.pipe()
        env = {**os.environ, READY_FD: str(write_fd), PARENT: str(os.getpid())}
        with self.log.open("wb") as output:
            command = [sys.executable, "-m", "baton", *argv, "-c", str(folder / "cluster.yaml")]
            self.popen = subprocess.Popen(command, stdout=output, stderr=output, env=env, pass_fds=(write_fd,))
        os.close(write_fd)
        self._pipe = os.fdopen(read_fd)

    def wait_ready(self):
        with self._pipe as pipe:
            line = pipe.readline()
        assert line, self.log.read_text()
        self.ready = json.loads(line)


class Cluster:
    """Four workers and a router, as a controller starts them, and the board that it writes its orders on."""

    def __init__(self, folder, board, ledger):
        self.board, self.ledger = board, ledger
        worker = "{}-worker".format
        self.workers = {
            name: Process(folder, worker(name.partition("-")[0]), "--id", name, log=name) for name in WORKERS
        }
        self.router = Process(folder, "router", log="router")

    @property
    def processes(self):
        return [*self.workers.values(), self.router]

    def client(self, **options):
        return Client(self.router.ready["grpc"], admin=self.router.ready["admin"], **options)

    async def infos(self):
        return {info.ref.worker_id: info for info in await self.ledger.workers()}

    async def order(self, worker_id, role, *, drain=False, grace_s=30.0):
        """What this worker's present incarnation is told."""
        info = (await self.infos())[worker_id]
        order = Order(incarnation=str(info.ref.incarnation), role=role, drain=drain, grace_s=grace_s)
        await self.board.put_order(worker_id, order)
        return info.ref

    async def turn(self, worker_id, role):
        """Until it is of that role."""
        before = await self.order(worker_id, role)

        async def turned():
            info = (await self.infos()).get(worker_id)
            return info is not None and info.role is role and info.ref.incarnation != before.incarnation

        await until(f"{worker_id} is a {role.value} worker", turned)


async def until(what, look, within_s=WITHIN_S):
    deadline = asyncio.get_running_loop().time() + within_s
    while not (found := await look()):
        assert asyncio.get_running_loop().time() < deadline, f"not so within {within_s:g} s: {what}"
        await asyncio.sleep(0.05)
    return found


@asynccontextmanager
async def running(folder, *, local="never"):
    with EmbeddedRedis.start(folder / "redis") as redis:
        (folder / "cluster.yaml").write_text(CONFIG.format(redis=redis.url, folder=folder, local=local))
        ledger = await Ledger.connect(redis.url, "baton:roles", 3.0, SystemClock())
        cluster = Cluster(folder, Board(ledger.connection), ledger)
        try:
            for process in cluster.processes:
                await asyncio.to_thread(process.wait_ready)
            yield cluster
        finally:
            await ledger.close()
            for process in reversed(cluster.processes):
                process.popen.terminate()
            for process in cluster.processes:
                await asyncio.to_thread(process.popen.wait, 30)


@contextmanager
def loaded(cluster, seed):
    """Streams all the time. Each request is answered, to its last token, or left by its client."""
    with Load(cluster, draw_jobs(random.Random(seed)), seed) as load:
        yield load
    assert set(load.outcomes) <= {"whole", "left"}, load.outcomes


def all_is_free(cluster):
    """Nobody holds a block, and every block is accounted for; on how many workers."""
    censuses, problems = look(cluster.router.ready["admin"])
    assert [problem for problem in problems if problem.handoff is None] == []
    return not problems and not any(census.held for census in censuses) and len(censuses)


def checked(folder):
    report = check([folder / "history"])
    assert [str(violation) for violation in report.violations] == []
    return report


async def test_workers_change_their_roles_under_load(tmp_path, seed):
    async with running(tmp_path) as cluster:
        with loaded(cluster, seed) as load:
            await asyncio.to_thread(load.settle, 2)
            for worker_id, role in (*THERE_AND_BACK, *THERE_AND_BACK):
                await cluster.turn(worker_id, role)
                await asyncio.to_thread(load.settle, 2)
        pids = {name: info.pid for name, info in (await cluster.infos()).items()}
        assert pids == {name: cluster.workers[name].popen.pid for name in WORKERS}
        await until("all is free", partial(asyncio.to_thread, all_is_free, cluster))
    report = checked(tmp_path)
    lives = [journal.process for journal in report.journals]
    assert [lives.count(name) for name in WORKERS] == [1, 5, 1, 5]
    assert {journal.end for journal in report.journals} == {"stopped"}


@pytest.mark.parametrize("grace_s", [WITHIN_S, 0.0])
async def test_a_worker_that_is_told_to_drain_ends_and_its_streams_do_not(tmp_path, seed, grace_s):
    """They end there, or, when there is no time left, go on elsewhere."""
    async with running(tmp_path) as cluster:
        with loaded(cluster, seed) as load, cluster.client(timeout=WITHIN_S) as client:
            await asyncio.to_thread(load.settle, 2)
            for worker_id, role in (("decode-1", Role.DECODE), ("prefill-1", Role.PREFILL)):
                await cluster.order(worker_id, role, drain=True, grace_s=grace_s)
                process = cluster.workers[worker_id].popen
                assert await asyncio.to_thread(process.wait, WITHIN_S) == 0
                await asyncio.to_thread(load.settle, 2)
            assert set(await cluster.infos()) == {"prefill-0", "decode-0"}
            await asyncio.to_thread(client.generate, "what is left serves", max_tokens=4)
        await until("all is free", partial(asyncio.to_thread, all_is_free, cluster))
    report = checked(tmp_path)
    (drained,) = [journal for journal in report.journals if journal.process == "decode-1"]
    assert drained.end == "stopped"
