"""The prefix directory against a real redis-server: writers, a reader, and every kind of loss between them."""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog

from baton.core import HandoffId, WorkerInfo
from baton.errors import LedgerError
from baton.ledger import prefix_directory
from baton.ledger.embedded_redis import EmbeddedRedis
from baton.ledger.ownership import OwnershipLog, OwnershipStore, RecordState
from baton.ledger.prefix_directory import DONE, GAP, REFUSED, DirectoryStore, PrefixPublisher, PrefixReplica
from baton.ledger.prefix_index import Change, Holder
from baton.ledger.registry import Ledger
from tests.support.ledger import holders, opened, password_of, raw, registered
from tests.support.time_factor import scaled
from tests.support.waiting import until

DIGESTS = [n.to_bytes(2, "big") * 16 for n in range(5000)]

pytestmark = pytest.mark.usefixtures("without_pauses")


def holder_of(info: WorkerInfo) -> Holder:
    return Holder(info.ref.worker_id, info.ref.incarnation)


@contextlib.asynccontextmanager
async def following(view: PrefixReplica) -> AsyncIterator[None]:
    task = asyncio.create_task(view.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


@pytest.fixture
async def written(ledger):
    """A worker, its log with three written blocks, and a view that has read them."""
    info = await registered(ledger)
    log, view = PrefixPublisher(ledger, info.ref), PrefixReplica(ledger.connection)
    log.note(DIGESTS[:3])
    await log.flush()
    await view.compare()
    assert holders(view.prefixes, DIGESTS) == {holder_of(info): 3}
    yield info, log, view
    await log.close()


async def test_a_router_that_starts_late_knows_all_and_one_that_follows_is_told(ledger):
    one, two = await registered(ledger, "prefill-0"), await registered(ledger, "prefill-1")
    logs = [PrefixPublisher(ledger, info.ref) for info in (one, two)]
    logs[0].note(DIGESTS)
    logs[1].note(DIGESTS[:10])
    for log in logs:
        await log.flush()
    view = PrefixReplica(ledger.connection, compare_s=3600)
    await view.compare()
    assert holders(view.prefixes, DIGESTS) == {holder_of(one): 5000, holder_of(two): 10}
    async with following(view):
        logs[1].note(DIGESTS[10:20])
        await until(lambda: holders(view.prefixes, DIGESTS) == {holder_of(one): 5000, holder_of(two): 20})
        logs[0].note([], DIGESTS[100:])
        await until(lambda: holders(view.prefixes, DIGESTS) == {holder_of(one): 100, holder_of(two): 20})
        replaced = await registered(ledger, "prefill-1")
        newer = PrefixPublisher(ledger, replaced.ref)
        newer.note(DIGESTS[:3])
        await newer.flush()
        await until(lambda: holders(view.prefixes, DIGESTS).get(holder_of(replaced)) == 3)
    await view.compare()
    assert holders(view.prefixes, DIGESTS) == {holder_of(one): 100, holder_of(replaced): 3}
    for log in (*logs, newer):
        await log.close()


async def test_a_waiting_reader_is_told_at_once_and_hinders_nobody(ledger):
    """The reader waits on its own connection, so that the ledger can make other calls."""
    info = await registered(ledger)
    store = DirectoryStore(ledger.connection)
    waiting = asyncio.create_task(store.events("0-0", 1500))
    for _ in range(3):
        assert await ledger.renew(info.ref, 1)
    assert not waiting.done()
    await store.publish(Change(holder_of(info), 1, True, [b"n" * 16]))
    ((_, change),) = await waiting
    assert change == Change(holder_of(info), 1, True, [b"n" * 16], [])
    assert await store.events("0-0", 0) != []


async def test_the_script_takes_changes_in_order_once_and_from_the_holder_of_the_place(ledger, server):
    old = await registered(ledger)
    store, mine, name = DirectoryStore(ledger.connection), holder_of(old), [b"n" * 16]

    def length() -> int:
        return int(raw(server).xlen(ledger.connection.key("block-events")))

    assert await store.publish(Change(mine, 1, added=name)) == GAP
    assert await store.publish(Change(mine, 0)) == GAP
    assert await store.publish(Change(mine, 1, True, name)) == DONE
    assert await store.publish(Change(mine, 1, True, name)) == DONE
    assert length() == 1
    assert await store.publish(Change(mine, 1)) == DONE  # the worker is still alive
    assert await store.publish(Change(mine, 3, added=name)) == GAP
    assert await store.publish(Change(mine, 2, removed=name)) == DONE
    assert await store.read("decode-0") == Change(mine, 2, True, [])
    assert length() == 2
    assert await store.publish(Change(mine, 3)) == GAP  # refers to change 3, which was not written
    new = await registered(ledger)
    assert await store.publish(Change(mine, 3, added=name)) == REFUSED
    assert await store.publish(Change(holder_of(new), 3, added=name)) == GAP
    assert await store.publish(Change(holder_of(new), 1, True, name)) == DONE
    assert await store.read("decode-0") == Change(holder_of(new), 1, True, name)
    assert await store.read("nobody") is None


async def test_the_stream_is_bounded_and_a_reader_that_was_away_longer_reads_the_sets(
    ledger, server, written, monkeypatch
):
    monkeypatch.setattr("baton.ledger.prefix_directory.EVENTS", 100)
    info, log, view = written
    for n in range(3, 500):
        log.note([DIGESTS[n]])
        await log.flush()
    assert raw(server).xlen(ledger.connection.key("block-events")) < 300
    await view.compare()
    assert holders(view.prefixes, DIGESTS) == {holder_of(info): 500}


async def test_blocks_of_a_dead_worker_expire_and_those_of_a_live_one_go_with_its_lease(ledger, server):
    dead, live = await registered(ledger, "prefill-0"), await registered(ledger, "prefill-1")
    ttl_s = scaled(1.0)  # longer than the first look
    last, log = PrefixPublisher(ledger, dead.ref, ttl_s=ttl_s), PrefixPublisher(ledger, live.ref, ttl_s=ttl_s)
    for one in (last, log):
        one.note(DIGESTS[:3])
        await one.flush()
    await last.close()  # sends no more updates
    view = PrefixReplica(ledger.connection)
    await view.compare()
    assert set(holders(view.prefixes, DIGESTS)) == {holder_of(dead), holder_of(live)}

    async def gone() -> bool:
        await view.compare()
        return set(holders(view.prefixes, DIGESTS)) == {holder_of(live)}

    await until(gone)
    assert not raw(server).exists(ledger.connection.key("blocks", "prefill-0"))
    await ledger.deregister(live.ref)
    await view.compare()
    assert holders(view.prefixes, DIGESTS) == {}
    await log.close()


async def test_damaged_and_foreign_events_and_sets_are_passed_over(ledger, server, written):
    info, log, view = written
    client, key = raw(server), ledger.connection.key
    client.xadd(key("block-events"), {"hello": "world"})
    fields: dict[Any, Any] = {"worker": "w", "seq": "1", "reset": "1", "added": "", "removed": ""}
    client.xadd(key("block-events"), {**fields, "incarnation": "x"})
    client.xadd(key("block-events"), {**fields, "incarnation": "1.1", "worker": b"\xff"})
    client.sadd(key("workers"), "string", "half", "other", b"\xff")
    client.set(key("blocks", "string"), "x")
    client.hset(key("blocks", "half"), "seq", 1)
    client.hset(key("blocks", "other"), mapping={"seq": "1", "incarnation": "none"})
    client.hset(key("blocks", "").encode() + b"\xff", mapping={"seq": "1", "incarnation": "1.1"})
    log.note(DIGESTS[3:5])
    await log.flush()
    with structlog.testing.capture_logs() as logged:
        await view.compare()
    assert [entry["event"] for entry in logged] == ["directory_damaged"] * 5
    assert await DirectoryStore(ledger.connection).read("other") is None
    assert holders(view.prefixes, DIGESTS) == {holder_of(info): 5}


async def test_a_store_that_begins_anew_with_its_clock_behind_is_followed(ledger, server, written):
    info, log, view = written
    events = ledger.connection.key("block-events")
    raw(server).xadd(events, {"from": "the future"}, id="99999999999999-0")
    await view.compare()
    raw(server).delete(events)
    await view.compare()
    log.note(DIGESTS[3:4])
    await log.flush()
    assert await view._advance()
    assert holders(view.prefixes, DIGESTS) == {holder_of(info): 4}


async def test_a_redis_that_is_killed_and_comes_back_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_directory, "RETRY_S", 0.02)
    server = EmbeddedRedis.start(tmp_path)
    ledger = await opened(server.url)
    info = await registered(ledger)
    log, view = PrefixPublisher(ledger, info.ref), PrefixReplica(ledger.connection, compare_s=0.05)
    log.note(DIGESTS[:100])
    await log.flush()
    records, store = OwnershipLog(ledger, info.ref), OwnershipStore(ledger.connection)
    for request, state in (("live", RecordState.COMMITTED), ("ended", RecordState.RELEASED)):
        records.note(HandoffId(request, 1), "router", state)
    await records.flush()
    async with following(view):
        await until(lambda: holders(view.prefixes, DIGESTS) == {holder_of(info): 100})
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        log.note(DIGESTS[100:110], DIGESTS[90:100])
        log.note(DIGESTS[90:100])
        with pytest.raises(LedgerError, match="prefix blocks not written"):
            await log.flush(0.1)
        assert holders(view.prefixes, DIGESTS) == {holder_of(info): 100}  # its last known state
        with EmbeddedRedis.start(tmp_path, port=server.port, password=password_of(server)):
            assert await ledger.register(info)
            await log.flush()
            await records.flush()
            restored = await store.read("live")
            assert restored is not None
            assert (restored.state, await store.read("ended")) == (RecordState.COMMITTED, None)
            await until(lambda: holders(view.prefixes, DIGESTS) == {holder_of(info): 110})
            await log.close()
            await records.close()
    await ledger.close()


