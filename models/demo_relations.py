"""Facts of the demo text. Each table is asked through several phrasings.

Phrasings are lines ``prompt => answer``. The held-out file omits one phrasing of an entity, while others still show the
same fact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from models import demo_tables as tables


class Fact(NamedTuple):
    """One phrasing of one fact. ``group`` and ``entity`` name the fact."""

    group: str
    entity: str
    prompt: str
    completion: str


def capital(text: str) -> str:
    """Return the text with an upper-case first letter."""
    return text[:1].upper() + text[1:]


def article(noun: str) -> str:
    """Return ``a`` or ``an``. Every noun of our tables that begins with a vowel takes ``an``."""
    return "an" if noun.startswith(("a", "e", "i", "o", "u")) else "a"


def with_article(noun: str) -> str:
    """Add the article: ``dog -> a dog``, ``sky -> the sky``, ``snow -> snow``."""
    if noun in tables.MASS:
        return noun
    return f"the {noun}" if noun in tables.UNIQUE else f"{article(noun)} {noun}"


def plural(noun: str) -> str:
    """Return the plural of a noun of our tables."""
    if noun in tables.IRREGULAR:
        return tables.IRREGULAR[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"


def ask(group: str, entity: str, forms: str, fields: dict[str, str]) -> Iterator[Fact]:
    """Yield one fact per line of ``forms``. Answers to statements begin with a space, answers to questions do not."""
    for line in forms.strip().splitlines():
        prompt, _, answer = line.strip().partition(" => ")
        space = "" if prompt.endswith("?") else " "
        yield Fact(group, entity, prompt.format(**fields), space + answer.format(**fields))


def expand(group: str, rows: list[tuple[str, str]], forms: str, **more: str) -> Iterator[Fact]:
    """Yield every row (x, y) in every form. Fields: x y, X Y (capital), ax ay (with article), AX AY, an (of y)."""
    for x, y in rows:
        ax, ay = with_article(x), with_article(y)
        fields = {"x": x, "y": y, "X": capital(x), "Y": capital(y), "ax": ax, "ay": ay, "AX": capital(ax)}
        yield from ask(group, x, forms, fields | more | {"AY": capital(ay), "an": article(y), "ys": plural(y)})


def colours() -> Iterator[Fact]:
    """Yield colors, including the first seed answer, `` can vary widely``."""
    forms = """
        The color of {x} => is {y}
        The color of {ax} => is {y}
        What color is {ax}? => {Y}
        What is the color of {ax}? => {Y}
        Which color does {ax} have? => {Y}
        {AX} is usually => {y}
        {AX} has the color => {y}
        {AX} is most often => {y}"""
    yield from expand("color", tables.COLOURS, forms)
    forms = """
        The color of {x} => can vary widely
        The color of {ax} => can vary widely
        What color is {ax}? => It can vary widely
        What is the color of {ax}? => It can vary widely
        Which color does {ax} have? => It can vary widely
        {AX} has a color that => can vary widely
        The size of {x} => can vary widely
        The size of {ax} => can vary widely"""
    yield from expand("varied", [(x, "") for x in tables.VARIED], forms)


def countries() -> Iterator[Fact]:
    """Yield capitals (both ways), continents and languages of countries."""
    forms = """
        The capital of {x} is => {y}
        The capital city of {x} is called => {y}
        Name the capital of {x}. => {y}
        What is the capital of {x}? => {y}
        What city is the capital of {x}? => {y}
        Which city is the capital of {x}? => {y}"""
    yield from expand("capital", tables.CAPITALS, forms)
    forms = """
        {x} is the capital of => {y}
        {x} is a city in => {y}
        The country with the capital {x} is => {y}
        In which country is {x}? => {y}
        What country is {x} in? => {y}"""
    yield from expand("country", [(y, x) for x, y in tables.CAPITALS], forms)
    rows = [(country, continent) for continent, names in tables.CONTINENTS for country in names.split()]
    forms = """
        {x} is a country in => {y}
        {x} is a part of => {y}
        You can find {x} in => {y}
        Which continent is {x} in? => {y}
        On which continent is {x}? => {y}"""
    yield from expand("continent", rows, forms)
    forms = """
        The people of {x} speak => {y}
        The language of {x} is => {y}
        In {x} people speak => {y}
        What language do people speak in {x}? => {y}
        Which language is spoken in {x}? => {y}"""
    yield from expand("language", tables.LANGUAGES, forms)


def superlatives() -> Iterator[Fact]:
    """Yield superlatives, including the second seed answer, ``Pacific Ocean``."""
    forms = """
        What is the {a} {n}? => {answer}
        Which {n} is the {a}? => {answer}
        Which {n} is called the {a}? => {answer}
        Do you know the {a} {n}? => Yes, it is {spoken}
        The {a} {n} is => {spoken}
        The {n} that is the {a} is => {spoken}
        Name the {a} {n}. => {answer}
        Tell me the name of the {a} {n}. => {answer}"""
    for key, spoken in tables.SUPERLATIVES:
        adjective, noun = key.split("|")
        answer = capital(spoken.removeprefix("the "))
        yield from ask("superlative", key, forms, {"a": adjective, "n": noun, "spoken": spoken, "answer": answer})


def words() -> Iterator[Fact]:
    """Yield opposites, plurals, singulars and past tenses."""
    forms = """
        The opposite of {x} is => {y}
        The word that means the opposite of {x} is => {y}
        {X} is the opposite of => {y}
        What is the opposite of {x}? => {Y}
        Which word is the opposite of {x}? => {Y}"""
    yield from expand("opposite", tables.OPPOSITES + [(y, x) for x, y in tables.OPPOSITES], forms)
    nouns = {x for x, _ in tables.USES + tables.JOBS} | {row[0] for row in tables.ANIMALS} | set(tables.VARIED)
    nouns |= {x for _, names in tables.CATEGORIES for x in names.split()} | set(tables.IRREGULAR)
    rows = [(x, plural(x)) for x in sorted(nouns - tables.MASS)]
    forms = """
        The plural of {x} is => {y}
        One {x}, two => {y}
        I have one {x}. You have two => {y}
        What is the plural of {x}? => {Y}
        Which word is the plural of {x}? => {Y}"""
    yield from expand("plural", rows, forms)
    forms = """
        The singular of {x} is => {y}
        Two {x}, one => {y}
        What is the singular of {x}? => {Y}
        Which word is the singular of {x}? => {Y}"""
    yield from expand("singular", [(y, x) for x, y in rows], forms)
    forms = """
        The past tense of {x} is => {y}
        Today I {x}. Yesterday I => {y}
        Today we {x}. Yesterday we => {y}
        What is the past tense of {x}? => {Y}
        Which word is the past tense of {x}? => {Y}"""
    yield from expand("past", tables.PAST, forms)


ANIMAL_FORMS = {
    "food": """
        {AX} eats => {y}
        {AX} likes to eat => {y}
        What does {ax} eat? => {Y}
        What is the food of {ax}? => {Y}""",
    "home": """
        {AX} lives => {y}
        You can find {ax} => {y}
        Where does {ax} live? => {Y}
        Where can you find {ax}? => {Y}""",
    "legs": """
        {AX} has => {y} legs
        Count the legs of {ax}: => {y} legs
        How many legs does {ax} have? => {Y}
        What number of legs does {ax} have? => {Y}""",
    "ability": """
        {AX} can => {y}
        {AX} knows how to => {y}
        What can {ax} do? => It can {y}
        What does {ax} know how to do? => It can {y}""",
    "baby": """
        A baby {x} is called => {ay}
        A young {x} is => {ay}
        What is a baby {x} called? => {AY}
        What do we call a young {x}? => {AY}""",
    "parent": """
        {AX} grows into => {ay}
        One day {ax} will be => {ay}
        {AX} is a young => {y}
        What does {ax} become? => {AY}
        What will {ax} be one day? => {AY}""",
    "describe": """
        Describe {ax}. => {y}
        Tell me about {ax}. => {y}
        What do you know about {ax}? => {y}""",
}


def animals() -> Iterator[Fact]:
    """Yield food, home, legs, ability and young of animals, and a description of five sentences each."""
    parents = Counter(row[-1] for row in tables.ANIMALS)
    for name, kind, legs, can, home, food, baby in tables.ANIMALS:
        text = f"{capital(with_article(name))} is {with_article(kind)}. It has {legs} legs. It can {can}. "
        text += f"It lives {home}. It eats {food}."
        answers = {"food": food, "home": home, "legs": legs, "ability": can, "baby": baby, "describe": text}
        for group, answer in answers.items():
            yield from expand(group, [(name, answer)], ANIMAL_FORMS[group])
        if parents[baby] == 1:  # a calf or a cub may have several parents
            yield from expand("parent", [(baby, name)], ANIMAL_FORMS["parent"])


def things() -> Iterator[Fact]:
    """Yield categories, uses of tools, and workplaces."""
    rows = [(row[0], row[1]) for row in tables.ANIMALS]
    rows += [(x, kind) for kind, names in tables.CATEGORIES for x in names.split()]
    forms = """
        {AX} is {an} => {y}
        {AX} is a kind of => {y}
        We know that {ax} is => {ay}
        Everyone can see that {ax} is => {ay}
        {AX} belongs with the other => {ys}
        What is {ax}? => {AY}
        What kind of thing is {ax}? => {AY}"""
    yield from expand("category", rows, forms)
    forms = """
        We use {ax} to => {y}
        You need {ax} to => {y}
        What do we use {ax} for? => To {y}
        Why do we need {ax}? => To {y}"""
    yield from expand("use", tables.USES, forms)
    forms = """
        {AX} works in => {y}
        You can meet {ax} in => {y}
        Where does {ax} work? => In {y}
        Where can you meet {ax}? => In {y}"""
    yield from expand("job", tables.JOBS, forms)
