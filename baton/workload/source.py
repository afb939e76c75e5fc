"""One endless stream of requests, made of lengths, times and a trace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from baton.workload.arrival import Arrival
from baton.workload.lengths import Lengths
from baton.workload.times import Times
from baton.workload.traces import Trace


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
