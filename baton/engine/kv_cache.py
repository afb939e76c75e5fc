"""Paged KV cache of one worker, its wire order, and its size according to the cluster file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from baton.core import KVLayout
from baton.engine.kernels.cpu.ops import CompiledBlockCopy
from baton.engine.kernels.gpu.cuda_memory import CudaDevice, ExposedGpuMemory
from baton.engine.memory.exposed import ExposedMemory, Shape
from baton.engine.memory.host_memory import available_bytes, total_bytes
from baton.engine.memory.huge_pages import Arena
from baton.errors import ConfigError

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}
CPU_SHARE, CPU_CAP_BYTES = 0.2, 4 << 30  # of available memory, per worker, because several share a machine
GPU_SHARE = 0.9  # after activations (`claim_activations`); the rest is for graphs, sampling, transfers


Exposed = ExposedMemory | ExposedGpuMemory


class Mark(Protocol):
    """A point in the work of a device."""

    def wait(self) -> None:
        """Delay later work of the current stream until this point is reached."""

    def synchronize(self) -> None:
        """Wait on the host until this point is reached."""


class StateMemory:
    """The states of recurrent layers: `rows`, float32 [slots, numbers], with the state of a sequence each."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def whole(self, row: Tensor) -> Tensor:
        """Return the state in a row: float32 [state_size], in an order that does not depend on the number of ranks."""
        return row

    def divided(self, state: Tensor) -> Tensor:
        """Return the row of a state from `whole`."""
        return state


