"""Device memory that two processes share, by the CUDA driver itself.

torch's own way (`_share_cuda_`) counts its users in a file of /dev/shm, which a killed process leaves behind, and never
frees what such a process had open. Here the owner frees when it knows that nobody else can touch the memory any more.
Channels between workers use it (`kvtransfer.transports.cuda_ipc`), and ranks of a worker (`baton.engine.tp.kv_memory`).
Written from CUDA's documentation and not yet run: no GPU was at hand. On a machine with one, and with two:
`python -m pytest tests/unit/gpu/test_cuda_ipc.py tests/unit/gpu/test_ranks.py`.

What a GPU needs besides weights and KV, claimed before the rest is counted as free for KV.
"""

from __future__ import annotations

import ctypes
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch

from baton.engine.batch import Batch
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from baton.engine.model_backend import ModelBackend


HANDLE_BYTES = 64  # of memory and of an event
_LAZY_PEER_ACCESS = 1


class Device(Protocol):
    """One GPU. Addresses are of its memory; methods raise RuntimeError."""

    @property
    def uuid(self) -> str:
        """The GPU's own name, the same in all processes."""

    def allocate(self, nbytes: int) -> int:
        """The address of new memory, which no allocator of torch's knows."""

    def free(self, address: int) -> None:
        """Of what `allocate` gave; no other process may have it open."""

    def handle(self, address: int) -> bytes:
        """For `open` in another process."""

    def open(self, handle: bytes) -> int:
        """The address at which another process's memory is seen here."""

    def close(self, address: int) -> None:
        """Of what `open` gave: waits until nothing here works with it, then it is not seen any more."""

    def tensor(self, address: int, nbytes: int) -> Tensor:
        """uint8 [nbytes] over that memory, which it does not own."""

    def event(self) -> tuple[Callable[[], None], bytes]:
        """What puts a new event into the thread's current stream, and its handle."""

    def open_event(self, handle: bytes) -> Callable[[], bool]:
        """Whether another process's event, and all work before it, is done."""


class CudaDevice:
    """A `Device` over libcuda. Raises ConfigError where there is none, or no sharing between processes."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(f"CUDA IPC needs KV on an NVIDIA GPU; KV is on {device}")
        self._device = torch.empty(0, device=device).device  # with its index
        self.uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
            self._context = self._primary_context(self._device.index)
            self._probe()
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"CUDA IPC: memory of {self._device} cannot be shared: {error}") from error

    def allocate(self, nbytes: int) -> int:
        """See `Device`."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        """See `Device`."""
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def handle(self, address: int) -> bytes:
        """See `Device`."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """See `Device`."""
        address, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        """See `Device`."""
        torch.cuda.synchronize(self._device)
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def tensor(self, address: int, nbytes: int) -> Tensor:
        """See `Device`."""
        return torch.as_tensor(_Memory(address, nbytes), device=self._device)

    def event(self) -> tuple[Callable[[], None], bytes]:
        """See `Device`."""
        with torch.cuda.device(self._device):
            event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]  # its gap
            handle = event.ipc_handle()  # type: ignore[no-untyped-call]  # its gap
        return lambda: event.record(torch.cuda.current_stream(self._device)), handle

    def open_event(self, handle: bytes) -> Callable[[], bool]:
        """See `Device`."""
        event: torch.cuda.Event = torch.cuda.Event.from_ipc_handle(self._device, handle)  # type: ignore[no-untyped-call]
        return event.query

    def _primary_context(self, index: int) -> ctypes.c_void_p:
        """The context that torch works in, too."""
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
        # What is current belongs to a thread: another GPU's may be, and is afterwards, or none in a new thread.
        _checked(self._cuda, "cuCtxPushCurrent_v2", self._context)
        try:
            _checked(self._cuda, name, *arguments)
        finally:
            _checked(self._cuda, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Memory:
    """What torch makes a tensor of without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _checked(cuda: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = cuda[name](*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda["cuGetErrorName"](ctypes.c_int(code), ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'').decode()} ({code})")


def claim_activations(backend: ModelBackend, max_batched_tokens: int, max_running: int) -> None:
    """Run the widest forward once, on a GPU: scratch and the allocator keep its memory from then on.

    So `auto_kv_bytes`, called after it, sees what is free indeed. Raises torch.OutOfMemoryError if not even this fits.
    """
    if backend.device.type != "cuda":
        return
    lengths = backend.max_model_len, backend.layout.block_size
    batch = widest_batch(max_batched_tokens, max_running, *lengths, backend.device)
    backend.forward(batch, backend.make_cache(1))
    torch.cuda.synchronize(backend.device)


def widest_batch(tokens: int, running: int, max_model_len: int, block_size: int, device: torch.device) -> Batch:
    """Prompts of `tokens` tokens in all, logits for `running` rows. All KV goes to block 0: a cache of one will do."""
    lengths = [min(max_model_len, tokens - start) for start in range(0, tokens, max_model_len)]
    with device:
        positions = torch.cat([torch.arange(length) for length in lengths])
        return Batch(
            token_ids=torch.zeros(tokens, dtype=torch.int64),
            positions=positions,
            slot_mapping=positions % block_size,
            query_lens=lengths,
            context_lens=lengths,
            query_starts=torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32),
            kv_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.zeros(len(lengths), -(-max(lengths) // block_size), dtype=torch.int32),
            logit_rows=torch.arange(min(running, tokens)),
        )
