"""A sender and a receiver in one process. Closing them must leave no thread."""

import threading
from collections.abc import Iterator

import pytest

from tests.support.waiting import eventually
from tests.unit.kvtransfer.support import Pair, Pairs


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    """A function that creates pairs. They are closed at the end."""
    before = set(threading.enumerate())
    pairs = Pairs()
    yield pairs
    pairs.close()
    eventually(lambda: set(threading.enumerate()) <= before, f"no more threads than {before}")


@pytest.fixture
def pair(pairs: Pairs) -> Pair:
    return pairs()
