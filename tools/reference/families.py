"""Part of docs/reference/models.md: the model families that Baton serves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from baton.engine.models.config import ModelConfig, parse_config
from baton.engine.models.config_variants import DENSE
from baton.engine.models.families import FAMILIES, WRAPPERS
from baton.engine.models.formats.base import WeightFormat
from baton.engine.models.formats.select import METHODS
from baton.engine.models.json_fields import Fields
from baton.engine.models.spec import Family
from baton.engine.tp.sharding import divided
from baton.errors import ConfigError
from baton.gguf.architectures import ARCHITECTURES
from tests.unit.model.checkpoints import DENSE as DENSE_VARIANTS
from tests.unit.model.checkpoints import LATENT, NATIVE, RECURRENT, SPARSE
from tools.reference.pages import Page, code, table

HEAD = ("`model_type`", "`architectures`", "difference from Llama", "biases", "default `max_position_embeddings`")
MORE = ("sliding window", "thinking", "cache groups: per token; per sequence", "weight formats on CPUs", "TP")
COMPARED = ("exact with `model.backend`", "compared checkpoints")
SLIDES = {"never": "no", "all": "in all layers or none", "flagged": "with `use_sliding_window`"}
# Smallest configs of the families, and one section of each kind for each method of `quantization_config`.
SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 8}
SIZES |= {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 4, "attn_layer_indices": [2]}
SIZES |= {"moe_intermediate_size": 512}
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}
NEEDS: dict[str, dict[str, Any]] = {
    "apertus": {"rope_scaling": ROPE},
    "ministral3": {
        "rope_parameters": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
        | {"llama_4_scaling_beta": 0.1}
    },
    "gpt_oss": YARN,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 4},
    "nemotron_h": {"hybrid_override_pattern": "M*-M*-M-"},
}
# Settings with which a family has experts, or none, unlike without them.
EXPERTS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"num_local_experts": 0},
    "nemotron_h": {"hybrid_override_pattern": "ME*-M*-M"},
}
INTEGER = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True}
FLOAT = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
SECTIONS: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "awq": (("", {"bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}),),
    "bitsandbytes": (("int8", {"load_in_8bit": True}), ("nf4, fp4", {"load_in_4bit": True})),
    "compressed-tensors": (
        ("integers", {"format": "pack-quantized", "config_groups": {"g": {"weights": INTEGER}}}),
        ("floats", {"format": "float-quantized", "config_groups": {"g": {"weights": FLOAT}}}),
    ),
    "fbgemm_fp8": (("", {}),),
    "fp8": (("", {}),),
    "gguf": (
        ("Q8_0, Q4_0", {"architecture": "llama", "heads": 1, "kv_heads": 1, "types": ["Q8_0"]}),
        ("other types", {"architecture": "llama", "heads": 1, "kv_heads": 1, "types": ["F16"]}),
    ),
    "gptq": (("", {"bits": 4, "group_size": 128}),),
    "modelopt": (("", {"quant_algo": "FP8"}),),
    "mxfp4": (("", {}),),
    "torchao": (("integers", {}),),
}
VARIANTS = DENSE_VARIANTS | SPARSE | LATENT | NATIVE | RECURRENT
BIASES = (("qkv_bias", "q, k, v"), ("o_bias", "o"), ("mlp_bias", "MLP"))


def page() -> Page:
    """Return the page of models."""
    wrapped = table(("`model_type`", "`architectures`"), ((code(name), code(each)) for name, each in WRAPPERS.items()))
    families = table((*HEAD, *MORE, *COMPARED), (_row(*each) for each in FAMILIES.items()))
    return Page(
        "models.md", {"formats": _formats(), "families": families, "wrappers": wrapped, "fallback": _fallback()}
    )


def _fallback() -> str:
    """Return the results of `tools.fallback_models`."""
    results = _fallback_results()
    kinds = Counter(result for _, result, _ in results["models"].values())
    counts = ", ".join(f"{count} {result}" for result, count in kinds.most_common())
    exact = ", ".join(code(name) for name, (_, result, _) in results["models"].items() if result == "exact")
    rows = ((code(name), why) for name, (_, result, why) in results["models"].items() if result != "exact")
    return f"transformers {results['transformers']}, {results['date']}: {counts}.\n\n**Exact**: {exact}.\n\n" + table(
        ("`model_type`", "refused, or not tried, because"), rows
    )


def _fallback_results() -> dict[str, Any]:
    results: dict[str, Any] = json.loads((Path(__file__).parent / "fallback.json").read_text())
    return results


def _formats() -> str:
    """Return the lists of methods that the column of weight formats names."""
    kinds: dict[str, list[str]] = {"packed": [], "widened": []}
    for method in METHODS:
        for kind, section in SECTIONS[method]:
            found = _format(method, section)
            if 2 in found.dimensions:
                kinds["packed" if found.packs else "widened"].append(code(method) + f" ({kind})" * bool(kind))
    return table(("weights on CPUs", "`quant_method`"), ((kind, ", ".join(names)) for kind, names in kinds.items()))


def _format(method: str, section: dict[str, Any]) -> WeightFormat:
    return METHODS[method](Fields("config.json", section))


def _config(name: str, **more: Any) -> ModelConfig:
    return parse_config(Fields("config.json", SIZES | NEEDS.get(name, {}) | {"model_type": name, **more}))


def _of_weights(name: str, config: ModelConfig) -> str:
    """Return the weight formats of a family: of hub checkpoints, of stacked experts, and of GGUF files."""
    found = ["packed or widened by method"]
    found += ["`kv_b_proj` widened"] * (config.latent is not None)
    stacked = config.experts is not None and (config.experts.transposed or config.experts.biased)
    found += [f"stacked experts: only {', '.join(_of_stacks())}, widened"] * stacked
    files = [code(each) for each, row in ARCHITECTURES.items() if row.model_type == name]
    return "; ".join(found + [f"GGUF {', '.join(files)}"] * bool(files))


def _of_stacks() -> list[str]:
    return [
        code(method)
        for method in METHODS
        if method != "gguf" and 3 in _format(method, SECTIONS[method][0][1]).dimensions
    ]


def _divided(name: str) -> str:
    """Return whether tensor-parallel ranks can divide the family, and its quantised weights."""
    found = {_divides(_config(name, **more)) for more in ({}, EXPERTS.get(name, {}))}
    return found.pop() if len(found) == 1 else "yes, unless experts are quantised"


def _divides(config: ModelConfig) -> str:
    try:
        divided(config, 2, "tensor_parallel")
    except ConfigError:
        return "no"
    try:
        divided(config, 2, "tensor_parallel", "int8")
    except ConfigError:
        return "yes, unless quantised"
    return "yes"


def _row(name: str, family: Family) -> tuple[str, ...]:
    config = _config(name)
    return (
        ", ".join(map(code, (name, *family.also))),
        code(family.architecture),
        family.differs,
        "; ".join(_biases(family)) or "none",
        f"{family.max_positions:,}",
        "no" if family.slides == "types" and family.window is None else SLIDES.get(family.slides, "by layer"),
        "yes" if name in DENSE else "no",
        "; ".join(_groups(config, name, family)),
        _of_weights(name, config),
        _divided(name),
        *_compared(name, family),
    )


def _compared(name: str, family: Family) -> tuple[str, str]:
    """Return the backends with which the family is exact, and the checkpoints that tests compare with transformers."""
    models = _fallback_results()["models"]
    through = any(models.get(each, ("", ""))[1] == "exact" for each in (name, *family.also))
    kinds = [each.removeprefix(f"{name}-") for each, kind in VARIANTS.items() if kind.family == name]
    return "native, transformers" if through else "native", ", ".join(kinds)


def _groups(config: ModelConfig, name: str, family: Family) -> list[str]:
    groups = ["k, v" if config.latent is None else "latent, indexer keys" if config.latent.indexer else "latent"]
    groups += ["thinking state, if it thinks"] * (name in DENSE)
    return groups + [family.state] * bool(family.state)


def _biases(family: Family) -> list[str]:
    values = {"qkv_bias": family.qkv_bias, "o_bias": family.o_bias, "mlp_bias": family.mlp_bias}
    flags = {"qkv_bias": "attention_bias", "o_bias": "attention_bias", "mlp_bias": "mlp_bias"}
    return [
        f"{words} {'always' if values[name] else f'by `{flags[name]}`'}"
        for name, words in BIASES
        if values[name] is not False
    ]
