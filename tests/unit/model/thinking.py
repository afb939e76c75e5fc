"""Random checkpoints of models that think, and their reference: transformers' layers in a dense loop."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests.unit.model.checkpoints import HIDDEN, VOCAB, edit_config, random_checkpoint

LAYERS = 4
SETTINGS: dict[str, int] = {"chunk_size": 4, "input_layer": 1, "output_layer": 3, "max_thought_tokens": 3}
SETTINGS |= {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7}
_BLOCKS = {LAYERS: "thinking.block", LAYERS + 1: "compression.block"}


class Answer(NamedTuple):
    """Tokens, and thoughts without end tokens."""

    tokens: list[int]
    thoughts: list[tuple[int, ...]]


@dataclass(frozen=True)
class Reference:
    """The reference model. `model` has two layers more than the backbone: T and C. It uses none of Baton's code."""

    model: Any
    settings: dict[str, int]
    norm: torch.Tensor
    head: torch.Tensor

    @torch.inference_mode()
    def answer(self, prompt: list[int], new: int, *, thinks: bool = True, while_decoding: bool = False) -> Answer:
        """Answer greedily, strictly one chunk after the other, without a cache."""
        tokens, thoughts, size = list(prompt), list[tuple[int, ...]](), self.settings["chunk_size"]
        while len(tokens) < len(prompt) + new:
            known = len(tokens) if while_decoding else len(prompt)
            while thinks and (len(thoughts) + 1) * size <= known:
                hidden = self._forward(tokens[: (len(thoughts) + 1) * size], thoughts)[1]
                thoughts.append(self._think(hidden[-size:]))
            tokens.append(int(self._forward(tokens, thoughts)[0][-1].argmax()))
        return Answer(tokens[len(prompt) :], thoughts)

    def _forward(self, tokens: list[int], thoughts: list[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and the hidden rows."""
        size, settings = self.settings["chunk_size"], self.settings
        chunks = -(-len(tokens) // size)
        made = [self._compress(thoughts[i] if i < len(thoughts) else ()) for i in range(chunks - 1)]
        states = torch.cat([torch.zeros(size, HIDDEN), *made])[: len(tokens)]
        x, hidden = self._embed(tokens), torch.empty(0)
        for number in range(1, LAYERS + 1):
            x = self._layer(number - 1, x)
            if number == settings["input_layer"]:
                x = x + states
            if number == settings["output_layer"]:
                hidden = x[0]
        return self.model.lm_head(self.model.model.norm(x))[0], hidden

    def _think(self, hidden: torch.Tensor) -> tuple[int, ...]:
        thought: list[int] = []
        while len(thought) < self.settings["max_thought_tokens"]:
            written = self._embed([self.settings["bos_token_id"], *thought])
            last = self._layer(LAYERS, torch.cat((hidden[None], written), 1))[0, -1]
            last = self.norm * last * torch.rsqrt(last.pow(2).mean() + self.model.config.rms_norm_eps)
            token = int((self.head @ last).argmax())
            if token == self.settings["eos_token_id"]:
                break
            thought.append(token)
        return tuple(thought)

    def _compress(self, thought: tuple[int, ...]) -> torch.Tensor:
        size = self.settings["chunk_size"]
        ended = [*thought, self.settings["eos_token_id"]][: self.settings["max_thought_tokens"]]
        padded = ended + [self.settings["pad_token_id"]] * (size - len(ended))
        return self._layer(LAYERS + 1, self._embed(padded))[0, -size:]

    def _embed(self, tokens: list[int]) -> torch.Tensor:
        return self.model.model.embed_tokens(torch.tensor([tokens]))

    def _layer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        positions = torch.arange(length)[None]
        window = getattr(self.model.config, "sliding_window", None) if number < LAYERS else None
        back = torch.arange(length)[:, None] - torch.arange(length)
        seen = (back >= 0) & (back < (window or length))
        mask = torch.zeros(1, 1, length, length).masked_fill_(~seen, -torch.inf)
        trunk = self.model.model
        rotation = trunk.rotary_emb(x, positions)
        return trunk.layers[number](x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)


def thinking_checkpoint(folder: Path, family: str = "llama", *, eos: float = 12.0, **changed: Any) -> Reference:
    """Write a tiny checkpoint that thinks. `eos`: 12 gives half of the chunks no thought, 0 gives each a thought."""
    settings = SETTINGS | {name: changed.pop(name) for name in list(changed) if name in SETTINGS}
    model = random_checkpoint(folder, family, num_hidden_layers=LAYERS + 2, **changed)
    tensors = {_renamed(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(VOCAB, HIDDEN, generator=generator) * HIDDEN**-0.5
    head[settings["eos_token_id"]] *= eos  # above or below all others, by the sign of the input
    norm = 1 + 0.3 * torch.randn(HIDDEN, generator=generator)
    tensors |= {"thinking.norm.weight": norm, "thinking.lm_head.weight": head}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, num_hidden_layers=LAYERS, thinking=settings)
    if "layer_types" in (config := json.loads((folder / "config.json").read_text())):
        edit_config(folder, layer_types=config["layer_types"][:LAYERS])
    return Reference(model, settings, norm, head)


def _renamed(name: str) -> str:
    for number, block in _BLOCKS.items():
        name = name.replace(f"model.layers.{number}.", f"{block}.")
    return name
