"""The whole ledger against each installed redis-server: 6.2 from the wheel, and 7 or later if present.

Besides the common password: a user limited to our keys and commands, TLS, and a unix socket.
"""

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from baton.clock import SystemClock
from baton.core import HandoffId, Incarnation
from baton.errors import LedgerError
from baton.ledger import redis_client
from baton.ledger.embedded_redis import EmbeddedRedis, server_binary
from baton.ledger.ownership import OwnershipLog, OwnershipStore, RecordState
from baton.ledger.prefix_directory import PrefixPublisher, PrefixReplica
from baton.ledger.redis_client import COMMANDS, Connection
from baton.ledger.registry import Ledger
from tests.support import ledger as support
from tests.support.clients import Wire
from tests.support.ledger import LONG_LEASE_S, holders, info_of, owned_by, password_of, raw, registered, write_record
from tests.support.waiting import until

DIGESTS = [bytes([n]) * 32 for n in range(20)]


@pytest.fixture(scope="module", params=["6.2", "7 or later"])
def binary(request: pytest.FixtureRequest) -> Path:
    if request.param == "6.2":
        wheel = server_binary()
        assert support.version_of(wheel)[:2] == (6, 2)
        return wheel
    newer = support.newer_server()
    if newer is None:
        pytest.skip(f"no redis-server 7 or later on PATH or in {', '.join(support.KNOWN_PLACES)}")
    print(f"{newer} is version {support.version_of(newer)}")
    return newer


