"""Optional parts of config.json: latent attention (DeepSeek-V2, V3 and V3.2), mixture of experts, and thinking.

Keys, defaults and quirks follow `transformers`. A setting that `transformers` ignores, but other code for the same
checkpoints obeys, is rejected by name. Thinking States (arXiv 2602.08332, docs/how-to/thinking.md) are configured by

    "thinking": {"chunk_size": 4, "input_layer": 1, "output_layer": 3, "max_thought_tokens": 4,
                 "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.engine.models.json_fields import Fields, shown

MAX_DIM = 2**16


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """The lightning indexer of DeepSeek-V3.2: each token attends to the `top_k` positions with the best scores. Scores
    are of `heads` query heads and one key of `dim` numbers, which the cache holds after the latent row.
    """

    heads: int
    dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Widths of latent attention: a query head is [nope_dim, rope_dim], a value head `value_dim`. The cache holds
    `rank` numbers per token for all heads, and one rotated key of `rope_dim`. `query_rank` is None if queries have no
    low-rank projection. Dimensions (0, 1) rotate together if `interleaved`, else (0, rope_dim / 2).
    """

    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool
    indexer: IndexerConfig | None = None

    @property
    def width(self) -> int:
        return self.rank + self.rope_dim

    @property
    def cached(self) -> int:
        """Cached numbers per token and layer."""
        return self.width + (self.indexer.dim if self.indexer else 0)

    @property
    def query_dim(self) -> int:
        return self.nope_dim + self.rope_dim


def parse_latent(fields: Fields, family: str, heads: int) -> LatentConfig | None:
    """Return the checked section, or None for a family without it. Raises CheckpointError with the key."""
    if family not in {"deepseek_v2", "deepseek_v3", "deepseek_v32"}:
        return None
    if fields.integer("num_key_value_heads", heads) != heads:
        raise fields.error("num_key_value_heads", f"must be num_attention_heads ({heads}) for latent attention")
    rope_dim = fields.integer("qk_rope_head_dim", 64, high=MAX_DIM)
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", f"must be even for rotary embeddings, got {rope_dim}")
    direct = "q_lora_rank" in fields.values and not fields.has("q_lora_rank")
    indexer = _indexer(fields, rope_dim, direct=direct) if family == "deepseek_v32" else None
    return LatentConfig(
        query_rank=None if direct else fields.integer("q_lora_rank", 1536, high=MAX_DIM),
        rank=fields.integer("kv_lora_rank", 512, high=MAX_DIM),
        nope_dim=fields.integer("qk_nope_head_dim", 128, high=MAX_DIM),
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim", 128, high=MAX_DIM),
        interleaved=family == "deepseek_v2" or fields.flag("rope_interleave", True),
        indexer=indexer,
    )


def _indexer(fields: Fields, rope_dim: int, *, direct: bool) -> IndexerConfig:
    _expect(fields, "rope_interleave", True)
    if direct:
        raise fields.error("q_lora_rank", "must be a number, because the indexer reads the low-rank queries")
    dim = fields.integer("index_head_dim", 128, low=rope_dim, high=MAX_DIM)
    heads = fields.integer("index_n_heads", 64, high=MAX_DIM)
    return IndexerConfig(heads, dim, fields.integer("index_topk", 2048))


MAX_EXPERTS = 2**14


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Routing and sizes of a mixture of experts. Layer i has experts if `sparse[i]`, else a dense network. A token goes
    to `per_token` of `count` experts, each `inner` wide. If `groups` is above 1, only the experts of the token's
    `best_groups` best groups are eligible. The weights of the chosen experts are divided by their sum if `normalised`,
    then multiplied by `scaling`. `shared_inner` is the width of the shared network, or 0 without one.
    """

    count: int
    per_token: int
    inner: int
    sparse: tuple[bool, ...]
    normalised: bool
    scaling: float = 1.0
    shared_inner: int = 0
    shared_gate: bool = False  # the shared network is multiplied by the sigmoid of a projection
    groups: int = 1
    best_groups: int = 1
    sigmoid: bool = False  # sigmoid scores; else softmax scores
    corrected: bool = False  # scores are ranked with a learnt bias
    float32_router: bool = False  # False means the model's dtype
    biased: bool = False  # router and experts have biases
    transposed: bool = False  # the file has [experts, inputs, outputs]
    paired: bool = False  # rows of gate and up alternate
    least: float = 1e-20  # added to the sum that weights are divided by; sigmoids may all be 0
    scaled_inputs: bool = False  # weights multiply the inputs of experts, not their results


def mixtral_experts(fields: Fields, layers: int) -> ExpertsConfig:
    """Return the experts of Mixtral."""
    count = expert_count(fields, ("num_local_experts", "num_experts"), 8)
    inner = fields.integer("intermediate_size")
    return ExpertsConfig(count, experts_per_token(fields, 2, count), inner, (True,) * layers, normalised=True)


def qwen3_experts(fields: Fields, layers: int) -> ExpertsConfig:
    """Return the experts of Qwen3-MoE."""
    count = expert_count(fields, ("num_experts", "num_local_experts"), 128)
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    inner, normalised = fields.integer("moe_intermediate_size", 768), fields.flag("norm_topk_prob", False)
    return ExpertsConfig(count, experts_per_token(fields, 8, count), inner, sparse, normalised)


def deepseek_v2_experts(fields: Fields, layers: int) -> ExpertsConfig:
    """Return the experts of DeepSeek-V2."""
    _expect(fields, "scoring_func", "softmax")
    method = fields.text("topk_method", "greedy")
    if method not in {"greedy", "group_limited_greedy"}:
        raise fields.error("topk_method", f"{method!r} is not supported (supported: greedy, group_limited_greedy)")
    if fields.flag("norm_topk_prob", False):  # transformers ignores it, the authors' code obeys it
        raise fields.error("norm_topk_prob", "true is not supported for deepseek_v2")
    count = expert_count(fields, ("n_routed_experts", "num_experts"), 64)
    inner, shared = fields.integer("moe_intermediate_size", 1407), fields.integer("n_shared_experts", 2)
    groups, best = (1, 1) if method == "greedy" else _groups(fields, None, None, count)
    per_token, sparse = experts_per_token(fields, None, count // groups * best), _after_dense(fields, 0, layers)
    scaling = fields.number("routed_scaling_factor", 1.0)
    return ExpertsConfig(
        count, per_token, inner, sparse, normalised=False, scaling=scaling, shared_inner=shared * inner,
        groups=groups, best_groups=best, float32_router=True,
    )  # fmt: skip


def deepseek_v3_experts(fields: Fields, layers: int, default_count: int = 256) -> ExpertsConfig:
    """Return the experts of DeepSeek-V3 and its relatives."""
    _expect(fields, "scoring_func", "sigmoid")
    _expect(fields, "topk_method", "noaux_tc")
    count = expert_count(fields, ("n_routed_experts", "num_local_experts"), default_count)
    inner, shared = fields.integer("moe_intermediate_size", 2048), fields.integer("n_shared_experts", 1)
    groups, best = _groups(fields, 8, 4, count)
    per_token, sparse = experts_per_token(fields, 8, count // groups * best), _after_dense(fields, 3, layers)
    normalised, scaling = fields.flag("norm_topk_prob", True), fields.number("routed_scaling_factor", 2.5)
    return ExpertsConfig(
        count, per_token, inner, sparse, normalised=normalised, scaling=scaling, shared_inner=shared * inner,
        groups=groups, best_groups=best, sigmoid=True, corrected=True, float32_router=True,
    )  # fmt: skip


def expert_count(fields: Fields, keys: tuple[str, str], default: int) -> int:
    """Return the number of experts, from the hub's key or the key that transformers 5 writes."""
    found = [fields.integer(key, high=MAX_EXPERTS) for key in keys if fields.has(key)]
    if len(set(found)) > 1:
        raise fields.error(keys[0], f"({found[0]}) contradicts {keys[1]} ({found[1]})")
    return found[0] if found else default


