"""A model that thinks on a GPU: `python -m pytest tests/unit/gpu/test_thinking.py` on a machine with one.

None was at hand when this was written, so it has not been run.
"""

from pathlib import Path

import pytest
import torch

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.model.build import load_model
from baton.tokenizer import load_tokenizer

COIN = Path(__file__).parents[3] / "models" / "coin"
SENTENCE = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs an NVIDIA GPU and torch built for CUDA"),
]


def answer(mode, device):
    """Text and thoughts, and the state that would be handed over with one token less, as numbers."""
    tokenizer, key = load_tokenizer(COIN), HandoffId("r", 1)
    engine = Engine(load_model(COIN, device=device, thinking=mode), tokenizer, total_blocks=64)
    prompt = tuple(tokenizer.encode(SENTENCE))
    engine.submit(key, SequenceSpec(prompt[:-1], Sampling(max_tokens=1, temperature=0.0)), hold=True)
    while engine.has_work():
        engine.step()
    carried = engine.thinking_state(key)
    assert carried is not None
    engine.release(key)
    engine.submit(key, SequenceSpec(prompt, Sampling(max_tokens=6, temperature=0.0)))
    text, thoughts = "", []
    while engine.has_work():
        result = engine.step()
        thoughts += [thought.token_ids for _, made in result.thoughts for thought in made]
        text += "".join(token.text for output in result.outputs for token in output.tokens)
    return text, thoughts, torch.frombuffer(bytearray(carried.state), dtype=torch.float32)


@pytest.mark.parametrize("mode", ["auto", "fast", "sequential"])
def test_it_thinks_as_on_a_cpu(mode):
    text, thoughts, state = answer("sequential", "cpu")
    there = answer(mode, "cuda:0")
    assert there[:2] == (text, thoughts)
    torch.testing.assert_close(there[2], state, atol=1e-3, rtol=1e-3)
