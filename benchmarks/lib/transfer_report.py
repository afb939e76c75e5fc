"""Markdown tables of measured transfers."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from benchmarks.lib.report import markdown
from benchmarks.lib.transfer_figures import OURS, RAW, WHOLE, Figures, Way

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks.lib.transfer_figures import FrameTimes

NOT_MEASURED = "what it needs was not measured"


def tables(figures: Figures) -> str:
    """Return all tables with measurements."""
    parts = {
        "GB/s (spread) by size of the KV, all of it computed": _rates(figures),
        "A short prompt": _small(figures),
        "What is left to send when the prompt is computed": _prompts(figures),
    }
    return "\n\n".join(f"### {title}\n\n{table}" for title, table in parts.items() if table)


def ratio_table(found: Mapping[str, float | None], missing: Mapping[str, str]) -> str:
    """Return the figures that other programs use, with the reason for each missing one."""
    rows = [[key, *(("null", NOT_MEASURED) if value is None else (f"{value:.3f}", ""))] for key, value in found.items()]
    notes = [f"- not measured: {what}: {why}" for what, why in missing.items()]
    return "\n".join([markdown(["figure", "value", "why not"], rows), *([""] if notes else []), *notes])


def timeline_table(frames: Sequence[FrameTimes]) -> str:
    """Return each frame of a streamed prompt, in milliseconds since the arrival of the prompt."""
    rows = [
        [
            str(number),
            _span(f.layers),
            _span(f.positions),
            *(f"{s * 1e3:.2f}" for s in (f.ready_s, f.sent_s, f.landed_s)),
        ]
        for number, f in enumerate(frames)
    ]
    return markdown(["frame", "layers", "positions", "ready at", "sent at", "in blocks at"], rows)


def sweep_table(runs: Iterable[Mapping[str, object]]) -> str:
    """Return the results of other settings, one row each. The first one names the columns."""
    rows = [
        {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in run.items()}
        for run in runs
    ]
    return markdown(list(rows[0]), [list(row.values()) for row in rows]) if rows else ""


def _rates(figures: Figures) -> str:
    ways, sizes = [way for way in figures.ways if way.kind != WHOLE], figures.sizes
    rows: list[list[str]] = []
    for way in ways:
        rows.append([_named(way), *(_rate(figures.rates(way, size)) for size in sizes)])
        if way.kind != RAW:
            rows.append([f"{way} / {Way(way.transport, RAW)}", *(_number(figures.share(way, size)) for size in sizes)])
    return markdown(["", *(f"{size >> 20} MiB" for size in sizes)], rows) if sizes else ""


def _small(figures: Figures) -> str:
    rows = []
    for way in [way for way in figures.ways if way.kind == WHOLE]:
        mine = [s for s in figures.moved if s.way == way]
        raw = [s.seconds for s in figures.moved if s.way == Way(way.transport, RAW) and s.nominal == mine[0].nominal]
        over = figures.over_raw(way.transport)
        times = [median(s.seconds for s in mine), median(raw) if raw else None, over]
        rows.append([way.transport, f"{mine[0].nbytes / 1e6:.2f}", *(_ms(value) for value in times)])
    return markdown(["transport", "MB", "handoff, ms", "raw, ms", "above raw, ms"], rows) if rows else ""


def _prompts(figures: Figures) -> str:
    kinds = dict.fromkeys((p.transport, p.tokens, p.streams) for p in sorted(figures.prompts, key=lambda p: p.tokens))
    header = ["transport", "tokens", "streamed", "KV, MB", "frames", "first token, ms", "transfer, ms", "exposed, ms"]
    more = ["round trip, ms", "left / whole transfer", "left / own transfer", "exposed / TTFT", "of second token"]
    rows = [_prompt_row(figures, *kind) for kind in kinds]
    return markdown([*header, *more], rows) if rows else ""


def _prompt_row(figures: Figures, transport: str, tokens: int, streams: bool) -> list[str]:
    found = figures.select(transport, tokens, streams=streams)

    def middle(value: str) -> float:
        return median(float(getattr(prompt, value)) for prompt in found)

    one = found[0]
    whole = figures.exposed(transport, tokens) if streams else None
    own = figures.exposed(transport, tokens, by_own_transfer=True) if streams else None
    return [
        transport,
        str(tokens),
        "yes" if streams else "no",
        f"{one.nbytes / 1e6:.1f}",
        f"{middle('frames'):.0f}",
        *(_ms(middle(name)) for name in ("ttft_s", "transfer_s", "exposed_s", "round_trip_s")),
        *(_number(value) for value in (whole, own)),
        f"{middle('of_first'):.2%}",
        f"{middle('of_second'):.2%}",
    ]


def _rate(rates: Sequence[float]) -> str:
    if not rates:
        return "-"
    middle = median(rates)
    return f"{middle / 1e9:.2f} ({(max(rates) - min(rates)) / middle:.0%})"


def _named(way: Way) -> str:
    return f"**{way}**" if way.kind == OURS else str(way)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _span(span: tuple[int, int]) -> str:
    return f"{span[0]}..{span[1] - 1}"
