"""Parser for `--what-if`, such as `prefill=2,decode=1,fault=death:prefill-0@10`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.planner.search import Shape
from baton.planner.sim.scenario import Death, Fault, Slow, SlowLink

KEYS = ("prefill", "decode", "colocated", "prefill_tp", "decode_tp", "tp", "chunk", "workers", "fault")
_FAULT = re.compile(r"(death|slow|link):([a-z0-9-]*)@([0-9.]+)(?:-([0-9.]+)x([0-9.]+))?")
_ALLOWED = "death:WORKER@SECONDS, slow:WORKER@FROM-UNTILxFACTOR or link:WORKER@FROM-UNTILxFACTOR"


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One layout with faults. `scale`: factor of the load, if `workers` scaled the pools."""

    shape: Shape
    faults: tuple[Fault, ...] = ()
    scale: float = 1.0


def parse_what_if(text: str, like: Shape) -> WhatIf:
    """Parse a layout; missing keys come from `like`. Raises ConfigError with key, value and allowed values."""
    numbers: dict[str, int] = {}
    faults = []
    for part in text.split(","):
        key, found, value = part.strip().partition("=")
        if not found or key not in KEYS:
            raise ConfigError(f"--what-if: must be KEY=VALUE,... with {', '.join(KEYS)}, got {part!r}")
        if key == "fault":
            faults.append(_fault(value))
        else:
            numbers[key] = _whole(key, value)
    if "colocated" in numbers and numbers.keys() & {"prefill", "decode", "prefill_tp"}:
        raise ConfigError(f"--what-if: colocated: must be given without prefill, decode and prefill_tp, got {text!r}")
    shape = _shape(numbers, like)
    _check(numbers, shape)
    if "workers" not in numbers:
        return WhatIf(shape, tuple(faults))
    large = shape.of(numbers["workers"])
    return WhatIf(large, tuple(faults), (large.prefill + large.decode) / (shape.prefill + shape.decode))


def _shape(numbers: dict[str, int], like: Shape) -> Shape:
    tp = numbers.get("tp")
    decode_tp = numbers.get("decode_tp", tp or like.decode_tp)
    if "colocated" in numbers or (not like.prefill and "prefill" not in numbers):
        workers = numbers.get("colocated", numbers.get("decode", like.decode))
        return Shape(workers, decode_tp=decode_tp, chunk=numbers.get("chunk", like.chunk))
    prefill = numbers.get("prefill", like.prefill)
    prefill_tp = numbers.get("prefill_tp", tp or like.prefill_tp)
    return Shape(numbers.get("decode", like.decode), prefill, decode_tp, prefill_tp)


def _check(numbers: dict[str, int], shape: Shape) -> None:
    """Raise ConfigError for a key that such a layout does not have."""
    if shape.prefill and "chunk" in numbers:
        chunk = numbers["chunk"]
        raise ConfigError(f"--what-if: chunk: must be left out without colocated workers, got {chunk}")
    if not shape.prefill and "prefill_tp" in numbers:
        tp = numbers["prefill_tp"]
        raise ConfigError(f"--what-if: prefill_tp: must be left out, colocated workers have decode_tp, got {tp}")
    if shape.prefill and numbers.get("workers") == 1:
        raise ConfigError("--what-if: workers: must be 2 or more, one that prefills and one that decodes, got 1")


def _whole(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()) or int(value) < 1:
        raise ConfigError(f"--what-if: {key}: must be a whole number above 0, got {value!r}")
    return int(value)


def _fault(text: str) -> Fault:
    match = _FAULT.fullmatch(text)
    try:
        kind, worker, *times = match.groups() if match else ("", "", "", "", "")
        at_s, until_s, factor = (float(time) if time else math.nan for time in times)
    except ValueError:
        kind = ""
    if kind == "death" and worker and math.isnan(until_s):
        return Death(at_s, worker)
    if kind not in {"slow", "link"} or not at_s < until_s or not factor > 0 or (kind == "slow" and not worker):
        raise ConfigError(f"--what-if: fault: must be {_ALLOWED}, got {text!r}")
    return Slow(at_s, until_s, worker, factor) if kind == "slow" else SlowLink(at_s, until_s, worker, factor)
