"""Train the coin model from nothing: text, tokenizer, weights, measurement."""

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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python models/train_thinking.py`

from models.demo_model import Shape
from models.demo_tokenizer import END
from models.thinking_eval import report
from models.thinking_model import Thinking, ThinkingModel, save
from models.thinking_text import SIDES, training_sample
from models.thinking_tokenizer import CHUNK, SPECIAL, VOCABULARY, gold, thought_ids, train_tokenizer

# Token ids with the answer and the end token; number of prompt tokens; for each whole chunk of the prompt, the index of
# its thought in THOUGHTS.
Row = tuple[list[int], int, list[int]]

THOUGHTS = ("", *SIDES)
SHAPE = Shape(vocab_size=VOCABULARY, max_position_embeddings=4096)
BATCH_TOKENS = 2048
POOL = 400  # stories that are sorted by length together
PEAK_RATES = (2e-2, 5e-3)  # of Muon and of AdamW
WEIGHT_DECAY = 0.1
WARMUP = 50
# The prompts' text has a small weight, because it is mostly random. The thoughts must be free of errors.
PROMPT_WEIGHT = 0.01
THOUGHT_WEIGHT = 10.0
LONGEST = (10, 70)  # idle clauses of a story: at first, and from the middle of the training on
SKIPPED = 3500  # maximum of omitted positions in a story
SKIP_SHARE = 0.8


def encode(tokenizer: Tokenizer, rng: random.Random, longest: int) -> Row:
    """Return a new story."""
    sample = training_sample(rng, longest)
    prompt, thoughts = gold(tokenizer, sample)
    answer = tokenizer.encode(sample.answer).ids
    return [*prompt, *answer, SPECIAL[END]], len(prompt), [THOUGHTS.index(thought) for thought in thoughts]


def batches(tokenizer: Tokenizer, seed: int, steps: int) -> Iterator[list[Row]]:
    """Yield batches endlessly: rows of similar length, about BATCH_TOKENS tokens each. Stories grow with the steps."""
    rng, made = random.Random(f"coin {seed}"), 0
    while True:
        longest = int(LONGEST[0] + (LONGEST[1] - LONGEST[0]) * min(1.0, 2 * made / steps))
        rows = sorted((encode(tokenizer, rng, longest) for _ in range(POOL)), key=lambda row: len(row[0]))
        groups: list[list[Row]] = [[]]
        for row in rows:
            if groups[-1] and len(row[0]) * (len(groups[-1]) + 1) > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        made += len(groups)
        yield from groups


def tensors(batch: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids [B, T], loss weights of the tokens [B, T], and thoughts [B, T / c], which are -1 if not trained.

    T is a multiple of c. Rows are padded on the right with weight zero.
    """
    longest = -(-max(len(ids) for ids, _, _ in batch) // CHUNK) * CHUNK
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    weight = torch.zeros(len(batch), longest)
    thoughts = torch.full((len(batch), longest // CHUNK), -1)
    for i, (row, head, thought) in enumerate(batch):
        ids[i, : len(row)] = torch.tensor(row)
        weight[i, :head], weight[i, head : len(row)] = PROMPT_WEIGHT, 1.0
        thoughts[i, : len(thought)] = torch.tensor(thought)
    return ids, weight, thoughts


def skipping(thoughts: Tensor, most: int = SKIPPED) -> Tensor:
    """Return positions [B, T] of thoughts [B, T / c] with up to three gaps, as if text had been left out.

    A gap is between the chunk of an event and the state after it. Later text therefore sees that state nearby, and all
    older ones as far away as in a story of up to `most` more tokens. Untrained distances would mislead the attention,
    and stories of that length take too long to train on.
    """
    steps = torch.ones(len(thoughts), thoughts.shape[1] * CHUNK, dtype=torch.long)
    for row, thought in zip(steps, thoughts, strict=True):
        behind = (thought[:-1] > 0).nonzero().flatten() + 1
        if len(behind) and torch.rand(()) < SKIP_SHARE:
            places = behind[torch.randint(len(behind), (int(torch.randint(1, 4, ())),))]
            gap = int(torch.rand(()) * most / len(places)) // CHUNK * CHUNK
            row.index_add_(0, places * CHUNK, torch.full_like(places, gap))
    return steps.cumsum(1) - 1


def states_of(model: ThinkingModel, spelled: list[list[int]], thoughts: Tensor) -> Tensor:
    """Return the states [B, T, D] of all chunks from their known thoughts. Compresses each thought once."""
    table = torch.stack([model.compress(ids) for ids in spelled])
    states = table[thoughts.clamp(min=0)]  # [B, T / c, c, D]
    return torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), dim=1).flatten(1, 2)


def thought_loss(model: ThinkingModel, spelled: list[list[int]], rows: Tensor, thoughts: Tensor) -> Tensor:
    """Return the cross entropy of the thoughts [N] about chunks [N, c, D]: summed over a thought, mean over chunks."""
    total = torch.zeros(())
    for index, ids in enumerate(spelled):
        chosen = rows[thoughts == index]
        written = torch.tensor([[model.config.bos_token_id, *ids[:-1]]]).expand(len(chosen), -1)
        targets = torch.tensor([ids]).expand(len(chosen), -1)
        logits = model.thought_logits(chosen, written)
        total = total + functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / len(rows)


def loss_of(model: ThinkingModel, spelled: list[list[int]], batch: list[Row], *, think: bool) -> tuple[Tensor, Tensor]:
    """Return the losses of the text and of the thoughts, from one parallel forward over all chunks.

    Without `think` every state is trivial and no thought is trained.
    """
    ids, weight, thoughts = tensors(batch)
    states = states_of(model, spelled, thoughts if think else torch.zeros_like(thoughts))
    out, read = model(ids, states, skipping(thoughts))
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


def train(model: ThinkingModel, tokenizer: Tokenizer, steps: int, seed: int, *, think: bool) -> list[float]:
    """Train in place. Prints a line every 50 steps. Returns the whole loss of each step."""
    optimizers = make_optimizers(model)
    spelled = [thought_ids(tokenizer, thought) for thought in THOUGHTS]
    stream, started = batches(tokenizer, seed, steps), time.monotonic()
    history: list[tuple[float, float]] = []
    for step in range(steps):
        for optimizer, peak in zip(optimizers, PEAK_RATES, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(step, steps)
        text, thought = loss_of(model, spelled, next(stream), think=think)
        model.zero_grad()
        (text + THOUGHT_WEIGHT * thought).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        history.append((text.item(), thought.item()))
        if (step + 1) % 50 == 0:
            means = [sum(column) / 50 for column in zip(*history[-50:], strict=True)]
            took = f"{time.monotonic() - started:.0f} s"
            print(f"step {step + 1}/{steps} text {means[0]:.4f} thoughts {means[1]:.5f} {took}", flush=True)
    return [text + THOUGHT_WEIGHT * thought for text, thought in history]


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


def main() -> None:
    """Run the command line; see ``models/README.md``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "coin")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--stories", type=int, default=200, help="to measure with, for each number of flips")
    parser.add_argument("--without-thinking", action="store_true", help="the same net and text, every thought trivial")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    started, think = time.monotonic(), not args.without_thinking
    rng = random.Random(f"tokenizer {args.seed}")
    samples = [training_sample(rng, LONGEST[1]) for _ in range(2000)]
    tokenizer = train_tokenizer(text for sample in samples for text in (sample.prompt, sample.answer))
    model = ThinkingModel(SHAPE, Thinking(chunk_size=CHUNK), SPECIAL[END])
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    train(model, tokenizer, args.steps, args.seed, think=think)
    save(model, args.out)
    save_tokenizer(tokenizer, args.out)
    print(f"trained in {time.monotonic() - started:.0f} s", flush=True)
    report(args.out, args.stories, think=think)


if __name__ == "__main__":
    main()
