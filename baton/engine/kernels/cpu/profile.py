"""Which kernel is the faster one here: measured once per machine, dtype and thread count, and kept on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from baton.engine.kernels.cpu.build import SOURCES, machine, state_folder
from baton.hashing import fingerprint

if TYPE_CHECKING:
    from pathlib import Path

log = structlog.get_logger()

# Measured on a Zen 5 and good on average: with many rows, torch's own product is the faster one, by repacking W.
DEFAULT_FLAT_ROWS = 96


@dataclass(frozen=True, slots=True)
class Profile:
    """Up to how many rows the flat kernel is taken, by (width, K), and whether softmax subtracts a preset constant."""

    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    unified_max: float | None = None
    default_rows: int = DEFAULT_FLAT_ROWS

    def flat_rows(self, width: int, k: int) -> int:
        """The most rows that a product with a weight [width, K] is given to the flat kernel for."""
        return self.rows.get((width, k), self.default_rows)

    def merged(self, other: Profile) -> Profile:
        """This profile, with what the `other` knows taken from it."""
        return Profile(self.rows | other.rows, other.unified_max, self.default_rows)


def profile_path(dtype: str, threads: int, torch_version: str, folder: Path | None = None) -> Path:
    """Where the profile of this machine lies: another processor, torch or kernel source has another one."""
    here = machine()
    sources = [file.read_text() for file in sorted(SOURCES.glob("*.[ch]"))]
    key = fingerprint((here.model, *sorted(here.flags), torch_version, *sources))
    return (folder or state_folder() / "profile") / f"{key}-{dtype}-{threads}.json"


def load_profile(path: Path) -> Profile:
    """What was measured before; the defaults where nothing was, or where the file is not whole."""
    try:
        stored = json.loads(path.read_text())
        rows = {(int(width), int(k)): int(most) for width, k, most in stored["rows"]}
        unified = stored["unified_max"]
        return Profile(rows, None if unified is None else float(unified))
    except FileNotFoundError:
        return Profile()
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("profile_unreadable", path=str(path), error=str(error))
        return Profile()


def save_profile(path: Path, profile: Profile) -> None:
    """Write it in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [[width, k, most] for (width, k), most in sorted(profile.rows.items())]
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps({"rows": rows, "unified_max": profile.unified_max}, indent=1))
    scratch.replace(path)
