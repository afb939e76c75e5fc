"""Measured transfers and figures computed from them, without clocks and processes. Ratios are within a round."""

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
    """A way of moving bytes between the processes: the transport, and the work around it."""

    transport: str
    kind: str = OURS

    def __str__(self) -> str:
        return f"{self.kind} {self.transport}" if self.kind == RAW else f"{self.transport}, {self.kind}"


@dataclass(frozen=True)
class Moved:
    """One size over one way in one round: the median time in seconds. `nominal`: the requested size."""

    way: Way
    nominal: int
    nbytes: int
    round: int
    seconds: float


@dataclass(frozen=True)
class Prompt:
    """One prompt in one round."""

    transport: str
    tokens: int
    streams: bool
    round: int
    ttft_s: float  # until the first token
    exposed_s: float  # from `finish` until the commit is acknowledged
    round_trip_s: float  # of a control message on an idle system
    transfer_s: float  # as in `CommitState`
    step_s: float  # of the next decode step
    nbytes: int
    frames: int

    @property
    def left_s(self) -> float:
        """Seconds of transfer after the prompt is computed, without the commit's round trip."""
        return self.exposed_s - self.round_trip_s

    @property
    def of_first(self) -> float:
        """Exposed time over TTFT."""
        return self.exposed_s / self.ttft_s

    @property
    def of_second(self) -> float:
        """Share of exposed transfer in the time to the second token."""
        return self.exposed_s / (self.ttft_s + self.exposed_s + self.step_s)


class Figures:
    """All samples of a run."""

    def __init__(self, moved: Iterable[Moved] = (), prompts: Iterable[Prompt] = ()) -> None:
        self.moved, self.prompts = list(moved), list(prompts)

    @property
    def sizes(self) -> list[int]:
        """Ascending nominal sizes of KV handed over after its computation."""
        return sorted({sample.nominal for sample in self.moved if sample.way.kind == OURS})

    @property
    def ways(self) -> list[Way]:
        """Ways in the order of their first measurement."""
        return list(dict.fromkeys(sample.way for sample in self.moved))

    def rates(self, way: Way, nominal: int) -> list[float]:
        """Return bytes per second, one per round."""
        return [s.nbytes / s.seconds for s in self.moved if (s.way, s.nominal) == (way, nominal)]

    def share(self, way: Way, nominal: int) -> float | None:
        """Return the speed of `way` as a share of the raw way of its transport, in the same round."""
        pairs = self._beside_raw(way, nominal)
        return median(raw / ours for ours, raw in pairs) if pairs else None

    def over_raw(self, transport: str) -> float | None:
        """Return the seconds of a small handoff, from its offer on, beyond those of the same bytes in the raw loop."""
        small = {s.nominal for s in self.moved if s.way == Way(transport, WHOLE)}
        gaps = [ours - raw for nominal in small for ours, raw in self._beside_raw(Way(transport, WHOLE), nominal)]
        return median(gaps) if gaps else None

    def exposed(self, transport: str, tokens: int, *, by_own_transfer: bool = False) -> float | None:
        """Return the rest of a streamed transfer after its prompt is computed, as a share of a whole transfer. The
        whole is the `transfer_s` of an unstreamed prompt of this length in the same round, or for `by_own_transfer` the
        time in which the streamed frames were in flight during the prefill.
        """
        shares = [
            streamed.left_s / (streamed if by_own_transfer else whole).transfer_s
            for streamed in self.select(transport, tokens, streams=True)
            for whole in self.select(transport, tokens, streams=False)
            if whole.round == streamed.round
        ]
        return median(shares) if shares else None

    def select(self, transport: str, tokens: int, *, streams: bool) -> list[Prompt]:
        """Return the prompts of this kind."""
        return [p for p in self.prompts if (p.transport, p.tokens, p.streams) == (transport, tokens, streams)]

    def middle(self, transport: str, tokens: int, value: Callable[[Prompt], float], *, streams: bool) -> float | None:
        """Return the median of a value over the rounds."""
        found = [value(prompt) for prompt in self.select(transport, tokens, streams=streams)]
        return median(found) if found else None

    def _beside_raw(self, way: Way, nominal: int) -> list[tuple[float, float]]:
        """Return (seconds, seconds of the raw way) of each round with both."""
        raw = {s.round: s.seconds for s in self.moved if (s.way, s.nominal) == (Way(way.transport, RAW), nominal)}
        mine = [s for s in self.moved if (s.way, s.nominal) == (way, nominal) and s.round in raw]
        return [(sample.seconds, raw[sample.round]) for sample in mine]


def ratios(figures: Figures) -> dict[str, float | None]:
    """Return the figures that other programs use, each the worst over the transports. None means not measured."""
    transports = sorted({way.transport for way in figures.ways} | {p.transport for p in figures.prompts})
    small = _known(figures.over_raw(transport) for transport in transports)
    found: dict[str, float | None] = {
        "gloo_vs_raw_64mb": figures.share(Way("gloo"), GOAL_BYTES),
        "shm_vs_memcpy_64mb": figures.share(Way("shm"), GOAL_BYTES),
        "nixl_vs_raw_64mb": figures.share(Way("nixl"), GOAL_BYTES),
    }
    for tokens in SHARE_TOKENS:
        shares = _known(figures.exposed(transport, tokens) for transport in transports)
        found[f"exposed_share_{tokens}"] = max(shares, default=None)
    found["small_handoff_ms_over_raw"] = max(small) * 1e3 if small else None
    return {key: None if value is None else round(value, 4) for key, value in found.items()}


class FrameTimes(NamedTuple):
    """One frame of a streamed prompt, in seconds since the arrival of the prompt."""

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
    """Join the records of both processes, in the same order. A frame is ready when all its layers are computed."""
    told, frames = list(computed), list[FrameTimes]()
    for (sent, first, last, begin, end), there in zip(announced, landed, strict=True):
        ready = min(at for at, layers, reached in told if layers >= last and reached >= end)
        frames.append(FrameTimes((first, last), (begin, end), ready - began, sent - began, there - began))
    return frames


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
