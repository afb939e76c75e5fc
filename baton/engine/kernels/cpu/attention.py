"""Paged attention by the compiled kernel."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_long, c_void_p
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from baton.engine.batch import Batch
from baton.engine.kernels.base import Attention, Splits
from baton.engine.kernels.cpu.calls import Kernel, Recorder, struct_fields
from baton.engine.kernels.kv_levels import head_dim
from baton.engine.kernels.torch_reference import torch_attention

MAX_DIM, LANES = 576, 16  # as in the C sources
LOAD_TASKS = 32  # total splits of all decode sequences if their number depends on load
TASK_INTS = 9  # int32 in a task_t


class AttentionBatch(ctypes.Structure):
    """`attention_batch` of attention_chunk.h."""

    _fields_: ClassVar = struct_fields(
        (c_void_p, "tables starts lens tasks partials workspaces"), (c_long, "count joins table_stride")
    )


class AttentionArgs(ctypes.Structure):
    """`attention_args` of attention_chunk.h."""

    _fields_: ClassVar = struct_fields(
        (c_void_p, "query keys values out"),
        (ctypes.POINTER(AttentionBatch), "batch"),
        (c_long, "heads kv_heads dim value_dim block_size query_stride out_stride"),
        (c_long, "k_block k_token k_head v_block v_token v_head window unified narrow levels"),
        (c_float, "scale phi"),
    )


def strides_of(cache: Tensor) -> tuple[int, int, int]:
    """Return the strides in bytes of block, token and head in a cache [blocks, block_size, kv_heads, dim]."""
    block, token, head, _ = cache.stride()
    size = cache.itemsize
    return block * size, token * size, head * size


def is_compiled(dim: int, value_dim: int | None = None) -> bool:
    """Return whether C code supports heads of `dim` elements and values of `value_dim`, by default equal to `dim`."""
    value_dim = dim if value_dim is None else value_dim
    return dim % 2 == 0 and value_dim % LANES == 0 and max(dim, value_dim) <= MAX_DIM


class Sizes(NamedTuple):
    """Sizes that tasks depend on, next to the batch."""

    heads: int
    kv_heads: int
    value_dim: int
    threads: int


class CompiledAttention:
    """Implementation of `baton.engine.kernels.base.Attention` for one window, rebound to each batch. `unified_max` is a
    constant subtracted from scores instead of their maximum; None means a running maximum. `splits` is the number of
    ranges per decode context and takes precedence over `by`; None means that `by` decides. `fallbacks` counts the rows
    (token, head and split) that left the constant, because their best score is outside its range.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        element: str,
        window: int | None,
        unified_max: float | None,
        splits: int | None = None,
        by: Splits = "auto",
        recorder: Recorder | None = None,
    ) -> None:
        self._run = Kernel(library, element, "attention", recorder or Recorder())
        self._cut = library[f"attention_plan_{element}"]
        self._cut.restype = ctypes.c_long
        workspace_bytes = library[f"attention_workspace_{element}"]
        workspace_bytes.restype = ctypes.c_long
        self._workspace_bytes = int(workspace_bytes())  # of one thread
        self._window, self._splits = window, splits
        self._load = 0 if by == "auto" else LOAD_TASKS
        unified, phi = unified_max is not None, unified_max or 0.0
        self._shared = AttentionBatch()
        self._args = AttentionArgs(window=window or 0, unified=unified, phi=phi, narrow=by == "load_bf16")
        self._args.batch = ctypes.pointer(self._shared)
        self._tasks = torch.empty(256, TASK_INTS, dtype=torch.int32)
        self._partials = torch.empty(0)
        self._workspaces = torch.empty(0, dtype=torch.uint8)
        self._batch: Batch
        self._fallback: Attention | None = None
        self.planned: Sizes | None = None  # of the current tasks
        self.plans = 0  # how often it cut a batch into tasks
        self.fallbacks = 0

    def bind(self, batch: Batch, block_size: int, scale: float) -> CompiledAttention:
        self._batch, self.planned, self._fallback = batch, None, None
        args, shared = self._args, self._shared
        shared.tables, shared.table_stride = batch.block_tables.data_ptr(), batch.block_tables.stride(0)
        shared.starts, shared.lens = batch.query_starts.data_ptr(), batch.kv_lens.data_ptr()
        args.block_size, args.scale = block_size, scale
        return self

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        _, heads, dim = query.shape
        args, threads, value_dim = self._args, torch.get_num_threads(), head_dim(values)
        if not is_compiled(dim, value_dim):
            if self._fallback is None:
                self._fallback = torch_attention(self._batch, args.block_size, self._window, args.scale)
            return self._fallback(query, keys, values, out)
        self.plan(Sizes(heads, keys.shape[2], value_dim, threads))
        args.query, args.keys, args.values, args.out = (t.data_ptr() for t in (query, keys, values, out))
        args.heads, args.kv_heads, args.dim, args.value_dim = heads, keys.shape[2], dim, value_dim
        args.query_stride, args.out_stride = query.stride(0), out.stride(0)
        args.k_block, args.k_token, args.k_head = strides_of(keys)
        args.v_block, args.v_token, args.v_head = strides_of(values)
        args.levels = keys.dtype is torch.int8
        self.fallbacks += self._run(args, threads)
        return out

    def plan(self, sizes: Sizes) -> None:
        """Cut the bound batch into tasks for these sizes, unless it is cut so already."""
        if self.planned == sizes:
            return
        heads, kv_heads, value_dim, threads = sizes
        batch, shared, partials = self._batch, self._shared, ctypes.c_int32()
        settings = self._window or 0, threads, self._splits or 0, self._load, batch.fixed
        numbers = [ctypes.c_long(size) for size in (len(batch.query_lens), heads, kv_heads, *settings)]
        starts, lens = ctypes.c_void_p(shared.starts), ctypes.c_void_p(shared.lens)
        while True:
            tasks, capacity = ctypes.c_void_p(self._tasks.data_ptr()), ctypes.c_long(len(self._tasks))
            count = int(self._cut(tasks, capacity, starts, lens, *numbers, ctypes.byref(partials)))
            if count >= 0:
                break
            self._tasks = torch.empty(2 * len(self._tasks), TASK_INTS, dtype=torch.int32)
        self.planned, self.plans = sizes, self.plans + 1
        if self._partials.numel() < partials.value * (value_dim + 2):
            self._partials = torch.empty(partials.value * (value_dim + 2))
        if self._workspaces.numel() < threads * self._workspace_bytes:
            memory = torch.empty(threads * self._workspace_bytes + 64, dtype=torch.uint8)
            self._workspaces = memory[-memory.data_ptr() % 64 :]  # aligned to a cache line
        shared.tasks, shared.partials = self._tasks.data_ptr(), self._partials.data_ptr()
        shared.workspaces, shared.count, shared.joins = self._workspaces.data_ptr(), count, partials.value
