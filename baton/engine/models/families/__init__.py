"""The architectures that Baton computes itself: for each `model_type` a row, and a function config.json -> spec.

Read `common` first: it has the spec of a Llama-like decoder, which the functions of families change. A family with an
own function is 20 to 50 lines (docs/how-to/add-a-model.md). They load without torch.
"""

from __future__ import annotations

from baton.engine.models.families import (
    cohere,
    deepseek,
    gemma,
    glm,
    gpt_oss,
    granite,
    hybrid,
    llama,
    llama4,
    olmo,
    phi,
    qwen,
)
from baton.engine.models.spec import Family

FAMILIES: dict[str, Family] = llama.FAMILIES | qwen.FAMILIES | deepseek.FAMILIES | granite.FAMILIES | gemma.FAMILIES
FAMILIES |= phi.FAMILIES | olmo.FAMILIES | cohere.FAMILIES | glm.FAMILIES | gpt_oss.FAMILIES | llama4.FAMILIES
FAMILIES |= hybrid.FAMILIES
# Models for text and images. Their text model is served.
WRAPPERS = {
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