class KVCache:
    """Tensors of a KV layout, each `[layers, total_blocks, block_size, kv_heads, head_width]`, on `device`. Latent
    attention has only `k`, and `v` has no blocks. The wire order of layers x positions is, for each layer, K of all
    positions, then V of all. It has no blocks, so each side has its own block size. Not thread-safe: the block pool
    decides which component may access a block. `copy` replaces torch for contiguous CPU tensors. Other processes can
    read a cache in `exposed` memory.
    """

    def __init__(
        self,
        layout: KVLayout,
        total_blocks: int,
        device: torch.device | str = "cpu",
        storage: list[Tensor] | None = None,
        copy: CompiledBlockCopy | None = None,
        exposed: Exposed | None = None,
    ) -> None:
        shape = (layout.layers, total_blocks, layout.block_size, layout.kv_heads, layout.head_width)
        self.layout, self.total_blocks = layout, total_blocks
        self.device, self.exposed = torch.device(device), exposed
        if exposed is not None:
            storage = tensors_in(exposed.kv, layout, total_blocks)
        # Zeros, because a slot that was never written must be finite.
        self.tensors = storage or [_zeros(shape, DTYPES[layout.dtype], self.device) for _ in layout.tensors]
        self.k = self.tensors[0]
        self.v = self.tensors[1] if len(self.tensors) > 1 else self.k[:, :0]
        self.of_layers = tuple(zip(self.k.unbind(), self.v.unbind(), strict=True))  # K and V of each layer
        self._copy = copy if all(t.is_contiguous() and t.device.type == "cpu" for t in self.tensors) else None
        self.state_maker: Callable[[int], StateMemory] | None = None  # of ranks, which share the memory

    def make_states(self, slots: int) -> StateMemory:
        """Return memory for states of recurrent layers, zeroed. The previous one must not be used again."""
        if self.state_maker is not None:
            return self.state_maker(slots)
        return StateMemory(torch.zeros(slots, self.layout.state_size, device=self.device))

    def mark(self) -> Mark | None:
        """Return a mark to wait for before reading results of the work issued so far. None on a CPU."""
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a waiting thread needs no core
        event.record()
        return event

    def settle(self) -> None:
        """Wait until all work that this thread has issued to the device is done. Does nothing on a CPU."""
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()

    def gather(self, layers: range, blocks: Sequence[int], begin: int, end: int, out: Tensor) -> None:
        """Copy positions [begin, end) of a sequence that is in `blocks` into `out`, in wire order. `out` is uint8
        [layers * (end - begin) * layer_token_bytes], contiguous and aligned to the element size, on any device.
        """
        self._transfer(layers, blocks, begin, end, out, write=False)

    def scatter(self, layers: range, blocks: Sequence[int], begin: int, end: int, data: Tensor) -> None:
        """Copy `data` into the cache: the inverse of `gather`, with the same conditions."""
        self._transfer(layers, blocks, begin, end, data, write=True)

    def copied(self, layers: range, blocks: Sequence[int], begin: int, end: int) -> Tensor:
        """Return positions [begin, end) of a sequence that is in `blocks`, in wire order: uint8 [nbytes]."""
        nbytes = len(layers) * (end - begin) * self.layout.layer_token_bytes
        wire = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.gather(layers, blocks, begin, end, wire)
        return wire

    def copy_from(
        self, source: KVCache, layers: range, theirs: Sequence[int], ours: Sequence[int], begin: int, end: int
    ) -> None:
        """Copy positions [begin, end) of a sequence that is in blocks `theirs` of `source` and `ours` here. Both caches
        have one layout, except for the block size.
        """
        if self._copy is not None and source._copy is not None:
            self._validate(layers, ours, begin, end)
            source._validate(layers, theirs, begin, end)
            return self._copy.between(source.tensors, self.tensors, layers, theirs, ours, range(begin, end))
        return self.scatter(layers, ours, begin, end, source.copied(layers, theirs, begin, end))

    def reader_of(self, layout: KVLayout, total_blocks: int, memory: Tensor) -> KVCache:
        """Return a cache over `memory`, uint8, of another process. It must only be read."""
        return KVCache(layout, total_blocks, storage=tensors_in(memory, layout, total_blocks), copy=self._copy)

    def _transfer(
        self, layers: range, blocks: Sequence[int], begin: int, end: int, wire: Tensor, *, write: bool
    ) -> None:
        pieces = self._pieces(layers, end - begin, wire)
        self._validate(layers, blocks, begin, end)
        if self._copy is not None and wire.device.type == "cpu":
            return self._copy(self.tensors, layers, blocks, range(begin, end), wire, write=write)
        spans = self._spans(blocks, begin, end)
        for piece, layer in zip(pieces, layers, strict=True):
            for part, tensor in zip(piece, self.tensors, strict=True):
                for span in spans:
                    span.copy(tensor[layer], part, write=write)

    def _pieces(self, layers: range, tokens: int, data: Tensor) -> Tensor:
        """View `data` as [layers, tensors, tokens, kv_heads, head_width]."""
        nbytes = len(layers) * tokens * self.layout.layer_token_bytes
        if data.dtype != torch.uint8 or data.shape != (nbytes,):
            raise ValueError(f"need uint8 [{nbytes}], got {data.dtype} {list(data.shape)}")
        return data.view(self.k.dtype).view(len(layers), len(self.tensors), tokens, *self.k.shape[3:])

    def _validate(self, layers: range, blocks: Sequence[int], begin: int, end: int) -> None:
        size = self.layout.block_size
        for what, wanted, total in (
            ("layer", layers, self.layout.layers),
            ("position", (begin, end - 1), len(blocks) * size),
            ("block", blocks[begin // size : -(-end // size)], self.total_blocks),
        ):
            if wanted and not 0 <= min(wanted) <= max(wanted) < total:
                raise IndexError(f"{what} out of range 0..{total - 1}: {min(wanted)}..{max(wanted)}")

    def _spans(self, blocks: Sequence[int], begin: int, end: int) -> list[_Span]:
        size = self.layout.block_size
        full, last = -(-begin // size), end // size  # [full, last): blocks that are fully inside
        if full > last:
            return [_Part(blocks[last], begin - last * size, end - last * size, 0)]
        spans: list[_Span] = []
        if begin < full * size:
            spans.append(_Part(blocks[full - 1], begin - (full - 1) * size, size, 0))
        if full < last:
            index = torch.tensor(blocks[full:last], dtype=torch.int64, device=self.device)
            spans.append(_Whole(index, size, full * size - begin))
        if last * size < end:
            spans.append(_Part(blocks[last], 0, end - last * size, last * size - begin))
        return spans


@dataclass(frozen=True, slots=True)
class _Part:
    """Slots [begin, end) of one block; on the wire from `at` on."""

    block: int
    begin: int
    end: int
    at: int

    def copy(self, layer: Tensor, wire: Tensor, *, write: bool) -> None:
        cached, sent = layer[self.block, self.begin : self.end], wire[self.at : self.at + self.end - self.begin]
        if write:
            cached.copy_(sent)
        else:
            sent.copy_(cached)


@dataclass(frozen=True, slots=True)
class _Whole:
    """Whole blocks; on the wire from `at` on."""

    index: Tensor
    size: int
    at: int

    def copy(self, layer: Tensor, wire: Tensor, *, write: bool) -> None:
        n = len(self.index)
        sent = wire[self.at : self.at + n * self.size].view(n, self.size, *wire.shape[1:])
        if not write and wire.device == layer.device:
            torch.index_select(layer, 0, self.index, out=sent)
        elif not write:
            sent.copy_(layer.index_select(0, self.index))
        elif layer.device.type == "cpu" and layer.is_contiguous():  # faster: torch copies elements, not rows of bytes
            rows = layer.view(torch.uint8).view(len(layer), -1).numpy()
            rows[self.index.numpy()] = sent.view(torch.uint8).view(n, -1).numpy()
        else:
            layer.index_copy_(0, self.index, sent.to(layer.device))


_Span = _Part | _Whole


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Huge pages, because attention reads all over the cache; written now, so that no request waits for a page.
    return Arena().empty(shape, dtype).zero_()


def exposed_memory(layout: KVLayout, total_blocks: int, device: torch.device | str = "cpu") -> Exposed:
    """Return memory on `device` for a cache that other processes of this host can read. Raises ConfigError."""
    shape = Shape(total_blocks, total_blocks * layout.block_bytes)
    if (device := torch.device(device)).type == "cpu":
        return ExposedMemory(shape)
    return ExposedGpuMemory(shape, CudaDevice(device))


def tensors_in(memory: Tensor, layout: KVLayout, total_blocks: int) -> list[Tensor]:
    """Return the tensors of a cache as consecutive views of `memory`, uint8 [total_blocks * layout.block_bytes]."""
    shape = (len(layout.tensors), layout.layers, total_blocks, layout.block_size, layout.kv_heads, layout.head_width)
    return list(memory[: math.prod(shape) * layout.itemsize].view(DTYPES[layout.dtype]).view(shape))


class Sizing(NamedTuple):
    """Sizes that the engine is built with."""

    total_blocks: int
    max_model_len: int
    state_slots: int | None = None  # None without recurrent layers


def size_kv(  # noqa: PLR0913  (all but one are named)
    layout: KVLayout,
    *,
    kv_memory: int | Literal["auto"],
    max_model_len: int | Literal["auto"],
    model_max_len: int,
    device: torch.device,
    ranks: int = 1,
    key: str = "kv_memory",
    sequences: int = 64,
    deterministic: bool = False,
) -> Sizing:
    """Return the blocks in `kv_memory` bytes of all ranks together, and the longest sequence. Ranks have a GPU each, or
    share a CPU; ranks that share a KV head store it once each. States of recurrent layers take at most half of the
    memory: those of twice as many `sequences`, and as many checkpoints. If requests can be `deterministic`, a saved
    state of each running sequence is added. Raises ConfigError, about `key`, if anything does not fit.
    """
    devices = 1 if device.type == "cpu" else ranks
    block_bytes = layout.block_bytes * max(1, ranks // layout.kv_heads)
    budget = auto_kv_bytes(device) * devices if kv_memory == "auto" else kv_memory
    if budget > (most := _total_bytes(device) * devices):
        raise ConfigError(f"{key}: {budget} bytes, but {device} has {most}; set fewer, or auto")
    slots = _state_slots(layout, budget, sequences, key, deterministic=deterministic)
    states = 0 if slots is None else 2 * slots + deterministic * min(slots, sequences)
    blocks = (budget - states * layout.state_bytes) // block_bytes
    if blocks < 1:
        raise ConfigError(f"{key}: {budget} bytes are less than one block of {block_bytes} bytes")
    capacity = blocks * layout.block_size
    if max_model_len == "auto":
        return Sizing(blocks, min(model_max_len, capacity), slots)
    if not 2 <= max_model_len <= model_max_len:
        raise ConfigError(
            f"model.max_model_len: must be between 2 and the model's {model_max_len}, got {max_model_len}"
        )
    if max_model_len > capacity:
        need = layout.blocks_for(max_model_len) * block_bytes
        with_states = need + (4 + deterministic) * sequences * layout.state_bytes
        need = max(min(2 * need, with_states), 2 * (2 + deterministic) * layout.state_bytes)
        raise ConfigError(
            f"{key}: {budget} bytes hold {capacity} tokens, fewer than model.max_model_len {max_model_len}; "
            f"set at least {need} bytes, or lower model.max_model_len"
        )
    return Sizing(blocks, max_model_len, slots)


def _state_slots(layout: KVLayout, budget: int, sequences: int, key: str, *, deterministic: bool) -> int | None:
    """Return how many states of recurrent layers fit into half of the memory, with a checkpoint each. Up to
    `sequences` of them have a saved state too if requests can be `deterministic`.
    """
    if not layout.state_size:
        return None
    states = budget // (2 * layout.state_bytes)
    fit = max(states // 3, (states - sequences) // 2) if deterministic else states // 2
    found = min(2 * sequences, fit)
    if found < 1:
        least = 2 * (2 + deterministic) * layout.state_bytes
        raise ConfigError(f"{key}: {budget} bytes are too few for states of recurrent layers; set at least {least}")
    return found


def auto_kv_bytes(device: torch.device) -> int:
    """Return the share of the free memory of `device` that one worker uses for KV, in bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_SHARE)
    return min(int(available_bytes() * CPU_SHARE), CPU_CAP_BYTES)


def _total_bytes(device: torch.device) -> int:
    """Return all memory in bytes, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return total_bytes()
