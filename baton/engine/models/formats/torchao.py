"""torchao: tensors of subclasses, as transformers 5.23 with torchao 0.18 writes them to safetensors.

`layer.weight` is stored as `layer._weight_qdata`, `layer._weight_scale` and `layer._weight_zero_point`. The metadata of
the file has the class and the block of each such tensor in JSON. Nothing is unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.quantized import Scheme
from baton.engine.models.formats.base import (
    FLOAT8,
    FLOATS,
    Levels,
    Source,
    WeightFormat,
    finite,
    nibbles,
    packed_scheme,
    spread,
    unsigned,
)
from baton.engine.models.formats.floats import scales_of
from baton.engine.models.json_fields import Fields

DATA = re.compile(r"(?P<layer>.+)\._(?P<kind>[a-z_]+?)_qdata")
INT8, INTX, FLOAT, INT4 = "Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor", "Int4Tensor"
CLASSES = (INT8, INTX, FLOAT, INT4)


def parse(section: Fields) -> WeightFormat:
    """Return the format. The classes of tensors are checked when they are read."""
    kind = section.values.get("quant_type")
    inner = next(iter(kind.values()), None) if isinstance(kind, dict) else kind
    name = inner.get("_type", "") if isinstance(inner, dict) else inner
    summary = f"torchao {name if isinstance(name, str) else ''}".rstrip()
    return WeightFormat(summary, _wide_name, _read, scheme_of=_scheme)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a subclass: its class, the inputs of a block (0: all), and the bits of its levels."""

    kind: str
    group: int
    bits: int
    by_output: bool


def _wide_name(name: str, dtype: str) -> str | None:
    del dtype
    found = DATA.fullmatch(name)
    return f"{found['layer']}.{found['kind']}" if found else None


def _scheme(source: Source, name: str) -> Scheme | None:
    stored = _stored(source, name)
    return packed_scheme(stored.bits, stored.group) if stored.kind in (INT8, INTX) else None


def _read(source: Source, name: str, shape: Sequence[int]) -> Levels | Tensor:
    """Return a layer [n, k]: levels of integers in groups, and others in float32."""
    stored, (n, k) = _stored(source, name), shape
    data, scale, zero = (_part(name, end) for end in ("qdata", "scale", "zero_point"))
    group = stored.group or k
    if stored.kind == FLOAT:
        wide = source.part(data, (n, k), FLOAT8).float()
        return wide.mul_(scales_of(source, scale, shape, (int(stored.by_output), stored.group), FLOATS))
    if stored.kind == INT4:
        levels = nibbles(source.part(data, (n, k // 2), ("I8", "U8")).view(torch.uint8)) ^ 8
        shape = (-(-k // group), n)
        by_group = (finite(source, each, source.part(each, shape, FLOATS).float().t()) for each in (scale, zero))
        scales, zeros = (spread(each, group, k, 1) for each in by_group)
        return (levels.float() - 8) * scales + zeros
    groups = (n, -(-k // group))
    levels, zeros = unsigned(source, data, (n, k), stored.bits), unsigned(source, zero, groups, stored.bits)
    middle = None if bool((zeros == 2 ** (stored.bits - 1)).all()) else zeros
    scales = finite(source, scale, source.part(scale, groups, FLOATS))
    return Levels(levels, scales, middle, stored.bits, stored.group)


def _part(name: str, ending: str) -> str:
    layer, _, kind = name.rpartition(".")
    return f"{layer}._{kind}_{ending}"


def _stored(source: Source, name: str) -> Stored:
    """Return what the metadata has about a tensor. Raises CheckpointError if it is not one that `read` can read."""
    data, text = _part(name, "qdata"), source.metadata(name)
    try:
        found = json.loads(text) if text else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise source.error(data, f"has no valid entry {name!r} in the metadata of its file")
    fields = Fields(str(source.error(data, "of torchao")), found)
    values, kind = fields.section("_data"), fields.text("_type")
    if kind not in CLASSES or "act_pre_scale" in fields.texts("_tensor_data_names"):
        raise fields.error("_type", f"{kind} is not supported (supported: {', '.join(CLASSES)}, without act_pre_scale)")
    rows, columns = (*values.integers("block_size"), 0, 0)[:2]
    whole = source.shape(data)
    if (kind != FLOAT and rows != 1) or rows not in (1, *whole[:1]) or columns < 1:
        raise values.error("block_size", f"{[rows, columns]} is not supported")
    bits = {INT8: 8, INT4: 4, FLOAT: 8}.get(kind) or _bits(values)
    return Stored(kind, 0 if columns == whole[-1] and kind != INT4 else columns, bits, rows == 1)


def _bits(values: Fields) -> int:
    name = values.section("target_dtype").text("_data")
    bits = {f"int{count}": count for count in range(2, 9)}.get(name, 0)
    if not bits:
        raise values.error("target_dtype", f"{name!r} is not supported")
    return bits
