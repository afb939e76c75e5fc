"""Files of receipts and of prompts for `baton replay`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError, InvalidRequest
from baton.receipts import form
from baton.receipts.form import Receipt

_ENDINGS = (".json", ".jsonl")


@dataclass(frozen=True, slots=True)
class Source:
    """One receipt of a file, or the mistake in it. `place` is the file, with the line if it has several."""

    place: str
    found: Receipt | InvalidRequest


def read_sources(path: Path) -> Iterator[Source]:
    """Yield the receipts of a file, or of all .json and .jsonl files of a folder. Raises ConfigError for an unreadable
    path, or one without receipts. An unreadable file of a folder is a mistake like others.
    """
    try:
        files = sorted(each for each in path.iterdir() if each.suffix in _ENDINGS) if path.is_dir() else [path]
    except OSError as error:
        raise ConfigError(f"RECEIPT: {path}: cannot be read: {error.strerror}") from None
    if not files:
        raise ConfigError(f"RECEIPT: {path}: has no file that ends with {' or '.join(_ENDINGS)}")
    empty = True
    for file in files:
        try:
            found = list(_of_file(file))
        except (ConfigError, RecursionError) as error:
            if file == path and isinstance(error, ConfigError):
                raise
            found = [Source(str(file), InvalidRequest.of("receipt", str(error)))]
        empty = empty and not found
        yield from found
    if empty:
        raise ConfigError(f"RECEIPT: {path}: has no receipt")


def _of_file(file: Path) -> Iterator[Source]:
    text = _text(file, "RECEIPT")
    try:
        values = [(str(file), json.loads(text))]
    except (ValueError, RecursionError):
        # Not `splitlines`: U+2028, U+2029 and U+0085 may stand in a text of JSON.
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        if len(lines) < 2:
            yield Source(str(file), InvalidRequest.of("receipt", "is not JSON; the file may be truncated"))
            return
        values = [(f"{file}:{number}", _parsed(line)) for number, line in lines]
    for place, value in values:
        for each in _receipts(value):
            yield Source(place, _checked(each))


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _receipts(value: Any) -> Iterator[Any]:
    """Yield the receipts in a value: itself, the member `receipt` of an answer (also as text), or a list of them."""
    if isinstance(value, list):
        for each in value:
            yield from _receipts(each)
    elif isinstance(value, dict) and "receipt" in value:
        yield from _receipts(_parsed(value["receipt"]) if isinstance(value["receipt"], str) else value["receipt"])
    else:
        yield value


def _checked(value: Any) -> Receipt | InvalidRequest:
    try:
        if not isinstance(value, dict):
            raise InvalidRequest.of("receipt", "is not a JSON object; the file may be truncated")
        return form.parse(value)
    except InvalidRequest as error:
        return error


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A prompt: token ids, or a text that the cluster's tokenizer encodes."""

    ids: list[int] | None
    text: str = ""

    @classmethod
    def read(cls, path: Path) -> PromptFile:
        """Read a text, a JSON list of token ids, or an answer of /tokenize. Raises ConfigError."""
        text = _text(path, "--prompt")
        value = _parsed(text)
        value = value.get("tokens") if isinstance(value, dict) else value
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            return cls(None, text)
        if wrong := [each for each in value if not 0 <= each < 2**32]:
            raise ConfigError(f"--prompt: {path}: token ids must be 0 to {2**32 - 1}, got {wrong[0]}")
        return cls(value)


def _text(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{option}: {path}: cannot be read: {reason}") from None
