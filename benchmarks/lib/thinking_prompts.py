"""Prompts for models that think: stories of a coin, and mixed prompts for comparing modes."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, NamedTuple

from models.thinking_eval import samples

if TYPE_CHECKING:
    from baton.tokenizer import Tokenizer
    from benchmarks.lib.thinking_run import Prompt

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOST_FLIPS, LONGEST = 30, 200  # flips per story; number of random token ids
NAME = re.compile(r"\b[A-Z][a-z]+\b")


class Load(NamedTuple):
    """Stories of `flips` flips, with about `filler` unrelated clauses per flip."""

    flips: int
    filler: float

    def __str__(self) -> str:
        return f"{self.flips} flips, {'with filler' if self.filler else 'dense'}"


LOADS = (*(Load(flips, 1.0) for flips in (10, 30, 100)), *(Load(flips, 0.0) for flips in (10, 30, 100)))


def stories(load: Load, count: int, seed: int, tokenizer: Tokenizer) -> list[Prompt]:
    """Return the prompts of new stories."""
    return [tuple(tokenizer.encode(sample.prompt)) for sample in samples(load.flips, count, seed, load.filler)]


def mixed(count: int, seed: int, tokenizer: Tokenizer, vocab_size: int) -> list[Prompt]:
    """Return stories, some with unknown words and some cut anywhere. Every fourth prompt has random token ids."""
    rng, found = random.Random(f"mixed {seed}"), list[tuple[int, ...]]()
    for number in range(count):
        if number % 4 == 3:
            length = rng.randint(1, LONGEST)
            found.append(tuple(rng.randrange(vocab_size) for _ in range(length)))
            continue
        flips, filler = rng.randint(0, MOST_FLIPS), rng.choice((0.0, 0.5, 1.0, 2.0))
        text = samples(flips, 1, seed * count + number, filler)[0].prompt
        if rng.random() < 0.5:
            text = NAME.sub(lambda _: "".join(rng.choices(LETTERS, k=rng.randint(2, 9))).capitalize(), text)
        ids = tokenizer.encode(text)
        found.append(tuple(ids[: rng.randint(1, len(ids))] if rng.random() < 0.5 else ids))
    return found
