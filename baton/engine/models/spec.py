"""The description of a decoder: everything in which architectures differ, apart from sizes and weights.

A family (`baton.engine.models.families`) makes a `DecoderSpec` from config.json. `Decoder` interprets it.

    x = embed(tokens) * embedding_scale
    for each layer:   x += attention(norm(x)) * residual_scale      norms before or after, or both, as `names` has them
                      x += mlp(norm(x)) * residual_scale            parallel: both read the same x
    logits = cap(head(norm(x)) * head.scale)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from baton.engine.models.config_variants import ExpertsConfig, LatentConfig
from baton.engine.models.json_fields import Fields
from baton.engine.models.recurrent.spec import RecurrentSpec, state_size
from baton.engine.models.rope import RopeConfig

# Names of activations in config.json, and in kernels.
GATES = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
PLAIN = GATES | {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu2", "xielu": "xielu"}


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A root mean square norm, or a layer norm. The weight in the file is 1 less than the factor if `plus_one`."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False
    plus_one: bool = False

    @property
    def in_kernels(self) -> bool:
        return self.kind == "rms" and not self.plus_one


@dataclass(frozen=True, slots=True)
class HeadNormSpec:
    """Norms of queries and keys: each head by itself, with one weight for all heads (`head`), one for each (`heads`),
    or no weight (`bare`), or all heads as one row (`width`). They come before the rotation or `after` it.
    """

    norm: NormSpec
    over: Literal["head", "heads", "bare", "width"] = "head"
    after: bool = False

    @property
    def in_kernels(self) -> bool:
        return self.norm.in_kernels and self.over in ("head", "bare") and not self.after


class Reach(NamedTuple):
    """The positions that a token attends to: itself and `window` - 1 before it, those of its chunk, or all."""

    window: int | None = None
    chunk: int | None = None


EVERYWHERE = Reach()


class Temperature(NamedTuple):
    """A factor of queries that grows with the position: 1 + scale * log(1 + floor((position + offset) / floor))."""

    scale: float
    floor: float
    offset: int = 0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of one layer. `rope` is the number of its rotation in `DecoderSpec.ropes`. Scores are multiplied by
    `scale`, then limited by `soft_cap * tanh(score / soft_cap)`. Sinks add a learnt score per head to each softmax.
    """

    scale: float
    reach: Reach = EVERYWHERE
    rope: int = 0
    qkv_bias: bool = False
    o_bias: bool = False
    head_norm: HeadNormSpec | None = None
    soft_cap: float | None = None
    sinks: bool = False
    temperature: Temperature | None = None
    gated: bool = False  # results are multiplied by the sigmoid of a part of the projection of queries
    head_dim: int | None = None  # None means that of config.json; so for `kv_heads`
    kv_heads: int | None = None
    kv_heads_key: str = field(default="num_key_value_heads", repr=False)  # in config.json
    reads: int | None = None  # number of the layer whose keys and values are read, in place of own ones
    keys_are_values: bool = False  # before norms and the rotation
    value_norm: bool = False  # values have a norm without weights, with the eps of `head_norm`

    @property
    def in_kernels(self) -> bool:
        """Whether kernels compute the attention. Torch computes the others."""
        return self.soft_cap is None and not self.sinks and self.reach.chunk is None

    @property
    def is_steady(self) -> bool:
        """Whether kernels also compute all around the attention."""
        plain = self.in_kernels and self.temperature is None and not (self.gated or self.value_norm)
        return plain and (self.head_norm is None or self.head_norm.in_kernels)


class Clamp(NamedTuple):
    """Limits of a gated network: (up + 1) * gate * sigmoid(alpha * gate), with gate and up limited by `limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A feed-forward network: down(act(gate(x)) * up(x)), or down(act(up(x))) if it is not `gated`."""

    activation: str
    gated: bool = True
    bias: bool = False
    clamp: Clamp | None = None


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """The output: logits are multiplied by `scale`, then limited like scores of attention by `soft_cap`."""

    scale: float = 1.0
    soft_cap: float | None = None
    bias: bool = False


# Prefixes of the text model in models for text and images: of transformers 5, before, and without images.
PREFIXES = ("model.language_model", "language_model.model", "model")


@dataclass(frozen=True, slots=True)
class Names:
    """Names of tensors in the file. Those of one layer follow `model.layers.<number>`. An empty name means that the
    architecture has no such norm. Fused projections have one name.
    """

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    o: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    mlp: str = "mlp"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    shared: str = "mlp.shared_experts"
    stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")  # of all experts together
    recurrent: str = ""  # in place of `attention` in recurrent layers
    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""

    def saved_in(self, contains: Callable[[str], bool]) -> Names:
        """Return the names in a checkpoint, in which transformers 5 may have written `model` instead of `backbone`."""
        embed, layers, norm = (f"model.{name.partition('.')[2]}" for name in (self.embed, self.layers, self.norm))
        return replace(self, embed=embed, layers=layers, norm=norm) if contains(f"{embed}.weight") else self

    def found_in(self, contains: Callable[[str], bool]) -> Names:
        """Return the names with the prefix that a checkpoint of a model for text and images has."""
        inner = next((name for name in PREFIXES if contains(f"{name}.embed_tokens.weight")), "model")
        head = "language_model.lm_head" if contains("language_model.lm_head.weight") else self.head
        return replace(self, embed=f"{inner}.embed_tokens", layers=f"{inner}.layers", norm=f"{inner}.norm", head=head)


