"""Importable names with signatures and fields, and error classes with their statuses."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Iterator
from enum import Enum
from types import ModuleType

import grpc

from tools.face import product

# Methods called by the statements `with`, `for` and `await`.
STATEMENTS = {f"__{name}__" for name in "enter exit aenter aexit iter next aiter anext await".split()}
BOUND = {"self", "cls"}  # implicit parameters
CODES = {code.value[0]: code.name for code in grpc.StatusCode}


def names() -> Iterator[str]:
    """Yield each exported name, then the members of each exported class."""
    yield from (f"baton.{name}" for name in product.EXPORTED)
    classes: dict[type, str] = {}
    for path, module in product.MODULES.items():
        for name, value in _public(module):
            yield f"{path}.{name}"
            if isinstance(value, type):
                classes.setdefault(value, name)
    for kind, name in classes.items():
        yield from _class(name, kind)
        yield from _inner(name, kind, {*classes})


def errors() -> Iterator[str]:
    """Yield each error class with its base and the statuses that clients and shells receive."""
    for name, kind in _public(product.MODULES["baton.errors"]):
        if isinstance(kind, type) and issubclass(kind, product.Error):
            error = product.error_of(kind)
            http = product.http_problem(error)
            yield (
                f"{name}({kind.__base__.__name__ if kind.__base__ else ''}): gRPC {CODES[product.grpc_code(error)]}, "
                f"HTTP {http.status} {http.kind} {http.code}, exit {product.exit_status(error)}, "
                f"retryable {error.retryable}, attributes {', '.join(sorted(vars(error))) or '-'}"
            )


def _public(module: ModuleType) -> list[tuple[str, object]]:
    """Return the public names of a module, without modules and foreign imports."""
    found = [(name, value) for name, value in sorted(vars(module).items()) if not name.startswith("_")]
    return [(name, value) for name, value in found if not (isinstance(value, ModuleType) or _is_foreign(name, value))]


def _is_foreign(name: str, value: object) -> bool:
    """Return whether a module outside of the product exports this object under this name."""
    origin = str(getattr(value, "__module__", ""))
    return not _is_ours(origin) and getattr(sys.modules.get(origin), name, None) is value


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in product.PACKAGES


def _class(name: str, kind: type) -> Iterator[str]:
    if typing.is_typeddict(kind):
        required: frozenset[str] = getattr(kind, "__required_keys__", frozenset())
        yield from (f"{name}[{key!r}]{', required' if key in required else ''}" for key in kind.__annotations__)
        return
    if issubclass(kind, Enum):
        yield from (f"{name}.{member.name} = {member.value!r}" for member in kind)
        return
    ours = {
        key: value for base in reversed(kind.__mro__) if _is_ours(base.__module__) for key, value in vars(base).items()
    }
    if "__init__" in ours:
        yield f"{name}{_parameters(kind)}"
    for key in sorted({key for key in ours if not key.startswith("_") or key in STATEMENTS} | _fields(kind)):
        yield from _member(f"{name}.{key}", ours.get(key))


def _member(name: str, value: object) -> Iterator[str]:
    """Yield a method with its parameters, or an attribute."""
    kind = type(value).__name__ if isinstance(value, classmethod | staticmethod) else ""
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    if not inspect.isfunction(function):
        yield name
        return
    marks = [kind, "async" if inspect.iscoroutinefunction(function) else ""]
    yield " ".join((f"{name}{_parameters(function)}", *filter(None, marks)))


def _fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()


def _parameters(function: typing.Callable[..., object]) -> str:
    """Return names, kinds and defaults in the syntax of a `def`, without annotations because their classes may move."""
    signature = inspect.signature(function)
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values() if each.name not in BOUND]
    plain = [each.replace(default=_Shown(each.default)) if each.default is not each.empty else each for each in plain]
    return str(inspect.Signature(plain))


class _Shown:
    """A default as `repr` shows it, without addresses and module names."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        if isinstance(self._value, Enum):
            return repr(self._value.value)
        text = repr(self._value)
        return "..." if text.startswith("<") or dataclasses.is_dataclass(self._value) else text


def _inner(name: str, kind: type, seen: set[type]) -> Iterator[str]:
    """Yield the members of unexported dataclasses and enums in the fields of exported dataclasses."""
    for field in sorted(_fields(kind)):
        for inner in _classes_of(typing.get_type_hints(kind)[field]):
            if inner not in seen:
                parts = inner.__members__ if issubclass(inner, Enum) else _fields(inner)
                yield from (f"{name}.{field}.{part}" for part in sorted(parts))
                yield from _inner(f"{name}.{field}", inner, seen | {inner})


def _classes_of(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, Enum)):
        yield hint
    for argument in typing.get_args(hint):
        yield from _classes_of(argument)
