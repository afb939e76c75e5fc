from collections.abc import Callable
from functools import partial

import pytest

from baton.engine.tp.group import TpLayout
from tests.unit.tp.support import plan


@pytest.fixture
def plan_of(tmp_path) -> Callable[..., TpLayout]:
    return partial(plan, tmp_path)
