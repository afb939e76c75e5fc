"""Recorded requests: files of three formats, detected by their content.

Mooncake  JSON lines: timestamp (ms), input_length, output_length, hash_ids (one for each 512 tokens)
Azure     CSV: TIMESTAMP, ContextTokens, GeneratedTokens
Baton     JSON lines: prompt (text or token ids) or prompt_tokens; max_tokens and timestamp (ms) may be left out
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from baton.bench.lengths import LONGEST
from baton.errors import ConfigError

MOONCAKE_BLOCK = 512
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
BATON = ("prompt", "prompt_tokens", "max_tokens", "timestamp")
IDS = 2**32  # of tokens, as on the wire
MOST_SHOWN = 60  # characters of a wrong value


@dataclass(frozen=True, slots=True)
class Arrival:
    """The time and lengths of a request. Prompt tokens after the blocks are the request's own."""

    at_s: float  # seconds from the start of the load
    prompt_tokens: int  # 0 if `prompt` is text, which only the server tokenizes
    max_tokens: int
    blocks: tuple[int, ...] = ()  # equal leading ids mean equal prompt tokens
    block_tokens: int = 0  # of each block; the end of the prompt may cut the last one
    prompt: str | tuple[int, ...] | None = None  # None for any tokens

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.max_tokens

    def within(self, tokens: int) -> Arrival:
        """Return it with at most `tokens` (2 or more): the prompt is cut first, then the answer. Given ones stay."""
        if self.total_tokens <= tokens or self.prompt is not None:
            return self
        answer = min(self.max_tokens, tokens - 1)
        return replace(self, prompt_tokens=min(self.prompt_tokens, tokens - answer), max_tokens=answer)


def cached_share(load: Iterable[Arrival]) -> float:
    """Return the share of prompt tokens that an unlimited prefix cache would hit. `load` is in arrival order."""
    prompts = found = 0
    seen: set[int] = set()
    for one in load:
        prompts += one.prompt_tokens
        known = len(list(itertools.takewhile(seen.__contains__, one.blocks)))
        found += min(known * one.block_tokens, one.prompt_tokens)
        seen.update(one.blocks)
    return found / prompts if prompts else 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a file in time order. In Baton's format, 0 tokens mean that the file gives no number."""

    path: Path
    arrivals: tuple[Arrival, ...]
    timed: bool  # whether the file has arrival times

    @property
    def period_s(self) -> float:
        """The time after which the trace may restart: the last arrival plus a mean gap."""
        count, last = len(self.arrivals), self.arrivals[-1].at_s
        return last * count / (count - 1) if count > 1 else last

    def faster(self, speed: float) -> Trace:
        if not 0 < speed < math.inf:
            raise ConfigError(f"speed: must be a number above 0, got {speed:g}")
        return replace(self, arrivals=tuple(replace(one, at_s=one.at_s / speed) for one in self.arrivals))


