"""A Llama-shaped decoder that thinks between chunks of its prompt: training forward, and inference step by step.

It is dense and has no cache, because it is a readable reference. Parameter names are those of the checkpoint. Shapes: B
rows, T positions, c positions of a chunk, D hidden, N chunks, L thought tokens, V vocabulary.

A chunk i is positions [i * c, (i + 1) * c). Its state S_i, [c, D], is added to its rows after layer `input_layer`. The
thinking block reads the rows after layer `output_layer` and writes a short thought in tokens. The compression block
turns that thought into S_(i + 1). S_0 is zero.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from models import demo_model
from models.demo_model import Layer, Norm, Shape, Trunk, rotation


@dataclass(frozen=True)
class Thinking:
    """Sizes and special tokens of the thinking part. The field names are those of ``config.json``."""

    chunk_size: int = 2
    input_layer: int = 1
    output_layer: int = 3
    max_thought_tokens: int = 4  # including the end token
    bos_token_id: int = 1
    eos_token_id: int = 0
    pad_token_id: int = 2


class Thinker(nn.Module):
    """The thinking block T with its own unembedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.block = Layer(shape)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)


class Compressor(nn.Module):
    """The compression block C."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.block = Layer(shape)


class ThinkingModel(nn.Module):
    """Backbone, thinking block and compression block. Backbone and thoughts share the token embedding."""

    def __init__(self, shape: Shape, thinking: Thinking, end: int) -> None:
        super().__init__()
        self.shape, self.config, self.end = shape, thinking, end
        self.model = Trunk(shape)
        self.thinking = Thinker(shape)
        self.compression = Compressor(shape)
        demo_model.initialise(self, shape)

    def forward(self, ids: Tensor, states: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map ids [B, T] and states [B, T, D] to rows for `logits` and for `thought_logits`, [B, T, D] each.

        `positions` [B, T] are 0, 1, 2, ... by default.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1])[None]
        cos, sin = (table[positions][:, None] for table in rotation(self.shape, int(positions.max()) + 1))
        x: Tensor = self.model.embed_tokens(ids)
        read = x
        for number, layer in enumerate(self.model.layers, start=1):
            x = layer(x, cos, sin)
            if number == self.config.input_layer:
                x = x + states
            if number == self.config.output_layer:
                read = x
        return cast(Tensor, self.model.norm(x)), read

    def logits(self, rows: Tensor) -> Tensor:
        """Map [..., D] to [..., V]."""
        return functional.linear(rows, self.model.embed_tokens.weight)

    def thought_logits(self, rows: Tensor, written: Tensor) -> Tensor:
        """Map chunk rows [N, c, D] and thoughts [N, L], begin token first, to logits of the next token [N, L, V]."""
        x = torch.cat((rows, self.model.embed_tokens(written)), dim=1)
        x = self.thinking.block(x, *rotation(self.shape, x.shape[1]))[:, rows.shape[1] :]
        return cast(Tensor, self.thinking.lm_head(self.thinking.norm(x)))

    def compress(self, thought: list[int]) -> Tensor:
        """Return the state [c, D] of the next chunk from a thought, its end token included."""
        return self.compress_all([thought])[0]

    def compress_all(self, thoughts: list[list[int]]) -> Tensor:
        """Return the states [N, c, D] after thoughts of equal length, end tokens included."""
        size, pad = self.config.chunk_size, self.config.pad_token_id
        x = self.model.embed_tokens(torch.tensor([thought + [pad] * (size - len(thought)) for thought in thoughts]))
        return cast(Tensor, self.compression.block(x, *rotation(self.shape, x.shape[1]))[:, -size:])

    def think(self, rows: Tensor) -> list[int]:
        """Return the greedy thought about a chunk's rows [c, D], up to the end token or the maximum length."""
        thought: list[int] = []
        while len(thought) < self.config.max_thought_tokens and thought[-1:] != [self.config.eos_token_id]:
            written = torch.tensor([[self.config.bos_token_id, *thought]])
            thought.append(int(self.thought_logits(rows[None], written)[0, -1].argmax()))
        return thought

    def states(self, thoughts: list[list[int]], length: int) -> Tensor:
        """Return states [1, length, D] from thoughts about the first chunks. Later chunks have trivial thoughts."""
        chunks = -(-length // self.config.chunk_size)
        shown = (thoughts + [[self.config.eos_token_id]] * chunks)[: chunks - 1]
        made = {thought: self.compress(list(thought)) for thought in set(map(tuple, shown))}
        first = torch.zeros(self.config.chunk_size, self.shape.hidden_size)
        return torch.cat([first, *(made[tuple(thought)] for thought in shown)])[None, :length]

    @torch.inference_mode()
    def answer(
        self, prompt: list[int], most: int = 8, *, known: list[list[int]] | None = None, while_decoding: bool = False
    ) -> tuple[list[int], list[list[int]]]:
        """Return greedy tokens up to the end token, at most `most`, and the thoughts about whole chunks with end
        tokens. Works chunk by chunk: a chunk's thought is computed before the next chunk. The first thoughts may be
        `known`. Generated chunks are thought about only if `while_decoding`.
        """
        ids, thoughts, size = list(prompt), list(known or []), self.config.chunk_size
        while len(ids) - len(prompt) < most:
            whole = (len(ids) if while_decoding else len(prompt)) // size
            for stop in range(size * (len(thoughts) + 1), size * whole + 1, size):
                _, read = self(torch.tensor([ids[:stop]]), self.states(thoughts, stop))
                thoughts.append(self.think(read[0, -size:]))
            rows, _ = self(torch.tensor([ids]), self.states(thoughts, len(ids)))
            token = int(self.logits(rows[0, -1]).argmax())
            if token == self.end:
                break
            ids.append(token)
        return ids[len(prompt) :], thoughts


def save(model: ThinkingModel, folder: Path) -> None:
    """Write weights, ``config.json`` (a Llama's, and the object ``thinking``) and ``generation_config.json``."""
    content = {**demo_model.config(model.shape, model.end), "thinking": asdict(model.config)}
    demo_model.write(model, folder, content)


def load(folder: Path) -> ThinkingModel:
    """Read a checkpoint written by ``save``, in float32."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(**{name: content[name] for name in asdict(Shape())})
    model = ThinkingModel(shape, Thinking(**content["thinking"]), content["eos_token_id"])
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()
