"""Comparison of a quantised checkpoint with its original on a text: KL divergence per token and greedy agreement.

Both read the same tokens, so an early difference does not decide all later ones, as it would in free answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.determinism.checks import FixedRow, fixed_batch
from baton.engine.kv_cache import KVCache
from baton.engine.model_backend import ModelBackend
from baton.engine.models.loading import load_model
from baton.errors import ConfigError
from baton.tokenizer import load_tokenizer

PIECE = 256  # tokens that are read without the text before them
MOST = 32 * PIECE  # tokens of the text that are read


class Comparison(NamedTuple):
    """KL divergence of `tokens` next-token distributions in nats, and how often both have the same likeliest token."""

    tokens: int
    mean_kl: float
    worst_kl: float
    agreement: float

    def __str__(self) -> str:
        kl = f"KL per token {self.mean_kl:.2g} (worst {self.worst_kl:.2g})"
        return f"{self.tokens:,} tokens: {kl}, the same likeliest token for {self.agreement:.1%}"


def pieces_of(text: Path, folder: Path) -> list[list[int]]:
    """Return the first tokens of a UTF-8 text, by the tokenizer of a checkpoint, in pieces. Raises ConfigError if it
    has none or cannot be read, and CheckpointError if there is no tokenizer.
    """
    try:
        tokens = load_tokenizer(folder).encode(text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--compare {text}: cannot be read as UTF-8: {error}") from None
    if not tokens:
        raise ConfigError(f"--compare {text}: the file has no text")
    return [tokens[at : at + PIECE] for at in range(0, min(len(tokens), MOST), PIECE)]


def compare_checkpoints(original: Path, quantised: Path, pieces: list[list[int]]) -> Comparison:
    """Read the pieces of a text by both checkpoints, on the CPU. Raises CheckpointError if one cannot be loaded."""
    readers = [_Reader(load_model(folder)) for folder in (original, quantised)]
    divergences, equal = list[Tensor](), 0
    for piece in pieces:
        expected, found = (reader.log_probabilities(piece) for reader in readers)
        divergences.append((expected.exp() * (expected - found)).sum(-1))
        equal += int((expected.argmax(-1) == found.argmax(-1)).sum())
    each = torch.cat(divergences)
    return Comparison(len(each), float(each.mean()), float(each.max()), equal / len(each))


class _Reader:
    """A model and a cache for one piece."""

    def __init__(self, backend: ModelBackend) -> None:
        self._backend = backend
        self._blocks = list(range(backend.layout.blocks_for(PIECE)))
        self._kv: KVCache = backend.make_cache(len(self._blocks))

    @torch.inference_mode()
    def log_probabilities(self, piece: list[int]) -> Tensor:
        """Return those of the token after each token of `piece`: float32 [tokens, vocab]."""
        piece = piece[: self._backend.max_model_len]
        layout, device = self._backend.layout, self._backend.device
        batch = fixed_batch([FixedRow(piece, 0, self._blocks)], list(range(len(piece))), layout.block_size, device)
        return self._backend.forward(batch, self._kv).log_softmax(-1)
