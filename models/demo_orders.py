"""Facts with an order behind them: days, months, letters, numbers, counting and small sums."""

from __future__ import annotations

from collections.abc import Iterator

from models import demo_tables as tables
from models.demo_relations import NUMBERS, Fact, Forms, capital, expand

LETTERS = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def neighbours(group: str, items: list[str], question: str, cyclic: bool, extra: Forms, extra_before: Forms
               ) -> Iterator[Fact]:
    """What comes after and before each item; ``question`` is the asking word pair, e.g. ``What day``."""
    kind = question.split()[-1]
    after = list(zip(items, items[1:], strict=False)) + ([(items[-1], items[0])] if cyclic else [])
    yield from expand(group + "-after", after, [
        (f"The {kind} after {{x}} is", " {y}"), (f"{question} comes after {{x}}?", "{Y}"),
        (f"After the {kind} {{x}} comes", " {y}"), (f"What {kind} follows {{x}}?", "{Y}"), *extra])
    yield from expand(group + "-before", [(y, x) for x, y in after], [
        (f"The {kind} before {{x}} is", " {y}"), (f"{question} comes before {{x}}?", "{Y}"),
        (f"Before the {kind} {{x}} comes", " {y}"), (f"What {kind} stands before {{x}}?", "{Y}"), *extra_before])


def calendar() -> Iterator[Fact]:
    """Days, months, seasons and letters: neighbours and places in the row."""
    yield from neighbours("day", tables.DAYS, "What day", True,
                          [("If today is {x}, tomorrow is", " {y}")], [("If today is {x}, yesterday was", " {y}")])
    yield from neighbours("month", tables.MONTHS, "What month", True,
                          [("If this month is {x}, next month is", " {y}")],
                          [("If this month is {x}, last month was", " {y}")])
    yield from neighbours("season", tables.SEASONS, "What season", True, [], [])
    yield from neighbours("letter", LETTERS, "Which letter", False, [], [])
    yield from neighbours("number", NUMBERS, "Which number", False, [], [])
    for kind, row, items in [("day", "week", tables.DAYS), ("month", "year", tables.MONTHS)]:
        ranked = list(zip(tables.ORDINALS, items, strict=False))
        yield from expand(f"{kind}-rank", ranked, [
            (f"The {{x}} {kind} of the {row} is", " {y}"), (f"What is the {{x}} {kind} of the {row}?", "{y}"),
            (f"Name the {{x}} {kind} of the {row}.", " {y}"), (f"Which {kind} of the {row} is the {{x}}?", "{y}")])


def sums() -> Iterator[Fact]:
    """Sums, differences and products of small numbers, in words and in digits."""
    spans = range(1, 11)
    rows = [("plus", "+", a, b, a + b) for a in spans for b in spans]
    rows += [("minus", "-", a, b, a - b) for a in range(1, 21) for b in spans if a >= b]
    rows += [("times", "*", a, b, a * b) for a in spans for b in spans]
    for name, sign, a, b, c in rows:
        x, y, z = NUMBERS[a], NUMBERS[b], NUMBERS[c]
        for prompt, completion in [
            (f"{capital(x)} {name} {y} is", f" {z}"), (f"What is {x} {name} {y}?", capital(z)),
            (f"{capital(x)} {name} {y} makes", f" {z}"), (f"How much is {x} {name} {y}?", capital(z)),
            (f"{a} {sign} {b} =", f" {c}"), (f"What is {a} {sign} {b}?", f"{c}"),
            (f"{a} {sign} {b} is", f" {c}"), (f"How much is {a} {sign} {b}?", f"{c}"),
        ]:
            yield Fact(name, f"{a} {b}", prompt, completion)


def counting() -> Iterator[Fact]:
    """Long outputs: counting up and down, days and months in a row."""
    for low in range(1, 20):
        for high in range(low + 1, 31 if low == 1 else 21):
            row = NUMBERS[low:high + 1]
            x, y = row[0], row[-1]
            up, down = " " + " ".join(row), " " + " ".join(reversed(row))
            yield Fact("count", f"{low} {high}", f"Count from {x} to {y}:", up)
            yield Fact("count", f"{low} {high}", f"Say the numbers from {x} to {y}:", up)
            yield Fact("down", f"{low} {high}", f"Count down from {y} to {x}:", down)
            yield Fact("down", f"{low} {high}", f"Say the numbers down from {y} to {x}:", down)
    for kind, items in [("days", tables.DAYS), ("months", tables.MONTHS)]:
        for i in range(len(items)):
            for j in range(i + 1, len(items)):
                key, text = f"{i} {j}", " " + ", ".join(items[i:j + 1]) + "."
                yield Fact(kind, key, f"The {kind} from {items[i]} to {items[j]} are", text)
                yield Fact(kind, key, f"List the {kind} from {items[i]} to {items[j]}:", text)
                yield Fact(kind, key, f"Name the {kind} from {items[i]} to {items[j]}:", text)
