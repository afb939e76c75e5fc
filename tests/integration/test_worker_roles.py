"""A worker's host on this event loop, with a real Redis: its drains and role changes."""

import asyncio
import contextlib
import weakref
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.cluster.serve import role_factories
from baton.clock import SystemClock
from baton.config import load_config
from baton.core import HandoffId, Role, WorkerRef
from baton.engine.kv_cache import KVCache
from baton.ledger.control_state import ControlState, WorkerCommand
from baton.ledger.ownership import OwnershipRecord, OwnershipStore, RecordState
from baton.ledger.registry import Ledger
from baton.rpc.channel import aio_channel
from baton.tokenizer import OracleTokenizer
from baton.worker import engine_factory, process
from baton.worker.process import serve
from baton.worker.settings import of_both_roles
from router.placement.policy import POLICIES
from router.workers.pool import PoolOptions, WorkerPool
from tests.integration.gateway_support import raw
from tests.integration.test_worker_process import LONG, SHORT, Stream, handoff_of, spec_of
from tests.support import sessions
from tests.support.waiting import until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
CONFIG = """
name: turning
model: {{path: oracle, max_model_len: 512}}
redis: {{url: '{redis}'}}
prefill: {{device: cpu, threads: 1, kv_memory: 256KiB}}
decode: {{device: cpu, threads: 1, kv_memory: 256KiB}}
ledger: {{lease_s: 30.0, heartbeat_s: 0.05}}
"""  # longer than a loaded machine keeps this event loop from a heartbeat


class Worker:
    """Runs until it ends by itself or is stopped. `refs` are its incarnations."""

    def __init__(self, both, role, ledger):
        self.refs: list[WorkerRef] = []
        self.stop, self.ledger = asyncio.Event(), ledger
        self.task = asyncio.create_task(serve(both, role_factories(), role, self.stop, self.refs.append))

    async def ready(self, incarnations=1):
        async def registered():
            if self.task.done():
                self.task.result()
            return len(self.refs) == incarnations

        await until(registered)
        return self.refs[-1]

    async def order(self, role, **facts):
        command = WorkerCommand(incarnation=str(self.refs[-1].incarnation), role=role, **facts)
        await ControlState(self.ledger.connection).put_order(self.refs[-1].worker_id, command)

    async def roles(self):
        return {info.ref.worker_id: info.role for info in await self.ledger.workers()}


@pytest.fixture
async def worker(server, tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG.format(redis=server.url))
    config = load_config(tmp_path / "c.yaml")
    ledger = await Ledger.connect(server.url, "baton:turning", 30.0, SystemClock())
    made = Worker(of_both_roles(config, "prefill-3", Role.PREFILL), Role.PREFILL, ledger)
    await made.ready()
    yield made
    made.stop.set()
    await made.task
    await ledger.close()


async def health(ref):
    """Return the health status, or None without an answer."""
    async with aio_channel(ref.address) as channel:
        with contextlib.suppress(grpc.aio.AioRpcError):
            stub: Any = health_pb2_grpc.HealthStub(channel)
            return (await stub.Check(health_pb2.HealthCheckRequest())).status
    return None


@contextlib.asynccontextmanager
async def reserved(ref):
    """Yield a router's stream to a decode worker with a waiting reservation."""
    async with Stream(ref) as router:
        info, handoff = await router.welcome(), handoff_of("waits")
        spec = spec_of(length=40, sampling=SHORT)
        await router.say(sessions.reserve(handoff, len(spec), fingerprint=info.fingerprint))
        await router.heard("reserved", handoff)
        yield router


async def test_it_is_of_the_other_role_under_its_id_and_its_old_pool_is_gone(worker, monkeypatch):
    pools: list[weakref.ref[KVCache]] = []
    free: list[list[bool]] = []

    def build_engine(*given):
        engine = engine_factory.build_engine(*given)
        free.append([pool() is None for pool in pools])
        pools.append(weakref.ref(engine.kv))
        return engine

    monkeypatch.setattr(process, "build_engine", build_engine)
    assert await health(worker.refs[0]) == SERVING
    for incarnations, role in enumerate((Role.DECODE, Role.PREFILL, Role.DECODE), 2):
        await worker.order(role)
        ref = await worker.ready(incarnations)
        assert await worker.roles() == {"prefill-3": role}
        assert await health(ref) == SERVING
        assert await health(worker.refs[-2]) is None or worker.refs[-2].address == ref.address
        async with Stream(ref) as router:
            assert (await router.welcome()).role is role
    assert free == [[], [True], [True, True]]
    assert len({ref.incarnation for ref in worker.refs}) == 4


