"""DeepSeek-V2 and V3: Llama's skeleton with a mixture of experts and multi-head latent attention.

    c, k_r = norm(c'), rotate(k')           of [c', k'] = kv_a(x): all that is cached of a token, for all heads
    q_c, q_r = q, rotate(q')                of [q, q'] = q_b(norm(q_a(x))) per head; V2-Lite: of q_proj(x)
    k_c, v = kv_b(c)                        per head
    attention of [q_c, q_r] over [k_c, k_r] and v, then o

With kv_b = [W_k, W_v] per head, q_c . k_c = (q_c W_k) . c, and the sum of weights times v is W_v times the sum of
weights times c. So heads can attend to the latent rows as they are cached, like many queries of one wide KV head, and
k_c and v are never made (`_absorbed`). Where a forward holds all there is of its sequences, making them is less work
(`_expanded`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from baton.engine.models.llama import Llama, Step, Variant
from baton.engine.models.moe import feed_forward
from baton.engine.models.rope import Rotary

if TYPE_CHECKING:
    from torch import Tensor

    from baton.engine.batch import Batch
    from baton.engine.kernels.base import Linear, Rotation
    from baton.engine.models.config import ModelConfig
    from baton.engine.models.config_variants import LatentConfig
    from baton.engine.models.llama import Parts, RMSNorm

LOW_RANK_EPS = 1e-6  # whatever rms_norm_eps says


class LatentAttention:
    """Projects to latent rows and caches them, attends, projects back."""

    def __init__(self, config: ModelConfig, parts: Parts, latent: LatentConfig, name: str) -> None:
        self.latent, hidden = latent, config.hidden_size
        self.low_rank: tuple[Linear, RMSNorm] | None = None
        source, n_in = f"{name}.q_proj", hidden
        if latent.query_rank is not None:
            down = parts.whole(f"{name}.q_a_proj", latent.query_rank, hidden, bias=config.qkv_bias)
            self.low_rank = down, parts.norm(f"{name}.q_a_layernorm", latent.query_rank, LOW_RANK_EPS)
            source, n_in = f"{name}.q_b_proj", latent.query_rank
        self.query = parts.linear((source,), (config.heads * latent.query_dim,), n_in, bias=False)
        self.kv_a = parts.whole(f"{name}.kv_a_proj_with_mqa", latent.width, hidden, bias=config.qkv_bias)
        self.kv_norm = parts.norm(f"{name}.kv_a_layernorm", latent.rank, LOW_RANK_EPS)
        expanded = config.heads * (latent.nope_dim + latent.value_dim)
        kv_b = parts.columns((f"{name}.kv_b_proj",), (expanded,), latent.rank)
        self.kv_b = parts.kernels.linear(kv_b)
        by_head = kv_b.view(-1, latent.nope_dim + latent.value_dim, latent.rank)
        self.to_latent = by_head[:, : latent.nope_dim]  # [heads, nope_dim, rank]
        # A copy that lies as it is read: in bfloat16 torch would make one at every call.
        self.to_value = by_head[:, latent.nope_dim :].transpose(1, 2).contiguous()  # [heads, rank, value_dim]
        self.o = parts.summed(f"{name}.o_proj", hidden, config.heads * latent.value_dim, bias=config.o_bias)

    def __call__(self, x: Tensor, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        """`keys` is this layer's cache of latent rows [blocks, block_size, 1, width]; there are no `values`."""
        del values
        rows, take = len(x), step.scratch.take
        query = self._query(x, step).view(rows, -1, self.latent.query_dim)
        self._rotate(query[..., self.latent.nope_dim :], step.rotation)
        row = self._latent(x, step)
        keys.view(-1, self.latent.width).index_copy_(0, step.slots, row)
        attended = self._expanded(query, row, step) if step.over_rows else self._absorbed(query, keys, step)
        return self.o(attended, take("delta", rows, self.o.width))

    def _query(self, x: Tensor, step: Step) -> Tensor:
        rows, take = len(x), step.scratch.take
        if self.low_rank is not None:
            down, norm = self.low_rank
            x = norm(down(x, take("query_low", rows, down.width)), take("query_normed", rows, down.width))
        return self.query(x, take("query", rows, self.query.width))

    def _latent(self, x: Tensor, step: Step) -> Tensor:
        """What is cached of each row: [N, rank + rope_dim]."""
        rows, rank, take = len(x), self.latent.rank, step.scratch.take
        row = self.kv_a(x, take("latent", rows, self.latent.width))
        plain = take("latent_plain", rows, rank).copy_(row[:, :rank])
        row[:, :rank] = self.kv_norm(plain, take("latent_normed", rows, rank))
        self._rotate(row[:, None, rank:], step.rotation)
        return row

    def _rotate(self, x: Tensor, rotation: Rotation) -> None:
        """Rotate x [N, heads, rope_dim] in place, computed in float32.

        Interleaved pairs come out as the first and the second half, of queries and keys alike: their products stay.
        """
        first, second = (x[..., 0::2], x[..., 1::2]) if self.latent.interleaved else x.chunk(2, dim=-1)
        cos, sin = rotation.cos[:, None], rotation.sin[:, None]
        x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def _absorbed(self, query: Tensor, keys: Tensor, step: Step) -> Tensor:
        """Over the latent rows in the cache: [N, heads * value_dim]."""
        rows, heads, rank, take = *query.shape[:2], self.latent.rank, step.scratch.take
        wide = take("latent_query", rows, heads * self.latent.width).view(rows, heads, -1)
        wide[..., :rank] = _per_head(query[..., : self.latent.nope_dim], self.to_latent)
        wide[..., rank:] = query[..., self.latent.nope_dim :]
        mixed = step.attend[None](wide, keys, keys[..., :rank], take("latent_mixed", rows, heads * rank))
        attended = take("attended", rows, heads * self.latent.value_dim)
        attended.view(rows, heads, -1).copy_(_per_head(mixed.view(rows, heads, rank), self.to_value))
        return attended

    def _expanded(self, query: Tensor, row: Tensor, step: Step) -> Tensor:
        """Over keys and values of the rows of this forward: [N, heads * value_dim]."""
        rows, heads, nope, take = *query.shape[:2], self.latent.nope_dim, step.scratch.take
        plain = take("latent_plain", rows, self.latent.rank).copy_(row[:, : self.latent.rank])
        both = self.kv_b(plain, take("expanded", rows, self.kv_b.width)).view(rows, 1, heads, -1)
        keys = take("expanded_keys", rows, heads * self.latent.query_dim).view(rows, 1, heads, -1)
        keys[..., :nope] = both[..., :nope]
        keys[..., nope:] = row[:, None, None, self.latent.rank :]
        attended = take("attended", rows, heads * self.latent.value_dim)
        return step.attend[None](query, keys, both[..., nope:], attended)


