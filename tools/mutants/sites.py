"""All single changes (mutants) of the function bodies of a file.

A mutant is named by file, function, operator and number, so it keeps its name while its function is unchanged.
Defaults, decorators, annotations, strings, log calls and `__repr__` are left alone, because a change there has no
effect or should not be tested.
"""

from __future__ import annotations

import ast
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
LOGGERS = {"log", "_log", "logger", "logging"}
LEFT_ALONE = {"__repr__", "__str__"}

Functions = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One change. Tests that execute the lines `first` to `last`, from 1, can detect it."""

    path: str
    function: str
    operator: str
    number: int
    first: int
    last: int

    @property
    def name(self) -> str:
        """Name of the mutant in results, independent of line numbers."""
        return f"{self.path}::{self.function}::{self.operator}:{self.number}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Edit:
    """A possible change of a tree. `apply` makes it in place."""

    operator: str
    first: int
    last: int
    apply: Callable[[], None]


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """Return all mutants of the file `path` below `root`, in source order."""
    tree = ast.parse((root / path).read_text())
    return [mutant for _, mutant, _ in _all(tree, path)]


def mutated_code(root: Path, mutant: Mutant) -> types.CodeType:
    """Return the changed code of the mutant's outermost function. Raises LookupError if the file has no such mutant."""
    tree = ast.parse((root / mutant.path).read_text())
    for function, found, edit in _all(tree, mutant.path):
        if found.name == mutant.name:
            edit.apply()
            ast.fix_missing_locations(tree)
            line = min([function.lineno, *(each.lineno for each in function.decorator_list)])
            return _code_of(compile(tree, str(root / mutant.path), "exec", dont_inherit=True), found.function, line)
    raise LookupError(mutant.name)


def _code_of(module: types.CodeType, qualname: str, line: int) -> types.CodeType:
    waiting = [module]
    while waiting:
        code = waiting.pop()
        if code.co_qualname == qualname and code.co_firstlineno == line:
            return code
        waiting.extend(each for each in code.co_consts if isinstance(each, types.CodeType))
    raise LookupError(f"{qualname} at line {line}")


def _all(tree: ast.Module, path: str) -> Iterator[tuple[Functions, Mutant, Edit]]:
    counted: Counter[tuple[str, str]] = Counter()
    for qualname, function in _outermost(tree.body, ""):
        for edit in _block(function.body):
            number = counted[qualname, edit.operator]
            counted[qualname, edit.operator] += 1
            yield function, Mutant(path, qualname, edit.operator, number, edit.first, edit.last), edit


def _outermost(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Functions]]:
    """Yield the functions of modules and classes. Nested functions belong to them."""
    for each in body:
        if isinstance(each, ast.ClassDef):
            yield from _outermost(each.body, f"{prefix}{each.name}.")
        elif isinstance(each, Functions) and each.name not in LEFT_ALONE:
            yield f"{prefix}{each.name}", each


def _block(body: list[ast.stmt]) -> Iterator[Edit]:
    for index, statement in enumerate(body):
        yield from _statement(body, index, statement)


def _statement(body: list[ast.stmt], index: int, statement: ast.stmt) -> Iterator[Edit]:
    if isinstance(statement, ast.Assert | ast.Import | ast.ImportFrom | ast.Pass) or _is_text_or_log(statement):
        return
    if isinstance(statement, ast.ClassDef):
        return
    if _can_go(statement):
        yield _edit("remove", statement, lambda: body.__setitem__(index, ast.copy_location(ast.Pass(), statement)))
    if isinstance(statement, ast.Break | ast.Continue):
        other = ast.Continue() if isinstance(statement, ast.Break) else ast.Break()
        yield _edit("loop", statement, lambda: body.__setitem__(index, ast.copy_location(other, statement)))
    if isinstance(statement, ast.Return) and not _is_none(statement.value):
        yield _edit("return", statement, lambda: setattr(statement, "value", ast.Constant(None)))
    if isinstance(statement, ast.If | ast.While) and not isinstance(statement.test, ast.Compare):
        yield _negation(statement)
    for field, value in ast.iter_fields(statement):
        if field in ("annotation", "returns", "args", "decorator_list"):
            continue
        yield from _within(value)


def _within(value: object) -> Iterator[Edit]:
    if isinstance(value, list):
        if value and isinstance(value[0], ast.stmt):
            yield from _block(value)
        else:
            for each in value:
                yield from _within(each)
    elif isinstance(value, ast.expr):
        yield from _expression(value)
    elif isinstance(value, ast.AST):
        for each in (child for _, child in ast.iter_fields(value)):
            yield from _within(each)


def _expression(node: ast.expr) -> Iterator[Edit]:
    if isinstance(node, ast.JoinedStr):
        return
    yield from _changes(node)
    for _, value in ast.iter_fields(node):
        yield from _within(value)


def _changes(node: ast.expr) -> Iterator[Edit]:
    if isinstance(node, ast.Compare):
        for index, old in enumerate(node.ops):
            new = COMPARISONS[type(old)]
            yield _edit("compare", node, lambda index=index, new=new: node.ops.__setitem__(index, new()))  # type: ignore[misc]
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _edit("logic", node, lambda: setattr(node, "op", other))
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _is_text(node.left, node.right):
        swapped = OPERATORS[type(node.op)]()
        yield _edit("arithmetic", node, lambda: setattr(node, "op", swapped))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _edit("not", node, lambda: setattr(node, "operand", ast.UnaryOp(ast.Not(), node.operand)))
    elif isinstance(node, ast.IfExp) and not isinstance(node.test, ast.Compare):
        yield _negation(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        changed = not node.value if isinstance(node.value, bool) else node.value + 1
        yield _edit("constant", node, lambda: setattr(node, "value", changed))


def _negation(node: ast.If | ast.While | ast.IfExp) -> Edit:
    test = node.test
    return _edit("negate", test, lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), test)))


def _edit(operator: str, node: ast.stmt | ast.expr, apply: Callable[[], None]) -> Edit:
    return Edit(operator, node.lineno, node.end_lineno or node.lineno, apply)


def _can_go(statement: ast.stmt) -> bool:
    """Return whether the statement has an effect and its function is complete without it."""
    if isinstance(statement, ast.Assign):
        return all(isinstance(each, ast.Attribute | ast.Subscript) for each in statement.targets)
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call | ast.Await)
    return isinstance(statement, ast.AugAssign | ast.Raise | ast.Delete)


def _is_text_or_log(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise) and "NotImplementedError" in ast.unparse(statement):
        return True
    if not isinstance(statement, ast.Expr):
        return isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING")
    if isinstance(statement.value, ast.Constant):
        return True
    called = statement.value.func if isinstance(statement.value, ast.Call) else None
    owner = called.value if isinstance(called, ast.Attribute) else None
    return owner is not None and ast.unparse(owner).rpartition(".")[2] in LOGGERS


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in nodes
    )
