"""A prefill and a decode worker, and a router session for the latter."""

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


@pytest.fixture
def begin(pair):
    """A function that begins a resumable stream and decodes `tokens` tokens."""

    def begin(session, tokens=3, resumable_s=30.0):
        pair.adopt(session, resumable_s=resumable_s, stream="mine")
        while len(session.ids()) < tokens:
            pair.decode.step()

    return begin
