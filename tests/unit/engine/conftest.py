import pytest

from tests.support.engines import oracle


@pytest.fixture(scope="session")
def backend():
    return oracle()
