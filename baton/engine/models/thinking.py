"""The thinking block T and the compression block C of a model that thinks (Thinking States, arXiv 2602.08332).

    T:  [hidden rows of a chunk; embed(bos); embed(z_1); ...]  ->  layer  ->  norm  ->  own head  ->  z_1, z_2, ... eos
    C:  [embed(z_1), ..., embed(eos), embed(pad), ...]         ->  layer  ->  last rows = the state of the next chunk

Both are one layer of the backbone's form. It attends causally to its own rows only, with positions from 0. States are
computed in one shape, so that their bits depend on the thought alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from baton.engine.kernels.base import Scratch
from baton.engine.models.config import ModelConfig
from baton.engine.models.config_variants import ThinkingConfig
from baton.engine.models.decoder import Layer
from baton.engine.models.llama import Parts, Step
from baton.engine.models.rotary import Rotary
from baton.engine.models.spec import EVERYWHERE
from baton.hashing import fingerprint

Mode = Literal["auto", "fast", "sequential", "off"]
KEPT_STATES = 1024
# Extra rows that a forward computes at almost no cost, by device. Measured by benchmarks/thinking.py; cuda is a guess.
CHEAP_ROWS = {"cpu": 16, "cuda": 256}


class Block:
    """One layer over independent short sequences of equal length."""

    def __init__(self, config: ModelConfig, parts: Parts, name: str) -> None:
        self._layer = Layer(config, parts, replace(config.spec.attention[0], reach=EVERYWHERE), 0, name)
        self._config, self._scratch = config, Scratch(parts.weights.dtype, parts.weights.device)
        self._rotary = Rotary(config.spec.ropes[0], parts.weights.dtype, parts.weights.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output for x [B, L, hidden], which is overwritten."""
        count, length, hidden = x.shape
        rows = count * length
        slots = torch.arange(rows, device=x.device)
        room = (count, length, self._config.kv_heads, self._config.head_dim)
        keys, values = (self._scratch.take(name, rows, room[2] * room[3]).view(room) for name in ("keys", "values"))
        step = Step((self._rotary(slots % length, fixed=True),), slots, {EVERYWHERE: self._attend}, self._scratch)
        flat = x.view(rows, hidden)
        return flat.add_(self._layer(flat, None, step, keys, values)).view(x.shape)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        count, length, kv_heads, head_dim = keys.shape
        # (sequence, KV head) becomes the batch, its query heads become the heads, so K and V are not copied per head.
        shared = query.view(count, length, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).flatten(0, 1)
        over = (count * kv_heads, shared.shape[1], length, head_dim)
        k, v = (each.transpose(1, 2).reshape(-1, 1, length, head_dim).expand(over) for each in (keys, values))
        found = scaled_dot_product_attention(shared, k, v, is_causal=True, scale=head_dim**-0.5)
        # On a GPU, the memory of `found` can have another order than its dimensions.
        out.copy_(found.reshape(count, -1, length, head_dim).transpose(1, 2).reshape(out.shape))
        return out


class Thinker:
    """T and C of one model, used by one thread. `mode` is `prefill` of `baton.config.schema.ThinkingConfig`."""

    def __init__(self, config: ModelConfig, parts: Parts, embed: Tensor, mode: Mode = "auto") -> None:
        assert config.thinking is not None
        self.config: ThinkingConfig = config.thinking
        self.mode = mode
        self.hidden_size, self.fingerprint = config.hidden_size, ""
        self._embed = embed
        self._t, self._c = (Block(config, parts, f"{name}.block") for name in ("thinking", "compression"))
        self._norm = parts.norm("thinking.norm", config.hidden_size, config.spec.norm)
        self._head = parts.kernels.linear(parts.weights.tensor("thinking.lm_head.weight", *embed.shape))
        self._scratch = Scratch(embed.dtype, embed.device)
        self._states: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self.cheap_rows = CHEAP_ROWS.get(embed.device.type, CHEAP_ROWS["cuda"])
        # Mode fast computes the rest of the prompt in each forward, except where rows take long.
        self.unlimited = embed.device.type != "cpu"
        self.zeros = embed.new_zeros(self.config.chunk_size, self.hidden_size)

    def named(self, model: str) -> str:
        """Set and return the fingerprint of thoughts and states: the model's, or a derived one if thinking is off."""
        self.fingerprint = model if self.mode != "off" else fingerprint((model, "thinking off"))
        return self.fingerprint

    @torch.inference_mode()
    def first_tokens(self, hidden: Tensor) -> list[int]:
        """Return the first token of each chunk's thought, from hidden rows [B, chunk_size, hidden_size]."""
        return self._next(hidden, [[]] * len(hidden))

    @torch.inference_mode()
    def think(self, hidden: Tensor, first: int) -> tuple[int, ...]:
        """Return the thought about one chunk [chunk_size, hidden_size] from its first token, without end token."""
        tokens, token = list[int](), first
        while token != self.config.eos:
            tokens.append(token)
            if len(tokens) == self.config.max_thought_tokens:
                break
            token = self._next(hidden[None], [tokens])[0]
        return tuple(tokens)

    @torch.inference_mode()
    def state(self, thought: tuple[int, ...]) -> Tensor:
        if (found := self._states.get(thought)) is None:
            found = self._states[thought] = self._compressed(thought)
            if len(self._states) > KEPT_STATES:
                self._states.popitem(last=False)
        self._states.move_to_end(thought)
        return found

    def _compressed(self, thought: tuple[int, ...]) -> Tensor:
        config = self.config
        ids = [*thought, *[config.eos] * (len(thought) < config.max_thought_tokens)]
        ids += [config.pad] * (config.chunk_size - len(ids))
        rows = self._c(self._embed[torch.tensor([ids], device=self._embed.device)])
        return rows[0, -config.chunk_size :].clone()

    def _next(self, hidden: Tensor, written: Sequence[list[int]]) -> list[int]:
        """Return the next token of each chunk's thought, after the tokens `written`, which are equally many."""
        ids = torch.tensor([[self.config.bos, *tokens] for tokens in written], device=hidden.device)
        rows = self._t(torch.cat((hidden, self._embed[ids]), 1))[:, -1].contiguous()
        normed = self._norm(rows, self._scratch.take("normed", *rows.shape))
        logits = self._head(normed, self._scratch.take("logits", len(rows), self._head.width, torch.float32))
        return [int(token) for token in logits.argmax(-1).tolist()]
