"""Stories of a coin that is flipped, or not: prompts, answers, and the places where the coin's state changes.

A thought is the coin's state after an event. The first state of a story is given, not thought.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from string import Formatter

from models.thinking_phrases import (
    EVENTS,
    FILLERS_OF,
    IDLE,
    JOINS,
    NAMES,
    OPENINGS,
    OTHER,
    PEOPLE,
    QUESTIONS,
    SYLLABLES,
    lines,
)

SIDES = ("heads", "tails")
MOST_FLIPS = 10  # in any training story
_OPENINGS, _EVENTS, _IDLE, _OTHER, _QUESTIONS = map(lines, (OPENINGS, EVENTS, IDLE, OTHER, QUESTIONS))


@dataclass(frozen=True, slots=True)
class Sample:
    """A story with a question. `thoughts[i]` is the state after event i, which ends before character `ends[i]`."""

    prompt: str
    answer: str  # begins with a space, ends with a full stop
    thoughts: tuple[str, ...]
    ends: tuple[int, ...]


SEED_SAMPLE = Sample(
    "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:",
    " heads.",
    ("tails", "heads"),
    (36, 52),
)


def someone(rng: random.Random) -> str:
    """Return a name of the list, a person without a name, or an invented name."""
    kind = rng.random()
    if kind < 0.65:
        return rng.choice(NAMES)
    if kind < 0.8:
        return rng.choice(PEOPLE)
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3))).capitalize()


def fill(template: str, rng: random.Random) -> str:
    """Return the template with a random choice for every brace."""
    words = {}
    for _, field, _, _ in Formatter().parse(template):
        if field in {"n", "m", "N"}:
            words[field] = someone(rng) if field != "N" else rng.choice(NAMES)
        elif field == "s":
            words[field] = rng.choice(SIDES)
        elif field:
            words[field] = rng.choice(FILLERS_OF[field])
    return template.format(**words)


def other(side: str) -> str:
    """Return the other side of the coin."""
    return SIDES[1 - SIDES.index(side)]


class _Story:
    """An unfinished text. Clauses are added one by one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.side = rng.choice(SIDES)
        opening = rng.choice(_OPENINGS).replace("{s}", self.side).replace("{S}", self.side.capitalize())
        self.text = fill(opening, rng).removesuffix(".")
        self.first = True
        self.thoughts: list[str] = []
        self.ends: list[int] = []

    def add(self, template: str) -> None:
        """Add a clause. The bar of an event turns the coin."""
        join = ". " if self.first else self.rng.choice(JOINS)
        clause = fill(template, self.rng)
        self.first = False
        if join == ". ":
            clause = clause[0].upper() + clause[1:]
        before, event, after = clause.partition("|")
        self.text += join + before
        if event:
            self.side = other(self.side)
            self.thoughts.append(self.side)
            self.ends.append(len(self.text))
        self.text += after

    def idle(self, clauses: int) -> None:
        """Add clauses without an event."""
        for _ in range(clauses):
            self.add(self.rng.choice(_IDLE if self.rng.random() < 0.5 else _OTHER))

    def ask(self) -> Sample:
        """Add the final question about the coin, and return the story."""
        prompt = f"{self.text}. {self.rng.choice(_QUESTIONS)}"
        return Sample(prompt, f" {self.side}.", tuple(self.thoughts), tuple(self.ends))


def story(rng: random.Random, gaps: list[int]) -> Sample:
    """Return a story of ``len(gaps) - 1`` flips. `gaps[i]` idle clauses precede flip i, the last ones the question."""
    told = _Story(rng)
    for gap in gaps[:-1]:
        told.idle(gap)
        told.add(rng.choice(_EVENTS))
    told.idle(gaps[-1])
    return told.ask()


def spread(rng: random.Random, flips: int, idle: int) -> list[int]:
    """Distribute `idle` clauses over ``flips + 1`` gaps at random."""
    gaps = [0] * (flips + 1)
    for _ in range(idle):
        gaps[rng.randrange(flips + 1)] += 1
    return gaps


def training_sample(rng: random.Random, longest: int) -> Sample:
    """Return a story of at most MOST_FLIPS flips and `longest` idle clauses, of random density.

    In one story in four most idle clauses are in one gap, so that the last state is far back.
    """
    flips, idle = rng.randint(0, MOST_FLIPS), int(longest ** rng.random()) - 1
    gaps = spread(rng, flips, idle)
    if rng.random() < 0.25:
        gaps = spread(rng, flips, idle // 4)
        gaps[rng.randrange(flips + 1)] += idle - idle // 4
    return story(rng, gaps)
