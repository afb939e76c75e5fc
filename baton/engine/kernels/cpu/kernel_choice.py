"""Which kernel is the faster one here: measured once per machine, dtype and thread count, and kept on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import structlog

from baton.engine.kernels.cpu.compiler import SOURCES, machine, state_folder
from baton.hashing import fingerprint

if TYPE_CHECKING:
    from pathlib import Path

log = structlog.get_logger()

# Measured on a Zen 5 (docs/performance.md): the flat kernel leads up to here, less far where a row of W is long.
FLAT_ROWS, LONG_K, FLAT_ROWS_LONG = 96, 4096, 32
TILE_UNIT = "amx_bf16"  # has its own multiplier for bfloat16, which torch uses and the compiled kernels do not


class Choice(NamedTuple):
    """How a weight is multiplied: the flat kernel for at most `flat_rows` rows, and for more the tall one, or torch."""

    flat_rows: int
    tall: bool

    def product(self, rows: int) -> str:
        """The name of the kernel that multiplies so many rows."""
        if rows <= self.flat_rows:
            return "flat"
        return "tall" if self.tall else "torch"


@dataclass(frozen=True, slots=True)
class Profile:
    """The choice for each weight [width, K] that was measured, and whether softmax subtracts a preset constant.

    `static`: for all weights that were not measured (None: what was good elsewhere).
    """

    choices: dict[tuple[int, int], Choice] = field(default_factory=dict)
    unified_max: float | None = None
    static: Choice | None = None

    def choice(self, width: int, k: int) -> Choice:
        """How to multiply with a weight [width, K]."""
        return self.choices.get((width, k)) or self.static or static_choice(k)

    def merged(self, other: Profile) -> Profile:
        """This profile, with what the `other` knows taken from it."""
        return Profile(self.choices | other.choices, other.unified_max, self.static)


def static_choice(k: int) -> Choice:
    """Without a measurement on this machine."""
    return Choice(FLAT_ROWS if k < LONG_K else FLAT_ROWS_LONG, TILE_UNIT not in machine().flags)


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
        choices = {(int(n), int(k)): Choice(int(rows), bool(tall)) for n, k, rows, tall in stored["choices"]}
        unified = stored["unified_max"]
        return Profile(choices, None if unified is None else float(unified))
    except FileNotFoundError:
        return Profile()
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("profile_unreadable", path=str(path), error=str(error))
        return Profile()


def save_profile(path: Path, profile: Profile) -> None:
    """Write it in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    choices = [[*shape, *choice] for shape, choice in sorted(profile.choices.items())]
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps({"choices": choices, "unified_max": profile.unified_max}, indent=1))
    scratch.replace(path)
