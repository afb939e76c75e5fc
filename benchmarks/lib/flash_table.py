"""Tables and ratios of `benchmarks/flashdecoding.py` from the records of its processes.

A ratio is the time without an idea over the time with it, the median over rounds. Above 1, the idea helps.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from baton.engine.kernels.base import ANY_ROWS
from baton.engine.kernels.cpu.kernel_choice import Choice
from benchmarks.lib.report import markdown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Record = dict[str, Any]
Where = tuple[str, str]  # level and dtype
FEW = 64  # rows; more are prompts
FLAT_ONLY, TALL_ONLY = Choice(ANY_ROWS, tall=True), Choice(0, tall=True)
LINEAR = {
    "flat_gemm": "flat GEMM, against the tall one",
    "flat_gemm_vs_padded": "flat GEMM, against padding to 64",
    "flat_gemm_vs_single": "flat GEMM, against one row at a time",
    "dispatch": "dispatch, against flat for all rows",
    "dispatch_vs_tall": "dispatch, against tall for all rows",
    "dispatch_vs_static": "measured profile, against the static one",
}


@dataclass(frozen=True)
class Layer:
    """The products of one layer of a model for some rows: seconds by shape, candidate and round."""

    shapes: Mapping[tuple[int, int], Mapping[str, Sequence[float]]]
    measured: Mapping[tuple[int, int], Choice]
    static: Mapping[tuple[int, int], Choice]

    def by_name(self, name: str) -> list[float]:
        """Return the seconds of a layer by round if all its products take one candidate."""
        return [sum(each) for each in zip(*(found[name] for found in self.shapes.values()), strict=True)]

    def by_choice(self, choices: Mapping[tuple[int, int], Choice], rows: int) -> list[float]:
        """Return the seconds of a layer by round if a choice by shape decides. The rounds that chose do not count."""
        taken = [found[choices[shape].product(rows)] for shape, found in self.shapes.items()]
        return [sum(each) for each in zip(*taken, strict=True)][1::2]

    def ratios(self, rows: int) -> Iterator[tuple[str, float]]:
        """Yield the ratios of LINEAR that exist for so many rows."""
        if 1 < rows <= FEW:
            flat = self.by_name("flat")
            for idea, off in (
                ("flat_gemm", "tall"),
                ("flat_gemm_vs_padded", "padded"),
                ("flat_gemm_vs_single", "single"),
            ):
                yield idea, _ratio(self.by_name(off), flat)
        chosen = self.by_choice(self.measured, rows)
        for idea, one in (("dispatch", FLAT_ONLY), ("dispatch_vs_tall", TALL_ONLY)):
            yield idea, _ratio(self.by_choice(dict.fromkeys(self.shapes, one), rows), chosen)
        yield "dispatch_vs_static", _ratio(self.by_choice(self.static, rows), chosen)


def _ratio(off: Sequence[float], on: Sequence[float]) -> float:
    return median(a / b for a, b in zip(off, on, strict=True))


def layers(records: Iterable[Record]) -> dict[tuple[str, int], Layer]:
    """Return the layers of one process by model and rows."""
    every, choices = list(records), [each for each in records if each["part"] == "choice"]
    kinds = ({(c["width"], c["k"]): Choice(**c[kind]) for c in choices} for kind in ("measured", "static"))
    measured, static = kinds
    found: dict[tuple[str, int], dict[tuple[int, int], Any]] = defaultdict(dict)
    for each in (each for each in every if each["part"] == "linear"):
        found[each["model"], each["rows"]][each["width"], each["k"]] = each["seconds"]
    return {key: Layer(shapes, measured, static) for key, shapes in found.items()}


class Results:
    """Records by level and dtype, as tables and as ratios."""

    def __init__(self, records: Mapping[Where, Sequence[Record]]) -> None:
        self.records = records
        self._values: dict[str, list[float]] = defaultdict(list)

    def parts(self, name: str) -> Iterator[tuple[Where, Record]]:
        """Yield the records of a part, with level and dtype."""
        for where, records in self.records.items():
            for each in records:
                if each["part"] == name:
                    yield where, each

    def attention(self) -> str:
        """Return the ratios of the unified maximum by context and rows."""
        lines: dict[tuple[str, str, int], dict[int, str]] = defaultdict(dict)
        for where, each in self.parts("attention"):
            running, unified = each["seconds"]["running"], each["seconds"]["unified"]
            ratio = self._add("unified_max", where, _ratio(running, unified))
            lines[*where, each["context"]][each["rows"]] = f"{ratio:.2f} ({median(running) * 1e3:.2f} ms)"
        return _grid(["level", "dtype", "context"], lines)

    def fallbacks(self) -> str:
        """Return the counts of fall-backs, and the ratio of the unified maximum there."""
        rows = []
        for where, each in self.parts("fallback"):
            ratio = _ratio(each["seconds"]["running"], each["seconds"]["unified"])
            rows.append([*where, each["case"], f"{each['count']} of {each['of']}", f"{ratio:.2f}"])
        for where, each in self.parts("demo"):
            span = f"2^{each['lowest']:.1f} to 2^{each['highest']:.1f}"
            rows.append([*where, f"models/demo, best scores {span}", f"{each['count']} of {each['of']}", "-"])
        return markdown(["level", "dtype", "scores", "fall-backs", "ratio"], rows)

    def linear(self) -> str:
        """Return the ratios of products by rows."""
        lines: dict[tuple[str, str, str, str], dict[int, str]] = defaultdict(dict)
        for where, records in self.records.items():
            for (model, rows), layer in layers(records).items():
                for idea, ratio in layer.ratios(rows):
                    self._add(idea if rows <= FEW else f"{idea}_prompts", where, ratio)
                    lines[*where, model, LINEAR[idea]][rows] = f"{ratio:.2f}"
        return _grid(["level", "dtype", "layer", "idea"], dict(sorted(lines.items(), key=lambda line: line[0][:3])))

    def steps(self) -> str:
        """Return the ratios of whole forwards."""
        rows = []
        for where, each in self.parts("step"):
            times = each["seconds"]
            engine = times["engine"]
            found = {"unified_max": _ratio(engine, times["unified_max"])}
            found |= {name: _ratio(times[name], engine) for name in ("flat_gemm", "dispatch")}
            kind = "prompt" if each["point"].startswith("P") else "step"
            shown = [f"{self._add(f'{kind}_{name}', where, ratio):.2f}" for name, ratio in found.items()]
            rows.append(
                [*where, each["point"], f"{median(engine) * 1e3:.1f}", *shown, f"{each['count']} of {each['of']}"]
            )
        header = ["level", "dtype", "point", "engine, ms", "unified maximum", "flat GEMM", "dispatch", "fall-backs"]
        return markdown(header, rows)

    def notes(self) -> list[str]:
        """Return what was not measured, with the reason."""
        found = [f"{', '.join(where)}: {each['why']}" for where, each in self.parts("unavailable")]
        for where, each in self.parts("skipped"):
            found.append(f"{', '.join(where)}, {each['rows']} rows at {each['context']}: {each['why']}")
        return [f"- not measured: {line}" for line in found]

    def shown(self) -> str:
        """Return all tables."""
        titles = {
            "Unified maximum: decode attention of one layer": self.attention(),
            "Fall-backs": self.fallbacks(),
            "Flat GEMM and dispatch: the linear layers of one layer, by rows": self.linear(),
            "Whole forwards": self.steps(),
        }
        parts = [*(f"#### {title}\n{table}" for title, table in titles.items()), "\n".join(self.notes())]
        return "\n\n".join(filter(None, parts))

    def ratios(self) -> dict[str, float | None]:
        """Return the medians of each idea, over all and by level and dtype, of the tables shown so far."""
        return {name: round(median(values), 3) for name, values in sorted(self._values.items())}

    def counts(self) -> dict[str, float]:
        """Return the fall-backs of the demo model."""
        return {f"fall-backs of demo, {', '.join(where)}": each["count"] for where, each in self.parts("demo")}

    def _add(self, idea: str, where: Where, ratio: float) -> float:
        self._values[idea].append(ratio)
        self._values[f"{idea} {' '.join(where)}"].append(ratio)
        return ratio


def _grid(header: Sequence[str], lines: Mapping[Any, Mapping[int, str]]) -> str:
    """Return a table with a column for each number of rows."""
    columns = sorted({column for cells in lines.values() for column in cells})
    names = [f"{column} row{'s' * (column > 1)}" for column in columns]
    body = [[*map(str, key), *(cells.get(column, "-") for column in columns)] for key, cells in lines.items()]
    return markdown([*header, *names], body)


def gpu_tables(records: Sequence[Record]) -> tuple[str, dict[str, float | None]]:
    """Return the tables and ratios of a GPU."""
    attention: dict[tuple[int], dict[int, str]] = defaultdict(dict)
    products: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    unified, sums = list[float](), dict[tuple[str, str, int], float]()
    for each in records:
        if each["part"] == "attention":
            ratio = _ratio(each["seconds"]["running"], each["seconds"]["unified"])
            unified.append(ratio)
            attention[each["context"],][each["rows"]] = f"{ratio:.2f} ({each['count']} fall-backs)"
        if each["part"] == "product":
            for name, times in each["seconds"].items():
                key = each["model"], name, each["rows"]
                sums[key] = sums.get(key, 0.0) + median(times)
    for (model, name, rows), seconds in sums.items():
        products[model, name][rows] = f"{seconds * 1e6:.0f} us"
    text = f"{_grid(['context'], attention)}\n\n{_grid(['layer', 'torch.mm'], products)}"
    skipped = [
        f"- not measured: {r['rows']} rows at {r['context']}: {r['why']}" for r in records if r["part"] == "skipped"
    ]
    return "\n".join([text, *skipped]), {"gpu_unified_max": round(median(unified), 3) if unified else None}
