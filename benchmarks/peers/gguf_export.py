"""Exports a checkpoint of `benchmarks.lib.models` as a GGUF file in its own dtype, Q8_0 or Q4_0, without a vocabulary.

Inputs and outputs are token ids. llama.cpp's RoPE expects another order of the rows of Q and K; random weights keep
theirs, because the order does not change the time.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from benchmarks.lib.shapes import MAX_POSITIONS, read_shape

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TYPES = {"BF16": GGMLQuantizationType.BF16, "F32": GGMLQuantizationType.F32}
QUANTIZED = {"int8": GGMLQuantizationType.Q8_0, "int4": GGMLQuantizationType.Q4_0}


def exported(model: Path, cache: Path, weights: str) -> Path:
    """Return the GGUF file of a model folder with these weights, made at the first call."""
    path = cache / "gguf" / f"{model.name}{f'-{weights}' if weights in QUANTIZED else ''}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        _write(model, unfinished, QUANTIZED.get(weights))
        unfinished.rename(path)
    return path


def _write(model: Path, path: Path, kind: GGMLQuantizationType | None) -> None:
    shape = read_shape(model)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(MAX_POSITIONS)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("no_vocab")
    for name, dtype, data in _tensors(model / "model.safetensors"):
        if data.ndim == 1:  # llama.cpp has float32 norms
            writer.add_tensor(_name(name), np.ones(shape.hidden, np.float32))
        elif kind is not None:
            writer.add_tensor(_name(name), quantize(_wide(data), kind), raw_dtype=kind)
        else:
            writer.add_tensor(_name(name), data.view(np.uint8), raw_dtype=TYPES[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _wide(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if data.dtype == np.int16 else data


def _name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.weight"


def _tensors(path: Path) -> Iterator[tuple[str, str, np.ndarray[Any, Any]]]:
    """Yield name, dtype and data. bf16 data is int16, because numpy has no bf16."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = np.memmap(path, np.uint8, "r", offset=8 + length)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        kind = np.int16 if entry["dtype"] == "BF16" else np.float32
        yield name, entry["dtype"], data[begin:end].view(kind).reshape(entry["shape"])