@pytest.fixture(scope="module")
def server(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis"), binary=binary) as running:
        yield running


pytestmark = pytest.mark.usefixtures("without_pauses")


async def everything(url: str, prefix: str) -> None:
    """Do everything that a worker and a router do, with a loss of all data in the middle."""
    worker, router = [await Ledger.connect(url, prefix, LONG_LEASE_S, SystemClock()) for _ in range(2)]
    info = await registered(worker, "decode-0")
    assert await worker.renew(info.ref, 1)
    assert await router.workers() == [info]
    records, blocks = OwnershipLog(worker, info.ref), PrefixPublisher(worker, info.ref)
    view, store = PrefixReplica(router.connection), OwnershipStore(router.connection)
    following = asyncio.create_task(view.run())

    async def told() -> None:
        await records.flush()
        await blocks.flush()

    async def seen() -> bool:
        return holders(view.prefixes, DIGESTS) == {("decode-0", info.ref.incarnation): len(DIGESTS)}

    for state in RecordState:
        for request in ("live", "over") if state <= RecordState.COMMITTED else ("over",):
            records.note(HandoffId(request, 1), "router", state)
        await told()
    blocks.note(DIGESTS)
    blocks.note(DIGESTS, DIGESTS)
    await told()
    await until(seen)
    over = await store.read("over")
    assert over is not None
    assert over.state is RecordState.RELEASED
    await forgotten(worker)
    assert not await worker.renew(info.ref, 2)
    assert await worker.register(info)
    await told()
    await until(seen)
    assert await worker.connection.call("DEL", worker.connection.key("grace")) == 1  # it lasts as long as a lease
    assert (await router.mint("prefill-0")).epoch > info.ref.incarnation.epoch
    live = await store.read("live")
    assert live is not None
    assert (live.state, owned_by(live, info.ref)) == (RecordState.COMMITTED, True)
    following.cancel()
    await asyncio.wait([following])
    for closing in (records, blocks):
        await closing.close()
    await worker.deregister(info.ref)
    assert await router.workers() == []
    for ledger in (worker, router):
        await ledger.close()


async def forgotten(ledger: Ledger) -> None:
    key = ledger.connection.key
    single = (key(name) for name in ("epoch", "counter", "workers", "block-events"))
    of_worker = (key(kind, "decode-0") for kind in ("worker", "place", "blocks"))
    await ledger.connection.call("DEL", *single, *of_worker, key("req", "live"), key("req", "over"))


async def test_with_a_user_limited_to_the_prefix_and_the_listed_commands(server):
    """The user in the docstring of `redis_client` has all required permissions."""
    prefix = next(support.PREFIXES)
    text = " ".join((redis_client.__doc__ or "").partition("user baton ")[2].partition("\n\n")[0].split())
    rules = text.replace("baton:NAME", prefix).replace("PASSWORD", "pw").split()
    assert {rule[1:] for rule in rules if rule.startswith("+") and "@" not in rule} == set(COMMANDS)
    raw(server).execute_command("ACL", "SETUSER", "limited", "reset", *rules)
    raw(server).script_flush()
    url = f"redis://limited:pw@127.0.0.1:{server.port}/0"
    await everything(url, prefix)
    foreign = await Ledger.connect(url, "baton:elsewhere", LONG_LEASE_S, SystemClock())
    store = OwnershipStore(foreign.connection)
    info = info_of(Incarnation(5, 1))
    for refused in (
        foreign.mint(),
        foreign.register(info),
        foreign.workers(),
        write_record(store, HandoffId("r", 1), info.ref, "router", RecordState.RESERVED),
        PrefixReplica(foreign.connection).compare(),
        foreign.connection.call("FLUSHALL"),
        foreign.connection.call("KEYS", "*"),
        foreign.connection.call("CONFIG", "GET", "*"),
    ):
        with pytest.raises(LedgerError, match="NoPermission"):
            await refused
    await foreign.close()


async def test_who_has_no_or_another_password_is_refused_without_showing_it(server):
    for url in (f"redis://127.0.0.1:{server.port}/0", f"redis://:another-one@127.0.0.1:{server.port}/0"):
        with pytest.raises(LedgerError, match=rf"127\.0\.0\.1:{server.port}: .*Authentication") as caught:
            await Connection.open(url, "baton:x")
        assert "another-one" not in str(caught.value)


async def test_over_tls_with_an_authority_of_ones_own(server, folder):
    """A relay terminates TLS, because the wheel's server has no TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    async with Wire(f"127.0.0.1:{server.port}", context).laid() as address:
        url = f"rediss://:{password_of(server)}@{address}/0"
        await everything(f"{url}?ssl_ca_certs={folder}/ca.pem", next(support.PREFIXES))
        with pytest.raises(LedgerError, match=r"(?i)certificate"):
            await Connection.open(url, "baton:x")


async def test_a_full_server_keeps_leases(server):
    """It rejects all that needs memory. A lease needs none."""
    ledger = await Ledger.connect(server.url, next(support.PREFIXES), LONG_LEASE_S, SystemClock())
    info = await registered(ledger, "decode-0")
    key = ledger.connection.key("worker", "decode-0")
    try:
        raw(server).config_set("maxmemory", 1)
        with pytest.raises(LedgerError, match="OutOfMemory"):
            await ledger.connection.call("SET", "x", "y")
        raw(server).pexpire(key, 60_000)
        assert await ledger.renew(info.ref, 1)
        assert 0 < raw(server).pttl(key) <= 1000 * LONG_LEASE_S
    finally:
        raw(server).config_set("maxmemory", 0)
        await ledger.close()


async def test_after_a_failover_the_successor_is_found(server, binary, tmp_path):
    """The name leads to the new primary. The old one stays up as a replica, and connections to it stay open."""
    relay, script = Wire(f"127.0.0.1:{server.port}"), redis_client.Script("return redis.call('INCR', KEYS[1])")
    async with AsyncExitStack() as leaving:
        successor = leaving.enter_context(EmbeddedRedis.start(tmp_path, binary=binary))
        raw(successor).config_set("requirepass", password_of(server))
        address = await leaving.enter_async_context(relay.laid())
        connection = await Connection.open(f"redis://:{password_of(server)}@{address}/0", "baton:x")
        leaving.push_async_callback(connection.close)
        raw(server).execute_command("REPLICAOF", "127.0.0.1", "1")
        leaving.callback(raw(server).execute_command, "REPLICAOF", "NO", "ONE")
        relay.leads_to(f"127.0.0.1:{successor.port}")
        with pytest.raises(LedgerError, match="ReadOnly"):
            await connection.call("SET", "x", "y")
        await connection.call("SET", "x", "y")
        relay.leads_to(f"127.0.0.1:{server.port}")
        await connection.client.connection_pool.disconnect()
        (refused,) = await connection.run_many(script, [(["n"], [])])
        assert "read only replica" in str(refused)
        relay.leads_to(f"127.0.0.1:{successor.port}")
        assert await connection.run_many(script, [(["n"], [])]) == [1]


async def test_over_a_unix_socket(binary, tmp_path):
    socket_file, config, script = tmp_path / "s", tmp_path / "redis.conf", tmp_path / "redis-server"
    script.write_text(f"#!/bin/sh\n{{ cat; echo unixsocket {socket_file}; }} > {config}\nexec '{binary}' {config}\n")
    script.chmod(0o755)
    with EmbeddedRedis.start(tmp_path, binary=script) as server:
        await everything(f"unix://:{password_of(server)}@{socket_file}?db=0", next(support.PREFIXES))
