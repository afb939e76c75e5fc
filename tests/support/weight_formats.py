"""Layers of quantised checkpoints by the formats' own libraries, where these are small, and else by short writers.

Each writer returns the tensors of a layer by the rest of their name, and the values that they stand for. The writers of
GPTQ, AWQ and bitsandbytes imitate `QuantLinear.pack` of AutoGPTQ 0.7.1, `WQLinear_GEMM.from_linear` of AutoAWQ 0.2.7
and `quantize_4bit` of bitsandbytes 0.50.2, which are too large to install. Their tensors were compared once: only ties
of fp4 were rounded in another way.
"""

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

Layer = tuple[dict[str, Tensor], Tensor]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
NF4 = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
FP4 = [0, 0.0052083333, 0.6666667, 1, 0.3333333, 0.5, 0.1666667, 0.25]
CODES = {"nf4": NF4, "fp4": FP4 + [-value for value in FP4]}


def words(levels: Tensor, bits: int) -> Tensor:
    """Return unsigned levels [n, count] as a stream of bits in int32 words, the lowest bits first."""
    bit = (levels.numpy().astype(np.uint8)[..., None] >> np.arange(bits)) & 1
    stream = np.packbits(bit.reshape(len(levels), -1).astype(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(stream.view(np.int32).copy())


def integers(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned levels [n, k], float16 scales and zero levels [n, groups], rounded to nearest."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    if symmetric:
        scale, zero = 2 * torch.maximum(-low, high) / (2**bits - 1), torch.full(low.shape, 2.0 ** (bits - 1))
    else:
        scale = (high - low) / (2**bits - 1)
        zero = (-low / scale).round().clamp(1, 2**bits - 1)
    scale = scale.half()
    levels = (grouped / scale.float()[..., None] + zero[..., None]).round().clamp(0, 2**bits - 1)
    return levels.flatten(1).to(torch.uint8), scale, zero.to(torch.uint8)


def gptq(
    weight: Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool = False,
    ordered: bool = False,
    version: int = 1,
    biases: bool = False,
) -> Layer:
    """Quantise a layer. AutoGPTQ writes `biases` of zeros for layers without one."""
    k = weight.shape[1]
    group = k if group == -1 else group
    order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if ordered else torch.arange(k)
    levels, scale, zero = integers(weight[:, order], bits, group, symmetric=symmetric)
    back = order.argsort()
    g_idx = (back // group).int()
    values = scale.float()[:, g_idx] * (levels[:, back].float() - zero.float()[:, g_idx])
    tensors = {"qweight": words(levels[:, back], bits).t(), "qzeros": words((zero - (2 - version)).t(), bits)}
    tensors |= {"bias": torch.zeros(len(weight), dtype=torch.half)} if biases else {}
    return {name: each.contiguous() for name, each in (tensors | {"scales": scale.t(), "g_idx": g_idx}).items()}, values


def awq(weight: Tensor, group: int) -> Layer:
    levels, scale, zero = integers(weight, 4, group, symmetric=False)
    values = scale.float().repeat_interleave(group, 1) * (levels.float() - zero.float().repeat_interleave(group, 1))
    packed = [words(each.t().unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 4) for each in (levels, zero)]
    return {"qweight": packed[0], "qzeros": packed[1], "scales": scale.t().contiguous()}, values


def bitsandbytes_4bit(weight: Tensor, kind: str, *, nested: bool, storage: torch.dtype = torch.uint8) -> Layer:
    blocks, code = weight.reshape(-1, 64), torch.tensor(CODES[kind])
    most = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    tensors = {"weight.absmax": most, "weight.quant_map": code}
    if nested:
        offset, outer_code = most.mean(), torch.linspace(-1, 1, 256)
        outer = torch.nn.functional.pad(most - offset, (0, -len(most) % 256)).view(-1, 256)
        largest = outer.abs().amax(1)
        levels = outer.flatten()[: len(most), None] / largest.repeat_interleave(256)[: len(most), None] - outer_code
        levels = levels.abs().argmin(1).to(torch.uint8)
        most = outer_code[levels.long()] * largest.repeat_interleave(256)[: len(most)] + offset
        tensors |= {"weight.absmax": levels, "weight.nested_absmax": largest, "weight.nested_quant_map": outer_code}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
    nearest = (blocks / most[:, None])[..., None].sub(code).abs().argmin(-1).to(torch.uint8)
    packed = nearest.view(-1, 2)
    tensors["weight"] = ((packed[:, :1] << 4) | packed[:, 1:]).view(-1).view(storage)[:, None]
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode())).byte()
    return tensors, (code[nearest.long()] * most[:, None]).view_as(weight)


def bitsandbytes_8bit(weight: Tensor) -> Layer:
    most = weight.abs().amax(1)
    levels = (weight * (127 / most[:, None])).round().to(torch.int8)
    tensors = {"weight": levels, "SCB": most, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return tensors, levels.float() * (most / 127)[:, None]


def fp8(weight: Tensor, block: list[int] | None) -> Layer:
    """Quantise as transformers saves `quant_method: fp8`."""
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=block, scale_fmt=None))
    tensors = Fp8Quantize(quantizer).convert({"weight": weight})
    scale = tensors["weight_scale_inv"]
    rows, columns = (math.ceil(size / count) for size, count in zip(weight.shape, scale.shape, strict=True))
    wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    if block is None:
        tensors["weight_scale_inv"] = scale.view(())
    return tensors, tensors["weight"].float() * wide


def modelopt_fp8(weight: Tensor) -> Layer:
    scale = weight.abs().max() / 448
    levels = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": levels, "weight_scale": scale, "input_scale": torch.ones(())}, levels.float() * scale


def modelopt_nvfp4(weight: Tensor) -> Layer:
    """NVFP4 of ModelOpt differs from that of compressed-tensors in names, and in a whole scale that multiplies."""
    tensors, values = compressed(weight, "nvfp4-pack-quantized", NVFP4)
    whole = 1 / tensors["weight_global_scale"]
    named = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"], "weight_scale_2": whole}
    return named, values


INT4: torch.dtype = vars(torch)["int4"]  # without a type
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}


