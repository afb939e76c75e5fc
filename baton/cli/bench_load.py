"""What `baton bench` sends: prompts of random tokens, or a trace. The same seed gives the same requests."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.client import Model, Prompt
from baton.errors import ConfigError, InvalidRequest, UnknownModel

FIELDS = ("prompt", "prompt_tokens", "max_tokens")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens where a line of the trace says nothing."""

    prompt_tokens: int
    max_tokens: int


def trace(file: Path) -> list[dict[str, Any]]:
    """The requests of a file of JSON lines. Raises ConfigError naming the line that is wrong."""
    try:
        texts = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: cannot read {file}: {error}") from error
    lines = [_line(f"{file}:{number}", text) for number, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise ConfigError(f"--trace: {file} has no requests")
    return lines


def _line(where: str, text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(line, dict) or not set(line) <= set(FIELDS):
        raise ConfigError(f"{where}: must be an object with {', '.join(FIELDS)} and nothing else")
    for name in ("prompt_tokens", "max_tokens"):
        if name in line and not (type(line[name]) is int and line[name] > 0):
            raise ConfigError(f"{where}: {name}: must be a whole number above 0, got {line[name]!r}")
    if ("prompt" in line) == ("prompt_tokens" in line):
        raise ConfigError(f"{where}: must have one of prompt and prompt_tokens")
    if "prompt" in line and not _is_prompt(line["prompt"]):
        raise ConfigError(f"{where}: prompt: must be text or a list of token ids")
    return line


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(type(item) is int for item in value))


def served(models: Sequence[Model], name: str) -> Model:
    """The model called `name`, or the first one. Raises UnknownModel."""
    for model in models:
        if name in {"", model.id}:
            return model
    raise UnknownModel(f"no model {name!r} is served here")


def asks(
    lines: Sequence[Mapping[str, Any]], lengths: Lengths, model: Model | None, seed: int, count: int | None
) -> Iterator[Ask]:
    """The lines again and again, `count` requests or without end. Random tokens need the `model`.

    Raises InvalidRequest at once for lengths that the model cannot have.
    """
    for line in lines:
        _check(line, lengths, model)
    numbers = itertools.count() if count is None else iter(range(count))
    return (_ask(lines[number % len(lines)], lengths, model, f"{seed}/{number}") for number in numbers)


def _check(line: Mapping[str, Any], lengths: Lengths, model: Model | None) -> None:
    if "prompt" in line or model is None:
        return
    length, more = line.get("prompt_tokens", lengths.prompt_tokens), line.get("max_tokens", lengths.max_tokens)
    if length + more > model.max_model_len:
        what = f"{length} and {more} new ones are more than the {model.max_model_len} tokens of {model.id}"
        raise InvalidRequest.of("prompt_tokens", what)


def _ask(line: Mapping[str, Any], lengths: Lengths, model: Model | None, seed: str) -> Ask:
    """Each request has a seed of its own, so that it is the same whatever the others are."""
    more = line.get("max_tokens", lengths.max_tokens)
    if "prompt" in line or model is None:
        return Ask(line["prompt"], more)
    draw = random.Random(seed)
    length = line.get("prompt_tokens", lengths.prompt_tokens)
    return Ask([draw.randrange(model.vocab_size) for _ in range(length)], more)
