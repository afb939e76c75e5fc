"""bitsandbytes: int8 by output with `SCB`, and 4 bits (nf4, fp4) in blocks, with scales that may be quantised too.

As written by bitsandbytes 0.50. A layer in 4 bits has its shape and blocks in a JSON text, which is stored as bytes.
The high half of a byte is the first value, and blocks run through the rows. Outliers of activations are rounded like
all others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from baton.engine.models.formats.base import (
    BYTES,
    FLOATS,
    Levels,
    Source,
    WeightFormat,
    finite,
    packed_scheme,
    spread,
    unsigned,
    wide_names,
)
from baton.engine.models.json_fields import Fields

STATE = ".quant_state.bitsandbytes__"


def parse(section: Fields) -> WeightFormat:
    """Return the format of `quantization_config`. Raises CheckpointError if neither 8 nor 4 bits are declared."""
    eight = section.flag("load_in_8bit", False) or section.flag("_load_in_8bit", False)
    four = section.flag("load_in_4bit", False) or section.flag("_load_in_4bit", False)
    if eight == four:
        raise section.error("load_in_8bit", "or load_in_4bit must be true, and not both")
    if eight:
        names, unread = wide_names(".weight", ".weight", ("I8",)), (".weight_format",)
        return WeightFormat("bitsandbytes int8", names, _eight, packed_scheme(8, 0), unread=unread)
    kind = section.text("bnb_4bit_quant_type", "fp4")
    return WeightFormat(f"bitsandbytes {kind}", wide_names(STATE + kind, "", BYTES), partial(_four, kind))


def _eight(source: Source, name: str, shape: Sequence[int]) -> Levels:
    scale = source.part(f"{name.removesuffix('.weight')}.SCB", shape[:1], FLOATS).float() / 127
    scale = finite(source, f"{name.removesuffix('.weight')}.SCB", scale[:, None])
    return Levels(unsigned(source, name, shape, 8), scale, None, 8, 0)


def _four(kind: str, source: Source, name: str, shape: Sequence[int]) -> Tensor:
    state_name = f"{name}{STATE}{kind}"
    state = _state(source, state_name, shape)
    count, block = math.prod(shape), state.integer("blocksize")
    stored = source.part(name, None, (*BYTES, *FLOATS)).view(-1).view(torch.uint8)  # any `bnb_4bit_quant_storage`
    if stored.numel() != -(-count // 2):
        raise source.error(name, f"has {stored.numel()} bytes, expected {-(-count // 2)}")
    levels = torch.stack((stored >> 4, stored & 15), -1).view(-1)[:count]
    code = finite(source, f"{name}.quant_map", source.part(f"{name}.quant_map", (16,), FLOATS).float())
    scales = finite(source, f"{name}.absmax", _scales(source, name, state, -(-count // block)))
    return (code[levels.int()] * spread(scales, block, count, 0)).view(*shape)


def _state(source: Source, name: str, shape: Sequence[int]) -> Fields:
    try:
        values = json.loads(bytes(source.part(name, None, BYTES).flatten().tolist()))
    except ValueError as error:
        raise source.error(name, f"is not valid JSON: {error}") from error
    if not isinstance(values, dict) or values.get("shape") != list(shape):
        raise source.error(name, f"does not have the shape {list(shape)}")
    return Fields(str(source.error(name, "")).rstrip(), values)


def _scales(source: Source, name: str, state: Fields, blocks: int) -> Tensor:
    """Return the largest magnitude of each block."""
    if not state.has("nested_blocksize"):
        return source.part(f"{name}.absmax", (blocks,), FLOATS).float()
    nested = state.integer("nested_blocksize")
    levels = source.part(f"{name}.absmax", (blocks,), BYTES).int()
    outer = source.part(f"{name}.nested_absmax", (-(-blocks // nested),), FLOATS).float()
    code = source.part(f"{name}.nested_quant_map", (256,), FLOATS).float()
    offset = state.number("nested_offset", above=-math.inf)
    return code[levels] * spread(outer, nested, blocks, 0) + offset
