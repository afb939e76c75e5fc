"""The blocking client equals the one generated from the asyncio client."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.gen_sync_client import CLIENT, FILES, stale

ROOT = Path(__file__).resolve().parents[2]


def test_the_blocking_client_is_fresh():
    assert stale() == [], "run: make fmt"


@pytest.mark.parametrize("made", FILES.values())
def test_nothing_asynchronous_is_left(made: str):
    tree = ast.parse((ROOT / CLIENT / made).read_text())
    assert not [node for node in ast.walk(tree) if type(node).__name__.startswith(("Async", "Await"))]
    assert "asyncio" not in {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
