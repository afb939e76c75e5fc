"""Train the demo model from nothing: text, tokenizer, weights, held-out file, measurement."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python models/train_demo.py`

from models.demo_eval import report
from models.demo_model import DemoModel, Shape, save
from models.demo_text import Sample, heldout_samples, training_samples, write_heldout
from models.demo_tokenizer import END, end_id, train_tokenizer

Row = tuple[list[int], int]  # token ids with the end token; number of prompt tokens

BATCH_TOKENS = 1536
PEAK_RATES = (2e-2, 5e-3)  # of Muon and of AdamW
WEIGHT_DECAY = 0.1
WARMUP = 100
# Prompts have a small weight, so that an unfinished prompt is still continued as a sentence.
PROMPT_WEIGHT = 0.1


def encode(tokenizer: Tokenizer, samples: list[Sample]) -> list[Row]:
    """Encode prompt and completion separately, as at inference, and join them."""
    end, rows = end_id(tokenizer), []
    for prompt, completion in samples:
        head = tokenizer.encode(prompt).ids
        rows.append((head + tokenizer.encode(completion).ids + [end], len(head)))
    return rows


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[list[Row]]:
    """Yield batches endlessly: rows of similar length, about BATCH_TOKENS each, shuffled, new text every epoch."""
    for epoch in count():
        rng = random.Random(f"{seed} {epoch}")
        rows = encode(tokenizer, training_samples(seed + epoch))
        # The random part of the key mixes neighbors in length, so that batches differ between epochs.
        ordered = sorted(rows, key=lambda row: len(row[0]) + 3 * rng.random())
        groups: list[list[Row]] = [[]]
        for row in ordered:
            if groups[-1] and len(row[0]) * (len(groups[-1]) + 1) > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from groups


def tensors(batch: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets and loss weights, [B, T] each. Rows are padded on the right with weight zero."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    weight = torch.zeros(len(batch), longest)
    for i, (row, head) in enumerate(batch):
        ids[i, : len(row)] = torch.tensor(row)
        weight[i, :head], weight[i, head : len(row)] = PROMPT_WEIGHT, 1.0
    return ids[:, :-1], ids[:, 1:], weight[:, 1:]


def loss_of(model: DemoModel, batch: list[Row]) -> Tensor:
    """Return the weighted mean cross entropy. Logits are computed only where the weight is not zero."""
    inputs, targets, weight = tensors(batch)
    counted = weight > 0
    losses = functional.cross_entropy(model.logits(model(inputs)[counted]), targets[counted], reduction="none")
    return (losses * weight[counted]).sum() / weight.sum()


def rate(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: linear warm-up, then a half cosine down to zero."""
    return min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / steps)))


def make_optimizers(model: DemoModel) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the embedding and the norms.

    Muon answers held-out prompts much sooner than AdamW alone, which memorizes the training prompts.
    """
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in named.items() if p.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: DemoModel, tokenizer: Tokenizer, steps: int, seed: int) -> None:
    """Train in place. Prints a line every 100 steps."""
    optimizers = make_optimizers(model)
    stream, started, total = batches(tokenizer, seed), time.monotonic(), 0.0
    for step in range(steps):
        for optimizer, peak in zip(optimizers, PEAK_RATES, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(step, steps)
        loss = loss_of(model, next(stream))
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        total += loss.item()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps} loss {total / 100:.4f} {time.monotonic() - started:.0f} s", flush=True)
            total = 0.0


def main() -> None:
    """Run the command line; see ``models/README.md``."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=here / "demo")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    started = time.monotonic()
    samples = training_samples(args.seed)
    tokenizer = train_tokenizer((text for sample in samples for text in sample), Shape().vocab_size)
    model = DemoModel(Shape())
    print(f"{len(samples)} samples an epoch, {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    train(model, tokenizer, args.steps, args.seed)
    save(model, args.out, end_id(tokenizer))
    tokenizer.save(str(args.out / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "bos_token": None,
        "add_bos_token": False,
        "model_max_length": Shape().max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
    write_heldout()
    report(args.out, heldout_samples())
    print(f"total {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
