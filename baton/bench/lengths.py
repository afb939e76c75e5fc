"""Token counts of prompts and answers: a number, a distribution, or the pairs of a file."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TypeVar

from baton.errors import ConfigError

KINDS = "N, fixed:N, uniform:LOW-HIGH, lognormal:MEAN,CV[,MOST], zipf:EXPONENT,MOST or file:PATH"
LONGEST = 10_000_000  # tokens of any prompt or answer
MOST_ZIPF = 1_000_000  # because each length takes memory
LEAST_CV, MOST_CV = 1e-3, 1e3  # limits of a coefficient of variation
BOUNDS = f"lengths from 1 to {LONGEST}, of zipf to {MOST_ZIPF}, CV from {LEAST_CV:g} to {MOST_CV:g}"
Draw = Callable[[Random], int]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of requests: `draw` returns the tokens of a prompt and of its answer."""

    draw: Callable[[Random], tuple[int, int]]
    paired: bool = False  # a file has both

    @classmethod
    def parse(cls, prompt: str, answer: str | None) -> Lengths:
        """Parse texts of KINDS. `answer` must be None if `prompt` is a file of pairs. Raises ConfigError."""
        if prompt.startswith("file:") and len((rows := _rows("prompt_tokens", prompt))[0]) == 2:
            if answer is not None:
                raise ConfigError(f"max_tokens: must be left out, because {prompt} has pairs, got {answer!r}")
            pairs = [(row[0], row[1]) for row in rows]
            return cls(lambda draw: draw.choice(pairs), paired=True)
        first, second = _parsed("prompt_tokens", prompt), _parsed("max_tokens", "64" if answer is None else answer)
        return cls(lambda draw: (first(draw), second(draw)))


def _parsed(field: str, text: str) -> Draw:
    kind, found, rest = text.partition(":")
    if not found:
        kind, rest = "fixed", text
    if kind == "file":
        rows = _rows(field, text)
        if len(rows[0]) != 1:
            raise ConfigError(f"{field}: must have one length on each line, pairs are for prompts, got {text!r}")
        return lambda draw: draw.choice(rows)[0]
    try:
        return _MAKERS[kind](rest)
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"{field}: must be {KINDS}, {BOUNDS}, got {text!r}") from None


def _fixed(text: str) -> Draw:
    value = _whole(text)
    return lambda draw: value


def _uniform(text: str) -> Draw:
    low, high = map(_whole, text.split("-"))
    if low > high:
        raise ValueError(text)
    return lambda draw: draw.randint(low, high)


def _lognormal(text: str) -> Draw:
    """Parse the mean and coefficient of variation of the token counts. Larger values become MOST."""
    mean_text, cv_text, *most_texts = text.split(",")
    mean, cv = _within(float(mean_text), sys.float_info.min, LONGEST), variation(cv_text)
    (most,) = map(_whole, most_texts or [str(LONGEST)])
    variance = math.log1p(cv**2)
    place, width = math.log(mean) - variance / 2, math.sqrt(variance)
    return lambda draw: min(most, max(1, round(draw.lognormvariate(place, width))))


def _zipf(text: str) -> Draw:
    """Draw a length k with a probability proportional to k to the power of minus the exponent."""
    exponent_text, most_text = text.split(",")
    exponent = _within(float(exponent_text), sys.float_info.min, sys.float_info.max)
    most = _within(int(most_text), 1, MOST_ZIPF)
    lengths = range(1, most + 1)
    sums = list(accumulate(length**-exponent for length in lengths))
    return lambda draw: draw.choices(lengths, cum_weights=sums)[0]


_MAKERS = {"fixed": _fixed, "uniform": _uniform, "lognormal": _lognormal, "zipf": _zipf}


def variation(text: str) -> float:
    """Parse a coefficient of variation. Raises ValueError."""
    return _within(float(text), LEAST_CV, MOST_CV)


def _whole(text: str) -> int:
    return _within(int(text), 1, LONGEST)


def _within(value: Number, least: float, most: float) -> Number:
    if not least <= value <= most:
        raise ValueError(value)
    return value


def _rows(field: str, text: str) -> list[list[int]]:
    """Read a file of lengths: one or two on each line, separated by a comma or blanks."""
    path = Path(text.removeprefix("file:"))
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: cannot read {path}: {error}") from error
    rows = [_row(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows or len({len(row) for row in rows}) > 1:
        raise ConfigError(f"{field}: {path} must have one length on each line, or two on each")
    return rows


def _row(where: str, line: str) -> list[int]:
    try:
        row = [_whole(word) for word in line.replace(",", " ").split()]
    except ValueError:
        row = []
    if len(row) not in {1, 2}:
        raise ConfigError(f"{where}: must be one or two whole numbers from 1 to {LONGEST}, got {line!r}")
    return row
