"""Compiled CPU kernels for tests, or a skip that states why this machine has none."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from baton.engine.kernels.cpu.compiler import Unavailable
from baton.home import baton_home

T = TypeVar("T")
SHARED = baton_home() / "kernels"  # of the run, before any test sets another $BATON_HOME
CACHING = """#!{python} -IS
import hashlib, os, pathlib, shutil, subprocess, sys

arguments, cache = sys.argv[1:], pathlib.Path({cache!r})
cc = shutil.which("cc") or "gcc"
if "-c" not in arguments:
    sys.exit(subprocess.call([cc, *arguments]))
source, out = (pathlib.Path(arguments[arguments.index(flag) + 1]) for flag in ("-c", "-o"))
flags = [one for one in arguments if one not in (str(source), str(out))]
texts = [file.read_bytes() for file in sorted(source.parent.glob("*.[ch]"))]
texts.append(subprocess.check_output([cc, "--version"]))
kept = cache / (hashlib.sha256(repr((flags, texts)).encode()).hexdigest() + ".o")
if not kept.exists():
    draft = kept.with_suffix(f".{{os.getpid()}}")
    if failed := subprocess.call([cc, *flags[:-2], "-c", source, "-o", draft]):
        sys.exit(failed)
    draft.replace(kept)
shutil.copy(kept, out)
"""


def compiled_or_skip(make: Callable[[], T]) -> T:
    """Return `make()`, which loads compiled kernels. Skip the test where this machine cannot run them."""
    try:
        return make()
    except Unavailable as why:
        pytest.skip(f"no compiled CPU kernels here: {why}")


def share_kernels(home: Path) -> Path:
    """Make the state folder `home`, whose processes use the kernels of the run. Compilation takes 5 s of a core."""
    home.mkdir(parents=True, exist_ok=True)
    SHARED.mkdir(parents=True, exist_ok=True)
    if not (home / "kernels").exists():
        (home / "kernels").symlink_to(SHARED)
    return home


def caching_compiler() -> str:
    """Return the path of a C compiler for `CC`, which compiles the kernels of a wheel once for several builds."""
    program, objects = SHARED / "caching-cc", SHARED / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    draft = program.with_suffix(f".{os.getpid()}")
    draft.write_text(CACHING.format(python=sys.executable, cache=str(objects)))
    draft.chmod(0o755)
    draft.replace(program)
    return str(program)
