"""Train a decoder of 15 M parameters on the text of the Python installation. Its weights are not in the repository.

    python -m models.train_text build/text --minutes 50 --threads 2

The learning rate follows the clock, so that the time is known and the weights depend on the machine. A checkpoint is
written every few minutes, and `heldout.json` in OUT has prompts from documents that were not trained on.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from models.demo_model import DemoModel, Shape, save
from models.demo_tokenizer import END, end_id, train_tokenizer
from models.text_corpus import documents
from models.train_demo import make_optimizers

SHAPE = Shape(8192, 384, 1024, 8, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=2048)
ROWS, LENGTH = 4, 512  # sequences of a step, and tokens of each
PEAK_RATES = (1e-2, 3e-3)  # of Muon and of AdamW
WARMUP, DECAY = 0.02, 0.4  # shares of the time
PROMPTS, PROMPT = 256, 128  # held-out prompts, and tokens of each
EVERY = 180.0  # seconds between checkpoints


def joined(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Return the token ids [N] of all texts, with the end token behind each."""
    ids = [token for found in tokenizer.encode_batch(texts) for token in (*found.ids, end_id(tokenizer))]
    return torch.tensor(ids)


def batches(ids: Tensor, seed: int) -> Iterator[Tensor]:
    """Yield batches [ROWS, LENGTH + 1] of random places endlessly."""
    rng = random.Random(seed)
    while True:
        places = [rng.randrange(len(ids) - LENGTH - 1) for _ in range(ROWS)]
        yield torch.stack([ids[at : at + LENGTH + 1] for at in places])


def loss_of(model: DemoModel, batch: Tensor) -> Tensor:
    """Return the mean cross entropy. Products are in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.logits(model(batch[:, :-1]))
    return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model: DemoModel, ids: Tensor) -> float:
    """Return the mean cross entropy of the same 8 held-out batches each time."""
    stream = batches(ids, 0)
    return sum(loss_of(model, next(stream)).item() for _ in range(8)) / 8


def rate(done: float) -> float:
    """Return the share of the peak learning rate: linear warm-up, constant, linear decay at the end."""
    return max(0.0, min(1.0, (done + 0.001) / WARMUP, (1.0 - done) / DECAY))


def train(model: DemoModel, ids: Tensor, tested: Tensor, out: Path, minutes: float, end: int) -> None:
    """Train in place for so many minutes. Prints losses and saves at each checkpoint."""
    optimizers, stream = make_optimizers(model), batches(ids, 1)
    began = saved = time.monotonic()
    losses, step = list[float](), 0
    while (done := (time.monotonic() - began) / (60 * minutes)) < 1.0:
        for optimizer, peak in zip(optimizers, PEAK_RATES, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(done)
        loss = loss_of(model, next(stream))
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        step += 1
        if time.monotonic() - saved > EVERY:
            saved = time.monotonic()
            _report(model, tested, losses, step, saved - began)
            losses.clear()
            save(model, out, end)
    if losses:
        _report(model, tested, losses, step, time.monotonic() - began)
    save(model, out, end)


def _report(model: DemoModel, tested: Tensor, losses: list[float], step: int, seconds: float) -> None:
    mean, heldout = sum(losses) / len(losses), heldout_loss(model, tested)
    seen = step * ROWS * LENGTH
    print(f"{seconds:.0f} s, step {step}, {seen} tokens: loss {mean:.3f}, held out {heldout:.3f}", flush=True)


def save_tokenizer(tokenizer: Tokenizer, tested: list[str], out: Path) -> None:
    """Write the tokenizer's files, and the held-out prompts as lists of token ids."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (out / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
    ids, rng = joined(tokenizer, tested), random.Random(0)
    starts = [rng.randrange(len(ids) - 4 * PROMPT) for _ in range(PROMPTS)]
    prompts = [ids[at : at + 4 * PROMPT].tolist() for at in starts]
    (out / "heldout.json").write_text(json.dumps(prompts), encoding="utf-8")


def main(argv: list[str]) -> None:
    """Run the command line; see ``models/README.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=50.0, help="of the training, without its preparation")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    texts, tested = documents()
    tokenizer = train_tokenizer(texts, SHAPE.vocab_size)
    ids = joined(tokenizer, texts)
    model = DemoModel(SHAPE)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(ids)} tokens of text", flush=True)
    save_tokenizer(tokenizer, tested, args.out)
    train(model, ids, joined(tokenizer, tested), args.out, args.minutes, end_id(tokenizer))


if __name__ == "__main__":
    main(sys.argv[1:])
