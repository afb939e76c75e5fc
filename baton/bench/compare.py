"""`baton bench compare A.json B.json`: two reports side by side, and the differences between their options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from baton.bench.report import KIND, ROWS

SHOWN = ("mean", "p50", "p90", "p99", "max")
RATES = {"requests_per_s": "requests/s", "tokens_per_s": "new tokens/s", "completed": "completed"}


@dataclass(frozen=True, slots=True)
class Report:
    """The options and goals of a run, and its figures."""

    options: Mapping[str, Any]
    figures: Mapping[str, float]


def print_comparison(first: Path, second: Path, *, as_json: bool) -> None:
    """Print each figure of both reports and their ratio B / A. Raises BadParameter if a file is not a report."""
    a, b = load(first), load(second)
    found = {"a": str(first), "b": str(second), "differs": differences(a, b), "figures": figures(a, b)}
    typer.echo(json.dumps(found) if as_json else table(found))


def load(path: Path) -> Report:
    """Read a report of --json or --out. Raises BadParameter (exit code 2) for anything else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise typer.BadParameter(f"{path}: not a report of `baton bench`: `kind` must be {KIND!r}")
    try:
        return Report({**found["plan"], **_goals(found)}, _figures(found))
    except KeyError as error:
        raise typer.BadParameter(f"{path}: incomplete report of `baton bench`: has no {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise typer.BadParameter(f"{path}: not a report of `baton bench`: {error}") from error


def differences(a: Report, b: Report) -> dict[str, list[Any]]:
    """Return the options and goals that differ, each with both values."""
    names = list(dict.fromkeys([*a.options, *b.options]))
    both = {name: [each.options.get(name) for each in (a, b)] for name in names}
    return {name: values for name, values in both.items() if values[0] != values[1]}


def figures(a: Report, b: Report) -> dict[str, list[float | None]]:
    """Return by name the figures of A and B and their ratio B / A. Missing values are None."""
    pairs = {name: (a.figures.get(name), b.figures.get(name)) for name in dict.fromkeys([*a.figures, *b.figures])}
    return {name: [x, y, y / x if x and y is not None else None] for name, (x, y) in pairs.items()}


def _goals(found: Mapping[str, Any]) -> dict[str, Any]:
    goodput = found["goodput"] or {}
    goals = {f"goal {name}": goodput[name] for name in goodput.get("attained", {})}
    return goals | ({"goal gap_percentile": goodput.get("gap_percentile", 100)} if "gap_ms" in goodput else {})


def _figures(found: Mapping[str, Any]) -> dict[str, float]:
    failed = sum(found["errors"].values())
    values: dict[str, Any] = {label: found[key] for key, label in RATES.items()} | {"failed": failed}
    for key, label in ROWS.items():
        values |= {f"{label} {column}, ms": found[key][column] for column in SHOWN} if found[key] else {}
    if found["goodput"]:
        values |= {"goodput, requests/s": found["goodput"]["requests_per_s"], "attained": found["goodput"]["share"]}
    values["load generator, cores"] = found["generator"]["cpu_share"]
    for name, value in values.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{name}: must be a number, got {value!r}")
    return values


def table(found: Mapping[str, Any]) -> str:
    """Format a comparison for people."""
    lines = [f"A {found['a']}", f"B {found['b']}"]
    lines += [f"  {name}: {a} in A, {b} in B" for name, (a, b) in found["differs"].items()] or ["  same options"]
    lines.append(f"{'':<24}{'A':>12}{'B':>12}{'B / A':>10}")
    for name, (a, b, ratio) in found["figures"].items():
        lines.append(f"{name:<24}{_number(a):>12}{_number(b):>12}{_number(ratio):>10}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"
