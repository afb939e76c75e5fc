"""The header of a GGUF file: metadata, and the place of each tensor.

Layout (github.com/ggml-org/ggml, docs/gguf.md), little-endian: magic, version, counts; metadata as key, type, value;
tensors as name, dimensions, type, offset; then, aligned, the data. All sizes are checked against the file's.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from baton.errors import CheckpointError
from baton.limits import MAX_GGUF_ENTRIES, MAX_GGUF_FLOATS

INSTALL = "pip install 'baton-serve[gguf]'"
MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor: its file, its type as in `Q4_K`, its shape with the outputs first, and its bytes."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A parsed header."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key} {problem}")

    def floats(self, name: str) -> list[float]:
        """Return a small float32 tensor."""
        if (info := self.tensors.get(name)) is None:
            raise self.error(name, "is missing")
        if info.kind != "F32":
            raise self.error(name, f"has type {info.kind}, expected F32")
        if info.nbytes > 4 * MAX_GGUF_FLOATS:
            raise self.error(name, f"has {info.nbytes // 4} numbers, at most {MAX_GGUF_FLOATS} are allowed")
        with info.path.open("rb") as file:
            file.seek(info.start)
            return list(struct.unpack(f"<{info.nbytes // 4}f", file.read(info.nbytes)))


def read_header(path: Path) -> GgufHeader:
    """Parse a file. Raises CheckpointError with the file and the field."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


class _Parser:
    """A cursor over the bytes of a file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at, self._size = path, data, 0, len(data)
        self._entries = 0  # of all arrays

    def header(self) -> GgufHeader:
        if self._data[:4] != MAGIC:
            raise self._error("magic", f"is {self._data[:4]!r}, expected {MAGIC!r}: this is no GGUF file")
        self._at = 4
        version = self._number("I", "version")
        if version not in VERSIONS:
            raise self._error("version", f"is {version} (supported: 2, 3; little-endian)")
        tensors, keys = self._number("Q", "tensor_count"), self._number("Q", "metadata_kv_count")
        metadata = self._named(keys, "metadata key", self._metadata)
        infos = self._named(tensors, "tensor name", self._info)
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise self._error("general.alignment", f"must be a number above 0, got {align!r}")
        base = -(-self._at // align) * align
        return GgufHeader(self._path, metadata, {name: self._placed(name, base, *info) for name, info in infos.items()})

    def _named(self, count: int, field: str, read: Callable[[str], Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for i in range(count):
            name = self._string(f"{field} {i + 1} of {count}")
            if name in found:
                raise self._error(name, "is there twice")
            found[name] = read(name)
        return found

    def _metadata(self, key: str) -> Any:
        return self._value(self._number("I", f"type of {key}"), key)

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._string(key)
        if kind in NUMBERS:
            return self._number(NUMBERS[kind], key)
        if kind != ARRAY:
            raise self._error(key, f"has the unknown type {kind}")
        inner, count = self._number("I", key), self._number("Q", key)
        self._entries += count
        if self._entries > MAX_GGUF_ENTRIES:
            text = f"brings arrays to {self._entries} entries, at most {MAX_GGUF_ENTRIES} in all are allowed"
            raise self._error(key, text)
        if inner == STRING:
            self._room(8 * count, key)
            return [self._string(key) for _ in range(count)]
        if inner not in NUMBERS:
            raise self._error(key, f"is an array of the unknown type {inner}")
        return list(self._numbers(NUMBERS[inner], count, key))

    def _info(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        """Return the type, the shape, the offset and the number of bytes of a tensor."""
        sizes, dimensions = _block_sizes(self._path), self._number("I", f"dimensions of {name}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._error(name, f"has {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(reversed(self._numbers("Q", dimensions, f"dimensions of {name}")))
        if not all(shape):
            raise self._error(name, f"has the shape {list(shape)}, but no dimension may be 0")
        kind, offset = self._number("I", f"type of {name}"), self._number("Q", f"offset of {name}")
        if kind not in sizes:
            raise self._error(name, f"has the unknown type {kind}")
        text, block, nbytes = sizes[kind]
        if shape[-1] % block:
            raise self._error(name, f"has {shape[-1]} columns, which are no whole blocks of {block} ({text})")
        return text, shape, offset, prod(shape) // block * nbytes

    def _placed(self, name: str, base: int, kind: str, shape: tuple[int, ...], offset: int, nbytes: int) -> TensorInfo:
        if base + offset + nbytes > self._size:
            text = f"ends at byte {base + offset + nbytes}, but the file has {self._size}: it is not complete"
            raise self._error(name, text)
        return TensorInfo(self._path, kind, shape, base + offset, nbytes)

    def _number(self, code: str, field: str) -> Any:
        return self._numbers(code, 1, field)[0]

    def _numbers(self, code: str, count: int, field: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        self._room(size, field)
        found = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += size
        return found

    def _string(self, field: str) -> str:
        length = self._number("Q", field)
        self._room(length, field)
        found = self._data[self._at : self._at + length]
        self._at += length
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise self._error(field, f"is not UTF-8: {error.reason}") from error

    def _room(self, size: int, field: str) -> None:
        if self._at + size > self._size:
            raise self._error(field, f"needs {size} bytes at byte {self._at}, but the file has {self._size}")

    def _error(self, field: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {field} {problem}")


def _block_sizes(path: Path) -> dict[int, tuple[str, int, int]]:
    """Return the name, the elements and the bytes of a block of each type."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise CheckpointError(f"{path}: GGUF needs the package gguf: {INSTALL}") from error
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
