"""The coin model in the engine against its dense reference."""

from pathlib import Path

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
MODES: tuple[Mode, ...] = ("auto", "fast", "sequential")


def test_every_mode_is_the_dense_reference():
    """The prompts are computed in one batch: sentences, stories with and without filler, one that is cut, and noise."""
    torch.set_num_threads(1)
    stories = [samples(5, 1, 7)[0], samples(8, 1, 7, filler=0.0)[0], samples(3, 1, 7, filler=3.0)[0]]
    tokenizer, model = load_tokenizer(COIN), thinking_model.load(COIN)
    prompts = [tokenizer.encode(sample.prompt) for sample in [SEED_SAMPLE, *phrasings()[:6], *stories]]
    prompts += [prompts[-1][:25], list(range(3, 1024, 40))]
    wanted = [model.answer(prompt, 4) for prompt in prompts]
    assert sum(any(spoken) for _, spoken in wanted) > len(prompts) // 2, "most prompts have thoughts"
    for mode in MODES:
        engine = Engine(load_model(COIN, thinking=mode), tokenizer, total_blocks=800, prefix_cache=False)
        ended = engine.backend.thinker
        assert ended is not None
        streams = run(engine, [spec_of(prompt, max_tokens=4, ignore_eos=False) for prompt in prompts])
        for number, (tokens, spoken) in enumerate(wanted):
            assert streams.ids(key_of(number)) == tokens, mode
            thoughts = [tuple(token for token in thought if token != ended.config.eos) for thought in spoken]
            assert streams.thoughts[key_of(number)] == thoughts, mode
