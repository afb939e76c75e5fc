"""Description of the machine of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import psutil
import torch

from benchmarks.lib.protocol import ROOT

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def machine() -> dict[str, str]:
    """Return processor, memory, system and versions as text."""
    cpu = _cpu()
    flags = [flag for flag in FLAGS if flag in cpu.get("flags", "").split()]
    return {
        "processor": f"{cpu.get('model name', platform.processor())}, {os.cpu_count()} cores ({', '.join(flags)})",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB, huge pages: {_huge_pages()}",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "torch": str(torch.__version__),
        "revision": _revision(),
    }


def _cpu() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().split("\n\n", 1)[0].splitlines() if path.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _huge_pages() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return path.read_text().partition("[")[2].partition("]")[0] if path.exists() else "unknown"


def _revision() -> str:
    """Return the commit, with a mark if files differ from it."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()
