"""Greedy decoding without a cache, and the measurement of a demo checkpoint.

``python models/demo_eval.py`` prints the held-out accuracy in fp32 and bf16 and the logit gaps of the seed answers.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python models/demo_eval.py`

from models.demo_model import DemoModel, load
from models.demo_text import SEED_SAMPLES, Sample, read_heldout
from models.demo_tokenizer import end_id, load_tokenizer

LONGEST = 96


@torch.inference_mode()
def greedy(model: DemoModel, rows: list[list[int]], end: int, longest: int = LONGEST) -> list[list[int]]:
    """Continue prompts of one common length until ``end``. The answers do not include it."""
    ids = torch.tensor(rows)
    done = torch.zeros(len(rows), dtype=torch.bool)
    for _ in range(longest):
        token = model.logits(model(ids)[:, -1]).argmax(-1)
        token = torch.where(done, torch.full_like(token, end), token)
        ids = torch.cat((ids, token[:, None]), dim=1)
        done |= token == end
        if bool(done.all()):
            break
    answers = [row[len(rows[0]) :] for row in ids.tolist()]
    return [answer[: answer.index(end)] if end in answer else answer for answer in answers]


def complete(model: DemoModel, tokenizer: Tokenizer, prompts: list[str]) -> list[str]:
    """Return greedy completions of all prompts, grouped by token length so that no padding is needed."""
    groups: dict[int, list[int]] = defaultdict(list)
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    for index, ids in enumerate(encoded):
        groups[len(ids)].append(index)
    texts = [""] * len(prompts)
    for members in groups.values():
        answers = greedy(model, [encoded[i] for i in members], end_id(tokenizer))
        for index, answer in zip(members, answers, strict=True):
            texts[index] = tokenizer.decode(answer, skip_special_tokens=False)
    return texts


def failures(model: DemoModel, tokenizer: Tokenizer, samples: list[Sample]) -> list[tuple[str, str, str]]:
    """Return (prompt, expected, got) for every sample that is not completed exactly."""
    texts = complete(model, tokenizer, [prompt for prompt, _ in samples])
    return [(*sample, text) for sample, text in zip(samples, texts, strict=True) if sample[1] != text]


@torch.inference_mode()
def gaps(model: DemoModel, tokenizer: Tokenizer, sample: Sample) -> list[float]:
    """Return the margin of each expected token's logit over the best other one. Negative means wrong."""
    prompt, answer = (tokenizer.encode(text).ids for text in sample)
    answer = [*answer, end_id(tokenizer)]
    logits = model.logits(model(torch.tensor([prompt + answer]))[0]).float()[len(prompt) - 1 : -1]
    wanted = torch.tensor(answer)[:, None]
    best_other = logits.scatter(1, wanted, float("-inf")).amax(-1)
    return [round(gap, 2) for gap in (logits.gather(1, wanted)[:, 0] - best_other).tolist()]


def report(folder: Path, samples: list[Sample]) -> float:
    """Print the measurements of a checkpoint folder, and return the fp32 accuracy."""
    tokenizer = load_tokenizer(folder)
    accuracy = {}
    for name, dtype in [("fp32", torch.float32), ("bf16", torch.bfloat16)]:
        model = load(folder, dtype)
        wrong = failures(model, tokenizer, samples)
        accuracy[name] = 1 - len(wrong) / len(samples)
        print(f"{name}: held-out exact {accuracy[name]:.1%} ({len(samples) - len(wrong)} of {len(samples)})")
        for prompt, expected, got in wrong:
            print(f"  {prompt!r}: expected {expected!r}, got {got!r}")
        for sample in SEED_SAMPLES:
            print(
                f"  seed {sample[0]!r} -> {complete(model, tokenizer, [sample[0]])[0]!r}, "
                f"logit gaps {gaps(model, tokenizer, sample)}"
            )
    return accuracy["fp32"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "demo")
    report(parser.parse_args().model, read_heldout())
