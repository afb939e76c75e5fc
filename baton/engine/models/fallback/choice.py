"""The backend of a model folder: native, or the fallback through transformers. The choice needs no torch.

As a program with a folder, it prints in the last line why nothing serves the folder, and exits with REFUSED.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from baton.engine.models.families import FAMILIES, WRAPPERS
from baton.engine.models.json_fields import Fields, read_json_object
from baton.errors import CheckpointError, ConfigError

Backend = Literal["auto", "native", "transformers"]
REFUSED = 3  # exit code of the program; an exception of a library has 1
INSTALL = "pip install baton-serve[transformers]"


def chosen_backend(folder: Path, wanted: Backend) -> Backend:
    """Return the backend; for `auto`, native if there is a family. Raises ConfigError or CheckpointError if it is not
    installed.
    """
    if wanted == "native":
        return "native"
    installed = transformers_version()
    if wanted == "transformers":
        if not installed:
            raise ConfigError(f"model.backend: transformers is not installed; {INSTALL}")
        return "transformers"
    path = folder / "config.json"
    fields = Fields(str(path), read_json_object(path))
    kind = fields.text("model_type", "")
    name = next(iter(fields.texts("architectures")), kind)
    native = {*WRAPPERS.values(), *(family.architecture for family in FAMILIES.values())}
    kinds = {"", *WRAPPERS, *FAMILIES, *(also for each in FAMILIES.values() for also in each.also)}
    if kind in kinds and name in {*native, *kinds}:
        return "native"
    name = kind if name in native else name  # a class of transformers may serve other kinds, too
    if not installed:
        has = ", ".join(sorted(native))
        raise CheckpointError(f"{path}: {name} has no native family ({has}); {INSTALL} to serve more architectures")
    return "transformers"


def check_served(folder: Path) -> None:
    """Raise CheckpointError if neither a native family nor transformers serves this config.json. Needs no weights."""
    if chosen_backend(folder, "auto") == "native":
        from baton.engine.models.config import read_config  # imports torch

        read_config(folder)
        return
    from baton.engine.models.fallback import guard  # transformers is slow to import, and may be absent

    path = folder / "config.json"
    guard.check_class(guard.checked_config(Fields(str(path), read_json_object(path)), str(folder)))


def transformers_version() -> str:
    """Return the version of the installed transformers, or ""."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    try:
        check_served(Path(sys.argv[1]))
    except CheckpointError as why:
        print(*str(why).splitlines())  # noqa: T201
        sys.exit(REFUSED)
