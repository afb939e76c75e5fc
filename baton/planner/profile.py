"""Step costs of a model on some hardware, measured by `baton profile --live` or published with their source.

A profile is a JSON file. The profiles shipped with Baton are in `profiles/` and are loaded by name.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, field_validator

from baton.config.schema import Section
from baton.errors import ConfigError
from baton.planner.sim.scenario import Contention, Linear, Network, Piecewise, Pool, Slowed, StepCost, line
from router.placement.cost_model import Cost

FOLDER = Path(__file__).parent / "profiles"
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Line(Section):
    """Seconds: `step_s + token_s * tokens + context_s * context`. `step_s` may be negative in a piece of a curve."""

    step_s: Annotated[float, Field(allow_inf_nan=False)]
    token_s: Seconds
    context_s: Seconds


class Piece(Line):
    """Cost of decode steps with fewer than `rows_below` sequences. The last piece has no `rows_below`."""

    rows_below: Annotated[int, Field(gt=0)] | None = None


class Layout(Section):
    """Step costs of one worker with `tensor_parallel` devices on an idle host, and its KV capacity in tokens."""

    tensor_parallel: Annotated[int, Field(gt=0)]
    kv_tokens: Annotated[int, Field(gt=0)]
    prompt: Line
    decode: Annotated[tuple[Piece, ...], Field(min_length=1)]
    joint_extra_s: Seconds | None = None  # a mixed step beyond decode and prompt tokens; None if weights are read once
    spread: tuple[Seconds, ...] = ()  # equally likely factors of the step time; empty means no variation
    host_workers: Annotated[int, Field(gt=0)] = 1  # workers that share a host
    busy_prompt: Factor = 1.0  # factor of prompt steps while all others are busy
    beside_prompts: Slowed = Slowed()  # of decode steps, while others compute prompts
    beside_decode: Slowed | None = None  # of decode steps, while others decode; None means as `beside_prompts`

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
        """Contention between the workers of a host, or None if the worker has its host to itself."""
        if self.host_workers == 1:
            return None
        prompts = self.beside_prompts
        return Contention(self.host_workers, self.busy_prompt, prompts, self.beside_decode or prompts)

    def cost(self) -> StepCost:
        """Return the step cost for the simulator, of a worker that has its host to itself."""
        prompt = _line(self.prompt)
        extra = self.joint_extra_s
        lines = [Linear(prompt, _line(piece), None if extra is None else piece.step_s + extra) for piece in self.decode]
        pieces = [(piece.rows_below or 0, cost) for piece, cost in zip(self.decode[:-1], lines, strict=False)]
        return Piecewise(tuple(pieces), lines[-1]) if pieces else lines[-1]


class Link(Section):
    """Network speed at which KV leaves or enters a worker."""

    bytes_per_s: Annotated[float, Field(gt=0)]
    latency_s: Seconds = 0.0


class RequestOverheads(Section):
    """Seconds of a request outside of steps and KV transfers. See `baton.planner.sim.scenario.Overheads`."""

    admit_s: Seconds = 0.0
    hop_s: Seconds = 0.0
    commit_s: Seconds = 0.0
    tell_s: Seconds = 0.0


class Profile(Section):
    """A model on some hardware. `token_bytes`: KV per token. `source`: author, place and method of the measurements.
    `level`, `dtype` and `quantize` are those of the measured workers; empty means unknown.
    """

    name: str
    model: str
    hardware: str
    source: Annotated[str, Field(min_length=1)]
    level: str = ""
    dtype: str = ""
    quantize: str = ""
    token_bytes: Annotated[float, Field(ge=0)]
    layers: Annotated[int, Field(gt=0)]
    link: Link
    overheads: RequestOverheads = RequestOverheads()
    layouts: Annotated[tuple[Layout, ...], Field(min_length=1)]

    @field_validator("layouts")
    @classmethod
    def _differ(cls, layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        sizes = [layout.tensor_parallel for layout in layouts]
        if len(set(sizes)) < len(sizes):
            raise ValueError(f"tensor_parallel must differ between layouts, got {', '.join(map(str, sizes))}")
        return layouts

    @property
    def kind(self) -> str:
        """The level, dtype and weight format that were measured, as far as they are known."""
        return " ".join(part for part in (self.level, self.dtype, self.quantize) if part not in {"", "none"})

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(layout.tensor_parallel for layout in self.layouts)

    def layout(self, tensor_parallel: int) -> Layout:
        """Return the layout of a tensor-parallel size. Raises ConfigError if the profile does not have it."""
        for layout in self.layouts:
            if layout.tensor_parallel == tensor_parallel:
                return layout
        known = ", ".join(map(str, self.sizes))
        raise ConfigError(f"tensor_parallel: profile {self.name} has {known}, got {tensor_parallel}")

    def pool(self, workers: int, tensor_parallel: int, like: Pool) -> Pool:
        """Return a pool of such workers. Settings missing in a profile, such as `max_running`, come from `like`."""
        layout = self.layout(tensor_parallel)
        return replace(
            like,
            workers=workers,
            cost=layout.cost(),
            kv_blocks=max(1, layout.kv_tokens // like.block_size),
            tensor_parallel=tensor_parallel,
            spread=layout.spread,
            contention=layout.contention,
        )

    def network(self) -> Network:
        return Network(self.link.bytes_per_s, self.link.latency_s, self.token_bytes, self.layers)


def names() -> list[str]:
    """Return the names of the profiles shipped with Baton."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_profile(name: str) -> Profile:
    """Load a profile by name or from a file. Raises ConfigError with every invalid field."""
    path = FOLDER / f"{name}.json" if name in names() else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--profile: must be a readable file or one of {', '.join(names())}, got {name!r}") from None
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        lines = (f"{path}: {'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}" for one in error.errors())
        raise ConfigError("\n".join(lines)) from None


def _line(of: Line) -> Cost:
    return line(of.step_s, of.token_s, of.context_s)
