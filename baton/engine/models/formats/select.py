"""The weight format that config.json declares."""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.models.formats import bitsandbytes, compressed_tensors, gguf, gptq, torchao
from baton.engine.models.formats.base import WeightFormat
from baton.engine.models.formats.floats import block_of, float8, mxfp4_experts, nvfp4
from baton.engine.models.json_fields import Fields

KEYS = ("quantization_config", "compression_config")


def _fp8(section: Fields) -> WeightFormat:
    if not section.has("weight_block_size"):
        return float8("fp8 tensor", "_scale_inv", (0, 0))
    rows, columns = block_of(section, "weight_block_size")
    return float8(f"fp8 block {rows} x {columns}", "_scale_inv", (rows, columns))


def _modelopt(section: Fields) -> WeightFormat:
    kind = section.text("quant_algo")
    if kind == "FP8":
        return float8("fp8 tensor", "_scale", (0, 0))
    if kind == "NVFP4":
        return nvfp4(".weight", ".weight_scale_2", divides=False)
    raise section.error("quant_algo", f"{kind!r} is not supported (supported: FP8, NVFP4)")


METHODS: dict[str, Callable[[Fields], WeightFormat]] = {
    "awq": gptq.parse_awq,
    "bitsandbytes": bitsandbytes.parse,
    "compressed-tensors": compressed_tensors.parse,
    "fbgemm_fp8": lambda _: float8("fp8 channel", "_scale", (1, 0), of_stack=(0, 1)),
    "fp8": _fp8,
    "gguf": gguf.parse,
    "gptq": gptq.parse_gptq,
    "modelopt": _modelopt,
    "mxfp4": lambda _: mxfp4_experts(),
    "torchao": torchao.parse,
}


def declared_format(fields: Fields) -> WeightFormat | None:
    """Return the format that config.json declares, or None. Raises CheckpointError with the key if it is unknown."""
    for key in KEYS:
        if fields.has(key):
            section = fields.section(key)
            by_bits = section.values.get("load_in_8bit") or section.values.get("load_in_4bit")
            method = section.text("quant_method", "bitsandbytes" if by_bits else "")
            if method not in METHODS:
                raise section.error("quant_method", f"{method!r} is not supported (supported: {', '.join(METHODS)})")
            return METHODS[method](section)
    return None
