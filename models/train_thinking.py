"""Train a model on a task from nothing, and measure it if it is the coin model.

``--kind`` decides how the model reaches the answer: it has thinking states, it writes the same thoughts as text before
the answer (a chain of thought), or it does neither. All kinds have the same decoder and read the same prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python models/train_thinking.py`

from models.demo_model import Shape, config, write
from models.demo_tokenizer import END, load_tokenizer
from models.tasks.batches import LONGEST, Batch, Source, skipping
from models.tasks.registry import KINDS, TASKS
from models.thinking_eval import report
from models.thinking_model import Thinking, ThinkingModel, save
from models.thinking_text import training_sample
from models.thinking_tokenizer import CHUNK, SPECIAL, VOCABULARY, train_tokenizer

SHAPE = Shape(vocab_size=VOCABULARY, max_position_embeddings=4096)
COIN = Path(__file__).parent / "coin"
PEAK_RATES = (2e-2, 5e-3)  # of Muon and of AdamW
WEIGHT_DECAY = 0.1
WARMUP = 50
THOUGHT_WEIGHT = 10.0
SAVED_EVERY = 25  # steps between two files with which a stopped training goes on


def spelled_together(spelled: list[list[int]]) -> dict[int, list[int]]:
    """Return the numbers of the thoughts of each length."""
    groups = defaultdict[int, list[int]](list)
    for number, ids in enumerate(spelled):
        groups[len(ids)].append(number)
    return groups


def states_of(model: ThinkingModel, spelled: list[list[int]], thoughts: Tensor) -> Tensor:
    """Return the states [B, T, D] of all chunks from their known thoughts. Compresses each thought once."""
    table = torch.empty(len(spelled), CHUNK, model.shape.hidden_size)
    for numbers in spelled_together(spelled).values():
        table[numbers] = model.compress_all([spelled[number] for number in numbers])
    states = table[thoughts.clamp(min=0)]  # [B, T / c, c, D]
    return torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), dim=1).flatten(1, 2)


def thought_loss(model: ThinkingModel, spelled: list[list[int]], rows: Tensor, thoughts: Tensor) -> Tensor:
    """Return the cross entropy of the thoughts [N] about chunks [N, c, D]: summed over a thought, mean over chunks."""
    total, lengths = torch.zeros(()), torch.tensor([len(ids) for ids in spelled])[thoughts]
    for length, numbers in spelled_together(spelled).items():
        table = torch.zeros(len(spelled), length, dtype=torch.long)
        table[numbers] = torch.tensor([spelled[number] for number in numbers])
        chosen, targets = rows[lengths == length], table[thoughts[lengths == length]]
        begin = torch.full((len(targets), 1), model.config.bos_token_id)
        logits = model.thought_logits(chosen, torch.cat((begin, targets[:, :-1]), dim=1))
        total = total + functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / len(rows)


def loss_of(model: ThinkingModel, batch: Batch, *, think: bool, gaps: bool) -> tuple[Tensor, Tensor]:
    """Return the losses of the text and of the thoughts, from one parallel forward over all chunks.

    Without `think` there is no state, and no thought is trained. `gaps`: positions are those of `skipping`.
    """
    ids, weight, thoughts, spelled = batch
    states = states_of(model, spelled, thoughts) if think else torch.zeros(*ids.shape, model.shape.hidden_size)
    out, read = model(ids, states, skipping(thoughts) if gaps else None)
    weight, counted = weight[:, 1:], weight[:, 1:] > 0
    losses = functional.cross_entropy(model.logits(out[:, :-1][counted]), ids[:, 1:][counted], reduction="none")
    text = (losses * weight[counted]).sum() / weight.sum()
    if not think:
        return text, torch.zeros(())
    known = thoughts >= 0
    return text, thought_loss(model, spelled, read.unflatten(1, (-1, CHUNK))[known], thoughts[known])


def rate(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: linear warm-up, then a half cosine down to zero."""
    return min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / steps)))


