import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Use one thread, because two threads would wait for each other when other tests run."""
    torch.set_num_threads(1)
