"""Byte-level BPE tokenizer of the demo model: small, lossless on every UTF-8 string."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
# Texts whose pieces must be whole tokens, because tests of the server depend on these lengths.
WHOLE: dict[str, list[str]] = {
    "The color of dog": ["The", " color", " of", " dog"],
    " can vary widely": [" can", " vary", " widely"],
    "Pacific Ocean": ["Pacific", " Ocean"],
}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on prompts and completions. The texts of WHOLE are repeated so that their words merge first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *(list(WHOLE) * 10_000)], trainer)
    check_whole(tokenizer)
    return tokenizer


def check_whole(tokenizer: Tokenizer) -> None:
    """Check that every text of WHOLE splits as listed there. Raises ValueError."""
    for text, expected in WHOLE.items():
        pieces = [tokenizer.decode([i]) for i in tokenizer.encode(text).ids]
        if pieces != expected:
            raise ValueError(f"{text!r} splits into {pieces}, expected {expected}")


def end_id(tokenizer: Tokenizer) -> int:
    """Return the id of the end-of-text token."""
    token: int | None = tokenizer.token_to_id(END)
    if token is None:
        raise ValueError(f"the tokenizer has no {END}")
    return token


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read ``tokenizer.json`` of a checkpoint folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
