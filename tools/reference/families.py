"""Part of docs/reference/models.md: the model families that Baton serves."""

from __future__ import annotations

from baton.engine.models.config import FAMILIES, Family
from baton.engine.models.config_variants import DENSE
from tools.reference.pages import Page, code, table

HEAD = ("`model_type`", "`architectures`", "biases", "default `max_position_embeddings`", "sliding window", "thinking")
SLIDES = {"never": "no", "all": "in all layers or none", "flagged": "with `use_sliding_window`", "layers": "by layer"}
BIASES = (("qkv_bias", "q, k, v"), ("o_bias", "o"), ("mlp_bias", "MLP"))


def page() -> Page:
    """Return the page of models."""
    return Page("models.md", {"families": table(HEAD, (_row(*each) for each in FAMILIES.items()))})


def _row(name: str, family: Family) -> tuple[str, ...]:
    return (
        code(name),
        code(family.architecture),
        "; ".join(_biases(family)) or "none",
        f"{family.max_positions:,}",
        SLIDES[family.slides],
        "yes" if name in DENSE else "no",
    )


def _biases(family: Family) -> list[str]:
    values = {"qkv_bias": family.qkv_bias, "o_bias": family.o_bias, "mlp_bias": family.mlp_bias}
    flags = {"qkv_bias": "attention_bias", "o_bias": "attention_bias", "mlp_bias": "mlp_bias"}
    return [
        f"{words} {'always' if values[name] else f'by `{flags[name]}`'}"
        for name, words in BIASES
        if values[name] is not False
    ]
