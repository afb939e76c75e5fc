"""Markdown for the guards: commands that users type, links, and the anchors of headings.

Commands are checked against the command line and the programs of this repository.
"""

import ast
import math
import posixpath
import re
import shlex
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import dropwhile, groupby, takewhile
from pathlib import Path
from typing import Any

import typer

from baton.cli.app import app
from baton.config.loading import known_keys

ROOT = Path(__file__).resolve().parents[2]
SHELLS = {"", "sh", "bash", "shell", "console"}  # the languages of fences with commands
FENCE = re.compile(r"^[ \t]*```(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\s*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
LINE = re.compile(r"(?:.*\\\n)*.*")  # with continuation lines after backslashes
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\[[^\]\n]+\]:[ \t]*<?([^\s>]+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)(?:[ \t]+#+)?[ \t]*$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)
OPTIONAL = re.compile(r"\[[^][]*\]")
BEFORE = re.compile(r"\$|[A-Z_]\w*=.*", re.DOTALL)  # a prompt, and a command's environment variables
COMMANDS: Any = typer.main.get_command(app)  # untyped, because typer has its own click
KEYS = frozenset(known_keys())
PACKAGES = {"baton", "benchmarks", "models", "tools"}  # packages with our programs
BATON = re.compile(r"(?:.*\bbin/)?baton")
PYTHON = re.compile(r"(?:.*\bbin/)?python3?")
BETWEEN = {"or", "and", "...", "…"}  # not words of the command
IN_ANOTHER = (["docker", "run"], ["kubectl", "exec"])  # the command to run follows


@dataclass(frozen=True)
class Said:
    """A text of a document and its place, `file:line`."""

    where: str
    text: str


@dataclass(frozen=True)
class Document:
    """A Markdown file. `name` is its path from the root, with slashes."""

    name: str
    text: str

    def said(self, at: int, text: str) -> Said:
        return Said(f"{self.name}:{self.text.count(chr(10), 0, at) + 1}", text)

    @cached_property
    def prose(self) -> str:
        """The text with all fences replaced by blanks."""
        return FENCE.sub(_blank, self.text)

    def code(self) -> Iterator[Said]:
        """Yield the lines in shell fences, and all text between backticks."""
        for fence in FENCE.finditer(self.text):
            lines = LINE.finditer(self.text, *fence.span(2)) if fence[1] in SHELLS else ()
            yield from (self.said(line.start(), line[0].replace("\\\n", " ")) for line in lines)
        yield from (self.said(span.start(), span[2].replace("\n", " ")) for span in SPAN.finditer(self.prose))

    def fences(self) -> Iterator[tuple[str, str]]:
        """Yield language and text of each fence, in order."""
        yield from ((fence[1], fence[2]) for fence in FENCE.finditer(self.text))

    def links(self) -> Iterator[Said]:
        text = SPAN.sub(_blank, self.prose)
        for found in (*LINK.finditer(text), *REFERENCE.finditer(text)):
            if not ELSEWHERE.match(found[1]):
                yield self.said(found.start(), found[1])

    def resolved(self, link: str) -> tuple[str, str]:
        path, _, anchor = link.partition("#")
        return posixpath.normpath(posixpath.join(posixpath.dirname(self.name), path)) if path else self.name, anchor

    def anchors(self) -> set[str]:
        """Return the anchors of its headings, as GitHub forms them."""
        seen: Counter[str] = Counter()
        found = set[str]()
        for heading in HEADING.findall(self.prose):
            text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
        return found


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def commands(line: str) -> Iterator[list[str]]:
    """Yield the simple commands of a shell line as words, without comments, redirections and `[]` of optional parts.

    A bar within such brackets, and the escaped one of a table's cell, is an "or".
    """
    line = OPTIONAL.sub(lambda found: found[0].replace("|", " or "), line.replace("\\|", "|"))
    for ends, words in groupby(_words(line), lambda word: bool(word) and set(word) <= set("();|&")):
        if not ends:
            kept = takewhile(lambda word: not (word and set(word) <= set("<>&")), words)
            yield list(dropwhile(BEFORE.fullmatch, filter(None, (word.strip("[]") for word in kept))))


@cache
def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # a quotation that ends in another line
        return line.split()


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
