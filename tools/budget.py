"""Hold the tree to its size: readable in an afternoon is a feature, and it is counted.

    python tools/budget.py

The two budgets count lines of code: docstrings, comments and blank lines are free, since every public name must have a
docstring and nobody should save on it. All lines of the files are shown beside. Tests, benchmarks, models, tools and
generated code are not part of the budget. A file above 600 lines, all counted, or a function above 50 fails too.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
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
# Behind one protocol each, of which the core knows no more: models, kernels, ranks, and ways to move bytes. And what
# only looks on, for an operator.
NOT_CORE = (
    "baton/engine/models/",
    "baton/engine/kernels/",
    "baton/engine/tp/",
    "baton/worker/block_census.py",
    "baton/worker/handoff_timing.py",
    "router/openai/",
    "router/dashboard/",
    "router/auth/",
    "router/observe/",
    "kvtransfer/transports/",
)
TREE = ("baton", "router", "prefill_workers", "decode_workers", "kvtransfer")
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
CORE_LIMIT, TREE_LIMIT, FILE_LIMIT, FUNCTION_LIMIT = 12000, 36000, 600, 50


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file, by its path from the root of the repository."""

    path: str
    text: str

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def code(self) -> int:
        """Lines with a token of code on them: no blank lines, no comments, no docstrings."""
        return code_lines(self.text)

    def functions(self) -> Iterator[tuple[str, int]]:
        """The name and the lines of each function, without those of its decorators."""
        for node in ast.walk(ast.parse(self.text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


@cache  # a file is in a part, in the core and in the whole tree
def code_lines(text: str) -> int:
    """Number of lines of a Python file that hold a token of code."""
    docs = {line for node in ast.walk(ast.parse(text)) for line in docstring_lines(node)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    spans = (range(token.start[0], token.end[0] + 1) for token in tokens if token.type not in NOT_CODE)
    return len({line for span in spans for line in span} - docs)


def docstring_lines(node: ast.AST) -> range:
    """The lines of the docstring of a module, class or function; empty for what has none."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return range(0)
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return range(first.lineno, (first.end_lineno or first.lineno) + 1)
    return range(0)


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


def row(name: str, found: list[Source], limit: int | None = None) -> str:
    """One line of the table."""
    code = sum(source.code for source in found)
    share = f"{limit:>7} {code / limit:>5.0%}" if limit else ""
    return f"{name:<18}{len(found):>6}{sum(source.lines for source in found):>7}{code:>7}{share}"


def main() -> int:
    """Print the table; 1 if anything is over its limit."""
    parts = {folder: sources([folder], NOT_CORE) for folder in CORE}
    core, tree = [source for part in parts.values() for source in part], sources(TREE)
    print(f"{'':<18}{'files':>6}{'lines':>7}{'code':>7}{'limit':>7}")
    for folder, part in parts.items():
        print(row(f"  {folder}", part))
    print(row("core", core, CORE_LIMIT))
    print(row("whole tree", tree, TREE_LIMIT))
    wrong = list(faults(tree))
    for name, found, limit in (("core", core, CORE_LIMIT), ("whole tree", tree, TREE_LIMIT)):
        if (code := sum(source.code for source in found)) > limit:
            wrong.append(f"{name}: {code} lines of code, at most {limit}")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
