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
    """Make the interpreter round like a GPU. It truncates float32 to bfloat16, and multiplies bfloat16 as integers."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert, builder = interpreter._convert_float, interpreter.InterpreterBuilder
    dot = builder.create_dot

    def rounded(data, source, target, mode):
        if source != tl.float32 or target != tl.bfloat16:
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data, np.float32).view(np.uint32)
        nearest = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
        return np.where(np.isnan(data), 0x7FC0, nearest >> 16).astype(np.uint16)

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.view(np.uint16).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def wide_dot(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounded)
        patch.setattr(builder, "create_dot", wide_dot)
        yield


@pytest.fixture
def products_by_row(monkeypatch):
    """Round a row equally at every place. numpy's products depend on the place; a GPU's must be tested on one."""
    if INTERPRETED:
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b[None]).sum(1, dtype=dtype))
