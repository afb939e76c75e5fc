"""Contents that no file of the tree may have, and caps in `baton.limits` alone."""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import limits

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = (200_000, 8_000_000)  # of any file, and of one in models/
PACKAGES = ("baton", "router", "prefill_workers", "decode_workers", "kvtransfer")
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = set("eval exec torch.load yaml.load yaml.unsafe_load yaml.full_load os.system os.popen".split())
ENDS = {call.rpartition(".")[2] for call in UNSAFE_CALLS}
OWN_FOLDER = re.compile(r"(?<![\w.~}-])/(?:home|root|Users|work)/\w")
MAY_NAME_FOLDERS = {"Dockerfile"}  # the paths in an image are the same on every machine


def unsafe(source: str) -> Iterator[str]:
    """Yield a line for each import and call in `source` that runs foreign code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
            yield from (f"line {node.lineno}: import {name}" for name in sorted(names & UNSAFE_MODULES))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {module.split(".")[0]} & UNSAFE_MODULES
            names |= {f"{module}.{alias.name}" for alias in node.names} & UNSAFE_CALLS
            yield from (f"line {node.lineno}: from {name}" for name in sorted(names))
        elif isinstance(node, ast.Call):
            end = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if end in ENDS and (called := ast.unparse(node.func)) in UNSAFE_CALLS:
                yield f"line {node.lineno}: {called}()"
            if any(word.arg == "shell" and getattr(word.value, "value", True) for word in node.keywords):
                yield f"line {node.lineno}: shell=True"


def shipped() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def tracked() -> list[Path]:
    """Return the files that git has or would add. Skips the test outside of a clone."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git clone")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def test_shipped_code_runs_nothing_foreign():
    found = [f"{path.relative_to(ROOT)}: {what}" for path in shipped() for what in unsafe(path.read_text())]
    assert not found, "\n".join(found)


IMPORTS = ["import pickle", "from cloudpickle import dumps", "from torch import load"]
CALLS = ["torch.load(path, weights_only=True)", "eval(text)", "subprocess.run(line, shell=flag)"]
SAFE = ["model.eval()", "yaml.safe_load(text)", "run(line, shell=False)"]


@pytest.mark.parametrize("source", [*IMPORTS, *CALLS, *SAFE])
def test_the_check_sees_what_is_unsafe_and_nothing_else(source: str):
    assert bool(list(unsafe(source))) == (source not in SAFE)


def test_no_fork_runs_python_before_it_starts_a_program():
    """In a process with threads of gRPC such a child often dies before its program starts, and `Popen` raises nothing:
    116 of 3,607 starts next to four busy channels of grpcio 1.85.1 did (2026-11-28).
    """
    found = [
        f"{path.relative_to(ROOT)}:{node.value.lineno}"
        for path in tracked()
        if path.suffix == ".py" and "preexec_fn" in text_of(path)
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, ast.keyword) and node.arg == "preexec_fn"
    ]
    assert not found, found


def test_no_folder_of_one_machine():
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}..."
        for path in tracked()
        if path.name not in MAY_NAME_FOLDERS
        for match in OWN_FOLDER.finditer(text_of(path))
    ]
    assert not found, "\n".join(found)


def test_no_file_is_larger_than_a_small_checkpoint():
    """Generated files, such as the models of benchmarks, do not belong here."""
    found = {str(path.relative_to(ROOT)): path.stat().st_size for path in tracked()}
    assert {name: size for name, size in found.items() if size > MOST_BYTES[name.startswith("models/")]} == {}


def test_folders_that_are_no_packages():
    """An `__init__.py` in proto/ would shadow another distribution; tests and configs must not be importable."""
    folders = ("proto", "configs", "helm", "tests", "benchmarks", "docs")
    assert [str(path) for folder in folders for path in (ROOT / folder).rglob("__init__.py")] == []


def test_every_cap_is_in_the_table_and_is_used():
    """`tools/reference/caps.py` lists every cap, and the product uses it."""
    names = {name for name in dir(limits) if re.fullmatch(r"(MAX|MIN)_\w+|\w+_BYTES", name)}
    source = (ROOT / "tools/reference/caps.py").read_text()
    in_table = set(re.findall(r"Cap\([^()]*?\blimits\.([A-Z_]+),", source)) | {"MIN_TOKEN_CHARS"}
    assert names == in_table
    files = (path for part in ("baton", "router") for path in (ROOT / part).rglob("*.py"))
    used = Counter(word for path in files if path.name != "limits.py" for word in re.findall(r"\w+", path.read_text()))
    assert {name for name in names if not used[name]} == set()


def test_caps_are_nowhere_else():
    """A limit for external input has its name in `baton.limits`."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("router", "baton/rpc", "baton/core.py")
        for path in ([ROOT / folder] if folder.endswith(".py") else sorted((ROOT / folder).rglob("*.py")))
        if "/v1/" not in str(path)
        for line in path.read_text().splitlines()
        if re.match(r"_?MAX_\w+( *:.*)? = ", line) or re.search(r"len\(.*\) > \d", line)
    ]
    assert not found, found
