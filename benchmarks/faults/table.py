"""Results of the finished pieces of a soak: one line of JSON for each piece, and the table of all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.report import markdown

Piece = dict[str, Any]
HEADER = (
    "fault",
    "injected",
    "touched",
    "recovered",
    "errors by class",
    "wrong",
    "lost or repeated",
    "hung",
    "longest stall",
    "next token p50",
    "p99",
)


def read(path: Path) -> list[Piece]:
    """Return the finished pieces."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, piece: Piece) -> None:
    """Add a finished piece."""
    with path.open("a") as file:
        file.write(json.dumps(piece) + "\n")


def at(values: Sequence[float], share: float) -> float | None:
    """Return a quantile, or None without values."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else None


def overview(pieces: Sequence[Piece]) -> str:
    """Return one line for each piece, with the ends of all its requests."""
    header = ("piece", "seed", "workers", "model", "seconds", "requests", "ends", "faults", "findings", "leaked blocks")
    return markdown((*header, "left behind", "broken histories"), [_overview(piece) for piece in pieces])


def _overview(piece: Piece) -> list[str]:
    workers = "Ray" if piece["ray"] else "processes"
    return [
        f"{piece['piece']} of {piece['of']}",
        str(piece["seed"]),
        workers,
        piece["model"],
        str(piece["seconds"]),
        str(piece["requests"]),
        _counts(piece["ends"]),
        str(len(piece["faults"])),
        _counts(piece["findings"]),
        str(piece["leaked_blocks"]),
        str(sum(map(len, piece["left"].values()))),
        str(piece["broken_histories"]),
    ]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(counts).most_common()) or "-"


def table(pieces: Sequence[Piece]) -> str:
    """Return one line for each kind of fault and one for all."""
    faults = [fault for piece in pieces for fault in piece["faults"]]
    kinds = sorted({fault["kind"] for fault in faults})
    rows = [_row(kind, [fault for fault in faults if fault["kind"] == kind]) for kind in kinds]
    return markdown(HEADER, [*rows, _row("all", faults)])


def _row(name: str, faults: Sequence[dict[str, Any]]) -> list[str]:
    errors = sum((Counter(fault["errors"]) for fault in faults), Counter[str]())
    delays = [delay for fault in faults for delay in fault["next_token_s"]]
    counts = [sum(fault[key] for fault in faults) for key in ("wrong", "lost_or_repeated", "hung")]
    return [
        name,
        str(len(faults)),
        str(sum(fault["touched"] for fault in faults)),
        str(sum(fault["recovered"] for fault in faults)),
        _counts(errors),
        *map(str, counts),
        _seconds(max((fault["stall_s"] for fault in faults), default=None)),
        _seconds(at(delays, 0.5)),
        _seconds(at(delays, 0.99)),
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def summary(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return the figures of the last line. `control_lost`: requests that the control run lost, or None without one."""
    real = [piece for piece in pieces if not piece["control"]]
    control = [fault for piece in pieces if piece["control"] for fault in piece["faults"]]
    faults = [fault for piece in real for fault in piece["faults"]]
    rules = sum((Counter(piece["findings"]) for piece in real), Counter[str]())
    delays = [delay for fault in faults for delay in fault["next_token_s"]]
    return {
        "requests": sum(piece["requests"] for piece in real),
        "faults": len(faults),
        "wrong": rules["wrong"],
        "lost_or_repeated": rules["lost_or_repeated"] + rules["unended"],
        "untyped": rules["untyped"],
        "leaked_blocks": sum(piece["leaked_blocks"] for piece in real),
        "left": sum(len(names) for piece in real for names in piece["left"].values()),
        "broken_histories": sum(piece["broken_histories"] for piece in real),
        "hung": rules["hung"],
        "unhealthy": sum(fault["healthy_s"] is None for fault in faults),
        "recovery_p99_s": at(delays, 0.99),
        "control_lost": sum(fault["touched"] - fault["recovered"] for fault in control) if control else None,
    }
