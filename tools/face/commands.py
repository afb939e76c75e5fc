"""Console commands with their options, arguments and defaults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.face import product

# Usual properties of an option or argument. A line shows only the differences.
USUAL: dict[str, object] = {
    "required": False,
    "multiple": False,
    "nargs": 1,
    "is_flag": False,
    "count": False,
    "hidden": False,
}
USUAL |= dict.fromkeys(("min", "max", "envvar"))


def commands() -> Iterator[str]:
    """Yield each command of the tree, followed by its options and arguments."""
    yield from _commands("baton", product.command())


def _commands(path: str, command: Any) -> Iterator[str]:
    yield f"{path}{' (hidden)' if command.hidden else ''}"
    for parameter in command.params:
        yield f"{path} {_parameter(parameter)}"
    for name, inner in getattr(command, "commands", {}).items():
        yield from _commands(f"{path} {name}", inner)


def _parameter(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    shown = f"<{parameter.name}>" if is_argument else " ".join((*parameter.opts, *parameter.secondary_opts))
    has = {key: getattr(parameter, key, usual) for key, usual in USUAL.items()}
    unusual = [f"{key}={value}" for key, value in has.items() if value != USUAL[key]]
    default = str(parameter.default) if isinstance(parameter.default, Path) else repr(parameter.default)
    return ", ".join((f"{shown}: default {default}", *unusual))
