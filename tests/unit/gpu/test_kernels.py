"""Runs tests/unit/gpu/kernels under Triton's interpreter in a separate process, because it is chosen at import."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def test_each_kernel_equals_its_torch_reference(seed):
    """Runs tests/unit/gpu/kernels under Triton's interpreter in a separate process, because it is chosen at import."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    variables = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "BATON_TEST_SEED": str(seed)}
    command += ["-x", str(HERE / "kernels")]
    done = subprocess.run(command, cwd=HERE.parents[2], env=variables, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