def compressed(weight: Tensor, form: str, weights: dict[str, Any]) -> Layer:
    """Quantise floats by the compressor of compressed-tensors."""
    scheme, n = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights}), len(weight)
    strategy, size = weights["strategy"], weights.get("group_size", weight.shape[1])
    most = {"tensor": weight.abs().max().view(1), "channel": weight.abs().amax(1, keepdim=True)}.get(strategy)
    if strategy == "block":
        rows, columns = weights["block_structure"]
        whole = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -n % rows))
        most = whole.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).abs().amax((1, 3))
    elif most is None:
        most = weight.unflatten(1, (-1, size)).abs().amax(2)
    state = {"weight": weight, "weight_scale": most / (448 if weights["num_bits"] == 8 else 6)}
    if form == "mxfp4-pack-quantized":
        state["weight_scale"] = 2 ** state["weight_scale"].log2().ceil()
    if form == "nvfp4-pack-quantized":
        state["weight_global_scale"] = (448 * 6 / weight.abs().max()).view(1)
        state["weight_scale"] = (state["weight_scale"] * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors = {name: tensor.contiguous() for name, tensor in compressor.compress(state, scheme).items()}
    if form == "nvfp4-pack-quantized":  # the decompressor rounds to bfloat16
        levels = unpack_fp4_from_uint8(tensors["weight_packed"], *weight.shape, dtype=torch.float32)
        scale, whole = tensors["weight_scale"].float(), tensors["weight_global_scale"]
        return tensors, dequantize(levels, scale, args=scheme.weights, dtype=torch.float32, global_scale=whole)
    return tensors, compressor.decompress(dict(tensors), scheme)["weight"].float()


def torchao(tensors: dict[str, Tensor], names: list[str], kind: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Quantise the named weights in `tensors` as transformers saves `quant_method: torchao`. Return what the file has:
    tensors and metadata. `tensors` get the values that they stand for.
    """
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    by_group = IntxWeightOnlyConfig(weight_dtype=INT4, granularity=PerGroup(32))
    by_row = Float8WeightOnlyConfig() if kind == "float8" else Int8WeightOnlyConfig()
    state = dict(tensors)
    for name in names:
        linear: Any = torch.nn.Linear(1, 1, bias=False)
        linear.weight = torch.nn.Parameter(tensors[name].clone())
        quantize_(linear, by_group if kind == "int4" or ("int4" in kind and "k_proj" in name) else by_row)
        linear.weight.scale.copy_(linear.weight.scale.half())  # kernels hold scales of groups in float16
        state[name] = linear.weight.data
        tensors[name].copy_(linear.weight.dequantize())
    made: tuple[dict[str, Tensor], dict[str, str]] = flatten_tensor_state_dict(state)
    return made


def torchao_int4(weight: Tensor, name: str) -> tuple[dict[str, Tensor], dict[str, str], Tensor]:
    """Quantise as `int4_row_quantize_zp` and `pack_int4` of mslk, which need a GPU, do for `Int4Tensor`."""
    grouped = weight.unflatten(1, (-1, 32))
    low = grouped.amin(2)
    scale = (grouped.amax(2) - low) / 15
    zero = low + scale * 8
    levels = ((grouped - low[..., None]) / scale[..., None]).round().clamp(0, 15) - 8
    flat = levels.flatten(1).to(torch.int8)
    parts = {"qdata": (flat[:, ::2] & 15) | (flat[:, 1::2] << 4), "scale": scale.t(), "zero_point": zero.t()}
    layer, _, last = name.rpartition(".")
    data = {"_type": "Int4Tensor", "_data": {"block_size": [1, 32]}, "_tensor_data_names": list(parts)}
    tensors = {f"{layer}._{last}_{part}": tensor.contiguous() for part, tensor in parts.items()}
    return tensors, {name: json.dumps(data)}, (levels * scale[..., None] + zero[..., None]).flatten(1)
