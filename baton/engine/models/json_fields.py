"""Typed access to an untrusted JSON object. A missing or wrong value raises CheckpointError with its key."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import CheckpointError
from baton.model_hub import check_file

MAX_INT = 2**31 - 1


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises CheckpointError if the file is missing, unreadable or no JSON object."""
    check_file(path)
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object, got {type(value).__name__}")
    return value


def shown(value: object) -> str:
    """Return a value for an error. A long one is cut and ends with `...`."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object and its origin. An absent or null key takes its default; it is an error if there is none."""

    where: str  # such as "/models/x/config.json" or "/models/x/config.json: rope_scaling"
    values: dict[str, Any]

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} {problem}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INT) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"must be a whole number from {low} to {high}, got {shown(value)}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0, below: float = math.inf) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < below:
            raise self.error(key, f"must be a number between {above:g} and {below:g}, got {shown(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, got {shown(value)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"must be a list of strings, got {shown(value)}")
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._get(key, [])
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(key, f"must be a list of whole numbers, got {shown(value)}")
        return tuple(value)

    def section(self, key: str) -> Fields:
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, got {shown(value)}")
        return Fields(f"{self.where}: {key}", value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None and default is None:
            raise self.error(key, "is missing")
        return default if value is None else value
