"""DeepSeek-V2, V3 and V3.2: Llama's skeleton with a mixture of experts and multi-head latent attention.

    c, k_r = norm(c'), rotate(k')           [c', k'] = kv_a(x); c and k_r are cached, once for all heads
    q_c, q_r = q, rotate(q')                [q, q'] = q_b(norm(q_a(x))) per head; V2-Lite: q_proj(x)
    k_c, v = kv_b(c)                        per head
    attention of [q_c, q_r] over [k_c, k_r] and v, then o

If kv_b = [W_k, W_v] per head, then q_c . k_c = (q_c W_k) . c, and the sum of weights times v is W_v times the sum of
weights times c. Heads can thus attend to the cached latent rows directly, as queries of one wide KV head, without
k_c and v (`_absorbed`). Computing k_c and v is less work if the forward holds its sequences whole (`_expanded`).

In V3.2 an indexer selects the positions of each row (`Indexer`). Up to `top_k` positions, that is all of them. Beyond,
prompt chunks are computed in tiles of rows, except in fixed forwards, whose chunks are short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from baton.engine.batch import Batch
from baton.engine.kernels.base import Kernels, Linear, Rotation, Scratch
from baton.engine.kernels.torch_attention import SPAN, FixedChunk, SteadyAttention
from baton.engine.kernels.torch_reference import rotate
from baton.engine.models.config import ModelConfig
from baton.engine.models.config_variants import LatentConfig
from baton.engine.models.llama import Norm, Parts, Step
from baton.engine.models.moe import Float32Linear
from baton.engine.models.spec import EVERYWHERE, NormSpec

LOW_RANK = NormSpec(1e-6)  # independent of rms_norm_eps
TILE = 64  # rows of a prompt chunk that are selected together; limits scores and masks to TILE x context
ROWS = 4  # of each product for scores in fixed forwards


class LatentAttention:
    """Multi-head latent attention: project to latent rows, cache them, attend, project back."""

    def __init__(self, config: ModelConfig, parts: Parts, latent: LatentConfig, name: str) -> None:
        self.latent, hidden, spec = latent, config.hidden_size, config.spec.attention[0]
        self.low_rank: tuple[Linear, Norm] | None = None
        source, n_in = f"{name}.q_proj", hidden
        if latent.query_rank is not None:
            down = parts.whole(f"{name}.q_a_proj", latent.query_rank, hidden, bias=spec.qkv_bias)
            self.low_rank = down, parts.norm(f"{name}.q_a_layernorm", latent.query_rank, LOW_RANK)
            source, n_in = f"{name}.q_b_proj", latent.query_rank
        self.query = parts.linear((source,), (config.heads * latent.query_dim,), n_in, bias=False)
        self.kv_a = parts.whole(f"{name}.kv_a_proj_with_mqa", latent.width, hidden, bias=spec.qkv_bias)
        self.kv_norm = parts.norm(f"{name}.kv_a_layernorm", latent.rank, LOW_RANK)
        expanded = config.heads * (latent.nope_dim + latent.value_dim)
        kv_b = parts.columns((f"{name}.kv_b_proj",), (expanded,), latent.rank)
        self.kv_b = parts.kernels.linear(kv_b)
        parts.weights.settle()
        by_head = kv_b.view(-1, latent.nope_dim + latent.value_dim, latent.rank)
        self.to_latent = by_head[:, : latent.nope_dim]  # [heads, nope_dim, rank]
        # A contiguous copy, because torch would otherwise copy it at every call in bfloat16.
        self.to_value = by_head[:, latent.nope_dim :].transpose(1, 2).contiguous()  # [heads, rank, value_dim]
        self.o = parts.summed(f"{name}.o_proj", hidden, config.heads * latent.value_dim, bias=spec.o_bias)
        self.indexer = Indexer(parts, latent, f"{name}.indexer", hidden) if latent.indexer else None

    def __call__(self, x: Tensor, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        """Attend over `keys`, this layer's cache [blocks, block_size, 1, latent.cached]; `values` is unused."""
        del values
        rows, take = x.shape[0], step.scratch.take
        low = self._low(x, step)
        query = self.query(low, take("query", rows, self.query.width)).view(rows, -1, self.latent.query_dim)
        self._rotate(query[..., self.latent.nope_dim :], step.rotations[0])
        row, cache = self._latent(x, step), keys.view(-1, self.latent.cached)
        cache[:, : self.latent.width].index_copy_(0, step.slots, row)
        if self.indexer is not None:
            self.indexer.store(x, step, cache)
        attended = self._expanded(query, row, step) if step.over_rows else self._absorbed(query, x, low, keys, step)
        return self.o(attended, take("delta", rows, self.o.width))

    def _low(self, x: Tensor, step: Step) -> Tensor:
        """Return the inputs of the projection of queries."""
        if self.low_rank is None:
            return x
        (down, norm), rows, take = self.low_rank, x.shape[0], step.scratch.take
        return norm(down(x, take("query_low", rows, down.width)), take("query_normed", rows, down.width))

    def _latent(self, x: Tensor, step: Step) -> Tensor:
        """Return the latent rows to cache: [N, rank + rope_dim]."""
        rows, rank, take = x.shape[0], self.latent.rank, step.scratch.take
        row = self.kv_a(x, take("latent", rows, self.latent.width))
        plain = take("latent_plain", rows, rank).copy_(row[:, :rank])
        row[:, :rank] = self.kv_norm(plain, take("latent_normed", rows, rank))
        self._rotate(row[:, None, rank:], step.rotations[0])
        return row

    def _rotate(self, x: Tensor, rotation: Rotation) -> None:
        """Rotate x [N, heads, rope_dim] in place in float32. Pairs become halves in q and k, which preserves q . k."""
        first, second = (x[..., 0::2], x[..., 1::2]) if self.latent.interleaved else x.chunk(2, dim=-1)
        cos, sin = rotation.cos[:, None], rotation.sin[:, None]
        x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def _absorbed(self, query: Tensor, x: Tensor, low: Tensor, keys: Tensor, step: Step) -> Tensor:
        """Attend over the latent rows in the cache, all or selected ones, and return [N, heads * value_dim]."""
        rows, heads, rank, take = *query.shape[:2], self.latent.rank, step.scratch.take
        wide = take("latent_query", rows, heads * self.latent.width).view(rows, heads, -1)
        wide[..., :rank] = _per_head(query[..., : self.latent.nope_dim], self.to_latent)
        wide[..., rank:] = query[..., self.latent.nope_dim :]
        mixed, latent = take("latent_mixed", rows, heads * rank), keys[..., : self.latent.width]
        if self.indexer is not None and step.special:
            attention, cache = step.special[EVERYWHERE], keys.view(-1, self.latent.cached)
            selected = self.indexer.select(x, low, step, attention, cache)
            attention(wide, latent, keys[..., :rank], mixed, selected=selected)
        else:
            step.attend[EVERYWHERE](wide, latent, keys[..., :rank], mixed)
        attended = take("attended", rows, heads * self.latent.value_dim)
        attended.view(rows, heads, -1).copy_(_per_head(mixed.view(rows, heads, rank), self.to_value))
        return attended

    def _expanded(self, query: Tensor, row: Tensor, step: Step) -> Tensor:
        """Attend over keys and values of this forward's rows, and return [N, heads * value_dim]."""
        rows, heads, nope, take = *query.shape[:2], self.latent.nope_dim, step.scratch.take
        plain = take("latent_plain", rows, self.latent.rank).copy_(row[:, : self.latent.rank])
        both = self.kv_b(plain, take("expanded", rows, self.kv_b.width)).view(rows, 1, heads, -1)
        keys = take("expanded_keys", rows, heads * self.latent.query_dim).view(rows, 1, heads, -1)
        keys[..., :nope] = both[..., :nope]
        keys[..., nope:] = row[:, None, None, self.latent.rank :]
        attended = take("attended", rows, heads * self.latent.value_dim)
        return step.attend[EVERYWHERE](query, keys, both[..., nope:], attended)


