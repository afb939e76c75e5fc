"""A prefill and a decode worker as processes, a real Redis, and a stream that acts as a valid or invalid router."""

import asyncio
import contextlib
import os
import signal
import sys
from functools import cached_property
from typing import Any

import psutil
import pytest
from grpc import StatusCode

from baton.clock import SystemClock
from baton.cluster.backend_process import Child, ProcessSpec, stop_all
from baton.cluster.signals import Stop
from baton.core import PROTOCOL_VERSION, HandoffId, Incarnation, Load, Role, Sampling, SequenceSpec, WorkerRef
from baton.engine.oracle import OracleBackend
from baton.errors import LedgerError
from baton.ledger.embedded_redis import EmbeddedRedis
from baton.ledger.registry import Ledger
from baton.rpc import convert
from baton.rpc.channel import aio_channel
from baton.rpc.v1 import worker_pb2 as pb
from baton.rpc.v1.worker_pb2_grpc import WorkerStub
from tests.support import sessions
from tests.support.time_factor import scaled
from tests.support.waiting import at_most, until

pytestmark = pytest.mark.slow
LEASE_S = scaled(5.0)  # longer than a loaded machine keeps a frozen worker from its next heartbeat
CONFIG = f"""
name: workers
model: {{path: oracle, max_model_len: 1024}}
ray: {{address: none}}
prefill: {{device: cpu, threads: 1, kv_memory: 256KiB}}
decode: {{device: cpu, threads: 1, kv_memory: 256KiB}}
ledger: {{lease_s: {LEASE_S}, heartbeat_s: 0.1}}
transfer: {{frame_deadline_s: 2.0}}
"""
LONG = Sampling(max_tokens=900, temperature=0.0, ignore_eos=True)
SHORT = Sampling(max_tokens=40, temperature=0.7, seed=11, ignore_eos=True)


class Process(Child):
    """A worker, started as its supervisor starts it. `ref` comes from its ready message."""

    def __init__(self, role, folder, number=0):
        argv = [sys.executable, "-m", "baton", f"{role}-worker", "-c", str(folder / "workers.yaml")]
        super().__init__(ProcessSpec(role.value, argv, folder / f"{role}-{number}.log"))
        self.start()

    @cached_property
    def ref(self):
        ready: Any = self.wait_ready(Stop())
        worker_id, _, incarnation = ready["worker"].partition("@")
        return WorkerRef(worker_id, Incarnation.parse(incarnation), ready["address"])


class Workers:
    def __init__(self, folder, redis):
        self.folder, self.redis = folder, redis
        (folder / "workers.yaml").write_text(CONFIG + f"redis: {{url: '{redis.url}'}}\n")
        self.children = {role: Process(role, folder) for role in Role}

    async def registered(self):
        ledger = await Ledger.connect(self.redis.url, "baton:workers", LEASE_S, SystemClock())
        try:
            return {info.ref for info in await ledger.workers()}
        finally:
            await ledger.close()

    @contextlib.asynccontextmanager
    async def router(self):
        """Connect to both workers."""
        async with Stream(self.children[Role.PREFILL].ref) as p, Stream(self.children[Role.DECODE].ref) as d:
            yield Router(p, d, (await d.welcome()).fingerprint)


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    with EmbeddedRedis.start(folder) as redis:
        made = Workers(folder, redis)
        yield made
        stop_all(list(made.children.values()), scaled(20))


