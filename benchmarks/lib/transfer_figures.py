"""Measured transfers and what follows from them. Pure: no clock, no process. Ratios are taken within a round."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

RAW, OURS, VERIFIED, WHOLE = "raw", "Baton", "Baton, digest of all KV", "Baton, from the offer on"
GOAL_BYTES = 64 << 20
SHARE_TOKENS = (512, 2048)


class Way(NamedTuple):
    """How bytes went from one process to the other: by which transport, and with what around it."""

    transport: str
    kind: str = OURS

    def __str__(self) -> str:
        return f"{self.kind} {self.transport}" if self.kind == RAW else f"{self.transport}, {self.kind}"


@dataclass(frozen=True)
class Moved:
    """One size over one way in one round: the median time in seconds. `nominal`: the size that was asked for."""

    way: Way
    nominal: int
    nbytes: int
    round: int
    seconds: float


@dataclass(frozen=True)
class Prompt:
    """One prompt in one round.

    Seconds: `ttft_s` until its first token was sampled, `exposed_s` from then (`finish`) until its commit was
    acknowledged, `round_trip_s` of one control message while all is idle, `transfer_s` as in `CommitState`, `step_s` of
    the decode step that would follow.
    """

    transport: str
    tokens: int
    streams: bool
    round: int
    ttft_s: float
    exposed_s: float
    round_trip_s: float
    transfer_s: float
    step_s: float
    nbytes: int
    frames: int

    @property
    def left_s(self) -> float:
        """What of the transfer is left when the prompt is computed: without the round trip of the commit."""
        return self.exposed_s - self.round_trip_s

    @property
    def of_first(self) -> float:
        """The exposed time beside the time to the first token."""
        return self.exposed_s / self.ttft_s

    @property
    def of_second(self) -> float:
        """The share of the time to the second token that is exposed transfer."""
        return self.exposed_s / (self.ttft_s + self.exposed_s + self.step_s)


class Figures:
    """All samples of a run."""

    def __init__(self, moved: Iterable[Moved] = (), prompts: Iterable[Prompt] = ()) -> None:
        self.moved, self.prompts = list(moved), list(prompts)

    @property
    def sizes(self) -> list[int]:
        """Nominal sizes of the KV that was handed over when it was all there, the smallest first."""
        return sorted({sample.nominal for sample in self.moved if sample.way.kind == OURS})

    @property
    def ways(self) -> list[Way]:
        """In the order in which they were first measured."""
        return list(dict.fromkeys(sample.way for sample in self.moved))

    def rates(self, way: Way, nominal: int) -> list[float]:
        """Bytes per second, one for each round."""
        return [s.nbytes / s.seconds for s in self.moved if (s.way, s.nominal) == (way, nominal)]

    def share(self, way: Way, nominal: int) -> float | None:
        """The speed of `way` as a share of what limits it, the raw way of its transport, in the same round."""
        pairs = self._beside_raw(way, nominal)
        return median(raw / ours for ours, raw in pairs) if pairs else None

    def over_raw(self, transport: str) -> float | None:
        """Seconds of a small handoff, from its offer on, above those of the same bytes in the raw loop."""
        small = {s.nominal for s in self.moved if s.way == Way(transport, WHOLE)}
        gaps = [ours - raw for nominal in small for ours, raw in self._beside_raw(Way(transport, WHOLE), nominal)]
        return median(gaps) if gaps else None

    def exposed(self, transport: str, tokens: int, *, by_own_transfer: bool = False) -> float | None:
        """What is left of a streamed transfer when its prompt is computed, as a share of a whole transfer.

        The whole is that of a prompt of this length whose KV left in one go in the same round (`transfer_s`); by its
        own transfer: the time in which its own frames were under way, spread over the prefill.
        """
        shares = [
            streamed.left_s / (streamed if by_own_transfer else whole).transfer_s
            for streamed in self.select(transport, tokens, streams=True)
            for whole in self.select(transport, tokens, streams=False)
            if whole.round == streamed.round
        ]
        return median(shares) if shares else None

    def select(self, transport: str, tokens: int, *, streams: bool) -> list[Prompt]:
        """The prompts of this kind."""
        return [p for p in self.prompts if (p.transport, p.tokens, p.streams) == (transport, tokens, streams)]

    def middle(self, transport: str, tokens: int, value: Callable[[Prompt], float], *, streams: bool) -> float | None:
        """The median of a value over the rounds."""
        found = [value(prompt) for prompt in self.select(transport, tokens, streams=streams)]
        return median(found) if found else None

    def _beside_raw(self, way: Way, nominal: int) -> list[tuple[float, float]]:
        """(seconds, seconds of the raw way) of each round that has both."""
        raw = {s.round: s.seconds for s in self.moved if (s.way, s.nominal) == (Way(way.transport, RAW), nominal)}
        mine = [s for s in self.moved if (s.way, s.nominal) == (way, nominal) and s.round in raw]
        return [(sample.seconds, raw[sample.round]) for sample in mine]


def ratios(figures: Figures) -> dict[str, float | None]:
    """The figures that others rely on, each the worst over the transports that were measured; None: not measured."""
    transports = sorted({way.transport for way in figures.ways} | {p.transport for p in figures.prompts})
    small = _known(figures.over_raw(transport) for transport in transports)
    found: dict[str, float | None] = {
        "gloo_vs_raw_64mb": figures.share(Way("gloo"), GOAL_BYTES),
        "shm_vs_memcpy_64mb": figures.share(Way("shm"), GOAL_BYTES),
    }
    for tokens in SHARE_TOKENS:
        shares = _known(figures.exposed(transport, tokens) for transport in transports)
        found[f"exposed_share_{tokens}"] = max(shares, default=None)
    found["small_handoff_ms_over_raw"] = max(small) * 1e3 if small else None
    return {key: None if value is None else round(value, 4) for key, value in found.items()}


class FrameTimes(NamedTuple):
    """One frame of a streamed prompt, in seconds since the prompt came."""

    layers: tuple[int, int]
    positions: tuple[int, int]
    ready_s: float
    sent_s: float
    landed_s: float


def timeline(
    began: float,
    computed: Iterable[tuple[float, int, int]],
    announced: Iterable[tuple[float, int, int, int, int]],
    landed: Iterable[float],
) -> list[FrameTimes]:
    """Put the notes of the two processes together: frames were announced and landed in the same order.

    A frame was ready when all of its layers had been computed up to its last position.
    """
    told, frames = list(computed), list[FrameTimes]()
    for (sent, first, last, begin, end), there in zip(announced, landed, strict=True):
        ready = min(at for at, layers, reached in told if layers >= last and reached >= end)
        frames.append(FrameTimes((first, last), (begin, end), ready - began, sent - began, there - began))
    return frames


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
