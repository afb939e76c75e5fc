"""Samples of a task as batches of tensors. B rows, T positions, c positions of a chunk."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.tasks.registry import TASKS, completion
from models.thinking_tokenizer import CHUNK, SPECIAL, gold, thought_ids

END = next(iter(SPECIAL))
POOL = 400  # samples that are sorted by length together
# The prompts' text has a small weight, because it is mostly random. The thoughts must be free of errors.
PROMPT_WEIGHT = 0.01
LONGEST = (10, 70)  # idle clauses of a story: at first, and from the middle of the training on
SKIPPED = 3500  # maximum of omitted positions in a story
SKIP_SHARE = 0.8


class Row(NamedTuple):
    """Token ids of prompt, completion and end token; the prompt's length; a thought for each whole chunk of it.

    `size` is the length with the answer alone, so that all kinds have the same batches.
    """

    ids: list[int]
    head: int
    thoughts: list[str]
    size: int


class Batch(NamedTuple):
    """Tensors of a batch. `thoughts` are indices into `spelled`, or -1 if not trained. Thought 0 is the empty one."""

    ids: Tensor  # [B, T]
    weight: Tensor  # [B, T]: weight of each token in the loss
    thoughts: Tensor  # [B, T / c]
    spelled: list[list[int]]  # tokens of each thought, end token included


@dataclass(frozen=True, slots=True)
class Source:
    """Batches of a task for a kind of model. The same `seed` and `steps` give the same prompts to every kind."""

    tokenizer: Tokenizer
    task: str
    kind: str
    seed: int
    steps: int

    def encode(self, rng: random.Random, longest: int) -> Row:
        """Return a new sample with at most `longest` idle clauses."""
        sample = TASKS[self.task].training(rng, longest)
        prompt, thoughts = gold(self.tokenizer, sample)
        rest = self.tokenizer.encode(completion(sample, self.kind)).ids
        size = len(prompt) + len(self.tokenizer.encode(sample.answer).ids) + 1
        return Row([*prompt, *rest, SPECIAL[END]], len(prompt), thoughts, size)

    def batches(self) -> Iterator[list[Row]]:
        """Yield batches endlessly: rows of similar length, about `batch_tokens` of the task. Stories grow."""
        most, rng, made = TASKS[self.task].batch_tokens, random.Random(f"{self.task} {self.seed}"), 0
        while True:
            longest = int(LONGEST[0] + (LONGEST[1] - LONGEST[0]) * min(1.0, 2 * made / self.steps))
            rows = sorted((self.encode(rng, longest) for _ in range(POOL)), key=lambda row: row.size)
            groups: list[list[Row]] = [[]]
            for row in rows:
                if groups[-1] and row.size * (len(groups[-1]) + 1) > most:
                    groups.append([])
                groups[-1].append(row)
            rng.shuffle(groups)
            made += len(groups)
            yield from groups

    def tensors(self, batch: list[Row]) -> Batch:
        """Return the tensors. T is a multiple of c, and rows are padded on the right with weight zero."""
        texts = ["", *sorted({text for row in batch for text in row.thoughts if text})]
        numbers = {text: number for number, text in enumerate(texts)}
        longest = -(-max(len(row.ids) for row in batch) // CHUNK) * CHUNK
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        weight = torch.zeros(len(batch), longest)
        thoughts = torch.full((len(batch), longest // CHUNK), -1)
        for i, row in enumerate(batch):
            ids[i, : len(row.ids)] = torch.tensor(row.ids)
            weight[i, : row.head], weight[i, row.head : len(row.ids)] = PROMPT_WEIGHT, 1.0
            thoughts[i, : len(row.thoughts)] = torch.tensor([numbers[text] for text in row.thoughts])
        return Batch(ids, weight, thoughts, [thought_ids(self.tokenizer, text) for text in texts])


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
