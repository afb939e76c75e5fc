"""Routers in this process with scripted workers, and ledgers in a Redis server for each module."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.cli.setup.certs import certs
from baton.clock import Clock, SystemClock
from baton.ledger import prefix_directory
from baton.ledger.embedded_redis import EmbeddedRedis
from baton.ledger.registry import Ledger
from tests.integration.gateway_support import Alone, alone
from tests.support.in_process_router import clusters
from tests.support.ledger import LONG_LEASE_S, PREFIXES


@pytest.fixture
async def make() -> AsyncIterator[Any]:
    """A function that starts a router with scripted workers. All are stopped after the test."""
    async with clusters() as build:
        yield build


@pytest.fixture
async def cluster(make: Callable[..., Awaitable[Any]]) -> Any:
    """A router with default settings, one prefill worker and one decode worker."""
    return await make()


@pytest.fixture
async def gateway() -> AsyncIterator[Alone]:
    """A gateway without a router in its process, in front of a scripted server."""
    async with alone() as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of one cluster, as `baton certs` writes them."""
    made = tmp_path_factory.mktemp("tls") / "cluster"
    certs(made, [], 30)
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A Redis server for this module."""
    with EmbeddedRedis.start(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
async def connect(server: EmbeddedRedis) -> AsyncIterator[Callable[..., Awaitable[Ledger]]]:
    """A function that opens a ledger under the test's own prefix, like a starting process."""
    prefix, opened = next(PREFIXES), []

    async def open_one(url: str = server.url, lease_s: float = LONG_LEASE_S, clock: Clock | None = None) -> Ledger:
        opened.append(await Ledger.connect(url, prefix, lease_s, clock or SystemClock()))
        return opened[-1]

    yield open_one
    for ledger in opened:
        await ledger.close()


@pytest.fixture
async def ledger(connect: Callable[..., Awaitable[Ledger]]) -> Ledger:
    """A ledger under the test's own prefix."""
    return await connect()


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes to the prefix directory without a pause between two writes."""
    monkeypatch.setattr(prefix_directory, "INTERVAL_S", 0.0)
