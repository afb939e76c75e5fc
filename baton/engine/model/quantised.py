"""Knows quantised checkpoints by what gives them away, so that they are refused by their method's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.engine.model.fields import Fields

REFUSED = "quantised weights are not supported; take the original checkpoint, in float32, bfloat16 or float16"
CONFIG_KEYS = ("quantization_config", "compression_config")

# By the end of a tensor's name. The first entry that any tensor of a checkpoint matches names its method.
NAMES = {
    ".g_idx": "GPTQ",
    ".qweight": "AWQ",
    ".qzeros": "AWQ or GPTQ",
    ".scales": "AWQ or GPTQ",
    ".SCB": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes",
    ".weight_packed": "compressed-tensors",
    "_scale_inv": "FP8",
}
# By dtype, as safetensors spell it; int32 and int64 may be buffers.
DTYPES = {"F8": "FP8", "F4": "FP4", "F6": "FP6", "I8": "int8", "U8": "uint8", "I4": "int4", "U4": "int4"}
# Scales beside weights: by themselves they do not tell the method, a dtype may.
SCALES = (".weight_scale", ".input_scale", ".weight_zero_point")


def refuse_quantised(fields: Fields) -> None:
    """Raises CheckpointError for a config.json that says how its weights are quantised."""
    for key in CONFIG_KEYS:
        if fields.has(key):
            section = fields.section(key)
            bits = section.values.get("load_in_8bit") or section.values.get("load_in_4bit")
            method = section.text("quant_method", "bitsandbytes" if bits else "unnamed")
            raise fields.error(key, f"({method}): {REFUSED}")


def quantised_as(dtypes: Mapping[str, str]) -> tuple[str, str] | None:
    """A tensor that gives a quantised checkpoint away, and the method; None for one that is not.

    `dtypes` holds each tensor's dtype by its name.
    """
    for ending, method in NAMES.items():
        for name in dtypes:
            if name.endswith(ending):
                return name, method
    for name, dtype in dtypes.items():
        method = DTYPES.get(dtype.partition("_")[0], "")
        if method:
            return name, method
    scale = next((name for name in dtypes if name.endswith(SCALES)), None)
    return (scale, "compressed-tensors or ModelOpt") if scale else None
