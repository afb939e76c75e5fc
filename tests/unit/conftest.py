import pytest
import torch


# Two threads wait for each other at each layer. During other tests that takes a hundred times as long.
@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.serial)], ids=["one thread", "two threads"])
def threads(request):
    """Set torch's number of threads and return it."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
