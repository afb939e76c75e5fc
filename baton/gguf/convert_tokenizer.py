"""Program: print the tokenizer.json of a GGUF file, made by transformers. A process of its own, because of its imports.

`python -m baton.gguf.convert_tokenizer FILE`
"""

from __future__ import annotations

import sys

import tokenizers
from tokenizers import normalizers, pre_tokenizers, processors

# Values of tokenizer.ggml.pre that transformers 5.23 reads as plain GPT-2, and those that also cut off each digit.
PLAIN = ("gpt-2", "gpt2", "olmo", "jais", "trillion", "granite-docling")
# Those whose tokens are found whole before merges apply, and which begin with a first token (llama-vocab.cpp).
WHOLE_WORDS = frozenset("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken".split())
BY_DIGIT = ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum")


def converted(path: str) -> str:
    """Return the text of tokenizer.json. Raises ValueError with the key that has no counterpart."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    architecture, fields, config = mapping.get_gguf_tokenizer(path)
    known, pre = mapping.GGUF_PRE_TOKENIZER_SPLITS, fields.get("pre_tokenizer_type")
    bytewise = fields.get("tokenizer_type") == "gpt2"
    if bytewise and pre not in (*known, *PLAIN, *BY_DIGIT):
        supported = ", ".join((*known, *PLAIN, *BY_DIGIT))
        raise ValueError(f"tokenizer.ggml.pre {pre!r} is not supported (supported: {supported})")
    tokenizer: tokenizers.Tokenizer = mapping.convert_gguf_tokenizer(architecture, fields)[0]
    if bytewise and pre in BY_DIGIT:
        split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    if bytewise and pre in WHOLE_WORDS:
        config.setdefault("add_bos_token", True)
        tokenizer.model.ignore_merges = True
    if fields.get("tokenizer_type") == "llama" and not architecture.startswith("gemma"):
        _as_sentencepiece(tokenizer, prefix=fields.get("add_prefix_space", True))
    tokenizer.post_processor = _around(tokenizer, config)
    return str(tokenizer.to_str())


def _as_sentencepiece(tokenizer: tokenizers.Tokenizer, *, prefix: bool) -> None:
    """Put a space before any text, also one that begins with a space. `Metaspace` of transformers does not."""
    first: list[normalizers.Normalizer] = [normalizers.Prepend("\u2581")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "\u2581")])
    tokenizer.pre_tokenizer = None


def _around(tokenizer: tokenizers.Tokenizer, config: dict[str, object]) -> processors.TemplateProcessing | None:
    """Return what adds the first and the last token, or None."""
    first = [str(config["bos_token"])] if config.get("add_bos_token") and config.get("bos_token") else []
    last = [str(config["eos_token"])] if config.get("add_eos_token") and config.get("eos_token") else []
    if not first and not last:
        return None
    special = [(text, tokenizer.token_to_id(text)) for text in {*first, *last}]
    return processors.TemplateProcessing(single=[*first, "$A", *last], special_tokens=special)


if __name__ == "__main__":
    sys.stdout.write(converted(sys.argv[1]))
