"""The modules that an import may load, and the layer of each part."""

import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "numpy", "transformers", "redis", "pydantic")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("module", "others"),
    [
        ("baton", HEAVY),
        ("baton.client", HEAVY),
        ("router", ("torch", "ray")),
        ("router.server", ("torch", "ray", "starlette", "uvicorn")),  # the gateway is a separate extra
    ],
)
def test_a_part_imports_nothing_heavy(module: str, others: tuple[str, ...]):
    assert python(f"import sys, {module}; print(*(set({others!r}) & set(sys.modules)))") == ""


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
    assert re.match(r"router\.http: starlette.*'baton-serve\[gateway\]'", python(code))


def test_each_part_belongs_to_a_layer():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    names = {name.strip(" ()") for layer in contract["layers"] for name in layer.split("|")}
    parts = {
        path.stem for path in (ROOT / "baton").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert {f"baton.{part}" for part in parts - {"__init__", "__main__"}} <= names


def test_no_modules_import_each_other_in_a_ring():
    """No import cycle, even for types, so that each module can be read before those that import it."""
    packages = "baton", "router", "prefill_workers", "decode_workers", "kvtransfer"
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False, cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imported) > 200
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
