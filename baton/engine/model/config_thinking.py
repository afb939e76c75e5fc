"""The part of config.json that makes a model one that thinks about its prompts (Thinking States, arXiv 2602.08332).

    "thinking": {"chunk_size": 4, "input_layer": 1, "output_layer": 3, "max_thought_tokens": 4,
                 "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

docs/thinking.md says what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.engine.model.fields import Fields

MAX_CHUNK, MAX_THOUGHT = 1024, 1024
KEYS = (
    "chunk_size",
    "input_layer",
    "output_layer",
    "max_thought_tokens",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


@dataclass(frozen=True, slots=True)
class ThinkingConfig:
    """Chunks have `chunk_size` tokens. Their state is added behind layer number `input_layer` (L_in, 1 is the first),
    and their hidden rows are those behind layer number `output_layer` (L_out).

    A thought begins with token `bos` and ends with token `eos`, or with its `max_thought_tokens`-th, `eos` counted. It
    is made as long as a chunk with `pad` for the compression block.
    """

    chunk_size: int
    input_layer: int
    output_layer: int
    max_thought_tokens: int
    bos: int
    eos: int
    pad: int


def parse_thinking(fields: Fields, family: str, layers: int, *, dense: bool) -> ThinkingConfig | None:
    """What config.json says of thinking, if it does. Raises CheckpointError naming the key."""
    if not fields.has("thinking"):
        return None
    if not dense:
        raise fields.error("thinking", f"is served with dense models with K and V in their cache, not with {family}")
    found = fields.section("thinking")
    if unknown := sorted(found.values.keys() - set(KEYS)):
        raise found.error(unknown[0], f"is not known (known: {', '.join(KEYS)})")
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
