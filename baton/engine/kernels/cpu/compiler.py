"""Compilation of the C kernels for this machine, once, into the state folder. Kernels of the wheel come first.

The name of a library depends on sources, compiler and processor, so a stale library is never loaded. The sources are
compiled for OpenMP but not linked to it, so that the library shares the threads of torch's own OpenMP runtime.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from baton.errors import ConfigError
from baton.hashing import fingerprint
from baton.home import baton_home

SOURCES = Path(__file__).parent
AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
X86_LEVELS = {  # needed instructions, best first. VNNI is for quantised weights only.
    "avx512-bf16": (*AVX512, "avx512_vnni", "avx512_bf16"),
    "avx512-vnni": (*AVX512, "avx512_vnni"),
    "avx512": AVX512,
    "avx-vnni": (*AVX2, "avx_vnni"),
    "avx2": AVX2,
}
ARM_LEVELS = {"neon": ("asimd", "asimddp")}  # with the dot product of ARMv8.2
LEVELS = X86_LEVELS | ARM_LEVELS
# Without traps, comparisons need no branches. Neither option changes a result.
FLAGS = ("-std=gnu11", "-O3", "-fopenmp", "-fPIC", "-fno-trapping-math", "-fno-math-errno")
ARM_FLAGS = ("-march=armv8.2-a+dotprod",)
PACKAGED = SOURCES / "built"  # kernels that a wheel may contain
COMPILE_SECONDS = 600  # on a machine that other work keeps busy; else some seconds
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
    part = fields.get("CPU part")  # aarch64 has numbers in place of a name, and calls its flags features
    model = fields.get("model name") or (f"{fields.get('CPU implementer')}/{part}" if part else "unknown")
    return Machine(model, frozenset((fields.get("flags") or fields.get("Features", "")).split()))


def load_library(element: str, folder: Path | None = None) -> ctypes.CDLL:
    """Load the kernels for "bf16" or "f32" elements: those of the wheel if it has them for these sources, else compiled
    into `folder` (default: the state folder). Raises Unavailable like `chosen_level`, and if that fails.
    """
    level = chosen_level()
    import torch  # noqa: F401  (loads the OpenMP runtime that provides the library's symbols)

    with suppress(OSError):  # it is not there, or needs a newer C library
        return ctypes.CDLL(str(_packaged(PACKAGED, element, level)), mode=os.RTLD_NOW)
    try:
        path = _path(folder or baton_home() / "kernels", element, level)
        broken = 0
        if path.is_file():
            with suppress(OSError):
                return ctypes.CDLL(str(path), mode=os.RTLD_NOW)
            broken = path.stat().st_ino  # a crash of the machine may have cut it
        _compile(path, _flags(element, level), broken)
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the kernels cannot be compiled or loaded: {error}") from error


def cpu_level() -> str:
    """Return `BATON_CPU_LEVEL`: "native" (default), "none" for torch, or a level. Raises ConfigError for others."""
    value, allowed = os.environ.get(LEVEL_VARIABLE) or "native", ("native", "none", *reversed(LEVELS))
    if value not in allowed:
        raise ConfigError(f"{LEVEL_VARIABLE} (environment): must be one of {', '.join(allowed)}, got {value!r}")
    return value


def chosen_level() -> str:
    """Return the level of instructions that the kernels use: the best of this processor, or `BATON_CPU_LEVEL`.
    Raises Unavailable if that is none or the processor lacks an instruction. Raises ConfigError if it is invalid.
    """
    asked, here = cpu_level(), machine()
    if asked == "none":
        raise Unavailable(f"{LEVEL_VARIABLE}=none")
    own = ARM_LEVELS if platform.machine() == "aarch64" else X86_LEVELS
    levels = own if asked == "native" else {asked: LEVELS[asked]}
    for level, needed in levels.items():
        missing = [flag for flag in needed if flag not in here.flags]
        if not missing:
            return level
    raise Unavailable(f"the processor ({here.model}) has no {', '.join(missing)}")


def level_here() -> str:
    """Return `chosen_level`, or "none" where the kernels cannot run. Raises ConfigError if the variable is invalid."""
    try:
        return chosen_level()
    except Unavailable:
        return "none"


def _compiler() -> str:
    names = (os.environ.get("CC"), "cc", "gcc")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        raise Unavailable("no C compiler was found (set CC, or install gcc)")
    return found


def compile_portable(folder: Path, level: str) -> list[Path]:
    """Compile the kernels of a level for a wheel, for any processor that has it. Raises Unavailable."""
    paths = {element: _packaged(folder, element, level) for element in ("bf16", "f32")}
    for element, path in paths.items():
        _compile(path, _flags(element, level, tune="generic"))
    return list(paths.values())


def _packaged(folder: Path, element: str, level: str) -> Path:
    key = fingerprint((*_sources(), *_flags(element, level, tune="generic")))
    return folder / f"{element}-{level}-{key}.so"


def _sources() -> list[str]:
    return [file.read_text() for file in sorted(SOURCES.glob("*.[ch]"))]


def _flags(element: str, level: str, tune: str = "native") -> tuple[str, ...]:
    define = ("-DELEM_BF16",) if element == "bf16" else ()
    if level in ARM_LEVELS:
        return (*FLAGS, f"-mtune={tune}", *ARM_FLAGS, *define)
    needed = (f"-m{flag.replace('_', '')}" for flag in LEVELS[level])
    return (*FLAGS, "-mprefer-vector-width=512", f"-mtune={tune}", *needed, *define)


def library_name(library: ctypes.CDLL) -> str:
    """Return its name in fingerprints. That of a packaged file, which any compiler may have made, has its hash."""
    file = Path(library._name)
    return file.stem if file.parent != PACKAGED else f"{file.stem}-{sha256(file.read_bytes()).hexdigest()[:16]}"


def _path(folder: Path, element: str, level: str) -> Path:
    here, version = machine(), _run((_compiler(), "--version")).partition("\n")[0]
    key = fingerprint((*_sources(), *_flags(element, level), version, here.model, *sorted(here.flags)))
    return folder / f"{element}-{level}-{key}.so"


def _compile(path: Path, flags: tuple[str, ...], broken: int = 0) -> None:
    """Compile the kernels, unless `path` is there by then. A file with the inode `broken` is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        # One compiler at a time, because several would only slow each other down. The lock ends with the process.
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file() and path.stat().st_ino != broken:
            return  # compiled by another worker
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            unit, library = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
            _run((_compiler(), *flags, "-c", str(SOURCES / "kernels.c"), "-o", str(unit)))
            _run((_compiler(), "-shared", str(unit), "-lm", "-o", str(library)))
            with library.open("rb") as file:
                os.fsync(file.fileno())
            library.replace(path)  # atomic, because some file systems have no locks; the last of equal results stays


def _run(command: tuple[str, ...]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if done.returncode:
        raise Unavailable(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
