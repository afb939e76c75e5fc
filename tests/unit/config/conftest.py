"""Cluster files of these tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.config import ClusterConfig, load_config


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., ClusterConfig]:
    def load_text(text: str, *sets: str, env: dict[str, str] | None = None) -> ClusterConfig:
        file = tmp_path / "cluster.yaml"
        file.write_text(text)
        return load_config(file, sets, env)

    return load_text
