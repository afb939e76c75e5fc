"""The modules that an import may load, and the layer of each part."""

import ast
import graphlib
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

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
        ("baton.cli.cluster.launch", ("torch",)),  # a supervisor lives as long as its cluster
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


ONLY_WITH_CUDA = {"torch.distributed.ProcessGroupNCCL"}


def torch_names(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names below imported modules of torch, for example `torch.cuda.Stream`."""
    imported = [name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    ours = [name for name in imported if name.name.split(".")[0] == "torch"]
    modules = {name.asname or "torch": name.name if name.asname else "torch" for name in ours}
    for node in ast.walk(tree):
        parts, inner = list[str](), node
        while isinstance(inner, ast.Attribute):
            parts, inner = [inner.attr, *parts], inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in modules:
            yield ".".join([modules[inner.id], *parts])


def exists(name: str) -> bool:
    """Return whether torch has this name. Attributes of classes and functions are not checked."""
    found: object = importlib.import_module("torch")
    rest = name.split(".")[1:]
    while rest and isinstance(found, ModuleType):
        if not hasattr(found, rest[0]):
            return False
        found, rest = getattr(found, rest[0]), rest[1:]
    return True


def test_every_name_of_torch_exists():
    """Also those that only a GPU would use, because a stand-in may have a name that torch lacks."""
    names = {
        name
        for part in ("baton", "kvtransfer", "decode_workers", "prefill_workers", "benchmarks")
        for path in (ROOT / part).rglob("*.py")
        if "torch" in (source := path.read_text())
        for name in torch_names(ast.parse(source))
    }
    assert len(names) > 100
    assert {
        name for name in names if not any(name.startswith(each) for each in ONLY_WITH_CUDA) and not exists(name)
    } == set()
    assert "torch._C._cuda_getDriverVersion" in torch_names(
        ast.parse("import torch\ntorch._C._cuda_getDriverVersion()")
    )
    assert not exists("torch._C._cuda_getDriverVersion")
