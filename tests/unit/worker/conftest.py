"""Both workers, a router session, and the settings of a decode worker."""

import gc

import pytest

from baton.config import load_config
from baton.core import Role
from baton.worker.settings import from_config
from tests.support.sessions import FakeSession
from tests.support.workers import Pair


@pytest.fixture
def pair():
    return Pair()


@pytest.fixture
def router():
    return FakeSession()


@pytest.fixture
def settings(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: oracle}\nredis: {url: 'redis://127.0.0.1:1/0'}\n")
    return lambda *sets: from_config(load_config(file, sets), Role.DECODE, "decode-0")


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Exclude the objects of the run from garbage collection again. `free_memory` includes them, and each full
    collection of the tests that follow would visit all of torch's: 0.3 s.
    """
    yield
    gc.freeze()