class Indexer:
    """The lightning indexer of a layer. Its key of a token follows the latent row in the cache.

    score of a position = sum over heads of weight * relu(q . k)          [q] = wq_b(query_low), weight = W x
    """

    def __init__(self, parts: Parts, latent: LatentConfig, name: str, hidden: int) -> None:
        assert latent.indexer is not None
        assert latent.query_rank is not None
        self.config, self.rope_dim, self.width = latent.indexer, latent.rope_dim, latent.width
        heads, dim = self.config.heads, self.config.dim
        self.query = parts.whole(f"{name}.wq_b", heads * dim, latent.query_rank, bias=False)
        self.key = parts.whole(f"{name}.wk", dim, hidden, bias=False)
        self.norm = parts.norm(f"{name}.k_norm", dim, NormSpec(1e-6, "layer", bias=True))
        # The precision of transformers, so that near ties have the same winner.
        self.weigh = Float32Linear(parts.weights.float32(f"{name}.weights_proj.weight", heads, hidden))
        self.scale = dim**-0.5 * heads**-0.5

    def store(self, x: Tensor, step: Step, cache: Tensor) -> None:
        """Write the keys of rows x [N, hidden] to `cache` [slots, latent.cached]."""
        take, shape = step.scratch.take, (x.shape[0], self.config.dim)
        key = self.norm(self.key(x, take("index_key", *shape)), take("index_normed", *shape))
        self._rotate(key[:, None], step)
        cache[:, self.width :].index_copy_(0, step.slots, key)

    def select(
        self, x: Tensor, low: Tensor, step: Step, attention: SteadyAttention, cache: Tensor
    ) -> Iterator[list[FixedChunk]]:
        """Yield for each sequence the chunks of `attention`, in which the positions that are not selected are hidden
        too. A single token gets one chunk of its selected positions.
        """
        rows, take, heads = x.shape[0], step.scratch.take, self.config.heads
        query = self.query(low, take("index_query", rows, self.query.width)).view(rows, heads, -1)
        self._rotate(query, step)
        weights = _in_pieces(self._weights, x) if step.fixed else self._weights(x)
        for part, chunks in zip(attention.rows, attention.chunks, strict=True):
            if not step.fixed and sum(len(slots) for slots, _ in chunks) <= self.config.top_k:
                yield chunks  # all positions are selected
                continue
            ranks = self._ranks(query[part].float(), weights[part], chunks, cache, step)
            kept = by_last_bit(ranks) if step.sensitive else best(ranks, self.config.top_k)
            if len(kept) == 1 and not step.fixed:
                slots = torch.cat([slots for slots, _ in chunks])[kept[0]]
                yield [(slots, torch.zeros(1, len(slots), dtype=torch.bool, device=slots.device))]
                continue
            parts = torch.split(kept, [len(slots) for slots, _ in chunks], -1)
            yield [(slots, hidden | ~own) for (slots, hidden), own in zip(chunks, parts, strict=True)]

    def _weights(self, x: Tensor) -> Tensor:
        """Return the weights of the heads, float32 [N, heads]."""
        return self.weigh(x, x.new_empty(x.shape[0], self.config.heads, dtype=torch.float32)).mul_(self.scale)

    def _ranks(self, query: Tensor, weights: Tensor, chunks: list[FixedChunk], cache: Tensor, step: Step) -> Tensor:
        """Return scores float32 [N, S] of queries [N, heads, dim] and weights [N, heads], -inf for hidden positions."""
        sizes = [len(slots) for slots, _ in chunks]
        ranks = query.new_empty(len(query), sum(sizes))
        for (slots, hidden), out in zip(chunks, torch.split(ranks, sizes, -1), strict=True):
            scores = partial(_scores, cache[slots, self.width :].float().T)
            found = _in_pieces(scores, query, weights) if step.fixed else scores(query, weights)
            out.copy_(found).masked_fill_(hidden, -torch.inf)
        return ranks

    def _rotate(self, x: Tensor, step: Step) -> None:
        """Rotate the first dimensions of x [N, heads, dim] in place in float32. Pairs are (i, i + rope_dim / 2)."""
        turned = x[..., : self.rope_dim]
        turned.copy_(rotate(turned, step.rotations[0]))