class Cluster:
    """Two writers, a reader, and a Redis that loses data. `held` is the expected final state of the reader."""

    def __init__(self, ledger: Ledger, server: EmbeddedRedis, seed: int) -> None:
        self.dice = random.Random(seed)
        self.ledger, self.redis, self.key = ledger, raw(server), ledger.connection.key
        self.view = PrefixReplica(ledger.connection)
        self.infos: dict[str, WorkerInfo] = {}
        self.logs: dict[str, PrefixPublisher] = {}
        self.held: dict[str, set[int]] = {}
        self.done: Counter[str] = Counter()

    async def step(self) -> None:
        rare = (self.flush, self.compare, self.trim, self.expire, self.wipe, self.start)
        what = self.dice.choice((self.change,) * 8 + rare)
        await what(self.dice.choice(("prefill-0", "decode-0")))
        self.done[what.__name__] += 1

    async def start(self, name: str) -> None:
        if name in self.logs:
            await self.logs[name].close()
        self.infos[name], self.held[name] = await registered(self.ledger, name), set()
        self.logs[name] = PrefixPublisher(self.ledger, self.infos[name].ref)

    async def change(self, name: str) -> None:
        added, removed = (set(self.dice.sample(range(30), self.dice.randrange(8))) for _ in range(2))
        self.logs[name].note([DIGESTS[n] for n in added], [DIGESTS[n] for n in removed])
        self.held[name] = self.held[name] - removed | added

    async def flush(self, name: str) -> None:
        await self.logs[name].flush()

    async def compare(self, _: str) -> None:
        await self.view.compare()

    async def trim(self, _: str) -> None:
        self.redis.xtrim(self.key("block-events"), maxlen=self.dice.randrange(3), approximate=False)

    async def expire(self, name: str) -> None:
        self.redis.delete(self.key("blocks", name))

    async def wipe(self, _: str) -> None:
        self.redis.delete(*self.redis.keys(self.key("*")))
        for info in self.infos.values():
            assert await self.ledger.register(info)


@pytest.mark.parametrize("seed", range(4))
async def test_reader_and_store_agree_after_any_trouble(ledger, server, seed, monkeypatch):
    print(f"seed {seed}")
    monkeypatch.setattr(prefix_directory, "BATCH", 7)
    cluster = Cluster(ledger, server, seed)
    for name in ("prefill-0", "decode-0"):
        await cluster.start(name)
    for _ in range(150):
        await cluster.step()
    assert len(cluster.done) == 7, cluster.done
    for log in cluster.logs.values():
        log._refresh()  # as after the refresh interval, which finds expired keys
        await log.flush()
    await cluster.view.compare()
    known = {holder: names for holder, (_, names) in cluster.view.prefixes._held.items()}
    assert known == {
        holder_of(info): {DIGESTS[n][:16] for n in cluster.held[name]} for name, info in cluster.infos.items()
    }
    for log in cluster.logs.values():
        await log.close()
