"""What the package exports."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import baton
import baton.client

ROOT = Path(__file__).parents[3]


def test_the_version_is_that_of_the_distribution():
    assert baton.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_clients_are_exported():
    assert baton.Client is baton.client.Client
    assert baton.AsyncClient is baton.client.AsyncClient
    with pytest.raises(AttributeError, match="Clinet"):
        _ = baton.Clinet  # type: ignore[attr-defined]


def test_sync_and_async_offer_the_same():
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(baton.client.Client) == public(baton.client.AsyncClient)
    assert public(baton.client.Stream) == public(baton.client.AsyncStream)
