"""Tensors of GGUF files (`baton.gguf`) under the names of the Hub's checkpoints, and the changes of llama.cpp undone.

Layers of Q8_0 and Q4_0 can stay packed: levels of 8 or 4 bits in groups of 32. The package `gguf` widens the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from baton.engine.kernels.quantized import Scheme
from baton.engine.models.formats.base import Levels, Source, WeightFormat, finite
from baton.engine.models.json_fields import Fields
from baton.gguf.architectures import ARCHITECTURES, GATES, UPS, Architecture
from baton.gguf.header import TensorInfo, read_header

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
BITS = {"Q8_0": 8, "Q4_0": 4}
GROUP = 32
UNREAD = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # are in config.json


class GgufFile:
    """The tensors of one file, as `safetensors.safe_open` has them. Quantised ones are bytes [.., bytes of a row]."""

    def __init__(self, path: Path) -> None:
        self._infos = read_header(path).tensors
        self._bytes = np.memmap(path, mode="c", dtype=np.uint8)

    def keys(self) -> Sequence[str]:
        return list(self._infos)

    def get_slice(self, name: str) -> GgufSlice:
        return GgufSlice(self._infos[name])

    def get_tensor(self, name: str) -> Tensor:
        info = self._infos[name]
        stored = torch.from_numpy(self._bytes[info.start : info.start + info.nbytes])
        if info.kind in PLAIN:
            return stored.view(PLAIN[info.kind]).view(info.shape)
        return stored.view(*info.shape[:-1], -1)

    def metadata(self) -> dict[str, str]:
        return {}


@dataclass(frozen=True, slots=True)
class GgufSlice:
    """Dtype and shape of a tensor."""

    info: TensorInfo

    def get_dtype(self) -> str:
        return self.info.kind

    def get_shape(self) -> Sequence[int]:
        return self.info.shape


def parse(section: Fields) -> WeightFormat:
    """Return the format of a folder that `baton.gguf` wrote."""
    name = section.text("architecture")
    if name not in ARCHITECTURES:
        raise section.error("architecture", f"{name!r} is not supported (supported: {', '.join(ARCHITECTURES)})")
    reader = _Reader(ARCHITECTURES[name], section.integer("heads"), section.integer("kv_heads"))
    kinds = section.texts("types")
    return WeightFormat(
        f"gguf {' '.join(kinds)}",
        lambda stored, _: reader.row.wide_name(stored),
        reader.read,
        scheme_of=reader.scheme if BITS.keys() & set(kinds) else None,
        unread=(*UNREAD, f"{UPS}.weight"),
        dimensions=(1, 2, 3),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    row: Architecture
    heads: int
    kv_heads: int

    def read(self, source: Source, name: str, shape: Sequence[int]) -> Levels | Tensor:
        """Return a tensor by its name in a checkpoint of the Hub."""
        stored = source.stored(name)
        if f".{GATES}." in stored:
            halves = (shape[0], shape[1] // 2, shape[2])
            both = [_wide(source, each, halves) for each in (stored, stored.replace(GATES, UPS))]
            return torch.cat(both, 1)
        heads = self._pairs(stored)
        if source.dtype(stored) in BITS and len(shape) == 2:
            levels = _levels(source, stored, shape)
            order = torch.arange(shape[0]) if not heads else _halves(torch.arange(shape[0]), heads)
            return Levels(levels.levels[order], levels.scales[order], None, levels.bits, GROUP)
        wide = _wide(source, stored, shape)
        if self.row.plus_one and stored.endswith("norm.weight"):
            wide = wide - 1
        return _halves(wide, heads) if heads else wide

    def scheme(self, source: Source, name: str) -> Scheme | None:
        """Return how a matrix can stay packed."""
        kind = source.dtype(source.stored(name))
        return Scheme(BITS[kind], GROUP) if kind in BITS and len(source.shape(source.stored(name))) == 2 else None

    def _pairs(self, stored: str) -> int:
        """Return the heads whose rows are in pairs, or 0."""
        part = stored.split(".")[-2]
        return {"attn_q": self.heads, "attn_k": self.kv_heads}.get(part, 0) if self.row.paired else 0


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Return rows with the two of each pair half a head apart."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _levels(source: Source, stored: str, shape: Sequence[int]) -> Levels:
    """Return a matrix of blocks: a float16 scale, then 32 signed bytes, or 16 bytes with the levels i and i + 16."""
    kind = source.dtype(stored)
    _check_shape(source, stored, shape)
    blocks = source.part(stored, None, (kind,)).view(shape[0], shape[1] // GROUP, -1)
    scales = finite(source, stored, blocks[..., :2].contiguous().view(torch.float16)[..., 0])
    rest = blocks[..., 2:]
    levels = rest ^ 128 if kind == "Q8_0" else torch.cat((rest & 15, rest >> 4), -1)
    return Levels(levels.reshape(shape[0], shape[1]), scales, None, BITS[kind], GROUP)


def _wide(source: Source, stored: str, shape: Sequence[int]) -> Tensor:
    """Return a tensor in float32, or in its own float type."""
    kind = source.dtype(stored)
    _check_shape(source, stored, shape)
    part = source.part(stored, None, (kind,))
    if kind in PLAIN:
        return part
    from gguf import GGMLQuantizationType, dequantize

    try:
        wide = dequantize(part.numpy(), GGMLQuantizationType[kind])
    except NotImplementedError as error:
        raise source.error(stored, f"has the type {kind}, which the package gguf cannot widen") from error
    return finite(source, stored, torch.from_numpy(wide))


def _check_shape(source: Source, stored: str, shape: Sequence[int]) -> None:
    found = source.shape(stored)
    if found != list(shape):
        raise source.error(stored, f"has shape {found}, expected {list(shape)}")
