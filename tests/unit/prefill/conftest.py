"""A prefill worker and a router session."""

import pytest

from tests.support.sessions import FakeSession
from tests.support.workers import PrefillSide


@pytest.fixture
def side():
    return PrefillSide()


@pytest.fixture
def chunked():
    """A worker that needs three steps for a prompt of 9 tokens."""
    return PrefillSide(max_batched_tokens=4)


@pytest.fixture
def router():
    return FakeSession()
