import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Two cores, many tests: one thread each, unless a test takes the fixture `threads`."""
    torch.set_num_threads(1)
