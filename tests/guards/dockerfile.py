"""Parsers for the Dockerfile and .dockerignore, as far as tests need them."""

import shlex
from fnmatch import fnmatchcase
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Step(NamedTuple):
    """An instruction. `flags` follow its name with --; `words` are the rest, split like a shell."""

    name: str
    flags: list[str]
    words: list[str]


def steps(text: str) -> list[Step]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, *rest = shlex.split(line)
        words = list(dropwhile(lambda word: word.startswith("--"), rest))
        flags = [word.removeprefix("--") for word in rest[: len(rest) - len(words)]]
        found.append(Step(name, flags, words))
    return found


def is_sent(path: str, ignored: str) -> bool:
    """Return whether .dockerignore (`ignored`) sends `path` to the builder. The last matching line counts."""
    parts = path.split("/")
    above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    sent = True
    for line in (line for line in ignored.splitlines() if line and not line.startswith("#")):
        pattern = line.removeprefix("!").removeprefix("**/")
        names = parts if "**/" in line else above
        if any(fnmatchcase(name, pattern) for name in names):
            sent = line.startswith("!")
    return sent
