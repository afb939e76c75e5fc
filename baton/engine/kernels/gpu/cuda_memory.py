"""Device memory shared by processes through the CUDA driver: KV pools that other processes read, and ranks of a worker.

CUDA leaves it undefined what a process reads if the owner frees memory that the process has open. So the owner frees it
once no other process can use it (`ExposedGpuMemory.lend`, `baton.engine.tp.kv_memory`). torch's `_share_cuda_` is
unsuitable: it counts users in a file of /dev/shm that a killed process leaves behind, and then never frees the memory.
It ran on one H100 (docs/measurements/gpu.md). It never ran between two; docs/how-to/gpu.md has the commands.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import structlog
import torch
from torch import Tensor

from baton.engine.memory.exposed import PROBE_BYTES, PROBES, ExposedMemory, Shape, check_platform, pattern
from baton.errors import ConfigError

HANDLE_BYTES = 64  # size of a handle of memory
CLOSE_S = 10.0  # seconds for a reader to close memory after its channel has ended
_LAZY_PEER_ACCESS = 1
_STREAM_ORDER, _OVERLAP = 1, 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE

Words = np.ndarray[Any, np.dtype[np.uint64]]
log = structlog.get_logger(__name__)


class CopyStream(Protocol):
    """A stream of its own for copies of device memory. Methods raise RuntimeError if CUDA fails."""

    def follow(self) -> None:
        """Let later copies begin after all work that the compute stream has now. The host does not wait."""

    def copy(self, sources: Words, targets: Words, sizes: Words) -> None:
        """Queue copies between addresses, uint64 [n] each, `sizes` in bytes. They may run in any order."""

    def wait(self) -> None:
        """Wait until all queued copies are done."""


class Device(Protocol):
    """One GPU. Addresses refer to its memory. Methods raise RuntimeError if CUDA fails."""

    def allocate(self, nbytes: int) -> int:
        """Allocate memory outside torch's allocators, and return its address."""

    def free(self, address: int) -> None:
        """Free memory from `allocate`. No other process may have it open."""

    def handle(self, address: int) -> bytes:
        """Return the handle of all memory of an `allocate`, for `open` in another process."""

    def open(self, handle: bytes) -> int:
        """Map another process's memory, also of another GPU with peer access, and return its address here. The driver
        counts: further calls return the same address, and each needs a `close`. In the owner's process it raises.
        """

    def close(self, address: int) -> None:
        """Wait until this process no longer uses memory from `open`, then unmap it."""

    def tensor(self, address: int, nbytes: int, owner: object = None) -> Tensor:
        """Return uint8 [nbytes] over this memory. It keeps `owner` alive, and does not free the memory."""

    def copies(self) -> CopyStream:
        """Return a new stream for copies."""


class CudaDevice:
    """A `Device` over libcuda. Raises ConfigError if it is missing or cannot share memory between processes."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(f"CUDA IPC needs KV on an NVIDIA GPU; KV is on {device}")
        self.torch = torch.empty(0, device=device).device  # resolves its index
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
            self._context = self._primary_context(self.torch.index)
            self._probe()
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"CUDA IPC: memory of {self.torch} cannot be shared: {error}") from error

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        torch.cuda.synchronize(self.torch)
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def tensor(self, address: int, nbytes: int, owner: object = None) -> Tensor:
        return torch.as_tensor(_Memory(address, nbytes, owner), device=self.torch)

    def copies(self) -> CopyStream:
        return _CudaCopies(self)

    def _primary_context(self, index: int) -> ctypes.c_void_p:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        _checked(self._cuda, "cuInit", ctypes.c_uint(0))
        _checked(self._cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        _checked(self._cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context

    def _probe(self) -> None:
        address = self.allocate(1)
        try:
            self.handle(address)
        finally:
            self.free(address)

    def has(self, name: str) -> bool:
        """Return whether the driver has this function."""
        return hasattr(self._cuda, name)

    @contextmanager
    def current(self) -> Iterator[Callable[..., None]]:
        """Yield a function that calls the driver for this GPU by name. It raises RuntimeError."""
        # The current context belongs to the thread and may be another GPU's, or none in a new thread.
        _checked(self._cuda, "cuCtxPushCurrent_v2", self._context)
        try:
            yield lambda name, *arguments: _checked(self._cuda, name, *arguments)
        finally:
            _checked(self._cuda, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        with self.current() as call:
            call(name, *arguments)


class _CudaCopies:
    """A `CopyStream` over a stream that does not synchronize with the default stream. A batch is one call of a driver
    of CUDA 12.8 or newer, else a call for each copy.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device.torch)  # type: ignore[no-untyped-call]  # its gap
        self._batched = device.has("cuMemcpyBatchAsync")

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device.torch))

    def copy(self, sources: Words, targets: Words, sizes: Words) -> None:
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        with self._device.current() as call:
            if self._batched:
                arrays = (ctypes.c_void_p(array.ctypes.data) for array in (targets, sources, sizes))
                attributes = ctypes.byref(_CopyAttributes(_STREAM_ORDER, flags=_OVERLAP)), ctypes.byref(_ZERO)
                counts = ctypes.c_size_t(len(sizes)), *attributes, ctypes.c_size_t(1), ctypes.byref(ctypes.c_size_t())
                return call("cuMemcpyBatchAsync", *arrays, *counts, stream)
            for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
                call("cuMemcpyAsync", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), stream)

    def wait(self) -> None:
        self._stream.synchronize()


