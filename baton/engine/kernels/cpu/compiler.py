"""Compilation of the C kernels for this machine, once, into the state folder.

The name of a library depends on sources, compiler and processor, so a stale library is never loaded. The sources are
compiled for OpenMP but not linked to it, so that the library shares the threads of torch's own OpenMP runtime.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from baton.errors import ConfigError
from baton.hashing import fingerprint

SOURCES = Path(__file__).parent
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
NEEDED = {"f32": AVX512, "bf16": (*AVX512, "avx512_bf16")}
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-fPIC")
COMPILE_SECONDS = 120
LEVEL_VARIABLE = "BATON_CPU_LEVEL"


class Unavailable(Exception):
    """Raised if the kernels cannot run on this machine, with the reason in the message."""


class Machine(NamedTuple):
    """The processor model and its instruction flags."""

    model: str
    flags: frozenset[str]


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """Read the processor from Linux. Other systems have model "unknown" and no flags."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return Machine("unknown", frozenset())
    fields: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in lines):
        fields.setdefault(name.strip(), value.strip())
    return Machine(fields.get("model name", "unknown"), frozenset(fields.get("flags", "").split()))


def load_library(element: str, folder: Path | None = None) -> ctypes.CDLL:
    """Load the kernels for "bf16" or "f32" elements, compiled into `folder` (default: the state folder) if missing.
    Raises Unavailable if `BATON_CPU_LEVEL` is none, the processor lacks an instruction, or compilation or loading
    fails. Raises ConfigError if `BATON_CPU_LEVEL` is invalid.
    """
    if cpu_level() == "none":
        raise Unavailable(f"{LEVEL_VARIABLE}=none")
    here = machine()
    missing = [flag for flag in NEEDED[element] if flag not in here.flags]
    if missing:
        raise Unavailable(f"the processor ({here.model}) has no {', '.join(missing)}")
    import torch  # noqa: F401  (loads the OpenMP runtime that provides the library's symbols)

    path = _path(folder or state_folder() / "kernels", element, here)
    try:
        if not path.is_file():
            _compile(path, element)
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the kernels cannot be compiled or loaded: {error}") from error


def cpu_level() -> str:
    """Return `BATON_CPU_LEVEL`: "native" (default), or "none" for torch only. Raises ConfigError for other values."""
    value = os.environ.get(LEVEL_VARIABLE) or "native"
    if value not in {"native", "none"}:
        raise ConfigError(f"{LEVEL_VARIABLE} (environment): must be native or none, got {value!r}")
    return value


def state_folder() -> Path:
    """Return the folder for profiles and compiled kernels: `$BATON_HOME`, or `~/.baton`."""
    return Path(os.environ.get("BATON_HOME") or Path.home() / ".baton").expanduser()


def _compiler() -> str:
    names = (os.environ.get("CC"), "cc", "gcc")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        raise Unavailable("no C compiler was found (set CC, or install gcc)")
    return found


def _path(folder: Path, element: str, here: Machine) -> Path:
    sources = [file.read_text() for file in sorted(SOURCES.glob("*.[ch]"))]
    version = _run((_compiler(), "--version")).splitlines()[0]
    return folder / f"{element}-{fingerprint((*sources, *FLAGS, version, here.model, *sorted(here.flags)))}.so"


def _compile(path: Path, element: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    define = ("-DELEM_BF16",) if element == "bf16" else ()
    with path.with_suffix(".lock").open("w") as lock:
        # One compiler at a time, because several would only slow each other down. The lock ends with the process.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file():
            return  # compiled by another worker
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            unit, library = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
            _run((_compiler(), *FLAGS, *define, "-c", str(SOURCES / "kernels.c"), "-o", str(unit)))
            _run((_compiler(), "-shared", str(unit), "-lm", "-o", str(library)))
            library.replace(path)  # atomic, because some file systems have no locks; the last of equal results stays


def _run(command: tuple[str, ...]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if done.returncode:
        raise Unavailable(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
