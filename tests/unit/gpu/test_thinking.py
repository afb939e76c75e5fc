"""A model that thinks on a GPU, not run yet: `python -m pytest tests/unit/gpu/test_thinking.py` on a GPU machine."""

from pathlib import Path

import pytest
import torch

from baton.engine.engine import Engine
from baton.engine.models.loading import load_model
from baton.tokenizer import load_tokenizer
from tests.support.engines import key_of, kv_of, run, spec_of

COIN = Path(__file__).parents[3] / "models" / "coin"
SENTENCE = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and torch built for CUDA")


def answer(mode, device):
    """Return text and thoughts, and, as numbers, the state of a handoff with one token fewer."""
    tokenizer = load_tokenizer(COIN)
    engine = Engine(load_model(COIN, device=device, thinking=mode), tokenizer, total_blocks=64)
    prompt = tokenizer.encode(SENTENCE)
    kv_of(engine, spec_of(prompt[:-1]))
    carried = engine.thinking_state(key_of())
    assert carried is not None
    engine.release(key_of())
    found = run(engine, [spec_of(prompt, max_tokens=6, ignore_eos=False)])
    text = "".join(token.text for token in found.tokens[key_of(0)])
    return text, found.thoughts[key_of(0)], torch.frombuffer(bytearray(carried.state), dtype=torch.float32)


@pytest.mark.parametrize("mode", ["auto", "fast", "sequential"])
def test_it_thinks_as_on_a_cpu(mode):
    text, thoughts, state = answer("sequential", "cpu")
    there = answer(mode, "cuda:0")
    assert there[:2] == (text, thoughts)
    torch.testing.assert_close(there[2], state, atol=1e-3, rtol=1e-3)
