"""GPTQ and AWQ: levels as columns of int32 words, float16 scales and zero levels by group.

GPTQ as written by AutoGPTQ 0.7 and GPTQModel: `qweight` packs inputs. Format `gptq` stores zero levels minus 1, format
`gptq_v2` stores them as they are. `g_idx` is the group of each input. AWQ as written by AutoAWQ 0.2 (`gemm`): `qweight`
packs outputs, and eight outputs of a word have the order 0 2 4 6 1 3 5 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.models.formats.base import (
    FLOATS,
    Levels,
    Source,
    WeightFormat,
    finite,
    order_of,
    packed_scheme,
    unpacked,
    wide_names,
)
from baton.engine.models.json_fields import Fields

PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of eight outputs in a word of AWQ
CHANGING = ("adapter", "rotation", "is_marlin_format")  # keys that would change weights or layout


def parse_gptq(section: Fields) -> WeightFormat:
    """Return the format of `quantization_config`. Raises CheckpointError with the key if it is not one of those."""
    bits, form = section.integer("bits"), section.text("checkpoint_format", section.text("format", "gptq"))
    if bits not in (2, 3, 4, 8):
        raise section.error("bits", f"must be 2, 3, 4 or 8, got {bits}")
    if form not in ("gptq", "gptq_v2"):
        raise section.error("checkpoint_format", f"{form!r} is not supported")
    if section.text("pack_dtype", "int32") != "int32":
        raise section.error("pack_dtype", "must be int32")
    for key in CHANGING:
        if section.values.get(key):
            raise section.error(key, "is not supported")
    for layers, changed in section.section("dynamic").values.items():  # "-:" are layers that are not quantised
        if changed and not layers.startswith("-:"):
            raise section.error("dynamic", f"with settings of its own for {layers!r} is not supported")
    ordered, offset = section.flag("desc_act", False), int(form == "gptq")
    return WordLevels(form, bits, _group_size(section), ordered, offset).format()


def parse_awq(section: Fields) -> WeightFormat:
    """Return the format of `quantization_config`. Raises CheckpointError with the key if it is not `gemm` in 4 bits."""
    bits = section.integer("bits", section.values.get("w_bit"))
    form = section.text("version", section.text("format", "gemm")).lower()
    if bits != 4:
        raise section.error("bits", f"must be 4, got {bits}")
    if form != "gemm" or section.text("backend", "") == "llm-awq":
        raise section.error("version", f"{form!r} is not supported, only gemm")
    if not section.flag("zero_point", True):
        raise section.error("zero_point", "must be true")
    size = section.integer("q_group_size", 0, low=-1) or _group_size(section)
    return WordLevels("awq", bits, max(size, 0), ordered=False, offset=0).format()


def _group_size(section: Fields) -> int:
    return max(section.integer("group_size", 128, low=-1), 0)


@dataclass(frozen=True, slots=True)
class WordLevels:
    """Levels in `qweight`, `qzeros` and `scales`. `size` 0 means that a row is one group."""

    name: str
    bits: int
    size: int
    ordered: bool
    offset: int

    def format(self) -> WeightFormat:
        kind = f"group {self.size}" if self.size else "one group"
        summary = f"{self.name} int{self.bits} {kind}" + (" in any order" if self.ordered else "")
        scheme = None if self.ordered else packed_scheme(self.bits, self.size)
        return WeightFormat(summary, wide_names(".qweight", ".weight", ("I32",)), self.read, scheme)

    def read(self, source: Source, name: str, shape: Sequence[int]) -> Levels:
        """Return levels [n, k], scales and zero levels [n, groups]."""
        (n, k), layer, bits = shape, name.removesuffix(".weight"), self.bits
        groups = -(-k // self.size) if self.size else 1
        scales = finite(source, f"{layer}.scales", source.part(f"{layer}.scales", (groups, n), FLOATS).t().contiguous())
        zeros = self._zeros(source, layer, (groups, n)).t().contiguous()
        if self.name == "awq":
            levels = self._by_outputs(source, f"{layer}.qweight", (k, n)).t().contiguous()
        else:
            words = source.part(f"{layer}.qweight", (-(-k * bits // 32), n), ("I32",))
            levels = unpacked(words.t(), bits)[:, :k]
        middle = None if bool((zeros == 2 ** (bits - 1)).all()) else zeros
        order = self._order(source, f"{layer}.g_idx", k, groups)
        return Levels(levels, scales, middle, bits, self.size, order)

    def _by_outputs(self, source: Source, name: str, shape: tuple[int, int]) -> Tensor:
        """Return unsigned levels [rows, n] of a tensor that packs outputs."""
        (rows, n), bits = shape, self.bits
        levels = unpacked(source.part(name, (rows, -(-n * bits // 32)), ("I32",)), bits)
        if self.name == "awq":
            levels = levels.view(rows, -1, len(PLACES))[:, :, PLACES].reshape(rows, -1)
        return levels[:, :n]

    def _zeros(self, source: Source, layer: str, shape: tuple[int, int]) -> Tensor:
        zeros = self._by_outputs(source, f"{layer}.qzeros", shape)
        most = 2**self.bits - self.offset
        if zeros.numel() and int(zeros.max()) >= most:  # libraries read it as 0 or as 2^bits
            raise source.error(f"{layer}.qzeros", f"has the zero level {most}, which is ambiguous in this format")
        return zeros + self.offset

    def _order(self, source: Source, name: str, k: int, groups: int) -> Tensor | None:
        if name not in source:
            return None
        order = order_of(source, name, k, groups)
        if not self.ordered and not torch.equal(order, torch.arange(k) // (self.size or k)):
            raise source.error(name, "has groups in another order, but desc_act is false")
        return order if self.ordered else None