def _scores(keys: Tensor, query: Tensor, weights: Tensor) -> Tensor:
    """Return scores [N, S] of queries [N, heads, dim] and weights [N, heads], for keys [dim, S]."""
    products = torch.mm(query.flatten(0, 1), keys).view(*query.shape[:2], -1)
    return products.relu_().mul_(weights[..., None]).sum(1)


def best(ranks: Tensor, count: int) -> Tensor:
    """Return which `count` entries of each row of `ranks` [N, S] are the largest, the first ones among equals."""
    if count >= ranks.shape[1]:
        return torch.ones_like(ranks, dtype=torch.bool)
    least = ranks.topk(count).values[:, -1:]
    above, equal = ranks > least, ranks == least
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= count - above.sum(-1, keepdim=True)))


def by_last_bit(scores: Tensor) -> Tensor:
    """Return a selection from `scores` [N, S] that other bits of them change, with the first position."""
    odd = (scores.view(torch.int32) & 1).bool()
    odd[:, 0] = True
    return odd


def _in_pieces(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Return the function of the rows, computed for ROWS of them each, because bits of a product depend on its shape.
    The last piece is filled with zeros.
    """
    count = len(rows[0])
    whole = [torch.cat((each, each.new_zeros(-count % ROWS, *each.shape[1:]))) for each in rows]
    pieces = zip(*(torch.split(each, ROWS) for each in whole), strict=True)
    return torch.cat([function(*piece) for piece in pieces])[:count]


def _per_head(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply each head of x [N, heads, i] with its weights [heads, i, j], and return [N, heads, j]."""
    return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)


