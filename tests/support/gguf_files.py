"""Writes GGUF files of small models as the converters of llama.cpp do, with the package gguf."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'baton-serve[gguf]')")

PAIRED = ("llama", "granite", "smollm3", "arcee")  # q and k are written for interleaved rotations
EPS = ("rms_norm_eps", "norm_epsilon", "layer_norm_eps", "norm_eps")
PLUS_ONE = ("gemma2", "gemma3", "nemotron")
FLOATS = {"F32": np.float32, "F16": np.float16}
_TYPES = {
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    bool: gguf.GGUFValueType.BOOL,
    str: gguf.GGUFValueType.STRING,
}
Tensors = dict[str, torch.Tensor]


def stored(wide: torch.Tensor, kind: str) -> tuple[np.ndarray, torch.Tensor]:
    """Return a tensor in a type of GGUF, and the values that it has there."""
    from gguf.quants import dequantize, quantize

    number = gguf.GGMLQuantizationType[kind]
    data = wide.float().numpy()
    if kind in FLOATS:
        data = data.astype(FLOATS[kind])
        return data, torch.from_numpy(data.astype(np.float32))
    packed = random_blocks(data.shape, number) if kind.endswith("_K") else quantize(data, number)
    return packed, torch.from_numpy(dequantize(packed, number))


def random_blocks(shape: tuple[int, ...], kind: Any) -> np.ndarray:
    """Return blocks of a type that the package cannot write: random bytes, but small scales without NaN."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(shape[-1] + shape[0])
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, nbytes), dtype=np.uint8)
    scales = np.full(blocks.shape[:-1], 0.0008, np.float16)[..., None].view(np.uint8)
    for start in {"Q4_K": (0, 2), "Q6_K": (nbytes - 2,)}[kind.name]:
        blocks[..., start : start + 2] = scales
    return blocks.reshape(*shape[:-1], -1)


class Export:
    """A GGUF file of a checkpoint of transformers, in `folder`. `keys` are further metadata."""

    def __init__(
        self, folder: Path, path: Path, architecture: str, kind: str = "F32", *, largest: int = 0, **keys: Any
    ) -> None:
        self.architecture, self.kind = architecture, kind
        self.writer = gguf.GGUFWriter(path, architecture, split_max_tensors=largest)
        self.wide: Tensors = {}  # values in the file, under the names of the checkpoint
        self._metadata(folder, keys)
        self._tokenizer(folder)
        self._tensors(load_file(folder / "model.safetensors"))
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _metadata(self, folder: Path, keys: dict[str, Any]) -> None:
        config, name, writer = json.loads((folder / "config.json").read_text()), self.architecture, self.writer
        rope = config.get("rope_parameters") or {}
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or hidden // heads
        self.heads = {"attn_q": heads, "attn_k": config["num_key_value_heads"]}
        eps = next(config[key] for key in EPS if key in config)
        found = {
            "context_length": config["max_position_embeddings"],
            "embedding_length": hidden,
            "block_count": config["num_hidden_layers"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": heads,
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        }
        self.layers = config["num_hidden_layers"]
        experts = config.get("num_local_experts") or config.get("num_experts")
        if experts:
            found |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
            found |= {"expert_feed_forward_length": config.get("moe_intermediate_size", config["intermediate_size"])}
        keys = {"tokenizer.ggml.pre": "gpt-2"} | keys
        for key, value in found.items():
            writer.add_uint32(f"{name}.{key}", value)
        theta = rope.get("rope_theta") or rope.get("full_attention", {}).get("rope_theta")
        if theta:
            writer.add_rope_freq_base(theta)
        writer.add_float32(f"{name}.attention.layer_norm_{'rms_' * ('rms_norm_eps' in config)}epsilon", eps)
        for key, value in keys.pop("tensors", {}).items():  # further float32 tensors
            writer.add_tensor(key, np.array(value, np.float32))
        for key, value in keys.items():
            prefix = "" if key.startswith("tokenizer.") else f"{name}."
            writer.add_key_value(f"{prefix}{key}", value, _TYPES[type(value)])

    def _tokenizer(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        model = json.loads(path.read_text())["model"] if path.exists() else {"vocab": {}, "merges": []}
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
        tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
        special = {t["content"] for t in json.loads(path.read_text())["added_tokens"]} if path.exists() else set()
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_token_list(tokens)
        self.writer.add_token_types([3 if t in special else 5 if t.startswith("[PAD") else 1 for t in tokens])
        self.writer.add_token_merges([" ".join(pair) for pair in model["merges"]])

    def _tensors(self, tensors: Tensors) -> None:
        names = gguf.get_tensor_name_map(_architecture(self.architecture), self.layers)
        for name, tensor in sorted(_stacked(tensors).items()):
            stem, end = name.rsplit(".", 1) if name.endswith((".weight", ".bias")) else (name, "weight")
            target = names.get_name(stem)
            assert target is not None, name
            kind = self.kind if tensor.dim() > 1 and "ffn_gate_inp" not in target else "F32"
            data, wide = stored(self._changed(tensor.float(), target, end), kind)
            number = gguf.GGMLQuantizationType[kind]
            self.writer.add_tensor(f"{target}.{end}", data, raw_dtype=None if kind in FLOATS else number)
            self.wide[name] = self._restored(wide, target, end)

    def _changed(self, tensor: torch.Tensor, target: str, end: str) -> torch.Tensor:
        if self._has_one(target, end):
            return tensor + 1
        heads = self._paired(target)
        if not heads:
            return tensor
        return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    def _restored(self, wide: torch.Tensor, target: str, end: str) -> torch.Tensor:
        if self._has_one(target, end):
            return wide - 1
        heads = self._paired(target)
        return wide.view(heads, -1, 2, *wide.shape[1:]).transpose(1, 2).reshape(wide.shape) if heads else wide

    def _has_one(self, target: str, end: str) -> bool:
        return self.architecture in PLUS_ONE and target.endswith("norm") and end == "weight"

    def _paired(self, target: str) -> int:
        return self.heads.get(target.rpartition(".")[2], 0) if self.architecture in PAIRED else 0


def _architecture(name: str) -> Any:
    return next(number for number, text in gguf.MODEL_ARCH_NAMES.items() if text == name)


def _stacked(tensors: Tensors) -> Tensors:
    """Return the tensors with those of all experts as one."""
    found, experts = dict[str, torch.Tensor](), defaultdict[str, dict[int, torch.Tensor]](dict)
    for name, tensor in tensors.items():
        each = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if each is None:
            found[name] = tensor
        else:
            experts[f"{each[1]}.{each[3]}.weight"][int(each[2])] = tensor
    return found | {name: torch.stack([rows[i] for i in range(len(rows))]) for name, rows in experts.items()}
