"""Train the demo model from nothing: text, tokenizer, weights, held-out file, measurement."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python models/train_demo.py`

from models.demo_eval import report
from models.demo_model import DemoModel, Shape, save
from models.demo_text import Sample, heldout_samples, training_samples, write_heldout
from models.demo_tokenizer import END, train_tokenizer

Row = tuple[list[int], int]  # token ids with the end token; number of prompt tokens

BATCH_TOKENS = 1536
PEAK_RATE = 3e-3
WARMUP = 100
# Prompts count a little: a user who stops in mid-prompt still sees it continued as a sentence.
PROMPT_WEIGHT = 0.1


def encode(tokenizer: Tokenizer, samples: list[Sample]) -> list[Row]:
    """Prompt and completion are encoded apart, as they are at inference, then joined."""
    end = tokenizer.token_to_id(END)
    rows = []
    for prompt, completion in samples:
        head = tokenizer.encode(prompt).ids
        rows.append((head + tokenizer.encode(completion).ids + [end], len(head)))
    return rows


def batches(rows: list[Row], rng: random.Random) -> Iterator[list[Row]]:
    """Endless batches of rows of like length, about BATCH_TOKENS tokens each, in random order."""
    while True:
        # The random part of the key mixes neighbours in length, so that batches differ from epoch to epoch.
        ordered = sorted(rows, key=lambda row: len(row[0]) + 3 * rng.random())
        groups: list[list[Row]] = [[]]
        for row in ordered:
            if groups[-1] and len(row[0]) * (len(groups[-1]) + 1) > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from groups


def tensors(batch: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [B, T], targets [B, T] and loss weights [B, T]; rows are padded on the right with weight zero."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    weight = torch.zeros(len(batch), longest)
    for i, (row, head) in enumerate(batch):
        ids[i, :len(row)] = torch.tensor(row)
        weight[i, :head], weight[i, head:len(row)] = PROMPT_WEIGHT, 1.0
    return ids[:, :-1], ids[:, 1:], weight[:, 1:]


def loss_of(model: DemoModel, batch: list[Row]) -> Tensor:
    """Weighted mean cross entropy; logits are computed only where the weight is not zero."""
    inputs, targets, weight = tensors(batch)
    counted = weight > 0
    losses = functional.cross_entropy(model.logits(model(inputs)[counted]), targets[counted], reduction="none")
    return (losses * weight[counted]).sum() / weight.sum()


def rate(step: int, steps: int) -> float:
    """Learning rate: linear warm-up, then a half cosine down to zero."""
    return PEAK_RATE * min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(model: DemoModel, rows: list[Row], steps: int, seed: int) -> None:
    """Train in place with AdamW; prints a line every 100 steps."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}], betas=(0.9, 0.98))
    stream, started, total = batches(rows, random.Random(seed)), time.monotonic(), 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        loss = loss_of(model, next(stream))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps} loss {total / 100:.4f} {time.monotonic() - started:.0f} s", flush=True)
            total = 0.0


def main() -> None:
    """Command line; see ``models/README.md``."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=here / "demo")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    started = time.monotonic()
    samples = training_samples(args.seed)
    tokenizer = train_tokenizer((text for sample in samples for text in sample), Shape().vocab_size)
    rows, model = encode(tokenizer, samples), DemoModel(Shape())
    print(f"{len(samples)} samples, {sum(len(ids) for ids, _ in rows)} tokens, "
          f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    train(model, rows, args.steps, args.seed)
    save(model, args.out, tokenizer.token_to_id(END))
    tokenizer.save(str(args.out / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "bos_token": None,
             "add_bos_token": False, "model_max_length": Shape().max_position_embeddings,
             "clean_up_tokenization_spaces": False}
    (args.out / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
    write_heldout()
    report(args.out, heldout_samples())
    print(f"total {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
