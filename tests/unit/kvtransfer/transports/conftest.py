"""Channels over every transport, for tests of the contract."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.kvtransfer.transports.pairs import Pairs, two


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture(params=["memory", "gloo", "grpc"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pairs(kind: str, pool: ThreadPoolExecutor) -> Iterator[Pairs]:
    with two(kind) as sides:
        pairs = Pairs(sides, pool)
        yield pairs
        pairs.close()
