"""Part of docs/reference/models.md: the model families that Baton serves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from baton.engine.models.config import WRAPPERS
from baton.engine.models.config_variants import DENSE
from baton.engine.models.families import FAMILIES
from baton.engine.models.spec import Family
from tools.reference.pages import Page, code, table

HEAD = ("`model_type`", "`architectures`", "difference from Llama", "biases", "default `max_position_embeddings`")
MORE = ("sliding window", "thinking", "cache groups: per token; per sequence")
SLIDES = {"never": "no", "all": "in all layers or none", "flagged": "with `use_sliding_window`"}
BIASES = (("qkv_bias", "q, k, v"), ("o_bias", "o"), ("mlp_bias", "MLP"))


def page() -> Page:
    """Return the page of models."""
    wrapped = table(("`model_type`", "`architectures`"), ((code(name), code(each)) for name, each in WRAPPERS.items()))
    families = table((*HEAD, *MORE), (_row(*each) for each in FAMILIES.items()))
    return Page("models.md", {"families": families, "wrappers": wrapped, "fallback": _fallback()})


def _fallback() -> str:
    """Return the results of `tools.fallback_models`."""
    results: dict[str, Any] = json.loads((Path(__file__).parent / "fallback.json").read_text())
    kinds = Counter(result for _, result, _ in results["models"].values())
    counts = ", ".join(f"{count} {result}" for result, count in kinds.most_common())
    exact = ", ".join(code(name) for name, (_, result, _) in results["models"].items() if result == "exact")
    rows = ((code(name), why) for name, (_, result, why) in results["models"].items() if result != "exact")
    return f"transformers {results['transformers']}, {results['date']}: {counts}.\n\n**Exact**: {exact}.\n\n" + table(
        ("`model_type`", "refused, or not tried, because"), rows
    )


def _row(name: str, family: Family) -> tuple[str, ...]:
    return (
        ", ".join(map(code, (name, *family.also))),
        code(family.architecture),
        family.differs,
        "; ".join(_biases(family)) or "none",
        f"{family.max_positions:,}",
        "no" if family.slides == "types" and family.window is None else SLIDES.get(family.slides, "by layer"),
        "yes" if name in DENSE else "no",
        "; ".join(_groups(name, family)),
    )


def _groups(name: str, family: Family) -> list[str]:
    groups = ["latent" if "latent attention" in family.differs else "k, v"]
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
