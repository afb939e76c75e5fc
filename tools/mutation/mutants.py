"""Lists, samples and compiles the mutants of a module."""

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    """One change: ``index`` counts the places for changes in its function, in the order of the tree."""

    path: str
    qualname: str
    line: int
    kind: str
    index: int

    @property
    def id(self) -> str:
        return f"{self.path}:{self.qualname}:{self.line}:{self.kind}:{self.index}"


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _kind(node: ast.AST) -> str | None:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        return "compare"
    if isinstance(node, ast.BoolOp):
        return "boolean"
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return "constant"
    if isinstance(node, ast.If):
        return "condition"
    if isinstance(node, ast.Return) and node.value is not None:
        return "return"
    return None


def _places(function: ast.AST) -> list[tuple[str, ast.AST]]:
    body: list[ast.AST] = list(getattr(function, "body", []))
    return [(kind, node) for part in body for node in ast.walk(part) if (kind := _kind(node)) is not None]


def mutants(path: str, source: str) -> list[Mutant]:
    """All mutants of the functions and methods in ``source``."""
    return [
        Mutant(path, name, getattr(node, "lineno", 0), kind, index)
        for name, function in _functions(ast.parse(source))
        for index, (kind, node) in enumerate(_places(function))
    ]


def sample(found: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """The same ``count`` mutants for the same seed."""
    return random.Random(seed).sample(sorted(found, key=lambda mutant: mutant.id), min(count, len(found)))


def _change(kind: str, node: ast.AST) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = _COMPARED[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else int(str(node.value)) + 1
    elif isinstance(node, ast.If):
        node.test = ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))
    elif isinstance(node, ast.Return):
        node.value = ast.Constant(None)


def compiled(mutant: Mutant, source: str) -> CodeType:
    """The code of the module with the one change of ``mutant``."""
    tree = ast.parse(source)
    function = dict(_functions(tree))[mutant.qualname]
    kind, node = _places(function)[mutant.index]
    _change(kind, node)
    return compile(ast.fix_missing_locations(tree), mutant.path, "exec")
