"""Check that the code keeps its size: the main path stays readable in an afternoon.

    python tools/budget.py

All lines count: code, docstrings, comments and blank lines. Generated code, tests, benchmarks, models and tools are not
part of the product. The check fails if the main path or the product is over its limit, if a file has more than 600
lines or a function more than 50, or if a folder has more than 15 files, `__init__.py` and `__main__.py` not counted.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = "baton/rpc/v"
PRODUCT = ("baton", "router", "prefill_workers", "decode_workers", "kvtransfer")
MAIN_PATH = (  # in the order in which a request passes them
    "router/service.py",
    "router/parsing/generate_request.py",
    "router/request/client_request.py",
    "router/request/lifecycle.py",
    "router/request/attempt.py",
    "router/request/delivery.py",
    "router/admission/admission.py",
    "router/placement/policy.py",
    "router/workers/stream.py",
    "baton/worker/service.py",
    "prefill_workers/worker.py",
    "baton/engine/engine.py",
    "baton/engine/scheduler.py",
    "baton/engine/model_runner.py",
    "kvtransfer/sender.py",
    "kvtransfer/receive_loop.py",
    "decode_workers/reservations.py",
    "decode_workers/worker.py",
)
MAIN_PATH_LIMIT, PRODUCT_LIMIT, FILE_LIMIT, FUNCTION_LIMIT, FOLDER_LIMIT = 5600, 66500, 600, 50, 15


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file, with its path from the root of the repository."""

    path: str
    text: str

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def functions(self) -> Iterator[tuple[str, int]]:
        """Yield name and number of lines of each function, without its decorators."""
        for node in ast.walk(ast.parse(self.text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def sources(folder: str) -> list[Source]:
    """Return all Python files under `folder` that are not generated."""
    paths = ((path.relative_to(ROOT).as_posix(), path) for path in sorted((ROOT / folder).rglob("*.py")))
    return [Source(name, path.read_text()) for name, path in paths if not name.startswith(GENERATED)]


def faults(tree: Sequence[Source]) -> Iterator[str]:
    """Yield a line for each file and each function that is too long, and for each folder with too many files."""
    files = Counter(Path(source.path).parent for source in tree if not Path(source.path).stem.startswith("__"))
    for folder, count in files.items():
        if count > FOLDER_LIMIT:
            yield f"{folder}: {count} files, at most {FOLDER_LIMIT}"
    for source in tree:
        if source.lines > FILE_LIMIT:
            yield f"{source.path}: {source.lines} lines, at most {FILE_LIMIT}"
        for name, lines in source.functions():
            if lines > FUNCTION_LIMIT:
                yield f"{source.path}: {name}() has {lines} lines, at most {FUNCTION_LIMIT}"


def row(name: str, found: list[Source], limit: int | None = None) -> str:
    """Return one line of the table."""
    lines = sum(source.lines for source in found)
    share = f"{limit:>8,} {lines / limit:>5.0%}" if limit else ""
    return f"{name:<18}{len(found):>6}{lines:>8,}{share}"


def main() -> int:
    """Print the table. The exit code is 1 if anything is over its limit."""
    folders = {folder: sources(folder) for folder in PRODUCT}
    product = [source for found in folders.values() for source in found]
    main_path = [source for source in product if source.path in MAIN_PATH]
    totals = (("main path", main_path, MAIN_PATH_LIMIT), ("product", product, PRODUCT_LIMIT))
    print(f"{'':<18}{'files':>6}{'lines':>8}{'limit':>8}")
    for folder, found in folders.items():
        print(row(f"  {folder}", found))
    print(*(row(*total) for total in totals), sep="\n")
    wrong = [f"{path}: not there" for path in sorted({*MAIN_PATH} - {source.path for source in main_path})]
    wrong += faults(product)
    for name, found, limit in totals:
        if (lines := sum(source.lines for source in found)) > limit:
            wrong.append(f"{name}: {lines:,} lines, at most {limit:,}")
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
