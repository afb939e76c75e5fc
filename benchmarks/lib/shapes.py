"""Sizes of the benchmark models: parameters, bytes read per step, operations per prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

ITEMSIZE = {"bf16": 2, "fp32": 4}  # of weights that a checkpoint stores
WEIGHT_BYTES = {**ITEMSIZE, "int8": 1, "int4": 0.5625}  # int4 has a float16 scale for each group of 32
MAX_POSITIONS = 4096


def stored(dtype: str) -> str:
    """Return the dtype of the checkpoint, of the KV and of activations: bf16 for quantised weights."""
    return dtype if dtype in ITEMSIZE else "bf16"


@dataclass(frozen=True)
class Shape:
    """A Llama-shaped model. `tied`: the embedding table is also the output matrix."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool = False
    vocab: int = 32_000

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of one layer's matrices, joined by input: qkv, o, gate and up, down."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return ((self.hidden, qkv), (self.hidden, self.hidden), (self.hidden, 2 * self.ffn), (self.ffn, self.hidden))

    @property
    def layer_params(self) -> int:
        """Elements of the matrices of all layers."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears)

    @property
    def head_params(self) -> int:
        """Elements of the output matrix."""
        return self.vocab * self.hidden

    @property
    def read_params(self) -> int:
        """Elements of all matrices that a decode step reads: layers and output matrix, without the embedding table."""
        return self.layer_params + self.head_params

    def kv_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of K and V of `tokens` positions over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize * tokens

    def decode_bytes(self, batch: int, context: int, dtype: str) -> int:
        """Return the least bytes that a decode step of `batch` sequences reads: each weight and each KV once."""
        kv = self.kv_bytes(batch * context, ITEMSIZE[stored(dtype)])
        return int(self.read_params * WEIGHT_BYTES[dtype]) + kv

    def prefill_flops(self, tokens: int) -> int:
        """Return the operations of one prompt: layers, causal attention, and the output of the last row."""
        attention = 4 * self.layers * self.heads * self.head_dim * tokens * (tokens + 1) // 2
        return 2 * self.layer_params * tokens + attention + 2 * self.head_params


SIZES = {
    "S": Shape(hidden=288, ffn=768, layers=6, heads=6, kv_heads=6, tied=True),
    "M": Shape(hidden=768, ffn=2048, layers=12, heads=12, kv_heads=4),
    "L": Shape(hidden=2048, ffn=5632, layers=22, heads=32, kv_heads=4),
}
TINY = {
    "S": Shape(hidden=64, ffn=128, layers=1, heads=2, kv_heads=2, tied=True, vocab=1024),
    "M": Shape(hidden=64, ffn=192, layers=2, heads=4, kv_heads=2, vocab=1024),
    "L": Shape(hidden=128, ffn=256, layers=2, heads=4, kv_heads=2, vocab=1024),
}
LABELS = {"S": "15m", "M": "125m", "L": "1b"}


def read_shape(folder: Path) -> Shape:
    """Return the shape in a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    return Shape(
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        tied=config["tie_word_embeddings"],
        vocab=config["vocab_size"],
    )
