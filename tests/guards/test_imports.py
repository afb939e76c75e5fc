"""What importing a part may bring along, and which layer each part belongs to."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "numpy", "transformers", "redis", "pydantic")
LIMIT_S = 0.3


def python(code: str) -> str:
    """What `code` prints in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded(module: str, *others: str) -> set[str]:
    """Which of `others` are loaded once `module` is."""
    return set(python(f"import sys, {module}; print(*(set({others!r}) & set(sys.modules)))").split())


@pytest.mark.parametrize("module", ["baton", "baton.client"])
def test_the_sdk_is_light(module: str):
    assert loaded(module, *HEAVY) == set()


@pytest.mark.parametrize("module", ["router", "router.server", "router.service", "router.lifecycle"])
def test_the_router_reaches_neither_torch_nor_ray(module: str):
    assert loaded(module, "torch", "ray") == set()


def test_the_router_needs_no_gateway():
    """Its libraries are an extra of their own."""
    assert loaded("router.server", "starlette", "uvicorn") == set()


@pytest.mark.slow
def test_a_gateway_without_its_libraries_says_what_to_install():
    code = """import sys
sys.modules["starlette"] = None
from baton.errors import ConfigError
from router.server import _gateway
try:
    _gateway(None, None, None)
except ConfigError as error:
    print(error)"""
    assert python(code).startswith("router.http: starlette")
    assert "baton-serve[gateway]" in python(code)


@pytest.mark.serial
def test_import_time():
    """`from baton import Client`, the best of five; processor time, as other work stretches the wall clock."""
    code = "import time; start = time.process_time(); from baton import Client; print(time.process_time() - start)"
    assert min(float(python(code)) for _ in range(5)) < LIMIT_S


def test_each_part_belongs_to_a_layer():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    names = {name.strip(" ()") for layer in contract["layers"] for name in layer.split("|")}
    parts = {
        path.stem for path in (ROOT / "baton").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert {f"baton.{part}" for part in parts - {"__init__", "__main__"}} <= names
