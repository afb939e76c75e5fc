"""Functions of numbers in fixed forwards: bits do not depend on the place, the shape or the threads."""

from functools import partial

import pytest
import torch
from torch.nn.functional import gelu, silu, softplus

from baton.engine.kernels.elementwise import GRAIN, mapped

FUNCTIONS = (torch.exp, torch.tanh_, torch.sigmoid, torch.cos, silu, softplus, gelu, partial(gelu, approximate="tanh"))
SIZES = (1, 31, 100, GRAIN, 5 * GRAIN + 7, 16 * GRAIN)


@pytest.fixture(params=[1, 2, 3, 7, 24])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_on_the_number_alone(dtype):
    numbers = torch.rand(8, generator=torch.Generator().manual_seed(1)) * 2
    for function in FUNCTIONS:
        for number in numbers.to(dtype):
            found = [mapped(function, number.repeat(size), fixed=True).unique() for size in SIZES]
            assert all(torch.equal(each, found[0]) and len(each) == 1 for each in found), function


@pytest.mark.parametrize("shape", [(0,), (3, 5), (2, GRAIN), (4, 3, GRAIN - 1)])
def test_values_and_shape_are_those_of_the_function(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(mapped(gelu, x.clone(), fixed=True), gelu(x))
    assert mapped(gelu, x, fixed=False).shape == shape
