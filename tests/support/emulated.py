"""CPU kernels of aarch64 under `qemu-aarch64`, in place of a loaded library. It needs that and a cross compiler.

A call sends copies of the memory behind its pointers to the emulated process, and copies it back. Tensors whose address
was asked for are recorded, because their sizes are needed.
"""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from baton.engine.kernels.cpu import compiler, ops
from baton.engine.kernels.cpu.compiler import SOURCES

COMPILER, EMULATOR, LEVEL = "aarch64-linux-gnu-gcc", "qemu-aarch64", "neon"
data_ptr = torch.Tensor.data_ptr


class Emulated:
    """Functions by name, as `ctypes.CDLL` has them. `storages` are those of the recorded tensors by address."""

    def __init__(self, program: Path, storages: dict[int, torch.UntypedStorage]) -> None:
        self._name, self._storages = str(program), storages
        self._process = subprocess.Popen([EMULATOR, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._buffers: dict[int, int] = {}
        self._pointers: list[tuple[int, int, int, int]] = []

    def __getitem__(self, name: str) -> SimpleNamespace:
        return _Function(lambda *args: self._call(name.rpartition("_")[0], args))

    def close(self) -> None:
        self._stdin.close()
        self._stdout.close()
        self._process.wait()

    def _call(self, name: str, args: tuple) -> int:
        self._buffers, self._pointers = {}, []
        sent = [self._argument(each) for each in args]
        lines = [struct.pack("=32sq", name.encode(), len(self._buffers))]
        for address, size in self._buffers.items():
            lines += [struct.pack("=q", size), ctypes.string_at(address, size)]
        lines += [struct.pack("=q", len(self._pointers)), *(struct.pack("=4q", *each) for each in self._pointers)]
        lines += [struct.pack("=q", len(sent)), *(struct.pack("=2q", *each) for each in sent)]
        self._stdin.write(b"".join(lines))
        self._stdin.flush()
        (result,) = struct.unpack("=q", self._stdout.read(8))
        held = {index for index, *_ in self._pointers}
        for index, (address, size) in enumerate(self._buffers.items()):
            found = self._stdout.read(size)
            if index not in held:  # pointers of the other process stay there
                ctypes.memmove(address, found, size)
        return result

    def _buffer(self, address: int, size: int) -> int:
        self._buffers.setdefault(address, size)
        return list(self._buffers).index(address)

    def _place(self, pointer: int) -> tuple[int, int]:
        """Return the buffer of a pointer and the offset in it."""
        storage = self._storages[pointer]
        return self._buffer(storage.data_ptr(), storage.nbytes()), pointer - storage.data_ptr()

    def _argument(self, value) -> tuple[int, int]:
        if isinstance(value, ctypes.c_void_p):
            return self._place(value.value) if value.value else (-1, 0)
        if value is None or isinstance(value, int | ctypes.c_long):
            return -1, (value.value if isinstance(value, ctypes.c_long) else value) or 0
        return self._structure(value._obj), 0

    def _structure(self, held) -> int:
        """Return the buffer of a structure or number, after noting the pointers in it."""
        index = self._buffer(ctypes.addressof(held), ctypes.sizeof(held))
        for name, kind in getattr(held, "_fields_", ()):
            pointer, offset = getattr(held, name), getattr(type(held), name).offset
            if issubclass(kind, ctypes._Pointer):
                self._pointers.append((index, offset, self._structure(pointer.contents), 0))
            elif kind is ctypes.c_void_p and pointer:
                self._pointers.append((index, offset, *self._place(pointer)))
        return index


class _Function(SimpleNamespace):
    def __init__(self, run) -> None:
        super().__init__(run=run)

    def __call__(self, *args) -> int:
        return self.run(*args)


def _built(element: str, folder: Path) -> Path:
    path = folder / f"{element}-{LEVEL}"
    flags = [*compiler._flags(element, LEVEL, tune="generic"), "-static", f"-I{SOURCES}"]
    command = [COMPILER, *flags, str(Path(__file__).with_suffix(".c")), "-lm", "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path


@contextmanager
def emulated_kernels(folder: Path) -> Iterator[None]:
    """Let `CpuKernels` use the kernels of aarch64. Skip the test where a program for that is missing."""
    if missing := [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]:
        pytest.skip(f"no {' and no '.join(missing)} here, which the level neon needs on another processor")
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[str, Emulated] = {}

    def recorded(tensor: torch.Tensor) -> int:
        address = data_ptr(tensor)
        storages[address] = tensor.untyped_storage()
        return address

    def load(element: str, _: Path | None = None) -> Emulated:
        if element not in made:
            made[element] = Emulated(_built(element, folder), storages)
        return made[element]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "data_ptr", recorded)
        patch.setattr(ops, "load_library", load)
        patch.setattr(ops, "chosen_level", lambda: LEVEL)
        yield
    for library in made.values():
        library.close()