_ZERO = ctypes.c_size_t(0)


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. Hints are ignored for memory of cuMemAlloc."""

    _fields_ = (("order", ctypes.c_uint), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Memory:
    """Memory that torch can wrap in a tensor without a copy. The tensor's storage keeps this object alive."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def _checked(cuda: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = cuda[name](*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda["cuGetErrorName"](ctypes.c_int(code), ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'').decode()} ({code})")


class ExposedGpuMemory:
    """KV in device memory that other processes can open, and generations in main memory that they can map.

        device memory:  KV, uint8 [kv_bytes] | pattern for probes, uint8 [PROBES * PROBE_BYTES]
    `generations` and `file` are as in `ExposedMemory`, without KV. The memory is freed with its last tensor, once no
    reader has it open. Raises ConfigError if the system cannot share it, or has not enough memory.
    """

    def __init__(self, shape: Shape, gpu: Device) -> None:
        self._host = ExposedMemory(Shape(shape.blocks, 0))
        self.shape, self.gpu = shape, gpu
        self.file, self.generations = self._host.file, self._host.generations
        self._nbytes = shape.kv_bytes + PROBES * PROBE_BYTES
        try:
            self.address = gpu.allocate(self._nbytes)
        except RuntimeError as error:
            raise ConfigError(f"KV memory of {self._nbytes} bytes on the GPU: {error}") from error
        self._lock = threading.Lock()  # channels open in threads of their own
        self._readers: list[Callable[[], bool]] = []
        weakref.finalize(self, _free, gpu, self.address, self._readers).atexit = False
        whole = gpu.tensor(self.address, self._nbytes)
        whole[: shape.kv_bytes].zero_()
        for number in range(PROBES):
            whole[shape.kv_bytes + number * PROBE_BYTES :][:PROBE_BYTES].copy_(pattern(number, PROBE_BYTES))
        if whole.device.type == "cuda":
            torch.cuda.current_stream(whole.device).synchronize()  # readers use other streams

    @property
    def kv(self) -> Tensor:
        """The KV. This object must not keep it, because the tensor keeps this object."""
        return self.gpu.tensor(self.address, self._nbytes, self)[: self.shape.kv_bytes]

    def lend(self, gone: Callable[[], bool]) -> None:
        """Do not free the memory until `gone` returns True: a reader may have it open."""
        with self._lock:
            self._readers[:] = [*(one for one in self._readers if not one()), gone]


def _free(gpu: Device, address: int, readers: list[Callable[[], bool]]) -> None:
    deadline = time.monotonic() + CLOSE_S
    while not all(gone() for gone in readers):
        if time.monotonic() > deadline:
            log.warning("gpu_memory_kept", seconds=CLOSE_S)
            return
        time.sleep(0.001)
    gpu.free(address)


def can_expose(device: torch.device) -> bool:
    """Return whether other processes of this host could read KV on `device`."""
    try:
        check_platform()
        if device.type == "cuda":
            CudaDevice(device)
    except ConfigError:
        return False
    return device.type in {"cpu", "cuda"}
