import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Two would wait for each other beside other tests."""
    torch.set_num_threads(1)
