"""Markdown tables of results, and the sections of docs/measurements/ with them."""

from __future__ import annotations

import json
import shlex
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.lib.machine import machine
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.ratios import BATON, LIMIT, REFERENCE, Measured
from benchmarks.lib.shapes import LABELS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks.lib.points import Point
    from benchmarks.lib.ratios import Setting

NAMES = {LIMIT: "machine's limit", BATON: "**Baton**"}


def tables(measured: Measured) -> str:
    """Return a table per setting: tokens/s with the spread over the rounds, then Baton's ratios."""
    return "\n\n".join(_table(measured, setting) for setting in measured.settings)


def _table(measured: Measured, setting: Setting) -> str:
    points = [p for p in measured.points if measured.seconds(setting, BATON, p)]
    others = [engine for engine in measured.own if engine.split()[1:2] == [REFERENCE]]
    threads = "1 thread" if setting.threads == 1 else f"{setting.threads} threads"
    rows = [
        [NAMES.get(engine, engine), *(_rate(measured.seconds(setting, engine, point), point) for point in points)]
        for engine in (*measured.own, LIMIT, *measured.peers)
        if any(measured.seconds(setting, engine, point) for point in points)
    ]
    ratios: list[list[str]] = [
        [f"Baton / {NAMES.get(engine, engine)}", *(_ratio(measured.speed(setting, point, engine)) for point in points)]
        for engine in (LIMIT, *others, *measured.peers)
        if any(measured.seconds(setting, engine, point) for point in points)
    ]
    overhead = ["outside the forward", *(_percent(measured.overhead(setting, point)) for point in points)]
    return f"### {LABELS[setting.size]}, {setting.dtype}, {threads}\n\n" + markdown(
        ["tokens/s (spread)", *map(str, points)], [*rows, *ratios, overhead]
    )


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a padded Markdown table."""
    body = list(rows)
    widths = [max(len(row[i]) for row in (header, *body)) for i in range(len(header))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *body)]
    rule = "|".join("-" * (width + 2) for width in widths)
    first, *others = (f"| {line} |" for line in lines)
    return "\n".join([first, f"|{rule}|", *others])


def ratio_table(figures: Mapping[str, float | None], missing: Mapping[str, str], *, with_peers: bool) -> str:
    """Return the figures that other programs use, with the reason for each missing one."""
    reason = "a size, point or engine that it needs was not measured"
    rows = [
        [key, "null" if value is None else f"{value:.3f}", "" if value is not None else _why(key, reason, with_peers)]
        for key, value in figures.items()
    ]
    notes = [f"- not measured: {what}: {why}" for what, why in missing.items()]
    return "\n".join([markdown(["figure", "value", "why not"], rows), *([""] if notes else []), *notes])


def marks(section: str) -> tuple[str, str]:
    """Return the begin and end marks of a generated section."""
    return f"<!-- {section}:begin -->", f"<!-- {section}:end -->"


BEGIN, END = marks("engine")


def fill(text: str, content: str, section: str = "engine") -> str:
    """Replace the content between the marks of `section`. Raises ValueError if the marks are missing."""
    begin, end = marks(section)
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"there is no {begin} ... {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def finish(
    name: str,
    argv: Sequence[str],
    load: float,
    shown: str,
    ratios: Mapping[str, float | None],
    figures: Mapping[str, float] | None = None,
    *,
    write_docs: bool,
    section: str = "",
) -> None:
    """Print the results of `benchmarks/{name}.py`, with `write_docs` put them into a section of
    docs/measurements/{name}.md, by default `name`, and print ratios and figures as the last line. None means not
    measured. `load`: the machine's load before the run.
    """
    print(shown)
    if write_docs:
        write_section(f"measurements/{name}.md", name, argv, load, shown, section)
    print(json.dumps({"benchmark": name, "ratios": ratios, **({"figures": figures} if figures else {})}))


def write_section(page: str, name: str, argv: Sequence[str], load: float, shown: str, section: str = "") -> None:
    """Put results and machine facts into a section of the docs/ page, by default the one named `name`."""
    path = ROOT / "docs" / page
    facts = [f"- command: {shlex.join(['python', f'benchmarks/{name}.py', *argv])}"]
    facts += [f"- load at the start: {load:.1f}", *(f"- {what}: {value}" for what, value in machine().items())]
    path.write_text(fill(path.read_text(), "\n".join([*facts, "", shown]), section or name))


def _why(key: str, reason: str, with_peers: bool) -> str:
    return reason if with_peers or not key.startswith("vs_best") else "measured with --peers only"


def _rate(seconds: Sequence[float], point: Point) -> str:
    if not seconds:
        return "-"
    middle = median(seconds)
    rate, spread = point.produced / middle, (max(seconds) - min(seconds)) / middle
    return f"{rate:.0f} ({spread:.0%})" if rate >= 100 else f"{rate:.1f} ({spread:.0%})"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
