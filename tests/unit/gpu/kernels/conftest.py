"""The Triton kernels against their torch references: on a GPU if available, else under Triton's interpreter.

The interpreter must be chosen before triton is first imported, so `tests/unit/gpu/test_compile.py` runs these tests in
a separate process. By hand: `TRITON_INTERPRET=1 python -m pytest tests/unit/gpu/kernels`, and without the variable on a
machine with a GPU.
"""

import os

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture(scope="session", autouse=INTERPRETED)
def bfloat16_as_on_a_gpu():
    from benchmarks.lib.interpreter import rounded_as_on_a_gpu

    with rounded_as_on_a_gpu():
        yield


@pytest.fixture
def products_by_row(monkeypatch):
    """Round a row equally at every place. numpy's products depend on the place; a GPU's must be tested on one."""
    if INTERPRETED:
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b[None]).sum(1, dtype=dtype))
