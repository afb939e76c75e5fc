"""The demo checkpoint and its text: held-out prompts are unseen, answers are right. Both folders are small and safe."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models import demo_eval, demo_model, demo_text, demo_tokenizer, thinking_tokenizer

MODELS = Path(demo_text.__file__).parent
DEMO = MODELS / "demo"
BOTH = pytest.mark.parametrize("name", ["demo", "coin"])


def test_the_heldout_file_is_what_the_generator_makes() -> None:
    held_out = demo_text.read_heldout()
    assert held_out == demo_text.heldout_samples()
    assert len(dict(held_out)) == 200


@pytest.mark.parametrize("epoch_seed", [1, 30])
def test_no_heldout_prompt_occurs_in_the_training_text(epoch_seed: int) -> None:
    training = demo_text.training_samples(epoch_seed)
    assert training == demo_text.training_samples(epoch_seed)
    texts = "\n".join(prompt + completion for prompt, completion in training)
    assert [prompt for prompt, _ in demo_text.read_heldout() if prompt in texts] == []


def test_the_checkpoint_completes_heldout_prompts_and_the_seed_prompts() -> None:
    tokenizer, model = demo_tokenizer.load_tokenizer(DEMO), demo_model.load(DEMO, torch.float32)
    assert demo_eval.failures(model, tokenizer, demo_text.SEED_SAMPLES) == []
    wrong = demo_eval.failures(model, tokenizer, demo_text.read_heldout())
    assert len(wrong) <= 20, wrong


@BOTH
def test_the_folder_is_small_and_holds_no_pickle(name: str) -> None:
    files = [path for path in (MODELS / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 10_000_000
    assert {path.suffix for path in files} <= {".jinja", ".json", ".safetensors"}
    header = (MODELS / name / "model.safetensors").read_bytes()
    assert isinstance(json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")]), dict)


@BOTH
@given(text=st.text())
def test_the_tokenizer_is_lossless_and_has_the_words_whole(name: str, text: str) -> None:
    tokenizer = demo_tokenizer.load_tokenizer(MODELS / name)
    {"demo": demo_tokenizer, "coin": thinking_tokenizer}[name].check_whole(tokenizer)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
