"""When requests come, without regard to whether earlier ones have been answered (an open loop).

The tokens of prompts that nobody wrote: random, the same for the same seed, and alike where a trace says so.

One endless stream of requests, made of lengths, times and a trace.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from baton.bench.lengths import LEAST_CV, MOST_CV, Lengths, variation
from baton.bench.traces import Arrival, Trace
from baton.errors import ConfigError

_OWN, _BLOCK = 0, 1


@dataclass(frozen=True, slots=True)
class Prompts:
    """Token ids below `vocab_size`. The seed must not be negative."""

    vocab_size: int
    seed: int

    def tokens(self, arrival: Arrival, number: int) -> list[int]:
        """`arrival.prompt_tokens` ids. Request `number` has the same ones whatever the others are."""
        found: list[int] = []
        for block in arrival.blocks:
            found += self._drawn(_BLOCK, block, min(arrival.block_tokens, arrival.prompt_tokens - len(found)))
        return found + self._drawn(_OWN, number, arrival.prompt_tokens - len(found))

    def _drawn(self, kind: int, key: int, count: int) -> list[int]:
        if count <= 0:
            return []
        drawn: list[int] = np.random.default_rng((self.seed, kind, key)).integers(self.vocab_size, size=count).tolist()
        return drawn


KINDS = f"poisson, constant, or gamma:CV with a coefficient of variation from {LEAST_CV:g} to {MOST_CV:g}"


@dataclass(frozen=True, slots=True)
class Times:
    """`rate` requests per second; the gaps between them have the coefficient of variation `cv` and, but for 0 (all
    gaps equal), a gamma distribution. 1 is a Poisson process, more is burstier.
    """

    rate: float
    cv: float = 1.0

    @classmethod
    def parse(cls, text: str, rate: float) -> Times:
        """Raises ConfigError naming what is allowed."""
        if not (0 < rate < math.inf):
            raise ConfigError(f"rate: must be requests per second, a number above 0, got {rate:g}")
        kind, _, value = text.partition(":")
        if value == "" and kind in {"poisson", "constant"}:
            return cls(rate, 1.0 if kind == "poisson" else 0.0)
        try:
            cv = variation(value) if kind == "gamma" else 0.0
        except ValueError:
            cv = 0.0
        if not cv:
            raise ConfigError(f"arrivals: must be {KINDS}, got {text!r}")
        return cls(rate, cv)

    def seconds(self, seed: int) -> Iterator[float]:
        """The times from the start, without end. The first request comes after a gap like all others."""
        draw, now = Random(f"{seed}/times"), 0.0
        while True:
            now += self._gap(draw)
            yield now

    def _gap(self, draw: Random) -> float:
        if self.cv == 0:
            return 1 / self.rate
        if self.cv == 1:
            return draw.expovariate(self.rate)
        return draw.gammavariate(self.cv**-2, self.cv**2 / self.rate)


def arrivals(
    lengths: Lengths, seed: int, *, trace: Trace | None = None, times: Times | None = None
) -> Iterator[Arrival]:
    """Requests in the order of time, without end; the same for the same seed.

    Lengths are the trace's where it has them. Times are those of `times`, else the trace's, else 0. A trace begins
    anew when it ends: what it shares then is shared within one pass, not with the pass before.
    """
    found = _drawn(lengths, seed) if trace is None else _repeated(trace, lengths, seed)
    if times is None:
        return found
    return (replace(one, at_s=at_s) for one, at_s in zip(found, times.seconds(seed), strict=False))


def _drawn(lengths: Lengths, seed: int) -> Iterator[Arrival]:
    draw = Random(f"{seed}/lengths")
    while True:
        prompt, answer = lengths.draw(draw)
        yield Arrival(0.0, prompt, answer)


def _repeated(trace: Trace, lengths: Lengths, seed: int) -> Iterator[Arrival]:
    draw = Random(f"{seed}/lengths")
    ids = 1 + max((block for one in trace.arrivals for block in one.blocks), default=0)
    for number in itertools.count():
        for one in trace.arrivals:
            prompt, answer = lengths.draw(draw)
            yield replace(
                one,
                at_s=one.at_s + number * trace.period_s,
                prompt_tokens=one.prompt_tokens or (prompt if one.prompt is None else 0),
                max_tokens=one.max_tokens or answer,
                blocks=tuple(block + number * ids for block in one.blocks) if number else one.blocks,
            )
