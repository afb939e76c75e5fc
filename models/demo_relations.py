"""Facts of the demo text: each table asked through several phrasings.

A phrasing is a pair of templates, (prompt, completion).  Holding out one phrasing of one entity leaves the
same fact visible through the others: this is what the held-out file measures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from models import demo_tables as tables

Forms = list[tuple[str, str]]


class Fact(NamedTuple):
    """One way to ask for one fact; ``group`` and ``entity`` name the fact itself."""

    group: str
    entity: str
    prompt: str
    completion: str


def capital(text: str) -> str:
    """The same text with an upper-case first letter."""
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    """``a`` or ``an``; every vowel-initial noun of our tables takes ``an``."""
    return "an" if noun.startswith(("a", "e", "i", "o", "u")) else "a"


def with_article(noun: str) -> str:
    """``dog -> a dog``, ``sky -> the sky``, ``snow -> snow``."""
    if noun in tables.MASS:
        return noun
    return f"the {noun}" if noun in tables.UNIQUE else f"{article(noun)} {noun}"


def plural(noun: str) -> str:
    """The plural of a noun of our tables."""
    if noun in tables.IRREGULAR:
        return tables.IRREGULAR[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"


NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split() + [
    tens + unit
    for tens in "twenty thirty forty fifty sixty seventy eighty ninety".split()
    for unit in ("", "-one", "-two", "-three", "-four", "-five", "-six", "-seven", "-eight", "-nine")
] + ["one hundred"]


def expand(group: str, rows: list[tuple[str, str]], forms: Forms) -> Iterator[Fact]:
    """Every row (x, y) through every form; fields: x y, X Y (capital), ax ay (with article), AX AY, an (of y)."""
    for x, y in rows:
        ax, ay = with_article(x), with_article(y)
        fields = {"x": x, "y": y, "X": capital(x), "Y": capital(y), "ax": ax, "ay": ay, "AX": capital(ax)}
        fields |= {"AY": capital(ay), "an": article(y), "ys": plural(y)}
        for prompt, completion in forms:
            yield Fact(group, x, prompt.format(**fields), completion.format(**fields))


def colours() -> Iterator[Fact]:
    """Colors: the first seed answer, `` can vary widely``, lives here."""
    yield from expand("color", tables.COLOURS, [
        ("The color of {x}", " is {y}"), ("The color of {ax}", " is {y}"), ("What color is {ax}?", "{Y}"),
        ("What is the color of {ax}?", "{Y}"), ("{AX} is usually", " {y}"), ("{AX} has the color", " {y}"),
        ("Which color does {ax} have?", "{Y}"), ("{AX} is most often", " {y}"),
    ])
    yield from expand("varied", [(x, "") for x in tables.VARIED], [
        ("The color of {x}", " can vary widely"), ("The color of {ax}", " can vary widely"),
        ("What color is {ax}?", "It can vary widely"), ("What is the color of {ax}?", "It can vary widely"),
        ("The size of {x}", " can vary widely"), ("{AX} has a color that", " can vary widely"),
        ("Which color does {ax} have?", "It can vary widely"), ("The size of {ax}", " can vary widely"),
    ])


def places() -> Iterator[Fact]:
    """Countries: capital (both ways), continent, language."""
    yield from expand("capital", tables.CAPITALS, [
        ("The capital of {x} is", " {y}"), ("What is the capital of {x}?", "{y}"),
        ("Which city is the capital of {x}?", "{y}"), ("The capital city of {x} is called", " {y}"),
        ("Name the capital of {x}.", " {y}"), ("What city is the capital of {x}?", "{y}"),
    ])
    yield from expand("country", [(y, x) for x, y in tables.CAPITALS], [
        ("{x} is the capital of", " {y}"), ("{x} is a city in", " {y}"), ("In which country is {x}?", "{y}"),
        ("The country with the capital {x} is", " {y}"), ("What country is {x} in?", "{y}"),
    ])
    rows = [(country, continent) for continent, names in tables.CONTINENTS for country in names.split()]
    yield from expand("continent", rows, [
        ("{x} is a country in", " {y}"), ("Which continent is {x} in?", "{y}"), ("{x} is a part of", " {y}"),
        ("On which continent is {x}?", "{y}"), ("You can find {x} in", " {y}"),
    ])
    yield from expand("language", tables.LANGUAGES, [
        ("The people of {x} speak", " {y}"), ("The language of {x} is", " {y}"),
        ("What language do people speak in {x}?", "{y}"), ("Which language is spoken in {x}?", "{y}"),
        ("In {x} people speak", " {y}"),
    ])


def superlatives() -> Iterator[Fact]:
    """The largest, longest, coldest...: the second seed answer, ``Pacific Ocean``, lives here."""
    for key, spoken in tables.SUPERLATIVES:
        adjective, noun = key.split("|")
        answer = capital(spoken.removeprefix("the "))
        for prompt, completion in [
            ("What is the {a} {n}?", answer), ("Which {n} is the {a}?", answer), ("The {a} {n} is", f" {spoken}"),
            ("Name the {a} {n}.", f" {answer}"), ("Do you know the {a} {n}?", f"Yes, it is {spoken}"),
            ("Which {n} is called the {a}?", answer), ("The {n} that is the {a} is", f" {spoken}"),
            ("Tell me the name of the {a} {n}.", f" {answer}"),
        ]:
            yield Fact("superlative", key, prompt.format(a=adjective, n=noun), completion)


def words() -> Iterator[Fact]:
    """Opposites, plurals, singulars and past tenses."""
    both = tables.OPPOSITES + [(y, x) for x, y in tables.OPPOSITES]
    yield from expand("opposite", both, [
        ("The opposite of {x} is", " {y}"), ("What is the opposite of {x}?", "{Y}"), ("{X} is the opposite of", " {y}"),
        ("The word that means the opposite of {x} is", " {y}"), ("Which word is the opposite of {x}?", "{Y}"),
    ])
    nouns = {x for x, _ in tables.USES + tables.JOBS} | {row[0] for row in tables.ANIMALS} | set(tables.VARIED)
    nouns |= {x for _, names in tables.CATEGORIES for x in names.split()} | set(tables.IRREGULAR)
    rows = [(x, plural(x)) for x in sorted(nouns - tables.MASS)]
    yield from expand("plural", rows, [
        ("The plural of {x} is", " {y}"), ("What is the plural of {x}?", "{Y}"), ("One {x}, two", " {y}"),
        ("I have one {x}. You have two", " {y}"), ("Which word is the plural of {x}?", "{Y}"),
    ])
    yield from expand("singular", [(y, x) for x, y in rows], [
        ("The singular of {x} is", " {y}"), ("What is the singular of {x}?", "{Y}"), ("Two {x}, one", " {y}"),
        ("Which word is the singular of {x}?", "{Y}"),
    ])
    yield from expand("past", tables.PAST, [
        ("The past tense of {x} is", " {y}"), ("What is the past tense of {x}?", "{Y}"),
        ("Today I {x}. Yesterday I", " {y}"), ("Today we {x}. Yesterday we", " {y}"), ("Which word is the past tense of {x}?", "{Y}"),
    ])


def animals() -> Iterator[Fact]:
    """Food, home, legs, ability and young of animals; a description of five sentences each."""
    columns = list(zip(*tables.ANIMALS, strict=True))
    names, _, legs, ability, home, food, baby = columns
    yield from expand("food", list(zip(names, food, strict=True)), [
        ("{AX} eats", " {y}"), ("What does {ax} eat?", "{Y}"), ("{AX} likes to eat", " {y}"),
        ("What is the food of {ax}?", "{Y}")])
    yield from expand("home", list(zip(names, home, strict=True)), [
        ("{AX} lives", " {y}"), ("Where does {ax} live?", "{Y}"), ("You can find {ax}", " {y}"),
        ("Where can you find {ax}?", "{Y}")])
    yield from expand("legs", list(zip(names, legs, strict=True)), [
        ("{AX} has", " {y} legs"), ("How many legs does {ax} have?", "{Y}"), ("Count the legs of {ax}:", " {y} legs"),
        ("What number of legs does {ax} have?", "{Y}")])
    yield from expand("ability", list(zip(names, ability, strict=True)), [
        ("{AX} can", " {y}"), ("What can {ax} do?", "It can {y}"), ("{AX} knows how to", " {y}"),
        ("What does {ax} know how to do?", "It can {y}")])
    yield from expand("baby", list(zip(names, baby, strict=True)), [
        ("A baby {x} is called", " {ay}"), ("What is a baby {x} called?", "{AY}"), ("A young {x} is", " {ay}"),
        ("What do we call a young {x}?", "{AY}")])
    once = [(b, n) for n, b in zip(names, baby, strict=True) if Counter(baby)[b] == 1]
    yield from expand("parent", once, [
        ("{AX} grows into", " {ay}"), ("What does {ax} become?", "{AY}"), ("{AX} is a young", " {y}"),
        ("What will {ax} be one day?", "{AY}"), ("One day {ax} will be", " {ay}")])
    for name, kind, leg, can, where, eats, _ in tables.ANIMALS:
        text = f"{capital(with_article(name))} is {with_article(kind)}. It has {leg} legs. It can {can}. "
        yield from expand("describe", [(name, text + f"It lives {where}. It eats {eats}.")], [
            ("Describe {ax}.", " {y}"), ("Tell me about {ax}.", " {y}"), ("What do you know about {ax}?", "{y}")])


def things() -> Iterator[Fact]:
    """Categories, uses of tools, places of work."""
    rows = [(row[0], row[1]) for row in tables.ANIMALS]
    rows += [(x, kind) for kind, names in tables.CATEGORIES for x in names.split()]
    yield from expand("category", rows, [
        ("{AX} is {an}", " {y}"), ("What is {ax}?", "{AY}"), ("What kind of thing is {ax}?", "{AY}"),
        ("We know that {ax} is", " {ay}"), ("{AX} belongs with the other", " {ys}"),
        ("Everyone can see that {ax} is", " {ay}"), ("{AX} is a kind of", " {y}"),
    ])
    yield from expand("use", tables.USES, [
        ("We use {ax} to", " {y}"), ("What do we use {ax} for?", "To {y}"), ("You need {ax} to", " {y}"),
        ("Why do we need {ax}?", "To {y}")])
    yield from expand("job", tables.JOBS, [
        ("{AX} works in", " {y}"), ("Where does {ax} work?", "In {y}"), ("You can meet {ax} in", " {y}"),
        ("Where can you meet {ax}?", "In {y}")])
