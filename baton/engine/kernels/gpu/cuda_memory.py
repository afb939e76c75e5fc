"""Device memory shared by processes through the CUDA driver, and reservation of memory for activations.

Used by channels between workers (`kvtransfer.transports.cuda_ipc`) and ranks of a worker (`baton.engine.tp.kv_memory`).
The owner frees memory once no other process can use it. torch's `_share_cuda_` is unsuitable: it counts users in a file
of /dev/shm that a killed process leaves behind, and then never frees the memory.
Written from CUDA's documentation and not yet run on a GPU. docs/how-to/gpu.md has the commands for that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.batch import Batch
from baton.engine.kernels.gpu.warm_up import batch_of
from baton.engine.model_backend import ModelBackend
from baton.errors import ConfigError

HANDLE_BYTES = 64  # size of handles of memory and events
_LAZY_PEER_ACCESS = 1


class Device(Protocol):
    """One GPU. Addresses refer to its memory. Methods raise RuntimeError if CUDA fails."""

    @property
    def uuid(self) -> str:
        """UUID of the GPU, the same in all processes."""

    def allocate(self, nbytes: int) -> int:
        """Allocate memory outside torch's allocators, and return its address."""

    def free(self, address: int) -> None:
        """Free memory from `allocate`. No other process may have it open."""

    def handle(self, address: int) -> bytes:
        """Return the handle for `open` in another process."""

    def open(self, handle: bytes) -> int:
        """Map another process's memory, and return its address here."""

    def close(self, address: int) -> None:
        """Wait until this process no longer uses memory from `open`, then unmap it."""

    def tensor(self, address: int, nbytes: int) -> Tensor:
        """Return uint8 [nbytes] over this memory, without ownership."""

    def event(self) -> tuple[Callable[[], None], bytes]:
        """Create an event, and return its handle and a function that records it in the thread's current stream."""

    def open_event(self, handle: bytes) -> Callable[[], bool]:
        """Return a function that checks if another process's event, with all work before it, is done."""


class CudaDevice:
    """A `Device` over libcuda. Raises ConfigError if it is missing or cannot share memory between processes."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(f"CUDA IPC needs KV on an NVIDIA GPU; KV is on {device}")
        self._device = torch.empty(0, device=device).device  # resolves its index
        self.uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
            self._context = self._primary_context(self._device.index)
            self._probe()
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"CUDA IPC: memory of {self._device} cannot be shared: {error}") from error

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
        torch.cuda.synchronize(self._device)
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def tensor(self, address: int, nbytes: int) -> Tensor:
        return torch.as_tensor(_Memory(address, nbytes), device=self._device)

    def event(self) -> tuple[Callable[[], None], bytes]:
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]  # its gap
            handle = event.ipc_handle()  # type: ignore[no-untyped-call]  # its gap
        return lambda: event.record(torch.cuda.current_stream(self._device)), handle

    def open_event(self, handle: bytes) -> Callable[[], bool]:
        event: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(self._device, handle)  # type: ignore[no-untyped-call]
        return event.query

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

    def _call(self, name: str, *arguments: object) -> None:
        # The current context belongs to the thread and may be another GPU's, or none in a new thread.
        _checked(self._cuda, "cuCtxPushCurrent_v2", self._context)
        try:
            _checked(self._cuda, name, *arguments)
        finally:
            _checked(self._cuda, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Memory:
    """Memory that torch can wrap in a tensor without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


def _checked(cuda: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = cuda[name](*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda["cuGetErrorName"](ctypes.c_int(code), ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'').decode()} ({code})")


def claim_activations(backend: ModelBackend, max_batched_tokens: int, max_running: int) -> None:
    """Run the widest forward once on a GPU, so that scratch and the allocator hold their memory from then on. A later
    `auto_kv_bytes` then sees the memory that is free for KV. Raises torch.OutOfMemoryError if it does not fit.
    """
    if backend.device.type != "cuda":
        return
    longest, block_size = backend.max_model_len, backend.layout.block_size
    batch = widest_batch(max_batched_tokens, max_running, longest, block_size, backend.device)
    backend.forward(batch, backend.make_cache(1))
    torch.cuda.synchronize(backend.device)


def widest_batch(tokens: int, running: int, max_model_len: int, block_size: int, device: torch.device) -> Batch:
    """Return prompts of `tokens` tokens in total, with `running` rows of logits. All KV goes to block 0."""
    lengths = [min(max_model_len, tokens - start) for start in range(0, tokens, max_model_len)]
    table_width = -(-max(lengths) // block_size)
    return batch_of([(length, length) for length in lengths], min(running, tokens), table_width, block_size, device)
