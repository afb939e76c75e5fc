import pytest
import torch

from tests.support.engines import oracle


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def backend():
    return oracle()
