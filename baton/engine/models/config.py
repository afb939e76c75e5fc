"""config.json of a Hugging Face checkpoint, parsed once into a checked value.

Keys, defaults and quirks follow `transformers`. An unsupported setting that would change results is rejected by name,
never ignored. Quantised tensors without a declared format are detected and rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from baton.engine.models import config_variants
from baton.engine.models.formats.base import WeightFormat
from baton.engine.models.formats.select import declared_format
from baton.engine.models.json_fields import Fields, read_json_object
from baton.engine.models.rope import RopeConfig, parse_rope
from baton.errors import CheckpointError

REFUSED = "quantised weights need a quantization_config in config.json"
# Endings of names, and beginnings of dtypes in safetensors spelling, that show quantised weights. int32 and int64 are
# absent because they may be buffers.
NAMES = (".qweight", ".qzeros", ".scales", ".SCB", ".quant_map", "_packed", ".weight_scale", "_scale_inv", "_qdata")
DTYPES = ("F8_", "F4", "F6_", "I8", "U8", "I4", "U4")


def quantised_tensor(dtypes: Mapping[str, str]) -> str | None:
    """Return a tensor that shows quantisation, or None. `dtypes` maps tensor names to dtypes."""
    return next((name for name, dtype in dtypes.items() if name.endswith(NAMES) or dtype.startswith(DTYPES)), None)


# Names of activations in config.json, and in kernels.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
MAX_LAYERS = 4096  # far above any model; limits the work that a hostile config can cause


@dataclass(frozen=True, slots=True)
class Family:
    """Constants and defaults of an architecture. Those after `qk_norm` are defaults for absent keys of config.json. A
    bias of None means the flag `attention_bias` (qkv, o) or `mlp_bias` of config.json.
    """

    architecture: str
    max_positions: int
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    kv_heads: int | None = None  # None means the number of query heads
    head_dim: int | None = None  # None means hidden_size / heads
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    slides: Literal["never", "all", "flagged", "layers"] = "never"  # no default for a key: see `_windows`
    window: int | None = 4096


_QWEN3 = Family("Qwen3ForCausalLM", 32768, qkv_bias=None, o_bias=None, qk_norm=True, head_dim=128, slides="layers")
FAMILIES = {
    "llama": Family("LlamaForCausalLM", 2048, qkv_bias=None, o_bias=None, mlp_bias=None),
    "mistral": Family("MistralForCausalLM", 131072, kv_heads=8, slides="all"),
    "mixtral": Family(
        "MixtralForCausalLM", 131072, kv_heads=8, norm_eps=1e-5, rope_theta=1e6, slides="all", window=None
    ),
    "qwen2": Family("Qwen2ForCausalLM", 32768, qkv_bias=True, slides="layers"),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(_QWEN3, architecture="Qwen3MoeForCausalLM", kv_heads=4, head_dim=None, slides="flagged"),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", 2048, qkv_bias=None, o_bias=None, mlp_bias=None),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", 4096, qkv_bias=None, o_bias=None),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer. `windows[i]` is layer i's sliding window in tokens, None for no window.
    `kv_heads` and `head_dim` describe the cache. Latent attention has one cached head, `latent.width` wide.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str
    norm_eps: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig
    dtype: str | None  # as spelt in config.json, None if absent
    experts: config_variants.ExpertsConfig | None = None
    latent: config_variants.LatentConfig | None = None
    thinking: config_variants.ThinkingConfig | None = None
    quantised: WeightFormat | None = field(default=None, repr=False)  # fingerprints have the tensors themselves
    unread_layers: int = 0  # layers for multi-token prediction, which a checkpoint may have beyond `layers`

    @property
    def kv_tensors(self) -> tuple[str, ...]:
        return ("k", "v") if self.latent is None else ("latent",)


def read_config(folder: Path) -> ModelConfig:
    """Parse `folder/config.json`. Raises CheckpointError with the file and the key."""
    path = folder / "config.json"
    return parse_config(Fields(str(path), read_json_object(path)))


def parse_config(fields: Fields) -> ModelConfig:
    """Return the checked config. Raises CheckpointError with the key."""
    name = _family_name(fields)
    family = FAMILIES[name]
    heads = fields.integer("num_attention_heads", high=2**16)
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    latent = config_variants.parse_latent(fields, name, heads)
    head_dim = latent.width if latent else _head_dim(fields, heads, family)
    attention_bias = fields.flag("attention_bias", False)
    max_positions = fields.integer("max_position_embeddings", family.max_positions)
    unread = fields.integer("num_nextn_predict_layers", 1, low=0, high=MAX_LAYERS) if name == "deepseek_v3" else 0
    return ModelConfig(
        family=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=1 if latent else _kv_heads(fields, heads, family),
        head_dim=head_dim,
        activation=_activation(fields),
        norm_eps=fields.number("rms_norm_eps", family.norm_eps),
        max_positions=max_positions,
        tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=fields.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        windows=_windows(fields, name, layers),
        rope=parse_rope(fields, max_positions, latent.rope_dim if latent else head_dim, family.rope_theta),
        dtype=_dtype(fields),
        experts=config_variants.parse_experts(fields, name, layers),
        latent=latent,
        thinking=config_variants.parse_thinking(fields, name, layers),
        unread_layers=unread,
        quantised=declared_format(fields),
    )


def _family_name(fields: Fields) -> str:
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    architectures = fields.texts("architectures")
    model_type = fields.text("model_type", "")
    if not architectures and not model_type:
        raise fields.error("architectures", f"is missing (supported: {supported})")
    if not architectures and model_type not in FAMILIES:
        raise fields.error("model_type", f"{model_type!r} is not supported (supported: {', '.join(FAMILIES)})")
    architecture = architectures[0] if architectures else FAMILIES[model_type].architecture
    name = next((name for name, family in FAMILIES.items() if family.architecture == architecture), None)
    if name is None:
        raise fields.error("architectures", f"{architecture!r} is not supported (supported: {supported})")
    if model_type and model_type != name:
        raise fields.error("model_type", f"{model_type!r} contradicts architectures {architecture!r}")
    return name


def _head_dim(fields: Fields, heads: int, family: Family) -> int:
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", family.head_dim or max(hidden_size // heads, 1), high=2**16)
    if not fields.has("head_dim") and family.head_dim is None and hidden_size % heads:
        raise fields.error("hidden_size", f"({hidden_size}) must be divisible by num_attention_heads ({heads})")
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rotary embeddings, got {head_dim}")
    return head_dim


def _kv_heads(fields: Fields, heads: int, family: Family) -> int:
    absent = "num_key_value_heads" not in fields.values
    kv_heads = fields.integer("num_key_value_heads", (family.kv_heads if absent else None) or heads)
    if heads % kv_heads:
        raise fields.error("num_attention_heads", f"({heads}) must be divisible by num_key_value_heads ({kv_heads})")
    return kv_heads


def _activation(fields: Fields) -> str:
    name = fields.text("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise fields.error("hidden_act", f"{name!r} is not supported (supported: {', '.join(ACTIVATIONS)})")
    return name


def _dtype(fields: Fields) -> str | None:
    """Return `dtype`, or `torch_dtype`, its spelling before transformers 5."""
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    return fields.text(key).removeprefix("torch.") if fields.has(key) else None


def _windows(fields: Fields, name: str, layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, as in transformers. Llama never slides, Mistral in all layers or none.
    Qwen slides only with `use_sliding_window`: the family with experts in all layers, the others by layer type.
    """
    family = FAMILIES[name]
    on = family.slides == "all" or (family.slides in {"flagged", "layers"} and fields.flag("use_sliding_window", False))
    window = _window(fields, family) if on else None
    types = _layer_types(fields, name, layers, slides=window is not None)
    if window is None and "sliding_attention" in types:
        raise fields.error("layer_types", "contains sliding_attention, but no sliding window is set")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _window(fields: Fields, family: Family) -> int | None:
    if "sliding_window" not in fields.values:
        return family.window
    return fields.integer("sliding_window") if fields.has("sliding_window") else None


