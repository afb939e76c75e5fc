"""Byte-level BPE tokenizer of the coin model, and the gold thoughts of a text in its tokens."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from models.demo_tokenizer import END
from models.thinking_text import SEED_SAMPLE, Sample

BEGIN, PAD = "<|think|>", "<|pad|>"
SPECIAL = {END: 0, BEGIN: 1, PAD: 2}
VOCABULARY = 1024
CHUNK = 2
# Each is a whole token. In chunks of two tokens, a whole one (" then Bob") is between the flips of this sentence.
WHOLE: dict[str, list[str]] = {
    SEED_SAMPLE.prompt: [
        *("A", " coin", "'s", " state", " is", " heads", ".", " Alice", " flips", ",", " then", " Bob", " flips", "."),
        *(" What", "'s", " the", " state", "?", " A", ":"),
    ],
    "tails": ["tails"],
    "heads": ["heads"],
    " tails.": [" tails", "."],
}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train on prompts and answers. The texts of WHOLE are repeated so that their words merge first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *(list(WHOLE) * 1000)], trainer)
    check_whole(tokenizer)
    return tokenizer


def check_whole(tokenizer: Tokenizer) -> None:
    """Check that every text of WHOLE splits as listed there, and the ids of special tokens. Raises ValueError."""
    for text, expected in WHOLE.items():
        pieces = [tokenizer.decode([i]) for i in tokenizer.encode(text).ids]
        if pieces != expected:
            raise ValueError(f"{text!r} splits into {pieces}, expected {expected}")
    if any(tokenizer.token_to_id(name) != number for name, number in SPECIAL.items()):
        raise ValueError("the special tokens have other ids")


def thought_ids(tokenizer: Tokenizer, side: str) -> list[int]:
    """Return a thought's tokens with the end token. An empty text is the trivial thought."""
    return [*(tokenizer.encode(side).ids if side else []), SPECIAL[END]]


def gold(tokenizer: Tokenizer, sample: Sample, chunk: int = CHUNK) -> tuple[list[int], list[str]]:
    """Return the prompt's ids, and for each whole chunk the state after the last event that ends in it, or ""."""
    encoded = tokenizer.encode(sample.prompt)
    thoughts = [""] * (len(encoded.ids) // chunk)
    token_ends = [end for _, end in encoded.offsets]
    for end, thought in zip(sample.ends, sample.thoughts, strict=True):
        row = next(i for i, stop in enumerate(token_ends) if stop >= end)
        if row // chunk < len(thoughts):
            thoughts[row // chunk] = thought
    return encoded.ids, thoughts
