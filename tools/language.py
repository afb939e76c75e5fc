"""Find sentences that break the language rules of CONTRIBUTING.md, as far as a regular expression can see them.

    python -m tools.language                  # list all findings in the product, the tools and the documents
    python -m tools.language baton/engine     # only in these files and folders
    python -m tools.language --long           # also list sentences with more than 25 words

Docstrings, comments and texts for users are read in Python files, text outside code blocks in Markdown files, and
comments in all other files.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("baton", "router", "prefill_workers", "decode_workers", "kvtransfer", "tools", "docs")
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
COMMENTED = (
    "proto configs helm router/dashboard/static baton/engine/kernels/cpu Dockerfile Makefile pyproject.toml".split()
)
SUFFIXES = {".py", ".md", ".proto", ".yaml", ".tpl", ".sh", ".js", ".c", ".h", ".toml", ""}
OWN_LINE, AT_END = re.compile(r"\s*(?://|#|\*|/\*|{{/\*)\s?(.*)"), re.compile(r".*\s(?://|#|/\*) (.*)")
# tokenize would take ten times as long.
STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*', re.DOTALL
)
EXEMPT = ("baton/rpc/v", "docs/measurements", "tools/language.py")
LONGEST = 25  # words of a sentence

_START = r"(?:^|(?<=[.!?:;] )|(?<=[.!?:;]\n))"
RULES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "sentence begins with What, Who, Of or With",
        re.compile(_START + r"(?:What|Who|Whoever|Whose|Whom|Of|With) ", re.M),
    ),
    ("a program is not 'who'", re.compile(r"\b(?:who|whoever|whom|nobody|somebody|anybody|everybody)\b", re.I)),
    (
        "only people say, tell, hear or know",
        re.compile(r"\b(?:says|saying|tells|telling|told|hears|heard|knows)\b", re.I),
    ),
    (
        "archaic word",
        re.compile(r"\b(?:for ever|in vain|dear|dearer|beside|alike|let go|lets go|meanwhile|whither)\b", re.I),
    ),
    ("'at once': write immediately, or at the same time", re.compile(r"\bat once\b", re.I)),
    ("definition by ellipsis", re.compile(r"[;,.] (?:0|None|\"\"|''|True|False): ")),
    ("free relative as a noun", re.compile(r"\b(?:is|of|to|from|by|for|with|as) what (?!if\b)", re.I)),
)


@dataclass(frozen=True, slots=True)
class Text:
    """One docstring, comment, string or paragraph, with the line on which it begins."""

    path: str
    line: int
    text: str


def texts_of_python(path: str, source: str, *, strings: bool) -> Iterator[Text]:
    """Yield docstrings and comments, and with `strings` the texts that contain at least three words."""
    docstrings, tree = set(), ast.parse(source)
    for node in _statements(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.add(node.value)  # of an attribute too
            yield Text(path, node.value.lineno, node.value.value)
    if strings:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node not in docstrings and _is_prose(node.value):
                yield Text(path, node.lineno, str(node.value))
    yield from _comments(path, source)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below `node`, without a visit to their expressions, which are most nodes of a tree."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for statement in inner if isinstance(inner := getattr(node, field, None), list) else ():
            yield statement
            yield from _statements(statement)


def _is_prose(value: object) -> bool:
    return isinstance(value, str) and " " in value.strip() and len(re.findall(r"[A-Za-z]{2,}", value)) >= 3


def _comments(path: str, source: str) -> Iterator[Text]:
    """Yield comments; comments on consecutive lines are one text."""
    lines: list[str] = []
    first = last = 0
    for found in STRING_OR_COMMENT.finditer(source):
        if not found[0].startswith("#"):
            continue
        number, text = source.count("\n", 0, found.start()) + 1, found[0].lstrip("#").strip()
        if lines and number == last + 1:
            lines.append(text)
        else:
            if lines:
                yield Text(path, first, "\n".join(lines))
            lines, first = [text], number
        last = number
    if lines:
        yield Text(path, first, "\n".join(lines))


def texts_of_markdown(path: str, source: str) -> Iterator[Text]:
    """Yield each line outside of fenced code blocks."""
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield Text(path, number, line)


def texts_of_comments(path: str, source: str) -> Iterator[Text]:
    """Yield the comments that begin with `#`, `//` or `/*`. Consecutive lines are one text."""
    block: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if found := OWN_LINE.match(line):
            block.append(found[1])
            continue
        if block:
            yield Text(path, number - len(block), "\n".join(block))
            block = []
        if found := AT_END.match(line):
            yield Text(path, number, found[1])


def _plain(text: str) -> str:
    """Remove code in backticks, doctest lines and URLs."""
    text = re.sub(r"^\s*(?:>>>|\.\.\.).*$", "", text, flags=re.M)
    text = re.sub(r"``?[^`]*``?", "CODE", text)
    text = re.sub(r"https?://\S+", "URL", text)
    return re.sub(r"^[ \t]+", "", text, flags=re.M)


def findings(text: Text, *, long: bool = False) -> Iterator[str]:
    """Yield a line for each rule that `text` breaks."""
    plain = _plain(text.text)
    for name, pattern in RULES:
        for match in pattern.finditer(plain):
            line = text.line + plain.count("\n", 0, match.start())
            around = plain[max(0, match.start() - 30) : match.end() + 40].replace("\n", " ").strip()
            yield f"{text.path}:{line}: {name}: ...{around}..."
    if long:
        for sentence in re.split(r"(?<=[.!?:])\s+|\n\n", plain):
            if len(words := sentence.split()) > LONGEST:
                yield f"{text.path}:{text.line}: {len(words)} words: {' '.join(words[:12])}..."


def files_of(places: Iterable[str]) -> Iterator[Path]:
    """Yield files of text under `places`, without generated code and measurements."""
    for place in places:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(filter(Path.is_file, path.rglob("*"))):
            if file.suffix in SUFFIXES and not str(file.relative_to(ROOT)).startswith(EXEMPT):
                yield file


def all_findings(places: Iterable[str], *, strings: bool = True, long: bool = False) -> Iterator[str]:
    """Yield the findings in all files under `places`."""
    for file in files_of(places):
        name, source = str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
        for text in texts_of(file.suffix, name, source, strings=strings):
            yield from findings(text, long=long)


def texts_of(suffix: str, path: str, source: str, *, strings: bool) -> Iterator[Text]:
    """Yield the texts of a file by the kind that its suffix names."""
    if suffix == ".py":
        return texts_of_python(path, source, strings=strings)
    return texts_of_markdown(path, source) if suffix == ".md" else texts_of_comments(path, source)


def main() -> int:
    """Print the findings. The exit code is 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", help="files and folders (default: the product, the tools, the documents)")
    parser.add_argument("--no-strings", action="store_true", help="read docstrings and comments only")
    parser.add_argument("--long", action="store_true", help="also list long sentences")
    given = parser.parse_args()
    found = list(
        all_findings(given.places or (*FOLDERS, *PAGES, *COMMENTED), strings=not given.no_strings, long=given.long)
    )
    print(*found, sep="\n")
    print(f"{len(found)} findings", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
