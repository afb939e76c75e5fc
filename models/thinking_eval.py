"""Measure a coin checkpoint: thoughts and answers on fresh stories of 10 to 100 flips, and on phrasings it never saw.

``python models/thinking_eval.py`` prints the accuracy with thinking and with every thought trivial.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python models/thinking_eval.py`

from models.demo_tokenizer import load_tokenizer
from models.thinking_model import ThinkingModel, load
from models.thinking_text import SEED_SAMPLE, Sample, spread, story
from models.thinking_tokenizer import gold, thought_ids

HERE = Path(__file__).parent
PHRASINGS_FILE = HERE / "coin_phrasings.jsonl"
FLIPS = (10, 20, 40, 60, 100)
SEED = 2026
Thoughts = list[list[int]]


def phrasings() -> list[Sample]:
    """Return the prompts of PHRASINGS_FILE, whose wording is not in the training text. Their `ends` are unknown."""
    rows = map(json.loads, PHRASINGS_FILE.read_text(encoding="utf-8").splitlines())
    return [Sample(row["prompt"], row["answer"], tuple(row["thoughts"]), ()) for row in rows]


def samples(flips: int, n: int, seed: int, filler: float = 1.0) -> list[Sample]:
    """Return `n` new stories of `flips` flips, every other one with one less, and about `filler` idle clauses per flip.

    If all had the same even number, the first state of a story would be its answer.
    """
    rng = random.Random(f"fresh {seed} {flips} {filler}")
    return [story(rng, spread(rng, flips - i % 2, round(filler * flips))) for i in range(n)]


def think_all(model: ThinkingModel, rows: Tensor) -> Thoughts:
    """Return the thoughts about chunks with rows [N, c, D], each equal to that of `ThinkingModel.think`."""
    end = model.config.eos_token_id
    written = torch.full((len(rows), 1), model.config.bos_token_id)
    for _ in range(model.config.max_thought_tokens):
        token = model.thought_logits(rows, written)[:, -1].argmax(-1)
        written = torch.cat((written, token[:, None]), dim=1)
    thoughts = [row[1:] for row in written.tolist()]
    return [row[: row.index(end) + 1] if end in row else row for row in thoughts]


@torch.inference_mode()
def think_in_rounds(model: ThinkingModel, prompt: list[int], guess: Thoughts) -> Thoughts:
    """Compute the thoughts of `ThinkingModel.answer` by parallel forwards from a guess of all thoughts.

    A round uses the thoughts of the round before. A chunk's thought depends only on earlier ones, so each round makes
    at least one more right. A round that changes nothing has them all.
    """
    known, size = guess, model.config.chunk_size
    while True:
        _, read = model(torch.tensor([prompt]), model.states(known, len(prompt)))
        found = think_all(model, read[0, : len(known) * size].unflatten(0, (-1, size)))
        if found == known:
            return known
        known = found


def right(model: ThinkingModel, tokenizer: Tokenizer, sample: Sample, *, think: bool) -> tuple[bool, bool]:
    """Return whether the whole answer is right, and whether every thought of every chunk is."""
    prompt, texts = gold(tokenizer, sample)
    expected = [thought_ids(tokenizer, text if think else "") for text in texts]
    thoughts = think_in_rounds(model, prompt, expected) if think else expected
    tokens, _ = model.answer(prompt, known=thoughts)
    return tokenizer.decode(tokens, skip_special_tokens=False) == sample.answer, thoughts == expected


def accuracy(model: ThinkingModel, tokenizer: Tokenizer, stories: list[Sample], *, think: bool) -> tuple[float, float]:
    """Return the shares of stories with the right answer, and with the right thought about every chunk.

    Without `think` every thought is trivial.
    """
    marks = [right(model, tokenizer, story, think=think) for story in stories]
    answers, thoughts = (sum(column) / len(marks) for column in zip(*marks, strict=True))
    return answers, thoughts


def report(folder: Path, stories: int, *, think: bool) -> None:
    """Print the measurements of a checkpoint folder. `think` is false for a net that was trained without thoughts."""
    tokenizer, model = load_tokenizer(folder), load(folder)
    for flips in FLIPS:
        fresh = samples(flips, stories, SEED)
        answers, _ = accuracy(model, tokenizer, fresh, think=False)
        line = f"{flips} flips, {stories} stories: answers without thinking {answers:.3f}"
        if think:
            answers, exact = accuracy(model, tokenizer, fresh, think=True)
            line += f", with thinking {answers:.3f}, all thoughts right {exact:.3f}"
        print(line, flush=True)
    for sample in [SEED_SAMPLE, *phrasings()] if think else []:
        tokens, thoughts = model.answer(tokenizer.encode(sample.prompt).ids)
        texts = [tokenizer.decode(thought) for thought in thoughts]
        text, spoken = tokenizer.decode(tokens, skip_special_tokens=False), tuple(filter(None, texts))
        mark = "right" if (text, spoken) == (sample.answer, sample.thoughts) else "WRONG"
        print(f"{mark} {sample.prompt!r} -> {text!r}, thoughts {texts}")


def main() -> None:
    """Command line; see ``models/README.md``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE / "coin")
    parser.add_argument("--stories", type=int, default=200, help="for each number of flips")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report(args.model, args.stories, think=True)


if __name__ == "__main__":
    main()
