"""Measured points: prompts of a length, or decode steps of a batch at a context."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """The first token of one prompt of `tokens` (`batch` 0), or a decode step of `batch` sequences of `tokens`."""

    tokens: int
    batch: int = 0

    @classmethod
    def parse(cls, label: str) -> Point:
        """Parse the format of `str`: P512 or B4@128. Raises ValueError."""
        if match := re.fullmatch(r"P([1-9]\d*)", label):
            return cls(int(match[1]))
        if match := re.fullmatch(r"B([1-9]\d*)@([1-9]\d*)", label):
            return cls(int(match[2]), int(match[1]))
        raise ValueError(f"a point is like P512 or B4@128, not {label!r}")

    def __str__(self) -> str:
        return f"B{self.batch}@{self.tokens}" if self.batch else f"P{self.tokens}"

    @property
    def produced(self) -> int:
        """Tokens per measured time."""
        return self.batch or self.tokens

    @property
    def positions(self) -> int:
        """KV positions in use at the start."""
        return self.tokens * max(1, self.batch)


FULL = tuple(map(Point, (128, 512, 2048))) + tuple(Point(c, b) for c in (128, 1024) for b in (1, 4, 16, 32))
QUICK = tuple(map(Point.parse, ("P512", "B1@128", "B16@128", "B4@1024")))
