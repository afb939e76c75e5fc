"""A load of two kinds: streams of short prompts and long answers, and long prompts with short answers among them.

How long a prompt is for those who decode beside it counts in decode steps, and depends on the machine: while the
weights are read once, one of these cores computes about 16 tokens of a prompt, a GPU some hundreds. So 256 tokens are
16 steps here, as several thousand are there. With prompts of 1,024 tokens there are so few for the same work that
percentiles of gaps hardly see them.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Kind:
    """Tokens of a request, and how many of a hundred requests are of this kind."""

    name: str
    prompt_tokens: int
    max_tokens: int
    share: int


STREAM = Kind("stream", 32, 128, 33)
DOCUMENT = Kind("document", 256, 32, 67)
Kinds = tuple[Kind, Kind]  # the first: streams
KINDS: Kinds = (STREAM, DOCUMENT)


def kinds_of(lengths: str) -> Kinds:
    """The same two with other tokens: those of a stream's prompt and answer, then of a document's, as "32,128,256,32".
    ArgumentTypeError: it is not that.
    """
    numbers = [int(part) if part.isdecimal() else 0 for part in lengths.split(",")]
    if len(numbers) != 2 * len(KINDS) or min(numbers) < 2:
        raise argparse.ArgumentTypeError(f"four numbers of tokens from 2 on, with commas, are allowed, not {lengths}")
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    stream, document = (
        replace(kind, prompt_tokens=prompt, max_tokens=new) for kind, (prompt, new) in zip(KINDS, pairs, strict=True)
    )
    return stream, document


def arrivals(rate: float, seconds: float, seed: int, kinds: Kinds = KINDS) -> Iterator[tuple[float, Kind]]:
    """Seconds from the start and kinds: Poisson, `rate` requests/s. The same seed gives the same load to all sides."""
    rng = random.Random(f"{rate} {seconds} {seed}")
    at = rng.expovariate(rate)
    while at < seconds:
        yield at, rng.choices(kinds, [kind.share for kind in kinds])[0]
        at += rng.expovariate(rate)


def write_trace(path: Path, rate: float, seconds: float, seed: int, kinds: Kinds = KINDS) -> int:
    """As `baton bench --trace` reads it. Returns how many requests there are."""
    rows = [
        {"timestamp": round(at * 1e3, 3), "prompt_tokens": kind.prompt_tokens, "max_tokens": kind.max_tokens}
        for at, kind in arrivals(rate, seconds, seed, kinds)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)
