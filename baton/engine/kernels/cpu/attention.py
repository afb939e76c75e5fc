"""Paged attention by the compiled kernel, and helpers for the argument structures of C kernels."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_long, c_void_p
from typing import ClassVar

import torch
from torch import Tensor

from baton.engine.batch import Batch
from baton.engine.kernels.base import Attention, Splits
from baton.engine.kernels.kv_levels import head_dim
from baton.engine.kernels.torch_reference import torch_attention

MAX_DIM, LANES = 576, 16  # as in the C sources
LOAD_TASKS = 32  # total splits of all decode sequences if their number depends on load
TASK_INTS = 9  # int32 in a task_t


def struct_fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    """Return the fields of a C structure, for groups of a type and names."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class AttentionArgs(ctypes.Structure):
    """`attention_args` of attention.c."""

    _fields_: ClassVar = struct_fields(
        (c_void_p, "query keys values out tables starts lens tasks partials"),
        (c_long, "count heads kv_heads dim value_dim block_size table_stride query_stride out_stride"),
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
    ) -> None:
        self._run, self._cut = library[f"attention_{element}"], library[f"attention_plan_{element}"]
        self._cut.restype = self._run.restype = ctypes.c_long
        workspace_bytes = library[f"attention_workspace_{element}"]
        workspace_bytes.restype = ctypes.c_long
        self._workspace_bytes = int(workspace_bytes())  # of one thread
        self._window, self._splits = window, splits
        self._load = 0 if by == "auto" else LOAD_TASKS
        unified, phi = unified_max is not None, unified_max or 0.0
        self._args = AttentionArgs(window=window or 0, unified=unified, phi=phi, narrow=by == "load_bf16")
        self._tasks = torch.empty(256, TASK_INTS, dtype=torch.int32)
        self._partials = torch.empty(0)
        self._workspaces = torch.empty(0, dtype=torch.uint8)
        self._batch: Batch
        self._fallback: Attention | None = None
        self._planned: tuple[int, ...] | None = None  # heads, KV heads, value size and threads of the current tasks
        self.fallbacks = 0

    def bind(self, batch: Batch, block_size: int, scale: float) -> CompiledAttention:
        self._batch, self._planned, self._fallback = batch, None, None
        args = self._args
        args.tables, args.table_stride = batch.block_tables.data_ptr(), batch.block_tables.stride(0)
        args.starts, args.lens = batch.query_starts.data_ptr(), batch.kv_lens.data_ptr()
        args.block_size, args.scale = block_size, scale
        return self

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        _, heads, dim = query.shape
        args, threads, value_dim = self._args, torch.get_num_threads(), head_dim(values)
        if not is_compiled(dim, value_dim):
            if self._fallback is None:
                self._fallback = torch_attention(self._batch, args.block_size, self._window, args.scale)
            return self._fallback(query, keys, values, out)
        if self._planned != (heads, keys.shape[2], value_dim, threads):
            self._plan(heads, keys.shape[2], value_dim, threads)
        args.query, args.keys, args.values, args.out = (t.data_ptr() for t in (query, keys, values, out))
        args.heads, args.kv_heads, args.dim, args.value_dim = heads, keys.shape[2], dim, value_dim
        args.query_stride, args.out_stride = query.stride(0), out.stride(0)
        args.k_block, args.k_token, args.k_head = strides_of(keys)
        args.v_block, args.v_token, args.v_head = strides_of(values)
        args.levels = keys.dtype is torch.int8
        workspaces, joins = ctypes.c_void_p(self._workspaces.data_ptr()), ctypes.c_long(self._joins)
        self.fallbacks += self._run(ctypes.byref(args), workspaces, joins, threads)
        return out

    def _plan(self, heads: int, kv_heads: int, value_dim: int, threads: int) -> None:
        batch, partials = self._batch, ctypes.c_int32()
        settings = self._window or 0, threads, self._splits or 0, self._load, batch.fixed
        sizes = [ctypes.c_long(size) for size in (len(batch.query_lens), heads, kv_heads, *settings)]
        starts, lens = ctypes.c_void_p(self._args.starts), ctypes.c_void_p(self._args.lens)
        while True:
            tasks, capacity = ctypes.c_void_p(self._tasks.data_ptr()), ctypes.c_long(len(self._tasks))
            count = int(self._cut(tasks, capacity, starts, lens, *sizes, ctypes.byref(partials)))
            if count >= 0:
                break
            self._tasks = torch.empty(2 * len(self._tasks), TASK_INTS, dtype=torch.int32)
        self._planned, self._joins = (heads, kv_heads, value_dim, threads), partials.value
        if self._partials.numel() < partials.value * (value_dim + 2):
            self._partials = torch.empty(partials.value * (value_dim + 2))
        if self._workspaces.numel() < threads * self._workspace_bytes:
            memory = torch.empty(threads * self._workspace_bytes + 64, dtype=torch.uint8)
            self._workspaces = memory[-memory.data_ptr() % 64 :]  # aligned to a cache line
        self._args.tasks, self._args.partials = self._tasks.data_ptr(), self._partials.data_ptr()
        self._args.count = count
