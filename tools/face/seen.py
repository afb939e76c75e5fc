"""The part of the public face for operators: metrics, log events and environment variables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tools.face import product
from tools.log_events import ROOT, events
from tools.metric_docs import SHOWN, exported

VARIABLE = re.compile(r"BATON_[A-Z0-9_]+")


def metrics() -> Iterator[str]:
    """Yield each metric with its kind, its labels and the processes that export it."""
    for family in exported().values():
        labels, processes = ", ".join(sorted(family.labels)) or "-", ", ".join(family.processes)
        yield f"{family.name}{SHOWN.get(family.kind, '')}: {family.kind}, labels {labels}, from {processes}"


def logs() -> Iterator[str]:
    """Yield each event with its levels and keys."""
    for name, said in events().items():
        yield f"{name}: {', '.join(sorted(said.levels))}, keys {', '.join(sorted(said.keys)) or '-'}"


def variables() -> Iterator[str]:
    """Yield each string in the source that is an environment variable. `BATON__` is the prefix for config keys."""
    for path in sorted(path for package in product.PACKAGES for path in (ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "BATON_" in text:
            constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            yield from (value for value in constants if isinstance(value, str) and VARIABLE.fullmatch(value))
