"""The level of instructions of a test of compiled kernels."""

import pytest

from baton.engine.kernels.cpu.compiler import LEVEL_VARIABLE, cpu_level


@pytest.fixture(scope="module")
def level(request):
    if cpu_level() == "none":
        pytest.skip(f"{LEVEL_VARIABLE}=none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LEVEL_VARIABLE, request.param)
        yield request.param
