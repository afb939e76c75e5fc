"""The coin model in the engine: against its dense reference, and fast against sequential."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from baton.engine.engine import Engine
from baton.engine.models.loading import load_model
from baton.engine.models.thinking import Mode
from baton.tokenizer import load_tokenizer
from models import thinking_model
from models.thinking_eval import phrasings, samples
from models.thinking_text import SEED_SAMPLE
from tests.support.engines import key_of, run, spec_of

COIN = Path(__file__).parents[2] / "models" / "coin"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@cache
def tokenizer():
    return load_tokenizer(COIN)


def engine_of(mode: Mode = "auto", **options):
    return Engine(load_model(COIN, thinking=mode), tokenizer(), total_blocks=800, prefix_cache=False, **options)


def ids_of(text):
    return tuple(tokenizer().encode(text))


def answers(engine, prompts, new=4):
    """Return the tokens and thoughts of each prompt, computed in batches of 16."""
    found = []
    for first in range(0, len(prompts), 16):
        some = prompts[first : first + 16]
        streams = run(engine, [spec_of(prompt, max_tokens=new, ignore_eos=False) for prompt in some])
        found += [(streams.ids(key_of(number)), streams.thoughts[key_of(number)]) for number in range(len(some))]
    return found


def prompts_of(count, rng):
    """Return stories with few and many flips, with and without filler, cut anywhere, and some random tokens."""
    found = []
    for number in range(count):
        if number % 10 == 9:
            found.append(tuple(rng.randrange(3, 1024) for _ in range(rng.randint(1, 40))))
            continue
        (story,) = samples(rng.randint(1, 8), 1, rng.randrange(2**32), rng.choice([0.0, 0.5, 1.0, 3.0]))
        ids = ids_of(story.prompt)
        found.append(ids if rng.random() < 0.5 else ids[: rng.randint(1, len(ids))])
    return found


def test_it_is_the_dense_reference():
    model, ended = thinking_model.load(COIN), engine_of().backend.thinker
    assert ended is not None
    texts = [SEED_SAMPLE.prompt, *(sample.prompt for sample in phrasings()[:6]), samples(5, 1, 7)[0].prompt]
    for prompt, (tokens, thoughts) in zip(texts, answers(engine_of(), [ids_of(text) for text in texts]), strict=True):
        wanted, spoken = model.answer(list(ids_of(prompt)), 4)
        assert tokens == wanted
        assert thoughts == [tuple(token for token in thought if token != ended.config.eos) for thought in spoken]


@pytest.mark.slow
def test_fast_is_sequential_for_random_prompts(seed):
    prompts = prompts_of(120, random.Random(seed))
    wanted = answers(engine_of("sequential"), prompts)
    for mode in ("fast", "auto"):
        assert answers(engine_of(mode), prompts) == wanted
    assert sum(any(thoughts) for _, thoughts in wanted) > 60