class LayerInputs(NamedTuple):
    """Inputs of each layer, `width` numbers per token from an embedding of `vocab` tokens, and a factor of its output.
    Without inputs, `width` is 0.
    """

    width: int
    vocab: int


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder. `attention` has an entry for each layer. `interleaved` rotations pair dimensions (0, 1), else
    (0, n / 2); `partial` ones leave the last dimensions of a head as they are.
    """

    attention: tuple[AttentionSpec, ...]
    mlp: MlpSpec
    norm: NormSpec
    ropes: tuple[RopeConfig, ...]
    head: HeadSpec = field(default_factory=HeadSpec)
    names: Names = field(default_factory=Names)
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    parallel: bool = False
    interleaved: bool = False
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    recurrent: tuple[RecurrentSpec | None, ...] = ()  # of each layer; None for one with attention; empty: all have it
    single: tuple[Literal["mixer", "network"], ...] = ()  # the only block of each layer; empty: layers have both
    inputs: LayerInputs | None = None
    wide: tuple[int, ...] = ()  # width of the dense network of each layer, if they differ
    inner: int | None = None  # width of dense networks, if it is not a key of config.json

    def with_attention(self, **changes: Any) -> DecoderSpec:
        """Return the spec with these changes in all layers."""
        return replace(self, attention=tuple(replace(each, **changes) for each in self.attention))

    @property
    def rotated(self) -> int:
        """Rotated dimensions of a head."""
        return self.ropes[0].head_dim

    @property
    def has_kv(self) -> list[bool]:
        """Whether each layer has attention, and so KV."""
        layers = range(len(self.attention))
        mixes = [not self.single or self.single[layer] == "mixer" for layer in layers]
        own = [each.reads is None for each in self.attention]
        return [own[layer] and mixes[layer] and not (self.recurrent and self.recurrent[layer]) for layer in layers]

    @property
    def state_size(self) -> int:
        """Number of float32 numbers in the state that each sequence has besides its KV."""
        return self.state_offset(len(self.recurrent))

    def state_offset(self, layer: int) -> int:
        """Return the number of the state's numbers before those of a layer."""
        return sum(state_size(each) for each in self.recurrent[:layer] if each is not None)

    @property
    def limit(self) -> int:
        """Largest number of positions for which all rotations are valid."""
        return min(rope.limit for rope in self.ropes)

    @property
    def is_steady(self) -> bool:
        """Whether all products and functions of a layer are those of kernels, whose bits do not depend on the rows."""
        layers = (self.norm.in_kernels, self.mlp.gated, *(each.is_steady for each in self.attention))
        return all(layers) and not (self.experts or self.latent or self.head.soft_cap)

    @property
    def lacks(self) -> str:
        """Name the first part that GPU kernels lack, or ""."""
        if any(self.recurrent):
            return "recurrent layers"
        if self.inputs is not None:
            return "inputs of each layer"
        if self.latent and self.latent.indexer:
            return "a lightning indexer"
        for each in self.attention:
            if not each.in_kernels:
                return "attention sinks" if each.sinks else "soft caps" if each.soft_cap else "chunked attention"
        return ""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a family's function needs, as config.json has them."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int


Read = Callable[[Fields, Sizes, "Family"], DecoderSpec]


@dataclass(frozen=True, slots=True)
class Family:
    """Constants and defaults of an architecture. `read` makes its spec; `defaults` are values of absent keys of
    config.json. A bias of None means the flag `attention_bias` (qkv, o) or `mlp_bias` of config.json.
    """

    architecture: str
    max_positions: int
    read: Read | None = None  # None means `plain_decoder`
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    kv_heads: int | None = None  # None means the number of query heads
    head_dim: int | None = None  # None means hidden_size / heads
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    slides: Literal["never", "all", "flagged", "layers", "types"] = "never"  # see `windows` in families/common.py
    window: int | None = 4096
    differs: str = ""  # from Llama, for docs/reference/models.md
    state: str = ""  # of a sequence besides KV, likewise
    defaults: Mapping[str, Any] = field(default_factory=dict)
    eps_key: str = "rms_norm_eps"
    act_key: str = "hidden_act"
    partial: float | None = None  # default share of rotated dimensions; None means that all are rotated
    inner_key: str = "intermediate_size"
    also: tuple[str, ...] = ()  # other values of model_type
    unread: tuple[str, ...] = ()  # prefixes of tensors that are not read, such as those for multi-token prediction
    renamed: Mapping[str, str] = field(default_factory=dict)  # other names of keys, which take precedence
    listed: tuple[str, ...] = ()  # keys with an entry for each layer, of which the first gives their number
    ahead: int | None = None  # default of `num_nextn_predict_layers`, layers that are not read
