import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread on two cores for many tests, unless a test takes the fixture `threads`."""
    torch.set_num_threads(1)
