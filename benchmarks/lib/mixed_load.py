"""A load of two kinds: streams with short prompts and long answers, and documents with the opposite.

A prompt delays decoding by a number of decode steps that depends on the machine. In the time of reading the weights
once, a core here computes about 16 prompt tokens, and a GPU some hundreds. So 256 tokens are 16 steps here, like
several thousand tokens on a GPU. Prompts of 1,024 tokens would be too few to show in percentiles of gaps.
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
    """Tokens of a request, and the percentage of requests of this kind."""

    name: str
    prompt_tokens: int
    max_tokens: int
    share: int


STREAM = Kind("stream", 32, 128, 33)
DOCUMENT = Kind("document", 256, 32, 67)
Kinds = tuple[Kind, Kind]  # streams first
KINDS: Kinds = (STREAM, DOCUMENT)


def kinds_of(lengths: str) -> Kinds:
    """Parse tokens of a stream's prompt and answer, then a document's: "32,128,256,32". Raises ArgumentTypeError."""
    numbers = [int(part) if part.isdecimal() else 0 for part in lengths.split(",")]
    if len(numbers) != 2 * len(KINDS) or min(numbers) < 2:
        raise argparse.ArgumentTypeError(f"four numbers of tokens from 2 on, with commas, are allowed, not {lengths}")
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    stream, document = (
        replace(kind, prompt_tokens=prompt, max_tokens=new) for kind, (prompt, new) in zip(KINDS, pairs, strict=True)
    )
    return stream, document


def arrivals(rate: float, seconds: float, seed: int, kinds: Kinds = KINDS) -> Iterator[tuple[float, Kind]]:
    """Yield arrival seconds and kinds: Poisson, `rate` requests/s. Equal seeds give equal loads on all sides."""
    rng = random.Random(f"{rate} {seconds} {seed}")
    at = rng.expovariate(rate)
    while at < seconds:
        yield at, rng.choices(kinds, [kind.share for kind in kinds])[0]
        at += rng.expovariate(rate)


def write_trace(path: Path, rate: float, seconds: float, seed: int, kinds: Kinds = KINDS) -> int:
    """Write a trace for `baton bench --trace`, and return its number of requests."""
    rows = [
        {"timestamp": round(at * 1e3, 3), "prompt_tokens": kind.prompt_tokens, "max_tokens": kind.max_tokens}
        for at, kind in arrivals(rate, seconds, seed, kinds)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)
