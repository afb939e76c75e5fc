"""Hold the tree to its size: readable in an afternoon is a feature, and it is counted.

    python tools/budget.py

Counted are the lines of Python files, blank ones and comments included. Tests, benchmarks, models, tools and generated
code are not part of the budget. A file above 300 lines or a function above 50 fails too: split it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = "baton/rpc/v"
CORE = (
    "router",
    "prefill_workers",
    "decode_workers",
    "kvtransfer",
    "baton/engine",
    "baton/worker",
    "baton/ledger",
)
NOT_CORE = ("baton/engine/model/",)
TREE = ("baton", "router", "prefill_workers", "decode_workers", "kvtransfer", "simulator")
CORE_LIMIT, TREE_LIMIT, FILE_LIMIT, FUNCTION_LIMIT = 7000, 14000, 300, 50


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file, by its path from the root of the repository."""

    path: str
    text: str

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def functions(self) -> Iterator[tuple[str, int]]:
        """The name and the lines of each function, without those of its decorators."""
        for node in ast.walk(ast.parse(self.text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def sources(folders: Iterable[str], skip: tuple[str, ...] = ()) -> list[Source]:
    """All Python files below `folders`, except generated ones and those whose path starts as one of `skip`."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    named = ((path.relative_to(ROOT).as_posix(), path) for path in paths)
    return [Source(name, path.read_text()) for name, path in named if not name.startswith((GENERATED, *skip))]


def faults(tree: Iterable[Source]) -> Iterator[str]:
    """A line for each file and function that is too long."""
    for source in tree:
        if source.lines > FILE_LIMIT:
            yield f"{source.path}: {source.lines} lines, at most {FILE_LIMIT}"
        for name, lines in source.functions():
            if lines > FUNCTION_LIMIT:
                yield f"{source.path}: {name}() has {lines} lines, at most {FUNCTION_LIMIT}"


def total(folder: str, skip: tuple[str, ...] = ()) -> tuple[int, int]:
    """The number of files and of lines below `folder`."""
    found = sources([folder], skip)
    return len(found), sum(source.lines for source in found)


def row(name: str, files: int, lines: int, limit: int | None = None) -> str:
    """One line of the table."""
    share = f"{limit:>7} {lines / limit:>5.0%}" if limit else ""
    return f"{name:<18}{files:>6}{lines:>7}{share}"


def main() -> int:
    """Print the table; 1 if anything is over its limit."""
    core = {folder: total(folder, NOT_CORE) for folder in CORE}
    tree = sources(TREE)
    core_lines, tree_lines = sum(lines for _, lines in core.values()), sum(source.lines for source in tree)
    print(f"{'':<18}{'files':>6}{'lines':>7}{'limit':>7}")
    for folder, (files, lines) in core.items():
        print(row(f"  {folder}", files, lines))
    print(row("core", sum(files for files, _ in core.values()), core_lines, CORE_LIMIT))
    print(row("whole tree", len(tree), tree_lines, TREE_LIMIT))
    wrong = list(faults(tree))
    wrong += [f"the core has {core_lines} lines, at most {CORE_LIMIT}"] if core_lines > CORE_LIMIT else []
    wrong += [f"the whole tree has {tree_lines} lines, at most {TREE_LIMIT}"] if tree_lines > TREE_LIMIT else []
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
