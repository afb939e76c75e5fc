"""Functions of numbers whose bits depend on the number alone.

torch computes the numbers behind the last whole vector of a thread with other instructions, and shares large work among
threads at any number. So the bits of `gelu` or `softplus` depend on the place of a number and on the shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

VECTORS = 64  # numbers: two vectors of 512 bits, or more
GRAIN = 2048  # numbers that one thread computes; torch gives a thread no fewer, for some functions 16,384 or more


def mapped(function: Callable[[Tensor], Tensor], x: Tensor, *, fixed: bool) -> Tensor:
    """Return the function of each number. If `fixed`, on a CPU, all threads get whole vectors, so that bits depend on
    the number alone. A function that changes its input may change x.
    """
    if not fixed or x.device.type != "cpu":  # a GPU has the same instructions for all numbers
        return function(x)
    flat, threads = x.reshape(-1), torch.get_num_threads()
    size = GRAIN * (8 if 8 % threads == 0 else min(8, threads))  # the threads share whole grains, or whole vectors
    whole = len(flat) // GRAIN * GRAIN
    found = [function(piece) for piece in torch.split(flat[:whole], size) if len(piece)]
    if rest := len(flat) - whole:
        found.append(function(F.pad(flat[whole:], (0, -rest % VECTORS)))[:rest])
    return torch.cat(found).view(x.shape) if found else x