def _layer_types(fields: Fields, name: str, layers: int, *, slides: bool) -> tuple[str, ...]:
    by_layer = FAMILIES[name].slides == "layers"
    first_sliding = fields.integer("max_window_layers", 28, low=0) if by_layer else 0
    default = tuple("sliding_attention" if slides and i >= first_sliding else "full_attention" for i in range(layers))
    types = fields.texts("layer_types") or default
    if len(types) != layers:
        raise fields.error("layer_types", f"must have {layers} entries, one per layer, got {len(types)}")
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise fields.error("layer_types", f"{unknown[0]!r} is not supported")
    if not by_layer and types != default:
        raise fields.error("layer_types", f"must be {default[0]} in all {name} layers")
    return types


def chosen_dtype(config: ModelConfig, wanted: str, stored: str) -> str:
    """Return the dtype to compute in, "float32" or "bfloat16". Raises CheckpointError for any other dtype. `auto` means
    the dtype of config.json, else `stored`, that of the tensors. A float16 checkpoint is computed in float32: it holds
    all values, CPUs have no fast float16, and bfloat16 would drop three bits of each weight.
    """
    return dtype_of(config.dtype, wanted, stored)


def dtype_of(declared: str | None, wanted: str, stored: str) -> str:
    """Return the dtype to compute in, as `chosen_dtype` does for the dtype that config.json declares."""
    name = (declared or stored) if wanted == "auto" else wanted
    name = "float32" if name == "float16" and wanted == "auto" else name
    if name not in {"float32", "bfloat16"}:
        raise CheckpointError(f"dtype {name!r} is not supported (supported: auto, float32, bfloat16)")
    return name
