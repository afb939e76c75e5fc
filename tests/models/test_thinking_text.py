"""The coin stories: where the state changes, how much of a text has no event, what the training text leaves out."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest

from models import thinking_eval, thinking_text, thinking_tokenizer
from models.demo_tokenizer import load_tokenizer

COIN = Path(thinking_text.__file__).parent / "coin"
TURNED = ("flips", "flipped", "over", "flip")  # the words with which an event ends


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(COIN)


@pytest.fixture(scope="module")
def training():
    rng = random.Random(5)
    return [thinking_text.training_sample(rng, 70) for _ in range(3000)]


def test_every_event_turns_the_coin(training):
    for sample in training:
        told = re.findall("heads|tails", sample.prompt.lower())[0]
        sides = [told, *sample.thoughts]
        assert sample.answer == f" {sides[-1]}."
        assert all(left != right for left, right in pairwise(sides))
        assert len(sample.thoughts) == len(sample.ends)
        assert all(sample.prompt[:end].endswith(TURNED) for end in sample.ends)


def test_training_stories_have_at_most_ten_flips_and_most_chunks_have_none(training, tokenizer):
    assert {len(sample.thoughts) for sample in training} == set(range(11))
    chunks = [thought for sample in training for thought in thinking_tokenizer.gold(tokenizer, sample)[1]]
    assert 0.02 < sum(map(bool, chunks)) / len(chunks) < 0.2


def test_a_chunk_has_the_state_after_the_event_that_ends_in_it(training, tokenizer):
    for sample in training[:300]:
        ids, thoughts = thinking_tokenizer.gold(tokenizer, sample)
        assert tuple(filter(None, thoughts)) == sample.thoughts
        ends = [len(tokenizer.decode(ids[: 2 * i])) for i in range(len(thoughts) + 1)]
        spoken = [i for i, thought in enumerate(thoughts) if thought]
        for chunk, end in zip(spoken, sample.ends, strict=True):
            assert ends[chunk] < end <= ends[chunk + 1]


def test_the_phrasings_are_not_in_the_training_text(training):
    rows = [json.loads(line) for line in thinking_eval.PHRASINGS_FILE.read_text(encoding="utf-8").splitlines()]
    texts = "\n".join(sample.prompt for sample in training)
    assert len({row["prompt"] for row in rows}) >= 10
    for row in rows:
        assert row["new"] in row["prompt"]
        assert row["new"] not in texts
    names = set(re.findall(r"Priya|Yusuf|Ingrid|Omar|Keiko|Mateo|Fatima|Sven", " ".join(row["prompt"] for row in rows)))
    assert len(names) == 8
    assert not [name for name in names if name in texts]


def test_fresh_stories_have_the_flips_that_were_asked_for():
    fresh = thinking_eval.samples(60, 20, 1, 0.5)
    assert [len(sample.thoughts) for sample in fresh] == [60, 59] * 10
    assert fresh == thinking_eval.samples(60, 20, 1, 0.5)
    assert fresh != thinking_eval.samples(60, 20, 2, 0.5)
    assert len({sample.answer for sample in fresh}) == 2
