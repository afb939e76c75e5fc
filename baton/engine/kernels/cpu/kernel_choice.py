"""The choice of the fastest kernel, from a profile on disk: one per machine, dtype and thread count."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import structlog

from baton.engine.kernels.base import ANY_ROWS
from baton.engine.kernels.cpu.compiler import SOURCES, machine
from baton.hashing import fingerprint
from baton.home import baton_home

log = structlog.get_logger()

# Most rows up to which the flat kernel leads, fewer if rows of W are long: docs/design/kernels.md.
FLAT_ROWS, LONG_K, FLAT_ROWS_LONG = 96, 4096, 32
TILE_UNIT = "amx_bf16"  # a matrix unit for bfloat16, used by torch but not by the compiled kernels


UNIFIED = 0.0  # constant of the unified maximum, in units of scaled scores


class Choice(NamedTuple):
    """The product of a weight: the flat kernel up to `flat_rows` rows, then the tall kernel if `tall`, else torch."""

    flat_rows: int
    tall: bool

    def product(self, rows: int) -> str:
        if rows <= self.flat_rows:
            return "flat"
        return "tall" if self.tall else "torch"


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured choices by weight [width, K], and softmax's constant or None. `static` overrides `static_choice`."""

    choices: dict[tuple[int, int], Choice] = field(default_factory=dict)
    unified_max: float | None = None
    static: Choice | None = None

    def choice(self, width: int, k: int) -> Choice:
        return self.choices.get((width, k)) or self.static or static_choice(k)

    def merged(self, other: Profile) -> Profile:
        """Return this profile with the measurements of `other`, which take precedence."""
        return Profile(self.choices | other.choices, other.unified_max, self.static)


@dataclass(frozen=True, slots=True)
class Ideas:
    """Switches for the three ideas of FlashDecoding++ (arXiv 2311.01282), with the defaults of the engine.

    `unified_max`: attention subtracts a constant. `flat_gemm`: products of 2 and more rows may take the flat kernel;
    without it they take the tall one, which serves prompts. `dispatch`: the number of rows decides by the profile;
    without it, all numbers of rows take the same kernel.
    """

    unified_max: bool = False
    flat_gemm: bool = True
    dispatch: bool = True

    def applied(self, profile: Profile) -> Profile:
        """Return the profile with these ideas on or off."""
        unified = UNIFIED if self.unified_max else None
        if self.flat_gemm and self.dispatch:
            return replace(profile, unified_max=unified)
        rows = ANY_ROWS if self.flat_gemm else int(self.dispatch)
        return Profile(unified_max=unified, static=Choice(rows, tall=True))


def static_choice(k: int) -> Choice:
    """Return the choice for rows of K elements without a measurement."""
    return Choice(FLAT_ROWS if k < LONG_K else FLAT_ROWS_LONG, TILE_UNIT not in machine().flags)


def profile_path(dtype: str, level: str, threads: int, torch_version: str, folder: Path | None = None) -> Path:
    """Return the path of this machine's profile, which depends on the processor, torch and the kernel sources."""
    here = machine()
    sources = [file.read_text() for file in sorted(SOURCES.glob("*.[ch]"))]
    key = fingerprint((here.model, *sorted(here.flags), torch_version, *sources))
    return (folder or baton_home() / "profile") / f"{key}-{dtype}-{level}-{threads}.json"


def load_profile(path: Path) -> Profile:
    """Read a profile. Returns the defaults if the file is missing or unreadable."""
    try:
        stored = json.loads(path.read_text())
        choices = {(int(n), int(k)): Choice(int(rows), bool(tall)) for n, k, rows, tall in stored["choices"]}
        unified = stored["unified_max"]
        return Profile(choices, None if unified is None else float(unified))
    except FileNotFoundError:
        name_others(path)
        return Profile()
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("profile_unreadable", path=str(path), error=str(error))
        return Profile()


def name_others(path: Path) -> None:
    """Log the profiles of this machine for another dtype, level, weight format or thread count: they are not used."""
    key = path.name.partition("-")[0]
    if others := sorted(other.name for other in path.parent.glob(f"{key}-*.json")):
        log.info("profile_not_used", wanted=path.name, found=others)


def save_profile(path: Path, profile: Profile) -> None:
    """Write a profile atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    choices = [[*shape, *choice] for shape, choice in sorted(profile.choices.items())]
    scratch = path.with_suffix(f".{os.getpid()}.part")  # another process may write it, too
    scratch.write_text(json.dumps({"choices": choices, "unified_max": profile.unified_max}, indent=1))
    scratch.replace(path)
