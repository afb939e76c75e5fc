"""Prompts whose answers repeat parts of them, with the answers: edits, summaries and JSON with changes."""

from __future__ import annotations

import json
import random
import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

MODULES = ("textwrap.py", "shlex.py", "bisect.py", "heapq.py", "string.py", "fnmatch.py", "calendar.py", "queue.py")
CITIES = ("Lisbon", "Porto", "Madrid", "Paris", "Lyon", "Turin", "Milan", "Vienna", "Graz", "Prague", "Brno", "Berlin")


class Task(NamedTuple):
    """One prompt and the answer of a model that does what it asks."""

    kind: str
    prompt: str
    answer: str


def tasks(count: int) -> list[Task]:
    """Return `count` tasks of each kind, always the same ones."""
    rng = random.Random(0)
    makers = (_edit, _summary, _records)
    return [make(rng, number) for number in range(count) for make in makers]


def _source(number: int) -> str:
    name = MODULES[number % len(MODULES)]
    return (Path(sysconfig.get_path("stdlib")) / name).read_text()


def _edit(rng: random.Random, number: int) -> Task:
    """A function with a variable renamed. Each second or third line changes."""
    lines = _source(number).splitlines()
    at = rng.randrange(len(lines) // 4, len(lines) // 2)
    part = "\n".join(lines[at : at + 36])
    names = sorted(set(re.findall(r"\b[a-z_]{4,}\b", part)), key=lambda name: (-part.count(name), name))
    old = names[0] if names else "self"
    edited = re.sub(rf"\b{old}\b", "renamed_value", part)
    return Task("edit", f"Rename {old} to renamed_value in this code.\n\n{part}\n\nThe changed code:\n\n", edited)


def _summary(rng: random.Random, number: int) -> Task:
    """Sentences of a text, some left out, joined by new words."""
    words = re.findall(r"[A-Za-z][a-z]+", _source(number))
    sentences = [" ".join(words[at : at + 14]) + "." for at in range(0, 14 * 24, 14)]
    kept = sorted(rng.sample(range(24), 9))
    joints = ("In short, ", "It also states that ", "Moreover, ", "Then: ")
    answer = " ".join(joints[place % 4] + sentences[at] for place, at in enumerate(kept))
    return Task("summary", "Summarise this text.\n\n" + " ".join(sentences) + "\n\nSummary:\n\n", answer)


def _records(rng: random.Random, number: int) -> Task:
    """A list of records, and the same list with one field changed in each."""
    rows = [
        {
            "id": 1000 * number + at,
            "city": rng.choice(CITIES),
            "open": rng.random() < 0.5,
            "seats": rng.randrange(20, 90),
        }
        for at in range(14)
    ]
    changed = [row | {"seats": rng.randrange(20, 90)} for row in rows]
    given, wanted = (json.dumps(each, indent=1) for each in (rows, changed))
    return Task("json", f"Update the seats in these records.\n\n{given}\n\nUpdated records:\n\n", wanted)
