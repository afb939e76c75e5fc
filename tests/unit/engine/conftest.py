import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Two cores, many tests: one thread each."""
    torch.set_num_threads(1)
