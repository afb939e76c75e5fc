"""A Redis that was away, came back empty, or from an older copy: epochs, grace and expiry."""

from collections.abc import Awaitable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from baton.core import HandoffId
from baton.ledger.embedded_redis import EmbeddedRedis
from baton.ledger.ownership import OwnershipLog, RecordState
from baton.ledger.prefix_directory import PrefixPublisher
from baton.ledger.registry import Ledger
from tests.support.ledger import LONG_LEASE_S, info_of, order, raw, registered


def wipe(server: EmbeddedRedis, ledger: Ledger) -> None:
    client = raw(server)
    client.delete(*client.keys(ledger.connection.key("*")))


def grace_ms(server: EmbeddedRedis, ledger: Ledger) -> int:
    return max(0, raw(server).pttl(ledger.connection.key("grace")))


@pytest.fixture
def grace_ends(server, monkeypatch):
    """A function that replaces a mint's sleep by the end of the grace. Returns sleeps and remaining graces in ms."""

    def without_sleep(ledger: Ledger, meanwhile: Awaitable[Any] | None = None) -> list[tuple[float, int]]:
        slept: list[tuple[float, int]] = []

        async def sleep(seconds: float) -> None:
            slept.append((seconds * 1000, grace_ms(server, ledger)))
            if meanwhile is not None:
                await meanwhile
            raw(server).delete(ledger.connection.key("grace"))

        monkeypatch.setattr("baton.ledger.registry.asyncio", SimpleNamespace(sleep=sleep))
        return slept

    return without_sleep


async def test_a_first_store_makes_nobody_wait(connect, server):
    ledgers = [await connect() for _ in range(3)]
    assert await ledgers[0].workers() == []
    assert raw(server).keys(ledgers[0].connection.key("*")) == [], "looking at an empty store starts nothing"
    with structlog.testing.capture_logs() as logged:
        infos = [await registered(ledger, f"decode-{n}") for n, ledger in enumerate(ledgers)]
        assert await ledgers[0].workers() == infos
    assert logged == []
    assert grace_ms(server, ledgers[0]) == 0
    assert len({info.ref.incarnation.epoch for info in infos}) == 1


@pytest.mark.parametrize("how", ["renew", "workers", "register", "mint"])
async def test_whoever_knows_more_than_the_store_starts_the_next_epoch_and_its_grace(ledger, server, grace_ends, how):
    info = await registered(ledger)
    wipe(server, ledger)
    slept = grace_ends(ledger)
    match how:
        case "renew":
            assert not await ledger.renew(info.ref, 1)
        case "workers":
            assert await ledger.workers() == []
        case "register":
            assert await ledger.register(info)
        case "mint":
            assert order(await ledger.mint()) > order(info.ref.incarnation)
    epoch = int(raw(server).get(ledger.connection.key("epoch")) or 0)
    assert epoch > info.ref.incarnation.epoch
    left_ms = slept[0][1] if how == "mint" else grace_ms(server, ledger)
    assert 0 < left_ms <= LONG_LEASE_S * 1000


async def test_after_a_loss_a_new_incarnation_waits_unless_its_place_was_entered_again(connect, server, grace_ends):
    live, fresh = await connect(), await connect()
    info = await registered(live)
    wipe(server, live)
    assert await live.register(info)
    slept = grace_ends(live)
    at_once = await fresh.mint("decode-0")
    left_ms = grace_ms(server, live)
    assert (slept, left_ms > 0) == ([], True)
    waited = await fresh.mint("prefill-0")
    ((slept_ms, then_left_ms),) = slept
    assert left_ms >= slept_ms >= then_left_ms > 0
    assert order(info.ref.incarnation) < order(at_once) < order(waited)


async def test_what_is_minted_after_a_loss_is_later_than_all_who_live(connect, server, grace_ends):
    """The reason for the grace: the first worker to register may not have the highest epoch."""
    other, live, fresh = [await connect() for _ in range(3)]
    low = await registered(other, "prefill-0")
    high = replace(low.ref.incarnation, epoch=low.ref.incarnation.epoch + 10**12)
    assert await live.register(info_of(high))
    wipe(server, live)
    assert await other.workers() == []
    slept = grace_ends(live, live.register(info_of(high)))
    assert order(await fresh.mint("decode-1")) > order(high)
    assert len(slept) == 1


async def test_a_loss_that_a_newcomer_hid_is_noticed_by_the_first_who_enters_again(connect, server):
    live, newcomer = await connect(), await connect()
    info = await registered(live)
    told: list[str] = []
    live.follow(lambda: told.append("live"))
    wipe(server, live)
    hidden = await newcomer.mint("prefill-0")  # has seen no epoch, so it takes the store for a first one
    assert grace_ms(server, live) == 0
    assert not await live.renew(info.ref, 1)
    assert told == ["live"]
    assert await live.register(info)
    assert grace_ms(server, live) > 0
    assert await newcomer.register(info_of(hidden, "prefill-0"))
    assert len(await live.workers()) == 2


async def test_an_older_copy_of_the_store_does_not_mint_twice(connect, server, grace_ends):
    live, fresh = await connect(), await connect()
    minted = [await live.mint() for _ in range(5)]
    raw(server).set(live.connection.key("counter"), 2)
    assert await live.workers() == []
    slept = grace_ends(live)
    assert await fresh.mint() not in minted
    assert len(slept) == 1


async def test_a_grace_is_not_prolonged_by_those_who_enter_again(connect, server):
    ledgers = [await connect() for _ in range(3)]
    infos = [await registered(ledger, f"decode-{n}") for n, ledger in enumerate(ledgers)]
    wipe(server, ledgers[0])
    assert await ledgers[0].register(infos[0])
    raw(server).pexpire(ledgers[0].connection.key("grace"), 5000)
    for ledger, info in zip(ledgers[1:], infos[1:], strict=True):
        assert await ledger.register(info)
    assert 0 < grace_ms(server, ledgers[0]) <= 5000


async def test_every_key_has_a_time_to_live_but_the_two_that_carry_the_order(ledger, server):
    """The epoch and the counter never expire, because without them a store could mint an incarnation twice."""
    info, client = await registered(ledger), raw(server)
    await registered(ledger, "prefill-0")
    wipe(server, ledger)
    for _ in range(2):
        assert await ledger.register(info)
        assert await ledger.renew(info.ref, 1)
    records, blocks = OwnershipLog(ledger, info.ref), PrefixPublisher(ledger, info.ref)
    for state in RecordState:
        records.note(HandoffId(state.name, 1), "router", state)
    blocks.note([b"x" * 32])
    for writer in (records, blocks):
        await writer.flush()
    await ledger.mint("decode-0")
    prefix = ledger.connection.key("")
    names = [str(name, "utf-8") for name in client.keys(f"{prefix}*") if isinstance(name, bytes)]
    ttl_ms = {name.removeprefix(prefix): client.pttl(name) for name in names}
    assert set(ttl_ms) == {
        *("epoch", "counter", "grace", "workers", "worker:decode-0", "place:decode-0"),
        *("blocks:decode-0", "block-events"),
        *(f"req:{state.name}" for state in RecordState),
    }
    assert {name for name, ttl in ttl_ms.items() if ttl < 0} == {"epoch", "counter"}
    assert ttl_ms["worker:decode-0"] <= LONG_LEASE_S * 1000
    for writer in (records, blocks):
        await writer.close()
