"""A prefill and a decode worker, and a router of the latter, for each test."""

from __future__ import annotations

import pytest

from tests.support.sessions import FakeSession
from tests.support.workers import Pair


@pytest.fixture
def pair():
    return Pair()


@pytest.fixture
def side(pair):
    return pair.decode


@pytest.fixture
def router():
    return FakeSession("router-d")


@pytest.fixture
def second():
    return FakeSession("router-b")
