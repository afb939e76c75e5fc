"""Questions about hops through a small graph of people. The facts are not in the text: a model learns them.

``Q: Go from Alice to the friend, then to the cook. Who is it? A:`` is completed with the person. The thought after a
hop is the person reached. One triple in five of (person, relation, relation) is in no training text. A question of two
hops is always such a triple, so both facts are known and their composition is new.
"""

from __future__ import annotations

import random
from functools import cache

from models.thinking_phrases import NAMES
from models.thinking_text import MOST_FLIPS, Sample

RELATIONS = ("friend", "teacher", "neighbour", "cook")
HELD_OUT = 0.2


@cache
def graph() -> dict[str, dict[str, str]]:
    """Return the person at the end of each relation of each person. Each relation is a permutation without itself."""
    rng, found = random.Random("people"), dict[str, dict[str, str]]()
    for relation in RELATIONS:
        ring = rng.sample(NAMES, len(NAMES))
        found[relation] = dict(zip(ring, ring[1:] + ring[:1], strict=True))
    return found


@cache
def held_out() -> frozenset[tuple[str, str, str]]:
    """Return the triples (person, first relation, second relation) that no training text has."""
    rng = random.Random("held out")
    triples = [(name, first, second) for name in NAMES for first in RELATIONS for second in RELATIONS]
    return frozenset(triple for triple in triples if rng.random() < HELD_OUT)


def question(start: str, relations: list[str]) -> Sample:
    """Return the question of these hops from `start`."""
    text, person, thoughts, ends = f"Q: Go from {start}", start, list[str](), list[int]()
    for number, relation in enumerate(relations):
        text += f"{', then' if number else ''} to the {relation}"
        person = graph()[relation][person]
        thoughts.append(f" {person}")
        ends.append(len(text))
    return Sample(f"{text}. Who is it? A:", f" {person}.", tuple(thoughts), tuple(ends))


def training_sample(rng: random.Random, longest: int) -> Sample:
    """Return a question of at most MOST_FLIPS hops without a held-out triple. `longest` does not matter."""
    del longest
    start, relations = rng.choice(NAMES), list[str]()
    before, person = "", start
    for _ in range(rng.randint(0, MOST_FLIPS)):
        allowed = [r for r in RELATIONS if not relations or (before, relations[-1], r) not in held_out()]
        if not allowed:
            break
        relations.append(rng.choice(allowed))
        before, person = person, graph()[relations[-1]][person]
    return question(start, relations)


def samples(hops: int, n: int, seed: int) -> list[Sample]:
    """Return `n` questions of `hops` hops: of two hops, held-out triples; of others, any."""
    rng = random.Random(f"two hops {seed} {hops}")
    if hops == 2:
        return [question(start, [first, second]) for start, first, second in rng.choices(sorted(held_out()), k=n)]
    return [question(rng.choice(NAMES), rng.choices(RELATIONS, k=hops)) for _ in range(n)]
