"""The small files of a checkpoint as the Hub has them, from the metadata of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from reprlib import repr as shown
from typing import Any

from baton.errors import CheckpointError
from baton.gguf.architectures import ARCHITECTURES
from baton.gguf.header import GgufHeader

TEMPLATE = "tokenizer.chat_template"
CONTROL = 3  # in tokenizer.ggml.token_type
# Ends of a turn. Llama.cpp ends answers at these texts, because many files name only one end.
ENDS_OF_TURN = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>"}
)
LARGE_GEMMA = {("gemma2", 46): "27B", ("gemma3", 62): "27B"}  # by layers; its scores have another scale
# Only 1 is supported. Converters write two meanings under the second key, and llama.cpp seldom reads the last two.
FACTORS = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor")
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
Json = dict[str, Any]


def config_of(header: GgufHeader) -> Json:
    """Return config.json. Raises CheckpointError with the file and the key."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise header.error(
            "general.architecture", f"{shown(name)} is not supported (supported: {', '.join(ARCHITECTURES)})"
        )
    return _Config(header, name).json()


class _Config:
    """Typed access to the metadata of one architecture."""

    def __init__(self, header: GgufHeader, name: str) -> None:
        self._header, self._name, self._row = header, name, ARCHITECTURES[name]

    def json(self) -> Json:
        row, hidden = self._row, self._integer("embedding_length")
        heads = self._integer("attention.head_count")
        kv_heads = self._integer("attention.head_count_kv", heads)
        rotated = self._integer("rope.dimension_count", 0, low=0)
        usual = rotated if rotated and not row.partial else hidden // heads
        head_dim = self._integer("attention.key_length", usual)
        if self._integer("attention.value_length", head_dim) != head_dim:
            raise self._error("attention.value_length", f"must be attention.key_length ({head_dim})")
        found = {
            "architectures": [row.model_class],
            "model_type": row.model_type,
            "vocab_size": self._shape("token_embd.weight")[0],
            "hidden_size": hidden,
            "num_hidden_layers": self._integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self._integer("context_length"),
            "tie_word_embeddings": not self._has("output.weight"),
            row.eps: self._eps(),
            "attention_bias": self._has("blk.0.attn_q.bias") or self._has("blk.0.attn_qkv.bias"),
            "mlp_bias": self._has("blk.0.ffn_up.bias"),
            **row.fixed,
            **self._feed_forward(),
            **{key: value for at, key in row.keys.items() if (value := self._get(at)) is not None},
            **self._rope(rotated, head_dim),
            **self._of_family(hidden, heads, head_dim),
            "eos_token_id": ends(self._header) or None,
            "bos_token_id": self._header.metadata.get("tokenizer.ggml.bos_token_id"),
        }
        stored = {"quant_method": "gguf", "architecture": self._name, "heads": heads, "kv_heads": kv_heads}
        stored["types"] = sorted({info.kind for info in self._header.tensors.values() if len(info.shape) > 1})
        return found | {"quantization_config": stored}

    def _feed_forward(self) -> Json:
        experts, used, width = (
            self._integer(f"expert_{key}", 0, low=0) for key in ("count", "used_count", "feed_forward_length")
        )
        inner = self._integer("feed_forward_length", width or None)
        if not experts:
            return {"intermediate_size": inner}
        found = {"intermediate_size": inner, "num_experts_per_tok": used}
        if self._name == "llama":
            mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
            return found | mixtral | {"num_local_experts": experts}
        return found | {"num_experts": experts}

    def _rope(self, rotated: int, head_dim: int) -> Json:
        """Return the keys of the rotation, with the defaults of llama.cpp. Factors of frequencies, as of Llama 3.1, are
        a tensor in the file.
        """
        kind = str(self._get("rope.scaling.type") or "linear")
        found: Json = {"rope_theta": self._number("rope.freq_base", 10000.0)}
        if self._row.partial and rotated:
            found["partial_rotary_factor"] = rotated / head_dim
        length = self._integer("context_length")
        original = self._integer("rope.scaling.original_context_length", length)
        if self._has("rope_factors_short.weight"):
            short, long = (self._header.floats(f"rope_factors_{end}.weight") for end in ("short", "long"))
            scaling: Json = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
            factor = self._get("rope.scaling.attn_factor")
            scaling |= {} if factor is None else {"attention_factor": factor}
            return found | {"rope_scaling": scaling, "original_max_position_embeddings": original}
        if self._has("rope_freqs.weight"):
            factors = self._header.floats("rope_freqs.weight")
            scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
            scaling |= {"attention_factor": 1.0, "original_max_position_embeddings": length}
            return found | {"rope_scaling": scaling}
        if kind not in ("none", "linear", "yarn"):
            raise self._error("rope.scaling.type", f"{kind!r} is not supported (supported: none, linear, yarn)")
        for key in FACTORS:
            if (value := self._get(key)) not in (None, 1):
                raise self._error(key, f"must be 1, got {shown(value)}")
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))
        if kind == "none" or factor == 1.0:
            return found
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            betas = {"beta_fast": 32.0, "beta_slow": 1.0}
            scaling |= {key: self._number(f"rope.scaling.yarn_{key}", usual) for key, usual in betas.items()}
            scaling["original_max_position_embeddings"] = original
        return found | {"rope_scaling": scaling}

    def _of_family(self, hidden: int, heads: int, head_dim: int) -> Json:
        name, found = self._name, dict[str, Any]()
        if name in ("gemma2", "gemma3"):
            large = (name, self._integer("block_count")) in LARGE_GEMMA
            found["query_pre_attn_scalar"] = hidden // heads if large else head_dim
        if name == "gemma3":
            found["sliding_window_pattern"] = self._integer("attention.sliding_window_pattern", 6)
        if name in ("gemma3", "cohere2"):
            found["sliding_window"] = self._integer("attention.sliding_window")
        if name in ("phi3", "starcoder2"):
            found["sliding_window"] = self._get("attention.sliding_window") or None  # Phi 4 has 0
        if name == "stablelm":
            found["use_qkv_bias"] = self._has("blk.0.attn_q.bias")
            found["qk_layernorm"] = self._has("blk.0.attn_q_norm.weight")
            found["use_parallel_residual"] = not self._has("blk.0.ffn_norm.weight")  # llama.cpp reads no flag either
        if name == "starcoder2":
            found["use_bias"] = self._has("blk.0.attn_q.bias")
        if name == "command-r":
            found["use_qk_norm"] = self._has("blk.0.attn_q_norm.weight")
        if name == "olmo2" and self._get("attention.sliding_window"):
            raise self._error("attention.sliding_window", "is not supported: this is OLMo 3")
        return found

    def _eps(self) -> Any:
        keys = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
        value = next((value for key in keys if (value := self._get(key)) is not None), None)
        if value is None:
            raise self._error(keys[0], "is missing")
        return value

    def _number(self, key: str, default: float) -> float:
        value = self._get(key) or default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(key, f"must be a number, got {shown(value)}")
        return float(value)

    def _integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """Return a number from `low`, which may be a list of equal ones, one for each layer."""
        value = self._get(key)
        value = value[0] if isinstance(value, list) and len(set(value)) == 1 else default if value is None else value
        if value is None:
            raise self._error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self._error(key, f"must be one whole number from {low} for all layers, got {shown(value)}")
        return value

    def _get(self, key: str) -> Any:
        return self._header.metadata.get(f"{self._name}.{key}")

    def _has(self, tensor: str) -> bool:
        return tensor in self._header.tensors

    def _shape(self, tensor: str) -> tuple[int, ...]:
        if not self._has(tensor):
            raise self._header.error(tensor, "is missing")
        return self._header.tensors[tensor].shape

    def _error(self, key: str, problem: str) -> CheckpointError:
        return self._header.error(f"{self._name}.{key}", problem)


