"""The part of config.json that describes multi-head latent attention (DeepSeek-V2 and V3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.engine.model.fields import Fields

MAX_DIM = 2**16


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Widths of latent attention: a query head is [nope_dim, rope_dim], a value head `value_dim`.

    What is cached of a token is `rank` numbers for keys and values of all heads, and one rotated key of `rope_dim`.
    `query_rank` None: queries are projected at once. `interleaved`: which dimensions rotate together, (0, 1) or
    (0, rope_dim / 2).
    """

    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool

    @property
    def width(self) -> int:
        """Cached numbers per token and layer."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Width of a query head."""
        return self.nope_dim + self.rope_dim


def parse_latent(fields: Fields, family: str, heads: int) -> LatentConfig | None:
    """The checked section; None for a family without it. Raises CheckpointError naming the key."""
    if family not in {"deepseek_v2", "deepseek_v3"}:
        return None
    if fields.integer("num_key_value_heads", heads) != heads:
        raise fields.error("num_key_value_heads", f"must be num_attention_heads ({heads}) for latent attention")
    rope_dim = fields.integer("qk_rope_head_dim", 64, high=MAX_DIM)
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", f"must be even for rotary embeddings, got {rope_dim}")
    direct = "q_lora_rank" in fields.values and not fields.has("q_lora_rank")
    return LatentConfig(
        query_rank=None if direct else fields.integer("q_lora_rank", 1536, high=MAX_DIM),
        rank=fields.integer("kv_lora_rank", 512, high=MAX_DIM),
        nope_dim=fields.integer("qk_nope_head_dim", 128, high=MAX_DIM),
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim", 128, high=MAX_DIM),
        interleaved=family == "deepseek_v2" or fields.flag("rope_interleave", True),
    )