def _per_head(x: Tensor, weights: Tensor) -> Tensor:
    """Each head of x [N, heads, i] times its own of weights [heads, i, j]: [N, heads, j]."""
    return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)


class DeepSeek(Llama):
    """Token ids in, logits out."""

    def __init__(self, config: ModelConfig, parts: Parts, latent: LatentConfig) -> None:
        self.latent = latent
        self.softmax_scale = latent.query_dim**-0.5 * config.rope.softmax_factor
        super().__init__(config, parts, Variant(self._attention, feed_forward))
        self.rotary = Rotary(config.rope, torch.float32, parts.weights.device)

    def _attention(self, config: ModelConfig, parts: Parts, name: str, window: int | None) -> LatentAttention:
        del window
        return LatentAttention(config, parts, self.latent, name)

    def _step(self, batch: Batch, block_size: int) -> Step:
        # Prompts of one token are left to the form that decodes: the other gains nothing.
        # Both forms round differently: a fixed forward takes the one that is always there.
        fresh = not batch.fixed and batch.query_lens == batch.context_lens and max(batch.query_lens) > 1
        cache = (_rows_as_cache(batch), 1) if fresh else (batch, block_size)
        attend = self.kernels.attention(*cache, None, self.softmax_scale)
        rotation = self.rotary(batch.positions)
        return Step(rotation, batch.slot_mapping, {None: attend}, self.scratch, over_rows=fresh, fixed=batch.fixed)


def _rows_as_cache(batch: Batch) -> Batch:
    """The same batch over a cache of one block per row, which holds this forward's rows in their order."""
    span = torch.arange(max(batch.query_lens), device=batch.query_starts.device)
    tables = (batch.query_starts[:-1, None] + span).clamp(max=len(batch.token_ids) - 1)
    return replace(batch, block_tables=tables.to(torch.int32))
