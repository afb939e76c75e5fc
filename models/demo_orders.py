"""Ordered facts: days, months, letters, numbers, counting and small sums."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from models import demo_tables as tables
from models.demo_relations import Fact, ask, capital, expand

LETTERS = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBERS = [
    *SMALL.split(),
    *(f"{ten}-{unit}".removesuffix("-zero") for ten in TENS.split() for unit in SMALL.split()[:10]),
    "one hundred",
]


def neighbours(kind: str, items: list[str], cyclic: bool) -> Iterator[Fact]:
    """Yield the items after and before each item."""
    after = [*pairwise(items), (items[-1], items[0])] if cyclic else list(pairwise(items))
    forms = """
        The {kind} after {x} is => {y}
        After the {kind} {x} comes => {y}
        The {kind} {x} is followed by => {y}
        Which {kind} comes after {x}? => {Y}
        What {kind} comes after {x}? => {Y}
        What {kind} follows {x}? => {Y}"""
    yield from expand(f"{kind}-after", after, forms, kind=kind)
    forms = """
        The {kind} before {x} is => {y}
        Before the {kind} {x} comes => {y}
        The {kind} {x} is just behind => {y}
        Which {kind} comes before {x}? => {Y}
        What {kind} comes before {x}? => {Y}
        What {kind} stands before {x}? => {Y}"""
    yield from expand(f"{kind}-before", [(y, x) for x, y in after], forms, kind=kind)


def calendar() -> Iterator[Fact]:
    """Yield neighbors and positions of days, months, seasons, letters and numbers."""
    yield from neighbours("day", tables.DAYS, cyclic=True)
    yield from neighbours("month", tables.MONTHS, cyclic=True)
    yield from neighbours("season", tables.SEASONS, cyclic=True)
    yield from neighbours("letter", LETTERS, cyclic=False)
    yield from neighbours("number", NUMBERS, cyclic=False)
    days = list(zip(tables.DAYS, tables.DAYS[1:] + tables.DAYS[:1], strict=True))
    yield from expand("day-after", days, "If today is {x}, tomorrow is => {y}\nToday is {x}. Tomorrow is => {y}")
    days = [(y, x) for x, y in days]
    yield from expand("day-before", days, "If today is {x}, yesterday was => {y}\nToday is {x}. Yesterday was => {y}")
    forms = """
        The {x} {kind} of the {row} is => {y}
        Name the {x} {kind} of the {row}. => {y}
        We call the {x} {kind} of the {row} => {y}
        What is the {x} {kind} of the {row}? => {y}
        Which is the {x} {kind} of the {row}? => {y}
        Which {kind} of the {row} is the {x}? => {y}"""
    for kind, row, items in [("day", "week", tables.DAYS), ("month", "year", tables.MONTHS)]:
        ranked = list(zip(tables.ORDINALS, items, strict=False))
        yield from expand(f"{kind}-rank", ranked, forms, kind=kind, row=row)


def sums() -> Iterator[Fact]:
    """Yield sums, differences and products of small numbers, in words and in digits."""
    forms = """
        {X} {name} {y} is => {z}
        {X} {name} {y} makes => {z}
        What is {x} {name} {y}? => {Z}
        How much is {x} {name} {y}? => {Z}
        {a} {sign} {b} = => {c}
        {a} {sign} {b} is => {c}
        What is {a} {sign} {b}? => {c}
        How much is {a} {sign} {b}? => {c}"""
    spans = range(1, 11)
    rows = [("plus", "+", a, b, a + b) for a in spans for b in spans]
    rows += [("minus", "-", a, b, a - b) for a in range(1, 21) for b in spans if a >= b]
    rows += [("times", "*", a, b, a * b) for a in spans for b in spans]
    for name, sign, a, b, c in rows:
        x, y, z = NUMBERS[a], NUMBERS[b], NUMBERS[c]
        fields = {"x": x, "X": capital(x), "y": y, "z": z, "Z": capital(z), "name": name, "sign": sign}
        yield from ask(name, f"{a} {b}", forms, fields | {"a": str(a), "b": str(b), "c": str(c)})


def counting() -> Iterator[Fact]:
    """Yield long outputs: counting up and down, days and months in a row."""
    for low in range(1, 20):
        for high in range(low + 1, 31 if low == 1 else 21):
            row = NUMBERS[low : high + 1]
            fields = {"x": row[0], "y": row[-1], "up": " ".join(row), "down": " ".join(reversed(row))}
            forms = "Count from {x} to {y}: => {up}\nSay the numbers from {x} to {y}: => {up}"
            yield from ask("count", f"{low} {high}", forms, fields)
            forms = "Count down from {y} to {x}: => {down}\nSay the numbers down from {y} to {x}: => {down}"
            yield from ask("down", f"{low} {high}", forms, fields)
    forms = """
        The {kind} from {x} to {y} are => {list}.
        List the {kind} from {x} to {y}: => {list}.
        Name the {kind} from {x} to {y}: => {list}."""
    for kind, items in [("days", tables.DAYS), ("months", tables.MONTHS)]:
        for i in range(len(items)):
            for j in range(i + 1, len(items)):
                fields = {"kind": kind, "x": items[i], "y": items[j], "list": ", ".join(items[i : j + 1])}
                yield from ask(kind, f"{i} {j}", forms, fields)
