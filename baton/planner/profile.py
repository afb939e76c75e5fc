"""What a model costs on some hardware: measured by `baton profile --live`, or published, and then with its source.

A profile is a JSON file; those that come with Baton lie in `profiles/` and are found by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from baton.config.schema import Section
from baton.errors import ConfigError
from baton.planner.sim.scenario import Contention, Network, Overheads, Pool, Slowed
from baton.planner.sim.step_cost import Linear, Piecewise, StepCost, line
from router.placement.cost_model import Cost

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


class Busy(Section):
    """Decode steps beside busy workers of the same host take so many times as long, and differ by these factors."""

    factor: Factor = 1.0
    spread: tuple[Seconds, ...] = ()


class Layout(Section):
    """One worker of so many devices: what its steps cost and how many tokens of KV it holds.

    `joint_extra_s`: what a step that has prompts and decode rows takes more than its decode rows alone and the tokens
    of its prompts; None: as if the weights were read once for both. `spread`: factors, equally likely, by which steps
    differ from all that; none: they do not. All this is of a worker that has its host to itself. `host_workers` share
    one; with all others busy, what is computed of prompts takes `busy_prompt` times as long, and what decodes as
    `beside_prompts` and `beside_decode` say, by what the others do. None: as beside prompts.
    """

    tensor_parallel: Annotated[int, Field(gt=0)]
    kv_tokens: Annotated[int, Field(gt=0)]
    prompt: Line
    decode: Annotated[tuple[Piece, ...], Field(min_length=1)]
    joint_extra_s: Seconds | None = None
    spread: tuple[Seconds, ...] = ()
    host_workers: Annotated[int, Field(gt=0)] = 1
    busy_prompt: Factor = 1.0
    beside_prompts: Busy = Busy()
    beside_decode: Busy | None = None

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
    def contention(self) -> Contention | None:
        """Of workers that share a host; None: nothing is known of that."""
        if self.host_workers == 1:
            return None
        prompts = Slowed(self.beside_prompts.factor, self.beside_prompts.spread)
        decode = self.beside_decode
        beside = prompts if decode is None else Slowed(decode.factor, decode.spread)
        return Contention(self.host_workers, self.busy_prompt, prompts, beside)

    def cost(self) -> StepCost:
        """As the simulator takes it, of a worker that has its host to itself."""
        prompt = _line(self.prompt)
        lines = [Linear(prompt, _line(piece), self._joint(piece)) for piece in self.decode]
        pieces = [(piece.rows_below or 0, cost) for piece, cost in zip(self.decode[:-1], lines, strict=False)]
        return Piecewise(tuple(pieces), lines[-1]) if pieces else lines[-1]

    def _joint(self, piece: Piece) -> float | None:
        return None if self.joint_extra_s is None else piece.step_s + self.joint_extra_s


class Link(Section):
    """How fast KV leaves or enters a worker."""

    bytes_per_s: Annotated[float, Field(gt=0)]
    latency_s: Seconds = 0.0


class Beside(Section):
    """Seconds of a request outside of steps and links, as `baton.planner.sim.scenario.Overheads` names them."""

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

    def pool(self, workers: int, tensor_parallel: int, like: Pool) -> Pool:
        """So many such workers; what a profile does not say, such as `max_running`, is that of `like`."""
        layout = self.layout(tensor_parallel)
        return Pool(
            workers,
            layout.cost(),
            kv_blocks=max(1, layout.kv_tokens // like.block_size),
            block_size=like.block_size,
            max_batched_tokens=like.max_batched_tokens,
            max_running=like.max_running,
            tensor_parallel=tensor_parallel,
            prefix_cache=like.prefix_cache,
            spread=layout.spread,
            contention=layout.contention,
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


def _line(of: Line) -> Cost:
    return line(of.step_s, of.token_s, of.context_s)
