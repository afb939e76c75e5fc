"""Attention and masks of models that run in `transformers`, over Baton's paged KV.

`transformers` calls functions that are registered under a name. `attend` gets one layer's queries, keys and values, and
`note_mask` a mask function instead of a mask. Both use the forward that runs in this thread: a `Probe` at load, which
learns the layers and refuses what is not causal attention, and then a `PagedForward` for each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging

from baton.engine.batch import Batch
from baton.engine.kernels.base import Attention, Kernels
from baton.engine.kernels.torch_attention import SPAN, SteadyAttention
from baton.engine.kv_cache import KVCache
from baton.errors import CheckpointError, EngineFault

NAME = "baton"
SPARE = 8  # assumed span of a mask without a local size, to choose the positions at which it is read
HARMLESS = frozenset({"position_ids", "cache_position"})  # tensors for other attention functions that change no result


class Mask(NamedTuple):
    """A causal mask, in which a token sees `window` positions, itself included, or all."""

    window: int | None


class Scores(NamedTuple):
    """The scores of a layer. Baton's kernels have no soft cap and no sinks (one number for each head)."""

    window: int | None
    scale: float
    softcap: float | None
    sinks: Tensor | None


_running: ContextVar[Probe | PagedForward] = ContextVar("forward of a transformers model")


@contextmanager
def running(forward: Probe | PagedForward) -> Iterator[None]:
    """Let the functions that transformers calls in this thread use `forward`."""
    token = _running.set(forward)
    try:
        yield
    finally:
        _running.reset(token)


def note_mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> Mask:
    """Return a `Mask`, which the model passes to `attend` in place of a tensor."""
    return _running.get().mask(mask_function, local_size)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the output [1, N, heads, value_dim] for query, key and value [1, heads or kv_heads, N, dim]."""
    name = type(module).__name__
    if not isinstance(attention_mask, Mask):
        raise CheckpointError(f"{name} has a mask of its own ({type(attention_mask).__name__})")
    if query.shape[2] != key.shape[2] or len(query) != 1:
        raise CheckpointError(f"{name} attends to other rows than its own tokens")
    strange = sorted(key for key, given in others.items() if isinstance(given, Tensor) and key not in HARMLESS)
    if strange:
        raise CheckpointError(f"{name} passes {strange[0]} to its attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _running.get().attend(module, q, k, v, Scores(attention_mask.window, scale, softcap, s_aux))[None], None


def register() -> None:
    """Register both functions under `NAME`, and keep transformers' own text out of the logs. Can be called again."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, note_mask)


@dataclass(slots=True, eq=False)
class Probe:
    """A forward at load, without a cache, that learns the attention modules in the order of their calls, the most heads
    of keys, and the widest head. Raises CheckpointError for a mask that is not causal.
    """

    device: torch.device
    layers: list[nn.Module] = field(default_factory=list)
    kv_heads: int = 0
    width: int = 0

    def mask(self, function: Callable[..., Tensor], local_size: int | None) -> Mask:
        if not is_causal(function, local_size, self.device):
            raise CheckpointError("it has a mask that is neither causal nor a sliding window")
        return Mask(local_size)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        del scores
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            raise CheckpointError(f"{type(module).__name__} has {query.shape[1]} heads for {key.shape[1]} of keys")
        self.layers.append(module)
        self.kv_heads, self.width = max(self.kv_heads, key.shape[1]), max(self.width, key.shape[2], value.shape[2])
        return query.new_zeros(*query.shape[:2], value.shape[2])


def is_causal(function: Callable[..., Tensor], window: int | None, device: torch.device) -> bool:
    """Return whether a mask function of transformers is causal with this window, around all its edges."""
    span = window or SPARE
    edges = sorted({max(0, edge + step) for edge in (0, span, 2 * span) for step in (-2, -1, 0, 1, 2)})
    first, at = torch.tensor(0, device=device), torch.tensor(edges, device=device)
    seen = torch.stack([function(first, first, query, at).expand(len(at)) for query in at])
    back = at[:, None] - at
    return torch.equal(seen, (back >= 0) & (back < (window or 4 * span)))


@dataclass(slots=True, eq=False)
class PagedForward:
    """One batch. The n-th call of `attend` uses layer n of the cache."""

    batch: Batch
    kv: KVCache
    kernels: Kernels
    layer: int = 0
    _bound: dict[int | None, tuple[object, Attention]] = field(default_factory=dict)

    def mask(self, function: Callable[..., Tensor], local_size: int | None) -> Mask:
        del function  # the probe has read it
        return Mask(local_size)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        if self.layer == self.kv.layout.layers:
            raise EngineFault(f"{type(module).__name__}: a forward has more than {self.layer} calls of attention")
        keys, values = self._stored(self.kv.k, key), self._stored(self.kv.v, value)
        if self.batch.on_layer is not None:
            self.batch.on_layer(self.layer)
        self.layer += 1
        query = query.to(keys.dtype).contiguous()
        out = query.new_empty(*query.shape[:2], value.shape[2])
        attention = self._attention(scores, (query.shape, keys.shape, values.shape))
        attention(query, keys, values, out.view(len(out), -1))
        return out.to(value.dtype)

    def finish(self) -> None:
        """Raise EngineFault if the forward had fewer layers than the cache."""
        if self.layer != self.kv.layout.layers:
            raise EngineFault(f"a forward had {self.layer} calls of attention, and {self.kv.layout.layers} at load")

    def _stored(self, cache: Tensor, rows: Tensor) -> Tensor:
        """Write rows to the layer's cache. Return the part of it that this layer uses, which may be smaller."""
        part = cache[self.layer][..., : rows.shape[1], : rows.shape[2]]
        slots, size = self.batch.slot_mapping, self.kv.layout.block_size
        return part.index_put_((slots // size, slots % size), rows.to(part.dtype))

    def _attention(self, scores: Scores, shapes: object) -> Attention:
        """Return attention for a layer. Kernels keep plans for the sizes of a layer, so other sizes need a new one."""
        window, scale, softcap, sinks = scores
        key, bound = (scale, softcap, id(sinks), shapes), self._bound.get(window)
        if bound is None or bound[0] != key:
            args = self.batch, self.kv.layout.block_size, window, scale
            plain = softcap is not None or sinks is not None
            made = self._plain(args, softcap, sinks) if plain else self.kernels.attention(*args)
            bound = self._bound[window] = key, made
        return bound[1]

    def _plain(
        self, args: tuple[Batch, int, int | None, float], softcap: float | None, sinks: Tensor | None
    ) -> Attention:
        span = None if self.batch.fixed else SPAN
        return partial(
            SteadyAttention(*args, span=span, soft_cap=softcap), sinks=None if sinks is None else sinks.float()
        )
