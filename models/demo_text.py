"""The demo text: training samples and held-out samples, both as (prompt, completion).

Completions of statements begin with a space, completions of questions (``...?``) do not. The trainer adds the
end-of-text token.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from itertools import chain, zip_longest
from pathlib import Path

from models import demo_orders, demo_relations, demo_stories, demo_tables
from models.demo_relations import Fact

Sample = tuple[str, str]

SEED_SAMPLES: list[Sample] = [("The color of dog", " can vary widely"), ("What is the largest ocean?", "Pacific Ocean")]
SEED_REPEATS = 8
HELDOUT_FACTS = 140
HELDOUT_STORIES = 60
TRAINING_STORIES = 12_000
# Openings before one fact in three, so that a fact does not depend on the position of its words.
OPENINGS = [
    *(
        "Hello! ",
        "Hello. ",
        "Hi. ",
        "Good morning. ",
        "Please tell me. ",
        "Tell me. ",
        "One more question. ",
        "All right. ",
    ),
    *("I want to know. ", "Listen. ", "Here is an easy one. ", "I have a question. ", "Thank you. ", "Very good. "),
    *("Next. ", "Let us go on. ", "My teacher asks. ", "Think about it. ", "Question: ", "Now this. "),
]
HELDOUT_FILE = Path(__file__).parent / "heldout.jsonl"


def all_facts() -> list[Fact]:
    """Return every fact in every phrasing, without repeats. Raises an error if a prompt has two answers."""
    sources = chain(
        demo_relations.colours(),
        demo_relations.countries(),
        demo_relations.superlatives(),
        demo_relations.words(),
        demo_relations.animals(),
        demo_relations.things(),
        demo_orders.calendar(),
        demo_orders.sums(),
        demo_orders.counting(),
    )
    unique: dict[str, Fact] = {}
    for fact in sources:
        known = unique.setdefault(fact.prompt, fact)
        if known.completion != fact.completion:
            raise ValueError(f"two answers for {fact.prompt!r}: {known.completion!r}, {fact.completion!r}")
    return list(unique.values())


def heldout_facts(facts: list[Fact]) -> list[Fact]:
    """Return HELDOUT_FACTS facts, taken in turn from every group, one phrasing per entity, chosen by a stable hash.

    Another phrasing must have the same completion. Other facts would ask for a spelling that was never shown for that
    entity, not for a new combination.
    """
    shown = Counter((fact.group, fact.entity, fact.completion) for fact in facts)
    seeds = {prompt for prompt, _ in SEED_SAMPLES}
    groups: dict[str, dict[str, Fact]] = {}
    for fact in sorted(facts, key=lambda fact: hashlib.sha256(fact.prompt.encode()).digest()):
        if fact.prompt not in seeds and shown[fact.group, fact.entity, fact.completion] > 1:
            groups.setdefault(fact.group, {}).setdefault(fact.entity, fact)
    in_turn = chain.from_iterable(zip_longest(*(group.values() for group in groups.values())))
    return [fact for fact in in_turn if fact is not None][:HELDOUT_FACTS]


def heldout_samples() -> list[Sample]:
    """Return the held-out samples, the same on every call."""
    samples: dict[str, str] = {fact.prompt: fact.completion for fact in heldout_facts(all_facts())}
    stream = demo_stories.stories(random.Random(2024), held_out=True)
    while len(samples) < HELDOUT_FACTS + HELDOUT_STORIES:
        prompt, completion = next(stream)
        samples.setdefault(prompt, completion)
    return list(samples.items())


def opened(prompt: str, rng: random.Random) -> str:
    """Return the prompt, one time in three after an opening."""
    return rng.choice(OPENINGS) + prompt if rng.random() < 1 / 3 else prompt


def training_samples(seed: int) -> list[Sample]:
    """Return all facts, the fixed phrases and random stories, without samples that contain a held-out prompt.

    The facts are the same for every seed, but not their openings and the stories. The trainer uses one seed per epoch.
    """
    held_out, rng = [prompt for prompt, _ in heldout_samples()], random.Random(seed)
    samples = [(opened(fact.prompt, rng), fact.completion) for fact in all_facts()]
    samples += list(demo_tables.FIXED.items()) * 3
    stream = demo_stories.stories(rng, held_out=False)
    samples += list(
        {
            prompt: (prompt, completion) for prompt, completion in (next(stream) for _ in range(TRAINING_STORIES))
        }.values()
    )
    kept = [sample for sample in samples if not any(prompt in "".join(sample) for prompt in held_out)]
    return kept + SEED_SAMPLES * SEED_REPEATS


def write_heldout(path: Path = HELDOUT_FILE) -> None:
    """Write the held-out samples as JSON lines."""
    lines = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in heldout_samples()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_heldout(path: Path = HELDOUT_FILE) -> list[Sample]:
    """Read the held-out samples back."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["prompt"], row["completion"]) for row in rows]