def experts_per_token(fields: Fields, default: int | None, eligible: int) -> int:
    """Return the number of experts of each token, at most `eligible`."""
    per_token = fields.integer("num_experts_per_tok", default)
    if per_token > eligible:
        raise fields.error("num_experts_per_tok", f"({per_token}) must be at most the {eligible} eligible experts")
    return per_token


def _groups(fields: Fields, groups: int | None, best: int | None, count: int) -> tuple[int, int]:
    groups, best = fields.integer("n_group", groups), fields.integer("topk_group", best)
    if count % groups:
        raise fields.error("n_group", f"({groups}) must divide the number of experts ({count})")
    if best > groups:
        raise fields.error("topk_group", f"({best}) must be at most n_group ({groups})")
    return groups, best


def _after_dense(fields: Fields, dense: int, layers: int) -> tuple[bool, ...]:
    _expect(fields, "moe_layer_freq", 1)
    if kinds := fields.texts("mlp_layer_types"):
        if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
            raise fields.error("mlp_layer_types", f"must have {layers} entries, each 'dense' or 'sparse'")
        return tuple(kind == "sparse" for kind in kinds)
    first = fields.integer("first_k_dense_replace", dense, low=0)
    return tuple(layer >= first for layer in range(layers))


def _expect(fields: Fields, key: str, value: Any) -> None:
    if fields.has(key) and fields.values[key] != value:
        raise fields.error(key, f"must be {value!r} for this model, got {shown(fields.values[key])}")


DENSE = ("llama", "mistral", "qwen2", "qwen3")
MAX_CHUNK, MAX_THOUGHT = 1024, 1024
KEYS = (
    "chunk_size", "input_layer", "output_layer", "max_thought_tokens", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ThinkingConfig:
    """Sizes, layers and special tokens of Thinking States. A chunk has `chunk_size` tokens. Its state is added after
    layer `input_layer` (L_in, counted from 1), and its hidden rows are taken after layer `output_layer` (L_out). A
    thought begins with token `bos` and ends with `eos` or after `max_thought_tokens` tokens, `eos` included. For the
    compression block it is padded to a chunk with `pad`.
    """

    chunk_size: int
    input_layer: int
    output_layer: int
    max_thought_tokens: int
    bos: int
    eos: int
    pad: int


def parse_thinking(fields: Fields, family: str, layers: int) -> ThinkingConfig | None:
    """Return the checked section `thinking`, or None if absent. Raises CheckpointError with the key."""
    if not fields.has("thinking"):
        return None
    if family not in DENSE:
        raise fields.error("thinking", f"is supported only for dense models ({', '.join(DENSE)}), not for {family}")
    found = fields.section("thinking")
    if unknown := sorted(found.values.keys() - set(KEYS)):
        raise found.error(unknown[0], f"is not supported (supported: {', '.join(KEYS)})")
    top = fields.integer("vocab_size") - 1
    input_layer = found.integer("input_layer", high=layers)
    return ThinkingConfig(
        chunk_size=found.integer("chunk_size", high=MAX_CHUNK),
        input_layer=input_layer,
        output_layer=found.integer("output_layer", low=input_layer, high=layers),
        max_thought_tokens=found.integer("max_thought_tokens", high=MAX_THOUGHT),
        bos=found.integer("bos_token_id", low=0, high=top),
        eos=found.integer("eos_token_id", low=0, high=top),
        pad=found.integer("pad_token_id", low=0, high=top),
    )
