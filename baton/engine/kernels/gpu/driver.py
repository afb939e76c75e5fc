"""The version of NVIDIA's driver on this host. torch has no function for it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROC_VERSION = Path("/proc/driver/nvidia/version")
VERSION_BYTES = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE of nvml.h


def driver_version(load: Callable[[str], Any] = ctypes.CDLL, proc: Path = PROC_VERSION) -> str | None:
    """Return the version of NVIDIA's driver by NVML, else by the kernel module, or None without a driver."""
    try:
        nvml = load("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(VERSION_BYTES)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, VERSION_BYTES) == 0:
            return text.value.decode()
    except (OSError, AttributeError):  # no such library, or one without these functions
        pass
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", proc.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else None
