"""`baton bench compare A.json B.json`: two reports beside each other, and what was not the same about them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from baton.cli.bench.report import KIND, ROWS

SHOWN = ("mean", "p50", "p90", "p99", "max")
RATES = {"requests_per_s": "requests/s", "tokens_per_s": "new tokens/s", "completed": "completed"}


def compare(first: Path, second: Path, *, as_json: bool) -> None:
    """Print each figure of both and the second divided by the first. Raises BadParameter for what is no report."""
    a, b = load(first), load(second)
    found = {"a": str(first), "b": str(second), "differs": differences(a, b), "figures": figures(a, b)}
    typer.echo(json.dumps(found) if as_json else table(found))


def load(path: Path) -> dict[str, Any]:
    """A report, of --json or --out. Raises BadParameter (exit code 2) for anything else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise typer.BadParameter(f"{path}: is no report of `baton bench`: its `kind` must be {KIND!r}")
    return found


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What was asked for of one but not of the other: each option with both of its values, and the goals."""
    told = [{**found["plan"], **_goals(found)} for found in (a, b)]
    names = list(dict.fromkeys([*told[0], *told[1]]))
    both = {name: [each.get(name) for each in told] for name in names}
    return {name: values for name, values in both.items() if values[0] != values[1]}


def figures(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """By name: of A, of B, and B divided by A; None where there is none."""
    found = [_figures(a), _figures(b)]
    return {name: [*_pair(found, name), _ratio(*_pair(found, name))] for name in dict.fromkeys([*found[0], *found[1]])}


def _goals(found: Mapping[str, Any]) -> dict[str, Any]:
    goodput = found["goodput"] or {}
    return {f"goal {name}": goodput[name] for name in goodput.get("attained", {})}


def _figures(found: Mapping[str, Any]) -> dict[str, float]:
    failed = sum(found["errors"].values())
    values: dict[str, float] = {label: found[key] for key, label in RATES.items()} | {"failed": failed}
    for key, label in ROWS.items():
        values |= {f"{label} {column}, ms": found[key][column] for column in SHOWN} if found[key] else {}
    if found["goodput"]:
        values |= {"goodput, requests/s": found["goodput"]["requests_per_s"], "attained": found["goodput"]["share"]}
    return values | {"load generator, cores": found["generator"]["cpu_share"]}


def _pair(found: list[dict[str, float]], name: str) -> tuple[float | None, float | None]:
    return found[0].get(name), found[1].get(name)


def _ratio(a: float | None, b: float | None) -> float | None:
    return b / a if a and b is not None else None


def table(found: Mapping[str, Any]) -> str:
    """For people."""
    lines = [f"A {found['a']}", f"B {found['b']}"]
    lines += [f"  {name}: {a} in A, {b} in B" for name, (a, b) in found["differs"].items()] or ["  the same was asked"]
    lines.append(f"{'':<24}{'A':>12}{'B':>12}{'B / A':>10}")
    for name, (a, b, ratio) in found["figures"].items():
        lines.append(f"{name:<24}{_number(a):>12}{_number(b):>12}{_number(ratio):>10}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"
