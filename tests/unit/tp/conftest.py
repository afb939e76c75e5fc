import os
from collections.abc import Callable
from typing import Any

import pytest

from baton.engine.tp.group import TpLayout
from tests.support.time_factor import scaled


@pytest.fixture
def plan_of(tmp_path) -> Callable[..., TpLayout]:
    def plan(size: int, folder: str = "") -> TpLayout:
        model: dict[str, Any] = {"dtype": "auto", "device": "cpu", "block_size": 8, "max_model_len": None}
        ranks: dict[str, Any] = {"threads": 1, "store": str(tmp_path / "store"), "parent": os.getpid()}
        limits: dict[str, Any] = {"capacity": 1 << 16, "timeout_s": scaled(20.0)}
        return TpLayout(folder=folder, key="tensor_parallel", size=size, **model, **ranks, **limits)

    return plan
