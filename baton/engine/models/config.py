"""config.json of a Hugging Face checkpoint, parsed once into a checked value.

Keys, defaults and quirks follow `transformers`. An unsupported setting that would change results is rejected by name,
never ignored. Quantised tensors without a declared format are detected and rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.engine.models import config_variants
from baton.engine.models.families import FAMILIES, WRAPPERS
from baton.engine.models.families.common import plain_decoder
from baton.engine.models.formats.base import WeightFormat
from baton.engine.models.formats.select import declared_format
from baton.engine.models.json_fields import Fields, read_json_object
from baton.engine.models.spec import PREFIXES, DecoderSpec, Family, Names, Sizes
from baton.errors import CheckpointError

COMPUTED = ("float32", "bfloat16")
REFUSED = "quantised weights need a quantization_config in config.json"
# Endings of names, and beginnings of dtypes in safetensors spelling, that show quantised weights. int32 and int64 are
# absent because they may be buffers.
NAMES = (".qweight", ".qzeros", ".scales", ".SCB", ".quant_map", "_packed", ".weight_scale", "_scale_inv", "_qdata")
DTYPES = ("F8_", "F4", "F6_", "I8", "U8", "I4", "U4")
MASKS = (".attn.bias", ".attention.bias", ".masked_bias")  # buffers of older GPT checkpoints, U8 if not BOOL


def quantised_tensor(dtypes: Mapping[str, str]) -> str | None:
    """Return a tensor that shows quantisation, or None. `dtypes` maps tensor names to dtypes."""
    others = ((name, dtype) for name, dtype in dtypes.items() if dtype != "U8" or not name.endswith(MASKS))
    return next((name for name, dtype in others if name.endswith(NAMES) or dtype.startswith(DTYPES)), None)


MAX_LAYERS = 4096  # far above any model; limits the work that a hostile config can cause
# Prefixes of tensors of models for text and images that are not read.
IMAGES = ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "embed_vision.")
OTHERS = (*IMAGES, "embed_audio.", "audio_tower.")
WHOLE = ("tie_word_embeddings", "quantization_config", "compression_config", "dtype", "torch_dtype")  # keys that it has


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a decoder-only transformer, and its spec. `kv_heads` and `head_dim` describe the cache. Latent
    attention has one cached head, `latent.cached` wide.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    tied: bool
    spec: DecoderSpec
    dtype: str | None  # as spelt in config.json, None if absent
    dtype_origin: str = field(repr=False, compare=False)  # for errors
    thinking: config_variants.ThinkingConfig | None = None
    quantised: WeightFormat | None = field(default=None, repr=False)  # fingerprints have the tensors themselves
    unread_layers: int = 0  # layers for multi-token prediction, which a checkpoint may have beyond `layers`
    wrapped: bool = False  # the text part of a model for text and images

    @property
    def experts(self) -> config_variants.ExpertsConfig | None:
        return self.spec.experts

    @property
    def latent(self) -> config_variants.LatentConfig | None:
        return self.spec.latent

    @property
    def kv_tensors(self) -> tuple[str, ...]:
        return ("k", "v") if self.latent is None else ("latent",)

    @property
    def cache_dim(self) -> int:
        """Numbers of each of `kv_heads` rows of a token in the cache, of which layers with smaller heads use some. All
        rows together have an equal share for each head of a layer.
        """
        step = math.lcm(*(count // math.gcd(count, self.kv_heads) for count, _ in self._cached))
        widest = max(-(-count * dim // self.kv_heads) for count, dim in self._cached)
        return -(-widest // step) * step if self.latent is None else self.head_dim

    @property
    def cache_order(self) -> tuple[str, ...]:
        """Words for the order of numbers in a row of the cache, for fingerprints: none if each layer fills it."""
        return () if self._cached == {(self.kv_heads, self.cache_dim)} else ("equal shares",)

    @property
    def _cached(self) -> set[tuple[int, int]]:
        """Number and size of the KV heads of each kind of layer."""
        return {(each.kv_heads or self.kv_heads, each.head_dim or self.head_dim) for each in self.spec.attention}

    def names_in(self, contains: Callable[[str], bool]) -> Names:
        """Return the names of tensors in a checkpoint, which `contains` some."""
        return (self.spec.names.found_in if self.wrapped else self.spec.names.saved_in)(contains)

    @property
    def unread(self) -> tuple[str, ...]:
        """Prefixes of tensors that are not read."""
        ahead = tuple(f"{self.spec.names.layers}.{self.layers + i}." for i in range(self.unread_layers))
        images = (*OTHERS, *(f"model.{name}" for name in OTHERS)) if self.wrapped else ()
        readers = [layer for layer, each in enumerate(self.spec.attention) if each.reads is not None]
        layers = [f"{prefix}.layers.{layer}.self_attn" for prefix in PREFIXES for layer in readers]
        shared = (f"{layer}.{part}." for layer in layers for part in ("k_proj", "v_proj", "k_norm", "v_norm"))
        return (*ahead, *images, *shared, *FAMILIES[self.family].unread)


def read_config(folder: Path) -> ModelConfig:
    """Parse `folder/config.json`. Raises CheckpointError with the file and the key."""
    path = folder / "config.json"
    return parse_config(Fields(str(path), read_json_object(path)))


def parse_config(fields: Fields) -> ModelConfig:
    """Return the checked config. Raises CheckpointError with the key."""
    fields, wrapped = _text_part(fields)
    name = _family_name(fields)
    family = FAMILIES[name]
    other = {key: fields.values[alias] for alias, key in family.renamed.items() if fields.has(alias)}
    listed = (fields.values[key] for key in family.listed if fields.has(key))
    other |= next(({"num_hidden_layers": len(each)} for each in listed if isinstance(each, str | list)), {})
    fields = Fields(fields.where, {**family.defaults, **fields.values, **other, "model_type": name})
    heads = fields.integer("num_attention_heads", high=2**16)
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    latent = config_variants.parse_latent(fields, name, heads)
    sizes = Sizes(
        layers=layers,
        hidden_size=fields.integer("hidden_size"),
        heads=heads,
        head_dim=latent.cached if latent else _head_dim(fields, heads, family),
        kv_heads=1 if latent else _kv_heads(fields, heads, family),
        max_positions=fields.integer("max_position_embeddings", family.max_positions),
    )
    spec = (family.read or plain_decoder)(fields, sizes, family)
    ahead = family.ahead
    return ModelConfig(
        family=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=sizes.hidden_size,
        intermediate_size=spec.inner or fields.integer(family.inner_key),
        layers=layers,
        heads=heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_positions=min(sizes.max_positions, spec.limit),
        tied=fields.flag("tie_word_embeddings", False),
        spec=spec,
        dtype=_dtype(fields),
        dtype_origin=dtype_origin(fields),
        thinking=config_variants.parse_thinking(fields, name, layers),
        unread_layers=0 if ahead is None else fields.integer("num_nextn_predict_layers", ahead, low=0, high=MAX_LAYERS),
        quantised=declared_format(fields),
        wrapped=wrapped,
    )


def _text_part(fields: Fields) -> tuple[Fields, bool]:
    """Return the config of the text model, and whether it was part of a model for text and images."""
    architecture, model_type = (*fields.texts("architectures"), "")[0], fields.text("model_type", "")
    if architecture not in WRAPPERS.values() and (architecture or model_type not in WRAPPERS):
        return fields, False
    inner = fields.section("text_config")
    if not inner.values:
        raise fields.error("text_config", "is missing")
    whole = {"tie_word_embeddings": True} | {key: fields.values[key] for key in WHOLE if fields.has(key)}
    text = {key: value for key, value in inner.values.items() if key != "architectures"}
    return Fields(inner.where, text | whole), True


def _family_name(fields: Fields) -> str:
    supported = ", ".join([*(family.architecture for family in FAMILIES.values()), *WRAPPERS.values()])
    architectures = fields.texts("architectures")
    model_type = fields.text("model_type", "")
    names = {alias: name for name, family in FAMILIES.items() for alias in (name, *family.also)}
    if not architectures and not model_type:
        raise fields.error("architectures", f"is missing (supported: {supported})")
    if not architectures and model_type not in names:
        raise fields.error("model_type", f"{model_type!r} is not supported (supported: {', '.join(names)})")
    architecture = architectures[0] if architectures else FAMILIES[names[model_type]].architecture
    name = next((name for name, family in FAMILIES.items() if family.architecture == architecture), None)
    if name is None:
        raise fields.error("architectures", f"{architecture!r} is not supported (supported: {supported})")
    if model_type and names.get(model_type) != name:
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


def _dtype(fields: Fields) -> str | None:
    """Return `dtype`, or `torch_dtype`, its spelling before transformers 5."""
    key = _dtype_key(fields)
    return fields.text(key).removeprefix("torch.") if fields.has(key) else None


def _dtype_key(fields: Fields) -> str:
    return "dtype" if fields.has("dtype") else "torch_dtype"


def dtype_origin(fields: Fields) -> str:
    """Return where the dtype of a checkpoint is written: the key of config.json, or its tensors."""
    key = _dtype_key(fields)
    return f"{fields.where}: {key}" if fields.has(key) else f"{fields.where}: no dtype, and that of the tensors"


def chosen_dtype(config: ModelConfig, wanted: str, stored: str) -> str:
    """Return the dtype to compute in, "float32" or "bfloat16". Raises CheckpointError for any other dtype. `auto` means
    the dtype of config.json, else `stored`, that of the tensors. A float16 checkpoint is computed in float32: it holds
    all values, CPUs have no fast float16, and bfloat16 would drop three bits of each weight.
    """
    return dtype_of(config.dtype, wanted, stored, config.dtype_origin)


def dtype_of(declared: str | None, wanted: str, stored: str, origin: str) -> str:
    """Return the dtype to compute in, as `chosen_dtype` does for the dtype that config.json declares."""
    if wanted != "auto":
        if wanted not in COMPUTED:
            raise CheckpointError(f"dtype {wanted!r} is not supported (supported: auto, {', '.join(COMPUTED)})")
        return wanted
    name = declared or stored
    if name not in (*COMPUTED, "float16"):
        remedy = f"set model.dtype to {' or '.join(COMPUTED)}"
        raise CheckpointError(f"{origin} {name!r} is not supported; {remedy}")
    return "float32" if name == "float16" else name