def ends(header: GgufHeader) -> list[int]:
    """Return the ids that end an answer: those of the metadata, and control tokens that are ends of a turn."""
    found = [header.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    tokens, kinds = _list(header, "tokens"), _list(header, "token_type")
    by_text = [i for i, text in enumerate(tokens) if text in ENDS_OF_TURN and kinds[i : i + 1] == [CONTROL]]
    return list(dict.fromkeys([i for i in found if isinstance(i, int)] + by_text))


def tokenizer_config_of(header: GgufHeader) -> Json:
    """Return tokenizer_config.json. Raises CheckpointError for an id that no token has."""
    tokens, found = _list(header, "tokens"), dict[str, Any]()
    for name, key in _NAMED.items():
        at = f"tokenizer.ggml.{key}_token_id"
        token_id = header.metadata.get(at)
        if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < len(tokens)):
            raise header.error(at, f"must be the id of a token, got {shown(token_id)}")
        found[name] = None if token_id is None else tokens[token_id]
    return found


def _list(header: GgufHeader, key: str) -> list[Any]:
    """Return an array of the tokenizer, or an empty one."""
    found = header.metadata.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(found, list):
        raise header.error(f"tokenizer.ggml.{key}", f"must be an array, got {shown(found)}")
    return found


def templates_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by their file in a checkpoint."""
    found = {}
    for key, text in metadata.items():
        name = re.fullmatch(rf"{re.escape(TEMPLATE)}\.([A-Za-z0-9_-]{{1,64}})", key)
        if name and isinstance(text, str):
            found[f"additional_chat_templates/{name[1]}.jinja"] = text
    whole = metadata.get(TEMPLATE)
    return found | ({"chat_template.jinja": whole} if isinstance(whole, str) else {})
