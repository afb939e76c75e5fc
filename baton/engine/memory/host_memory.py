"""Main memory that processes on this host may use: the machine's, or the container's if that is less (cgroup v2)."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def total_bytes(cgroup: Path = CGROUP) -> int:
    """Return all memory in bytes, used or not, because a container counts reclaimable file cache as used."""
    machine, limit = int(psutil.virtual_memory().total), cgroup / "memory.max"
    text = limit.read_text().strip() if limit.exists() else ""
    return min(machine, int(text)) if text.isdigit() else machine


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Return the available main memory in bytes."""
    machine = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text()) - _file_cache(cgroup)
    except (OSError, ValueError):
        return machine
    return min(machine, max(0, int(limit) - used)) if limit.isdigit() else machine


def _file_cache(cgroup: Path) -> int:
    """Return the bytes of reclaimable file cache, which a container counts as used."""
    stat = cgroup / "memory.stat"
    lines = (line.split() for line in (stat.read_text() if stat.exists() else "").splitlines())
    return sum(int(value) for name, value in lines if name in {"inactive_file", "active_file"})
