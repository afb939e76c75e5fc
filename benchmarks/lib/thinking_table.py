"""Tables of the measurements of a model that thinks."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from benchmarks.lib.report import markdown
from benchmarks.lib.thinking_figures import AUTO, FAST, NONE, SEQUENTIAL, THINKS, UNLIMITED

if TYPE_CHECKING:
    from benchmarks.lib.thinking_figures import Agreement, Case, Measured, Score


def tables(measured: Measured) -> str:
    """Return all tables with their titles."""
    parts = {
        "Right answers": accuracy(measured),
        "Tokens and thoughts as in mode sequential": agreements(measured),
        "Forwards until the first token, each prompt alone": rounds(measured),
        "Time until the first token (all of them, where prompts arrived together)": speed(measured),
    }
    if len(measured.swept) > 1:
        parts[
            "Times faster than sequential, by the number of rows that mode auto takes for cheap (*: the engine's)"
        ] = sweep(measured)
    return "\n\n".join(f"**{title}**\n\n{text}" for title, text in parts.items())


def accuracy(measured: Measured) -> str:
    """Return a line per engine."""
    flips = list(next(iter(measured.scores.values())))
    rows = [[who, *(_score(scores[number]) for number in flips)] for who, scores in measured.scores.items()]
    thought = [f"{score.thoughts_right / score.of:.1%}" for score in measured.scores[THINKS].values()]
    return markdown(["flips", *map(str, flips)], [*rows, ["all thoughts right", *thought]])


def agreements(measured: Measured) -> str:
    """Return a line per mode."""
    header = ["mode", "equal", "forwards as predicted"]
    return markdown(header, [[mode, *_agreement(found)] for mode, found in measured.agreements.items()])


def rounds(measured: Measured) -> str:
    """Return a line per load, with means over its prompts."""
    modes, rows = (FAST, UNLIMITED, AUTO), list[list[str]]()
    for load, sums in measured.prompts.items():
        means = [f"{value / sums.number:.0f}" for value in (sums.tokens, sums.chunks, sums.thoughts)]
        rows.append([str(load), *means, *(f"{measured.rounds_per_chunk(mode, [load]):.3f}" for mode in modes)])
    return markdown(["", "tokens", "chunks", "thoughts", *(f"{mode}, forwards per chunk" for mode in modes)], rows)


def speed(measured: Measured) -> str:
    """Return a line per case. Ratios are within a round, with their spread."""
    modes = (SEQUENTIAL, FAST, AUTO, NONE)
    header = [
        "",
        *(f"{mode}, ms" for mode in modes),
        *(f"{mode}, times faster than sequential" for mode in (FAST, UNLIMITED, AUTO)),
        "auto, times as long as off",
    ]
    rows = []
    for case in measured.runs:
        times = [f"{measured.milliseconds(case, mode):,.1f}" for mode in modes]
        rows.append(
            [
                str(case),
                *times,
                *(_ratio(measured, case, mode, SEQUENTIAL) for mode in (FAST, UNLIMITED, AUTO)),
                _ratio(measured, case, NONE, AUTO),
            ]
        )
    return markdown(header, rows)


def sweep(measured: Measured) -> str:
    """Return a line per case, and their geometric mean. The engine's own number is marked."""
    modes = measured.swept
    rows = [[str(case), *(_ratio(measured, case, m, SEQUENTIAL) for m in modes.values())] for case in measured.runs]
    means = [f"{measured.overall(mode, SEQUENTIAL):.2f}" for mode in modes.values()]
    return markdown(["", *(f"{n}{'*' * (m == AUTO)}" for n, m in modes.items())], [*rows, ["mean", *means]])


def _score(score: Score) -> str:
    return f"{score.right / score.of:.1%} ({score.right} of {score.of})"


def _agreement(found: Agreement) -> list[str]:
    predicted = "-" if found.rounds is None else f"{found.rounds} of {found.of}"
    return [f"{found.equal} of {found.of}", predicted]


def _ratio(measured: Measured, case: Case, mode: str, base: str) -> str:
    ratios = measured.ratios(case, mode, base)
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
