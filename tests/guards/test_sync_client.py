"""The blocking client is the one that the asyncio client gives."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import gen_sync_client
from tools.gen_sync_client import blocking, formatted, stale

ROOT = Path(__file__).resolve().parents[2]


def test_the_blocking_client_is_fresh():
    assert stale() == [], "run: make fmt"


def test_a_change_of_the_asyncio_client_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / gen_sync_client.CLIENT
    folder.mkdir(parents=True)
    for pair in gen_sync_client.FILES.items():
        for name in pair:
            (folder / name).write_text((ROOT / gen_sync_client.CLIENT / name).read_text())
    monkeypatch.setattr(gen_sync_client, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    assert stale() == []
    source = folder / "aio.py"
    source.write_text(source.read_text().replace('"""What is served here."""', '"""What there is."""'))
    assert stale() == [folder / "sync.py"]


@pytest.mark.parametrize(
    ("source", "made"),
    [
        ("async def f():\n    return await g()\n", "def f():\n    return g()\n"),
        ("async with a as b:\n    async for c in b:\n        pass\n", "with a as b:\n    for c in b:\n        pass\n"),
        ("x = [await y async for y in z]\n", "x = [y for y in z]\n"),
        ("raise StopAsyncIteration\n", "raise StopIteration\n"),
        ('s = "await async AsyncClient"  # await\n', 's = "await async AsyncClient"  # await\n'),
        ('def f():\n    """Use `async with`; é."""\n', 'def f():\n    """Use `with`; é."""\n'),
        ("é = await x, AsyncClient, await y\n", "é = x, Client, y\n"),
    ],
)
def test_what_is_dropped_and_renamed(source: str, made: str):
    assert formatted(blocking(source, "some.py")).split("\n", 1)[1] == made


@pytest.mark.parametrize("made", gen_sync_client.FILES.values())
def test_nothing_asynchronous_is_left(made: str):
    tree = ast.parse((ROOT / gen_sync_client.CLIENT / made).read_text())
    assert not [node for node in ast.walk(tree) if type(node).__name__.startswith(("Async", "Await"))]
    assert "asyncio" not in {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