def read_trace(path: Path, *, scale: float = 1.0, limit: int | None = None, every: int = 1) -> Trace:
    """Read at most `limit` requests, from 0 s on. `scale` divides lengths and blocks. `every` N keeps each N-th
    conversation. Raises ConfigError.
    """
    if not 0 < scale < math.inf:
        raise ConfigError(f"scale: must be a number above 0, got {scale:g}")
    if every < 1:
        raise ConfigError(f"every: must be a whole number above 0, got {every}")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            found = list(itertools.islice(_thinned(_arrivals(path, file), every), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: cannot read {path}: {error}") from error
    if not found:
        raise ConfigError(f"--trace: {path} has no requests")
    timed = not all(math.isnan(one.at_s) for one in found)
    if timed and (number := next((i for i, one in enumerate(found) if math.isnan(one.at_s)), None)) is not None:
        raise ConfigError(f"{path}: timestamp: must be in all requests or in none, and request {number + 1} has none")
    found.sort(key=lambda one: one.at_s)
    first = found[0].at_s if timed else math.nan
    return Trace(path, tuple(_scaled(one, scale, one.at_s - first if timed else 0.0) for one in found), timed)


def _thinned(found: Iterable[Arrival], every: int) -> Iterator[Arrival]:
    """Yield each `every`-th conversation as a whole, so that the share of shared prefixes stays. Requests of one
    conversation have the same two first blocks, because the first one may be a system prompt of all conversations.
    """
    numbers: dict[tuple[int, ...], int] = {}
    count = itertools.count()
    for one in found:
        first = one.blocks[:2]
        number = numbers[first] if first in numbers else next(count)
        if len(first) == 2:  # a shorter prompt is a conversation of its own
            numbers[first] = number
        if number % every == 0:
            yield one


def _scaled(one: Arrival, scale: float, at_s: float) -> Arrival:
    if one.prompt is not None:
        return replace(one, at_s=at_s)
    counts = (one.prompt_tokens, one.max_tokens, one.block_tokens)
    prompt, answer, block = (max(1, round(count / scale)) if count else 0 for count in counts)
    return replace(one, at_s=at_s, prompt_tokens=prompt, max_tokens=answer, block_tokens=block)


def _arrivals(path: Path, file: TextIO) -> Iterator[Arrival]:
    """Yield the arrivals of a file, with NaN seconds where it has no time."""
    first = file.readline()
    file.seek(0)
    if set(AZURE) <= set(first.strip().split(",")):
        rows = csv.DictReader(file)
        try:
            for row in rows:
                yield _azure(f"{path}:{rows.line_num}", row)
        except csv.Error as error:
            raise ConfigError(f"{path}:{rows.reader.line_num}: not CSV: {error}") from error
        return
    for number, text in enumerate(file, 1):
        if text.strip():
            yield _line(f"{path}:{number}", text)


def _azure(where: str, row: dict[str, str | None]) -> Arrival:
    text = row[AZURE[0]] or ""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{where}: {AZURE[0]}: must be a date and time, got {text!r}") from None
    prompt, answer = (_tokens(where, name, _number(row[name])) for name in AZURE[1:])
    return Arrival((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp(), prompt, answer)


def _number(text: str | None) -> object:
    """Parse an int, or return the text unchanged for the error message. Python parses at most 4300 digits."""
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,4300}", text) else text


def _line(where: str, text: str) -> Arrival:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers that are too long and nesting that is too deep
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if isinstance(line, dict) and "input_length" in line:
        return _mooncake(where, line)
    if not isinstance(line, dict) or not set(line) <= set(BATON):
        raise ConfigError(f"{where}: must be an object with {', '.join(BATON)} and nothing else, or with {MOONCAKE}")
    return _own(where, line)


def _mooncake(where: str, line: dict[str, Any]) -> Arrival:
    blocks = line.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(type(block) is int and block >= 0 for block in blocks):
        raise ConfigError(f"{where}: hash_ids: must be a list of whole numbers of at least 0, got {blocks!r}")
    return Arrival(
        _seconds(where, line.get("timestamp")),
        _tokens(where, "input_length", line.get("input_length")),
        _tokens(where, "output_length", line.get("output_length")),
        tuple(blocks),
        MOONCAKE_BLOCK if blocks else 0,
    )


def _own(where: str, line: dict[str, Any]) -> Arrival:
    if ("prompt" in line) == ("prompt_tokens" in line):
        raise ConfigError(f"{where}: must have one of prompt and prompt_tokens")
    at_s = _seconds(where, line["timestamp"]) if "timestamp" in line else math.nan
    more = _tokens(where, "max_tokens", line["max_tokens"]) if "max_tokens" in line else 0
    prompt = line.get("prompt")
    if isinstance(prompt, str):
        if re.search(r"[\ud800-\udfff]", prompt):
            raise ConfigError(f"{where}: prompt: must have no lone surrogate, got {_shown(prompt)}")
        return Arrival(at_s, 0, more, prompt=prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        if wrong := [token for token in prompt if not 0 <= token < IDS]:
            raise ConfigError(f"{where}: prompt: token ids must be from 0 to {IDS - 1}, got {_shown(wrong[0])}")
        return Arrival(at_s, len(prompt), more, prompt=tuple(prompt))
    if "prompt" in line:
        raise ConfigError(f"{where}: prompt: must be text or a list of token ids")
    return Arrival(at_s, _tokens(where, "prompt_tokens", line["prompt_tokens"]), more)


def _tokens(where: str, name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where}: {name}: must be a whole number above 0, got {_shown(value)}")
    if value > LONGEST:
        raise ConfigError(f"{where}: {name}: must be at most {LONGEST}, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _seconds(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise ConfigError(f"{where}: timestamp: must be finite milliseconds of at least 0, got {_shown(value)}")
    return value / 1e3
