"""Checkpoints with random weights in the Hugging Face layout, for measuring speed only.

``python -m benchmarks.lib.models CACHE [S M L] [--dtype bf16|fp32] [--tiny]`` makes them ahead of a run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from benchmarks.lib.shapes import MAX_POSITIONS, SIZES, TINY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.lib.shapes import Shape

SPECIAL = ["<unk>", "<s>", "</s>"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SCALE = 0.02  # of the weights: bf16 stays finite through 22 layers
CORPUS_FILES = 900


def make_model(cache: Path, size: str, dtype: str, *, tiny: bool = False) -> Path:
    """Return the folder of a model, made at the first call. An aborted run leaves nothing under its name."""
    shape = (TINY if tiny else SIZES)[size]
    folder = cache / "models" / f"{'tiny-' if tiny else ''}{size}-{dtype}"
    if folder.is_dir():
        return folder
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file(dict(_tensors(shape, DTYPES[dtype])), unfinished / "model.safetensors", metadata={"format": "pt"})
    for name, content in _descriptions(shape, dtype).items():
        (unfinished / name).write_text(json.dumps(content, indent=1))
    shutil.copy(_tokenizer(cache, shape.vocab), unfinished / "tokenizer.json")
    return unfinished.rename(folder)


def _tensors(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def matrix(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator).mul_(SCALE).to(dtype)

    kv = shape.kv_heads * shape.head_dim
    linears = {
        "self_attn.q_proj": (shape.hidden, shape.hidden),
        "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden),
        "self_attn.o_proj": (shape.hidden, shape.hidden),
        "mlp.gate_proj": (shape.ffn, shape.hidden),
        "mlp.up_proj": (shape.ffn, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.ffn),
    }
    yield "model.embed_tokens.weight", matrix(shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        for name, (outputs, inputs) in linears.items():
            yield f"model.layers.{layer}.{name}.weight", matrix(outputs, inputs)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight", torch.ones(shape.hidden, dtype=dtype)
    yield "model.norm.weight", torch.ones(shape.hidden, dtype=dtype)
    if not shape.tied:
        yield "lm_head.weight", matrix(shape.vocab, shape.hidden)


def _descriptions(shape: Shape, dtype: str) -> dict[str, dict[str, object]]:
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": str(DTYPES[dtype]).removeprefix("torch."),
        **ends,
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        **dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True)),
    }
    return {"config.json": config, "generation_config.json": dict(ends), "tokenizer_config.json": tokenizer}


def _tokenizer(cache: Path, vocab: int) -> Path:
    """Return a byte-level BPE of exactly `vocab` entries, trained on the sources of Python's standard library."""
    path = cache / "models" / f"tokenizer-{vocab}.json"
    if not path.is_file():
        tokenizer = Tokenizer(BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train(_corpus(CORPUS_FILES if vocab > 10_000 else 20), trainer)
        tokenizer.add_tokens([f"<extra_{i}>" for i in range(vocab - tokenizer.get_vocab_size())])
        tokenizer.save(str(path))
    return path


def _corpus(files: int) -> list[str]:
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    return [str(path) for path in sources if not {"site-packages", "test", "tests"} & set(path.parts)][:files]


def main() -> None:
    """Make the named models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", type=Path)
    parser.add_argument("sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    for size in args.sizes:
        print(make_model(args.cache, size, args.dtype, tiny=args.tiny))


if __name__ == "__main__":
    main()
