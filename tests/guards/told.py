"""Commands in the documents, checked against the command line and the programs of this repository."""

import ast
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from baton.cli.app import app
from baton.config.loading import known_keys
from tests.guards.documents import Document, Said, commands

ROOT = Path(__file__).resolve().parents[2]
COMMANDS: Any = typer.main.get_command(app)  # untyped, because typer has its own click
KEYS = frozenset(known_keys())
PACKAGES = {"baton", "benchmarks", "models", "tools"}  # packages with our programs
BATON = re.compile(r"(?:.*\bbin/)?baton")
PYTHON = re.compile(r"(?:.*\bbin/)?python3?")
BETWEEN = {"or", "and", "...", "…"}  # not words of the command
IN_ANOTHER = (["docker", "run"], ["kubectl", "exec"])  # the command to run follows


def told(document: Document) -> Iterator[tuple[str, Said, list[str]]]:
    """Yield each of our commands: `baton` or `python`, its place, and its arguments."""
    for said in document.code():
        for program, *words in filter(None, map(_inner, commands(said.text))):
            if BATON.fullmatch(program) and words:
                yield "baton", said, words
            elif PYTHON.fullmatch(program) and words:
                yield ("baton", said, words[2:]) if words[:2] == ["-m", "baton"] else ("python", said, words)


def _inner(words: list[str]) -> list[str]:
    """Return the command that a container or a pod runs, or else the words themselves."""
    if words[:2] not in IN_ANOTHER:
        return words
    return words[max((at for at, word in enumerate(words) if BATON.fullmatch(word)), default=len(words)) :]


def wrong_words(given: Iterable[str]) -> Iterator[str]:
    """Yield the arguments of `baton` that the command line would reject."""
    command, path, room, words = COMMANDS, "baton", 0.0, deque(given)
    while words:
        word = words.popleft()
        inner = getattr(command, "commands", {})
        if word.startswith("-") and word != "-":
            options = {name: each for each in command.params for name in (*each.opts, *each.secondary_opts)}
            name, _, value = word.partition("=")
            if name not in options and name != "--help":
                yield f"`{path}` has no {name}; allowed: {listed(each for each in options if each.startswith('-'))}"
                room = math.inf  # the next word may be its value
            elif name in options and not options[name].is_flag and (value or words):
                yield from wrong_value(name, value or words.popleft())
        elif word in inner:
            command, path = inner[word], f"{path} {word}"
            sizes = [each.nargs for each in command.params if each.param_type_name == "argument"]
            room = sum(size if size > 0 else math.inf for size in sizes)
        elif word not in BETWEEN and not (inner and word.isupper()):
            room -= 1
            if room < 0:
                yield f"`{path}` takes no {word!r}; allowed: {listed(inner)}"
                return


def wrong_value(option: str, value: str) -> Iterator[str]:
    """Yield a wrong value of an option: a missing cluster file, or an unknown key of one."""
    key = value.partition("=")[0]
    if option in {"-c", "--config"} and value.startswith("configs/") and not (ROOT / value).is_file():
        yield f"there is no {value}; allowed: {listed(file.name for file in (ROOT / 'configs').glob('*.yaml'))}"
    if option == "--set" and key != "key" and key not in KEYS:
        near = [each for each in KEYS if each.startswith(f"{key.partition('.')[0]}.")]
        yield f"no cluster file has the key {key!r}; allowed: {listed(near or KEYS)}"


def listed(names: Iterable[str]) -> str:
    return " ".join(sorted(names)) or "nothing"


def wrong_program(words: list[str]) -> Iterator[str]:
    """Yield the problems of a `python` command that runs our file or module: missing files and options."""
    if words[0] == "-m":
        name = words[1] if len(words) > 1 else ""
        if name == "pytest":
            paths = (word.split("::")[0] for word in words[2:] if word.startswith("tests/"))
            yield from (f"there is no {path}" for path in paths if not (ROOT / path).exists())
        if name.partition(".")[0] not in PACKAGES:
            return
        source, words = _source(name), words[2:]
    else:
        name = words[0]
        if name.startswith(("-", "/")) or name.isupper():
            return
        source, words = ROOT / name, words[1:]
    if not source.is_file():
        yield f"there is no {source.relative_to(ROOT)}"
        return
    has = options_of(source) | {"--help"}
    used = [word.partition("=")[0] for word in words if word.startswith("-")]
    yield from (f"`{name}` has no {option}; allowed: {listed(has)}" for option in used if option not in has)


def _source(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def options_of(source: Path) -> frozenset[str]:
    """Return a program's options, including those of functions that it imports from this repository."""
    tree = ast.parse(source.read_text())
    found = set(_added(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            module = _source(node.module or "")
            names = {alias.name for alias in node.names}
            inside = ast.parse(module.read_text()).body if module.is_file() else []
            found.update(*(_added(each) for each in inside if isinstance(each, ast.FunctionDef) and each.name in names))
    return frozenset(found)


def _added(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            values = (each.value for each in node.args if isinstance(each, ast.Constant))
            yield from (value for value in values if isinstance(value, str) and value.startswith("-"))


def wrong_commands(document: Document) -> Iterator[str]:
    """Yield a line for each wrong command: its place, its text, its problem, and the allowed values."""
    for program, said, words in told(document):
        wrong = wrong_words(words) if program == "baton" else wrong_program(words)
        yield from (f"{said.where}: {said.text.strip()}: {what}" for what in wrong)