async def test_told_to_drain_it_ends_when_nothing_is_left(worker):
    await worker.order(Role.DECODE)
    ref = await worker.ready(2)
    async with reserved(ref) as router:
        await worker.order(Role.DECODE, drain=True)
        await until(lambda: router.load.draining)
        assert await health(ref) == NOT_SERVING
        assert await worker.roles() == {"prefill-3": Role.DECODE}  # and keeps its lease
        another = handoff_of("another")
        await router.say(sessions.reserve(another, 40, fingerprint=(await router.welcome()).fingerprint))
        await router.heard("refused", another)
        await router.say(sessions.prefill(handoff_of("waits"), spec_of(length=40, sampling=SHORT), to=None))
        await worker.task
        await asyncio.wait([router.reader])
        assert router.kinds(handoff_of("waits"))[-1] == "finish"
        assert len(router.ids(handoff_of("waits"))) == SHORT.max_tokens
    assert await worker.roles() == {}


@pytest.mark.parametrize("how", ["stop", "grace"])
async def test_what_is_left_is_given_back_when_its_time_is_up(worker, how):
    """The ledger then has no record of anything held."""
    await worker.order(Role.DECODE)
    waits, runs = handoff_of("waits"), handoff_of("runs")
    async with reserved(await worker.ready(2)) as router:
        await router.say(sessions.reserve(runs, 40, fingerprint=(await router.welcome()).fingerprint))
        await router.say(sessions.prefill(runs, spec_of(length=40, sampling=replace(LONG, max_tokens=400)), to=None))
        await router.heard("tokens", runs)
        await worker.order(Role.PREFILL, grace_s=60.0 if how == "stop" else 0.2)
        await until(lambda: router.load.draining)
        if how == "stop":
            worker.stop.set()
        await router.heard("refused", waits)
    await (worker.task if how == "stop" else worker.ready(3))
    assert await worker.roles() == ({} if how == "stop" else {"prefill-3": Role.PREFILL})
    records = [await OwnershipStore(worker.ledger.connection).read(each.request_id) for each in (waits, runs)]
    assert [record and record.state for record in records] == [RecordState.RELEASED] * 2


async def test_a_router_spares_who_drains_and_takes_who_has_turned(worker):
    await worker.order(Role.DECODE)
    ref = await worker.ready(2)
    pool = WorkerPool(worker.ledger.workers, POLICIES["predicted"], "router-a", 30.0, SystemClock())
    await pool.start()
    try:
        async with reserved(ref) as router:
            await until(pool.can_serve)
            (link,) = pool.links
            await worker.order(Role.PREFILL)
            await until(lambda: router.load.draining)
            await until(lambda: not pool.can_serve())
            assert (link.state, link.retired, pool.place(10)) == ("connected", False, None)
            await router.say(sessions.release(handoff_of("waits")))
            after = await worker.ready(3)
        await until(lambda: [link.info.ref for link in pool.links if link.usable] == [after])
        await until(lambda: [worker_id for worker_id, _ in pool.loads()] == ["prefill-3"])
        assert [one.info.role for one in pool.links] == [Role.PREFILL]
        assert link not in pool.links
    finally:
        await pool.stop()


@pytest.mark.parametrize(("tokenizer", "fits"), [(OracleTokenizer().identity(), True), ("of another model", False)])
async def test_a_router_sends_nothing_to_a_worker_with_another_tokenizer(worker, tokenizer, fits):
    """During `helm upgrade` to another model, new routers find the old workers."""
    await worker.order(Role.DECODE)
    ref = await worker.ready(2)
    options = PoolOptions(tokenizer=tokenizer)
    policy = POLICIES["predicted"]
    pool = WorkerPool(worker.ledger.workers, policy, "router-a", 30.0, SystemClock(), options=options)
    await pool.start()
    try:
        await until(lambda: [link.state for link in pool.links] == ["connected"])
        assert (pool.can_serve(), pool.max_model_len() is not None, pool.place(10) is not None) == (fits, fits, fits)
        record = OwnershipRecord(HandoffId("r", 1), RecordState.COMMITTED, ref.worker_id, ref.incarnation, "other")
        assert (pool.place_on(record) is not None) is fits
        assert ("its tokenizer is not that of this router's model" in pool.note(pool.links[0])) is not fits
    finally:
        await pool.stop()


async def test_it_serves_its_metrics_where_it_says(worker):
    for incarnations, role in enumerate((Role.PREFILL, Role.DECODE), 1):
        if incarnations > 1:
            await worker.order(role)
            await worker.ready(incarnations)
        (info,) = await worker.ledger.workers()
        text = (await raw(info.metrics, "GET", "/metrics"))[2].decode()
        assert f'baton_worker_info{{fingerprint="{info.fingerprint[:12]}",model="oracle",role="{role.value}"' in text
        assert f'baton_kv_blocks{{role="{role.value}",state="free"}} {info.total_blocks}.0' in text
        assert 'baton_lease_seconds{worker="prefill-3"} 30.0' in text
