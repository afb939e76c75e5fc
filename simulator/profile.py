"""What a model costs on some hardware: measured by `baton profile --live`, or published, and then with its source.

A profile is a JSON file; those that come with Baton lie in `profiles/` and are found by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from baton.config.security import Section
from baton.errors import ConfigError
from router.cost import Cost
from simulator.scenario import Network, Overheads, Pool
from simulator.steps import Linear, Piecewise, StepCost, line

FOLDER = Path(__file__).parent / "profiles"
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Line(Section):
    """Seconds: `step_s + token_s tokens + context_s context`. In a piece of a curve `step_s` may be negative."""

    step_s: Annotated[float, Field(allow_inf_nan=False)]
    token_s: Seconds
    context_s: Seconds


class Piece(Line):
    """Decode steps of fewer rows than `rows_below`; the last piece has none, and is of all others."""

    rows_below: Annotated[int, Field(gt=0)] | None = None


class Layout(Section):
    """One worker of so many devices: what its steps cost and how many tokens of KV it holds.

    `joint_extra_s`: what a step that has prompts and decode rows takes more than its decode rows alone and the tokens
    of its prompts; None: as if the weights were read once for both. `spread`: factors, equally likely, by which steps
    differ from all that; none: they do not. `busy_prompt`, `busy_decode`: how many times longer steps take while
    workers of the other pool are busy too, which is above 1 where they share a host; `busy_spread`: factors by which
    decode steps differ then.
    """

    tensor_parallel: Annotated[int, Field(gt=0)]
    kv_tokens: Annotated[int, Field(gt=0)]
    prompt: Line
    decode: Annotated[tuple[Piece, ...], Field(min_length=1)]
    joint_extra_s: Seconds | None = None
    spread: tuple[Seconds, ...] = ()
    busy_prompt: Factor = 1.0
    busy_decode: Factor = 1.0
    busy_spread: tuple[Seconds, ...] = ()

    @field_validator("prompt")
    @classmethod
    def _takes_time(cls, prompt: Line) -> Line:
        if prompt.step_s < 0:
            raise ValueError(f"step_s must be at least 0, got {prompt.step_s:g}")
        return prompt

    @field_validator("decode")
    @classmethod
    def _pieces(cls, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        rows, last = 1, len(pieces) - 1
        for place, piece in enumerate(pieces):
            if (piece.rows_below is None) != (place == last):
                allowed = "left out in the last piece and given in all others"
                raise ValueError(f"{place}: rows_below must be {allowed}, got {piece.rows_below}")
            if (seconds := piece.step_s + piece.token_s * rows) < 0:
                raise ValueError(f"{place}: a step of {rows} rows must take at least 0 s, got {seconds:g}")
            if piece.rows_below is not None and piece.rows_below <= rows:
                raise ValueError(f"{place}: rows_below must be above {rows}, got {piece.rows_below}")
            rows = piece.rows_below or rows
        return pieces

    @property
    def shares_host(self) -> bool:
        """Whether workers of the other pool slow these down."""
        return max(self.busy_prompt, self.busy_decode) > 1

    def decode_spread(self, busy: float) -> tuple[float, ...]:
        """Of decode steps, with the other pool busy for such a share of the time: some steps meet it, others do not.
        Their mean is 1.
        """
        met = round(len(self.spread) * min(busy, 1.0))
        if not met or not self.busy_spread:
            return self.spread
        mixed = _thinned(self.spread, len(self.spread) - met)
        mixed += [factor * self.busy_decode for factor in _thinned(self.busy_spread, met)]
        return tuple(factor * len(mixed) / sum(mixed) for factor in mixed)

    def cost(self, busy: float = 0.0) -> StepCost:
        """As the simulator takes it, with the other pool busy for such a share of the time."""
        prompt = _line(self.prompt, 1 + (self.busy_prompt - 1) * busy)
        factor = 1 + (self.busy_decode - 1) * busy
        lines = [Linear(prompt, _line(piece, factor), self._joint(piece, factor)) for piece in self.decode]
        pieces = [(piece.rows_below or 0, cost) for piece, cost in zip(self.decode[:-1], lines, strict=False)]
        return Piecewise(tuple(pieces), lines[-1]) if pieces else lines[-1]

    def _joint(self, piece: Piece, factor: float) -> float | None:
        return None if self.joint_extra_s is None else (piece.step_s + self.joint_extra_s) * factor


class Link(Section):
    """How fast KV leaves or enters a worker."""

    bytes_per_s: Annotated[float, Field(gt=0)]
    latency_s: Seconds = 0.0


class Beside(Section):
    """Seconds of a request outside of steps and links, as `simulator.scenario.Overheads` names them."""

    admit_s: Seconds = 0.0
    hop_s: Seconds = 0.0
    commit_s: Seconds = 0.0
    tell_s: Seconds = 0.0


class Profile(Section):
    """A model on some hardware. `token_bytes`: KV of one token. `source`: who measured it, where, and how."""

    name: str
    model: str
    hardware: str
    source: Annotated[str, Field(min_length=1)]
    token_bytes: Annotated[float, Field(ge=0)]
    layers: Annotated[int, Field(gt=0)]
    link: Link
    overheads: Beside = Beside()
    layouts: Annotated[tuple[Layout, ...], Field(min_length=1)]

    @field_validator("layouts")
    @classmethod
    def _differ(cls, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        sizes = [layout.tensor_parallel for layout in layouts]
        if len(set(sizes)) < len(sizes):
            raise ValueError(f"tensor_parallel must be another one in each, got {', '.join(map(str, sizes))}")
        return layouts

    @property
    def sizes(self) -> tuple[int, ...]:
        """The tensor-parallel sizes that it knows."""
        return tuple(layout.tensor_parallel for layout in self.layouts)

    def layout(self, tensor_parallel: int) -> Layout:
        """Raises ConfigError for a size that nobody has measured."""
        for layout in self.layouts:
            if layout.tensor_parallel == tensor_parallel:
                return layout
        known = ", ".join(map(str, self.sizes))
        raise ConfigError(f"tensor_parallel: profile {self.name} has {known}, got {tensor_parallel}")

    def pool(self, workers: int, tensor_parallel: int, like: Pool, busy: float = 0.0) -> Pool:
        """So many such workers; what a profile does not say, such as `max_running`, is that of `like`."""
        layout = self.layout(tensor_parallel)
        return Pool(
            workers,
            layout.cost(busy),
            kv_blocks=max(1, layout.kv_tokens // like.block_size),
            block_size=like.block_size,
            max_batched_tokens=like.max_batched_tokens,
            max_running=like.max_running,
            tensor_parallel=tensor_parallel,
            prefix_cache=like.prefix_cache,
            spread=layout.spread,
        )

    def network(self) -> Network:
        """Between workers of this hardware."""
        return Network(self.link.bytes_per_s, self.link.latency_s, self.token_bytes, self.layers)

    def beside(self) -> Overheads:
        """What requests take outside of steps."""
        return Overheads(**self.overheads.model_dump())


def names() -> list[str]:
    """Of the profiles that come with Baton."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_profile(name: str) -> Profile:
    """By name, or from a file. Raises ConfigError naming what is wrong in it."""
    path = FOLDER / f"{name}.json" if name in names() else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--profile: no file, and none of {', '.join(names())}: {name!r}") from None
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        lines = (f"{path}: {'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}" for one in error.errors())
        raise ConfigError("\n".join(lines)) from None


def _thinned(factors: tuple[float, ...], count: int) -> list[float]:
    """So many of them, as evenly chosen as they lie."""
    return [factors[(2 * i + 1) * len(factors) // (2 * count)] for i in range(count)]


def _line(of: Line, factor: float) -> Cost:
    return line(of.step_s * factor, of.token_s * factor, of.context_s * factor)
