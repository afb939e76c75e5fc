"""Parts of docs/reference/cli.md: each command with its arguments and options, as in `baton COMMAND --help`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin

import typer

from baton.cli.app import app
from baton.cli.exit_codes import EXIT_CODES
from tools.reference.pages import Page, code, table


def page() -> Page:
    """Return the page of the command line."""
    return Page("cli.md", {"commands": "\n".join(_sections())})


def _sections() -> Iterator[str]:
    # typer carries a click of its own, which has no types
    for path, command in _leaves(typer.main.get_command(app), "baton"):
        yield f"### `{path}`\n{_text(command.help)}\n\n{_examples(command)}{_parameters(command)}"


def _examples(command: Any) -> str:
    lines = [line.strip() for line in (command.epilog or "").split("\n\n")[1:]]
    return "\n".join(["```", *lines, "```", ""]) if lines else ""


def _leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    if not inner or command.invoke_without_command:
        yield path, command
    for name, each in inner.items():
        if not each.hidden:
            yield from _leaves(each, f"{path} {name}")


def _text(text: str | None) -> str:
    """Return a help text without the marks that only typer reads."""
    return "\n".join(line.strip() for line in (text or "").replace("\f", "").strip().splitlines())


def _parameters(command: Any) -> str:
    rows = [_row(each) for each in command.params if not each.hidden and each.name != "help"]
    return table(("argument or option", "value", "default", "meaning"), rows) if rows else "No options.\n"


def _row(each: Any) -> tuple[str, str, str, str]:
    is_argument = each.param_type_name == "argument"
    names = each.name.upper() if is_argument else ", ".join((*each.opts, *each.secondary_opts))
    kind = "" if getattr(each, "is_flag", False) else _kind(each)
    return code(names), kind, "required" if each.required else _default(each), _text(each.help)


def _kind(each: Any) -> str:
    """Return the values that a parameter takes: the choices, or the type with `...` if it may be repeated."""
    kind = each.type_descriptor.annotation
    inner = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) is Literal:
        return ", ".join(map(code, inner))
    return f"{getattr(inner[0] if inner else kind, '__name__', kind)}{' ...' if each.multiple else ''}".lower()


def _default(each: Any) -> str:
    default = each.default.value if isinstance(each.default, Enum) else each.default
    return "" if default is None or default is False or default == () or callable(default) else code(default)


def exit_codes() -> str:
    """Return the table of exit codes."""
    named = {number: [kind.__name__ for kind in kinds] for number, kinds in EXIT_CODES.items()}
    rows = [
        ("0", "success"),
        ("1", "any other error"),
        *((str(number), ", ".join(map(code, names))) for number, names in sorted(named.items())),
    ]
    return table(("exit code", "reason"), rows)