class Stream(sessions.FakeSession):
    """A router's stream to one worker."""

    def __init__(self, ref, incarnation=None):
        super().__init__("raw")
        self.ref = ref
        self.hello = incarnation or ref.incarnation
        self.load = Load()
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self):
        channel = await self._stack.enter_async_context(aio_channel(self.ref.address))
        self.call = WorkerStub(channel).Connect()
        worker = convert.incarnation_to_pb(self.hello)
        hello = pb.RouterHello(router_id=self.router_id, protocol_version=PROTOCOL_VERSION, worker=worker)
        await self.say(pb.RouterCommand(hello=hello))
        self.reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_):
        self.call.cancel()
        self.reader.cancel()
        await self._stack.aclose()

    async def say(self, *commands):
        await self.call.write(pb.RouterMessage(commands=commands))

    async def _read(self):
        with contextlib.suppress(Exception):
            async for message in self.call:
                self.emit(message.events)
                self.load = convert.load_from_pb(message.load)

    async def heard(self, kind, handoff):
        """Return the first event of this kind."""
        await until(lambda: kind in self.kinds(handoff), f"{kind} of {handoff}", within_s=20)
        return next(event for event in self.told(handoff) if event.HasField(kind))

    async def welcome(self):
        await until(lambda: self.events)
        return convert.info_from_pb(self.events[0].welcome)

    async def report(self):
        """Return the load after some more reports. Earlier messages have arrived by then."""
        due = len(self.messages) + 3
        await until(lambda: len(self.messages) >= due)
        return self.load

    async def all_free(self):
        await self.report()
        await until(lambda: self.load.blocks.available == self.load.blocks.total > 0, within_s=20)


class Router:
    """A router with streams to both workers."""

    def __init__(self, p, d, fingerprint):
        self.p, self.d, self.fingerprint = p, d, fingerprint

    async def reserve(self, handoff, spec):
        await self.d.say(sessions.reserve(handoff, len(spec), fingerprint=self.fingerprint))
        await self.d.heard("reserved", handoff)

    async def prefill(self, handoff, spec):
        await self.p.say(sessions.prefill(handoff, spec, self.d.ref))

    async def answer(self, handoff, spec):
        """Run one request from Reserve to its last token, and check its tokens."""
        await self.reserve(handoff, spec)
        await self.prefill(handoff, spec)
        await self.d.heard("finish", handoff)
        assert self.d.ids(handoff) == OracleBackend().expected(spec)

    async def all_free(self):
        for stream in (self.p, self.d):
            await stream.all_free()


def spec_of(length=100, sampling=LONG):
    return SequenceSpec(tuple((3 * i + length) % 250 for i in range(length)), sampling)


def handoff_of(request):
    return HandoffId(request, 1)


async def test_a_router_that_leaves_during_a_push_gets_all_blocks_back(workers):
    """The decode worker is frozen for less than its lease. The push waits, but its blocks are free."""
    decode = psutil.Process(workers.children[Role.DECODE].pid)
    handoff, spec = handoff_of("cut in push"), spec_of(length=400)
    async with workers.router() as watcher, contextlib.AsyncExitStack() as leaving:
        router = await leaving.enter_async_context(workers.router())
        await router.reserve(handoff, spec)
        decode.suspend()
        try:
            await router.prefill(handoff, spec)
            await router.p.heard("tokens", handoff)
            await leaving.aclose()
            await watcher.p.all_free()
        finally:
            decode.resume()
        await watcher.all_free()
        await watcher.answer(handoff_of("after push"), spec_of(sampling=SHORT))


async def test_a_worker_that_was_frozen_beyond_its_lease_comes_back_as_another(workers):
    frozen = workers.children[Role.DECODE]
    old = frozen.ref

    async def lapsed():
        return old not in await workers.registered()

    async with workers.router() as router:
        handoff, spec = handoff_of("frozen"), spec_of()
        await router.reserve(handoff, spec)
        await router.prefill(handoff, spec)
        await router.d.heard("committed", handoff)
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            await until(lapsed, "its lease has lapsed", within_s=20, every_s=0.05)
            workers.children[Role.DECODE] = replacement = Process(Role.DECODE, workers.folder, 1)
            new = await asyncio.to_thread(getattr, replacement, "ref")  # in the same place, while the old one is frozen
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        await asyncio.to_thread(frozen.wait, scaled(20))
        assert isinstance(frozen.failure(), LedgerError)
        await asyncio.wait([router.d.reader], timeout=scaled(10))
        assert router.d.reader.done()
    assert (new.worker_id == old.worker_id, new.incarnation == old.incarnation) == (True, False)
    assert {ref for ref in await workers.registered() if ref.worker_id == old.worker_id} == {new}
    async with Stream(new, old.incarnation) as stream, at_most(10):
        assert await stream.call.code() is StatusCode.FAILED_PRECONDITION
    async with workers.router() as router:
        await router.all_free()
        await router.answer(handoff_of("after the freeze"), spec_of(sampling=SHORT))