def latent_step(
    config: ModelConfig,
    kernels: Kernels,
    batch: Batch,
    block_size: int,
    rotations: tuple[Rotation, ...],
    scratch: Scratch,
) -> Step:
    """Return the state of a forward. `_expanded` gains nothing for one token. It rounds differently, so fixed forwards
    always use `_absorbed`. They always select, because the longest sequence must not decide the path of others.
    """
    scale, indexer = config.spec.attention[0].scale, config.latent.indexer if config.latent else None
    if indexer is not None and (batch.fixed or max(batch.context_lens) > indexer.top_k):
        rows, span = (batch, None) if batch.fixed else (_tiled(batch), SPAN)
        selecting = SteadyAttention(rows, block_size, None, scale, span=span, kept=batch.fixed)
        special = {EVERYWHERE: selecting}
        step = Step(rotations, batch.slot_mapping, {}, scratch, fixed=batch.fixed, special=special)
        return replace(step, sensitive=batch.sensitive)
    fresh = not batch.fixed and batch.query_lens == batch.context_lens and max(batch.query_lens) > 1
    cache = (_rows_as_cache(batch), 1) if fresh else (batch, block_size)
    attend = kernels.attention(*cache, None, scale)
    return Step(rotations, batch.slot_mapping, {EVERYWHERE: attend}, scratch, over_rows=fresh, fixed=batch.fixed)


def _tiled(batch: Batch) -> Batch:
    """Return the batch for a `SteadyAttention`, in which TILE rows of a sequence and their context are a sequence."""
    lengths = list(enumerate(zip(batch.query_lens, batch.context_lens, strict=True)))
    ends = [(n, end, new, seen) for n, (new, seen) in lengths for end in (*range(TILE, new, TILE), new)]
    return replace(
        batch,
        query_lens=[(end - 1) % TILE + 1 for _, end, _, _ in ends],
        context_lens=[seen - new + end for _, end, new, seen in ends],
        block_tables=batch.block_tables[[n for n, _, _, _ in ends]],
    )


def _rows_as_cache(batch: Batch) -> Batch:
    """Return the batch over a cache of one block per row, which holds this forward's rows in order."""
    span = torch.arange(max(batch.query_lens), device=batch.query_starts.device)
    tables = (batch.query_starts[:-1, None] + span).clamp(max=batch.token_ids.shape[0] - 1)
    return replace(batch, block_tables=tables.to(torch.int32))
