"""The part of the wheel that `make wheel` adds: compiled kernels for x86-64 levels, the demo model, its cluster file.

`BATON_WHEEL_KERNELS` asks for it: `all`, or levels with commas. Without it, the wheel is of pure Python.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TAG = "py3-none-linux_x86_64"
SHIPPED = ("models/demo", "configs/local.yaml")


class WheelHook(BuildHookInterface[Any]):
    """Called by hatchling before it writes the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels, and name the files. Raises Unavailable if there is no compiler or it fails."""
        asked = os.environ.get("BATON_WHEEL_KERNELS")
        if not asked or version == "editable":
            return
        sys.path.insert(0, self.root)
        from baton.engine.kernels.cpu.compiler import PACKAGED, X86_LEVELS, compile_portable

        root = Path(self.root)
        built = root / "build" / "kernels"
        files = {
            library: PACKAGED.relative_to(root) / library.name
            for level in (X86_LEVELS if asked == "all" else asked.split(","))
            for library in compile_portable(built, level)
        }
        files |= {root / name: Path("baton/shipped") / name for name in SHIPPED}
        build_data["force_include"] |= {str(source): str(target) for source, target in files.items()}
        build_data["pure_python"], build_data["tag"] = False, TAG
