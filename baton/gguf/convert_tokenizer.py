"""Program: print the tokenizer.json of a GGUF file, made by transformers. A process of its own, because of its imports.

`python -m baton.gguf.convert_tokenizer FILE`
"""

from __future__ import annotations

import sys

import tokenizers
from tokenizers import pre_tokenizers, processors

# Values of tokenizer.ggml.pre that transformers 5.23 reads as plain GPT-2, and those that also cut off each digit.
PLAIN = ("gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling")
BY_DIGIT = ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum")


def converted(path: str) -> str:
    """Return the text of tokenizer.json. Raises ValueError with the key that has no counterpart."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping

    architecture, fields, config = mapping.get_gguf_tokenizer(path)
    known, pre = mapping.GGUF_PRE_TOKENIZER_SPLITS, fields.get("pre_tokenizer_type")
    if fields.get("tokenizer_type") == "gpt2" and pre not in (*known, *PLAIN, *BY_DIGIT):
        supported = ", ".join((*known, *PLAIN, *BY_DIGIT))
        raise ValueError(f"tokenizer.ggml.pre {pre!r} is not supported (supported: {supported})")
    tokenizer: tokenizers.Tokenizer = mapping.convert_gguf_tokenizer(architecture, fields)[0]
    if fields.get("tokenizer_type") == "gpt2" and pre in BY_DIGIT:
        split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.post_processor = _around(tokenizer, config)
    return str(tokenizer.to_str())


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