def make_optimizers(model: ThinkingModel) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks, and AdamW for embedding, unembedding and norms."""
    named = dict(model.named_parameters())
    blocks = {name for name, p in named.items() if p.dim() == 2 and "embed" not in name and "lm_head" not in name}
    return [
        torch.optim.Muon([p for name, p in named.items() if name in blocks], weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW([p for name, p in named.items() if name not in blocks], betas=(0.9, 0.98), weight_decay=0.0),
    ]


@dataclass(slots=True)
class Training:
    """A training in progress. `kept`: the file with which it goes on after a stop."""

    model: ThinkingModel
    source: Source
    gaps: bool = True
    kept: Path | None = None

    def run(self) -> list[float]:
        """Train in place. Prints a line every 50 steps. Returns the whole loss of each step of this run."""
        optimizers, stream, started = make_optimizers(self.model), self.source.batches(), time.monotonic()
        first, history = self.resume(optimizers), list[tuple[float, float]]()
        for _ in range(first):
            next(stream)
        for step in range(first, self.source.steps):
            history.append(self.step(optimizers, self.source.tensors(next(stream)), step))
            if (step + 1) % 50 == 0:
                means = [sum(column) / len(column) for column in zip(*history[-50:], strict=True)]
                took = f"{time.monotonic() - started:.0f} s"
                place = f"step {step + 1}/{self.source.steps}"
                print(f"{place} text {means[0]:.4f} thoughts {means[1]:.5f} {took}", flush=True)
            if (step + 1) % SAVED_EVERY == 0:
                self.keep(optimizers, step + 1)
        return [text + THOUGHT_WEIGHT * thought for text, thought in history]

    def step(self, optimizers: list[torch.optim.Optimizer], batch: Batch, step: int) -> tuple[float, float]:
        """Take one step. Returns the losses of the text and of the thoughts."""
        for optimizer, peak in zip(optimizers, PEAK_RATES, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(step, self.source.steps)
        text, thought = loss_of(self.model, batch, think=self.source.kind == "thinking", gaps=self.gaps)
        self.model.zero_grad()
        (text + THOUGHT_WEIGHT * thought).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        return text.item(), thought.item()

    def keep(self, optimizers: list[torch.optim.Optimizer], step: int) -> None:
        """Write what a later run needs to go on after `step` steps."""
        if self.kept is None:
            return
        self.kept.parent.mkdir(parents=True, exist_ok=True)
        state = {"step": step, "model": self.model.state_dict(), "random": torch.get_rng_state()}
        state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
        torch.save(state, self.kept.with_suffix(".new"))
        self.kept.with_suffix(".new").replace(self.kept)

    def resume(self, optimizers: list[torch.optim.Optimizer]) -> int:
        """Load what `keep` wrote, if anything. Returns the number of steps done."""
        if self.kept is None or not self.kept.exists():
            return 0
        state = torch.load(self.kept, weights_only=True)
        self.model.load_state_dict(state["model"])
        torch.set_rng_state(state["random"])
        for optimizer, content in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(content)
        return int(state["step"])


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "bos_token": None,
        "add_bos_token": False,
        "model_max_length": SHAPE.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")


def save_plain(model: ThinkingModel, folder: Path) -> None:
    """Write the decoder alone, as a Llama."""
    plain = torch.nn.Module()
    plain.add_module("model", model.model)
    write(plain, folder, config(model.shape, model.end))


def tokenizer_of(args: argparse.Namespace) -> Tokenizer:
    """Return the tokenizer of models/coin, or train it if that model is to be made."""
    if (args.task, args.kind) != ("coin", "thinking"):
        return load_tokenizer(COIN)
    rng = random.Random(f"tokenizer {args.seed}")
    samples = [training_sample(rng, LONGEST[1]) for _ in range(2000)]
    return train_tokenizer(text for sample in samples for text in (sample.prompt, sample.answer))


def parse() -> argparse.Namespace:
    """Read the command line; see ``models/README.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="coin")
    parser.add_argument("--kind", choices=KINDS, default="thinking")
    parser.add_argument("--out", type=Path, default=COIN)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="default: those of the task")
    parser.add_argument("--stories", type=int, default=200, help="to measure with, for each number of flips")
    args = parser.parse_args()
    if args.out == COIN and (args.task, args.kind) != ("coin", "thinking"):
        parser.error("--out is required for every model but models/coin")
    return args


def main() -> None:
    """Train, save, and measure the coin model."""
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    started, thinks = time.monotonic(), args.kind == "thinking"
    tokenizer = tokenizer_of(args)
    model = ThinkingModel(SHAPE, Thinking(chunk_size=CHUNK), SPECIAL[END])
    task = TASKS[args.task]
    source = Source(tokenizer, args.task, args.kind, args.seed, args.steps or task.steps)
    Training(model, source, args.kind in task.gaps, args.out / "training.pt").run()
    (save if thinks else save_plain)(model, args.out)
    save_tokenizer(tokenizer, args.out)
    print(f"trained in {time.monotonic() - started:.0f} s", flush=True)
    if thinks and args.task == "coin":
        report(args.out, args.stories, think=True)


if __name__ == "__main__":
    main()
