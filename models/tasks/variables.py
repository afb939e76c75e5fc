"""Programs of three variables: start values, assignments, and a question about one of them. All sums are modulo 10.

``a=3,b=7,c=1,a=b+4,c=c+2. What is c? A:`` is completed with `` 3.``. The thought after an assignment has the values of
all three variables, because the question comes last. In the tokens of the coin model, an assignment has six tokens.
"""

from __future__ import annotations

import random

from models.thinking_text import MOST_FLIPS, Sample

NAMES = "abc"
SHARE_OWN = 0.5  # of assignments that add to the variable itself; the others read another variable


def program(rng: random.Random, steps: int) -> Sample:
    """Return a program of `steps` assignments after the three start values."""
    values = {name: rng.randrange(10) for name in NAMES}
    text = ",".join(f"{name}={value}" for name, value in values.items())
    thoughts, ends = list[str](), list[int]()
    for _ in range(steps):
        target, added = rng.choice(NAMES), rng.randint(1, 9)
        source = target if rng.random() < SHARE_OWN else rng.choice([name for name in NAMES if name != target])
        values[target] = (values[source] + added) % 10
        text += f",{target}={source}+{added}"
        thoughts.append("".join(map(str, values.values())))
        ends.append(len(text))
    asked = rng.choice(NAMES)
    return Sample(f"{text}. What is {asked}? A:", f" {values[asked]}.", tuple(thoughts), tuple(ends))


def training_sample(rng: random.Random, longest: int) -> Sample:
    """Return a program of at most MOST_FLIPS assignments. It has no idle clauses, so `longest` does not matter."""
    del longest
    return program(rng, rng.randint(0, MOST_FLIPS))


def samples(steps: int, n: int, seed: int) -> list[Sample]:
    """Return `n` new programs of `steps` assignments."""
    rng = random.Random(f"variables {seed} {steps}")
    return [program(rng, steps) for _ in range(n)]
