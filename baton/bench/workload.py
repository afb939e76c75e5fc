"""An endless stream of requests from lengths, times and a trace. Prompts share prefixes as their trace does."""

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
    """Random prompts of token ids below `vocab_size`. The seed must not be negative."""

    vocab_size: int
    seed: int

    def tokens(self, arrival: Arrival, number: int) -> list[int]:
        """Return `arrival.prompt_tokens` ids. The ids of request `number` do not depend on other requests."""
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
    """Arrival times of `rate` requests per second, with gaps from a gamma distribution."""

    rate: float
    cv: float = 1.0  # coefficient of variation: 0 makes all gaps equal, 1 is a Poisson process, more is burstier

    @classmethod
    def parse(cls, text: str, rate: float) -> Times:
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
        """Yield arrival times from the start, endlessly. A gap precedes the first request too."""
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
    """Yield requests in time order, endlessly, the same for the same seed. Lengths come from the trace if it has them.
    Times come from `times`, else from the trace, else are 0. A trace restarts when it ends; passes share no blocks.
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
