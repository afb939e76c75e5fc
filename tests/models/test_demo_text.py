"""The demo checkpoint and its text: held-out prompts are unseen, answers are right. Both folders are small and safe."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from models import demo_text, demo_tokenizer, thinking_tokenizer

MODELS = Path(demo_text.__file__).parent
DEMO = MODELS / "demo"
BOTH = pytest.mark.parametrize("name", ["demo", "coin"])


def complete(prompts: list[str]) -> list[str]:
    """Return batched greedy completions by transformers. Each batch has prompts of one length, so without padding."""
    import torch
    from transformers import LlamaForCausalLM

    tokenizer, model = Tokenizer.from_file(str(DEMO / "tokenizer.json")), LlamaForCausalLM.from_pretrained(DEMO)
    end = demo_tokenizer.end_id(tokenizer)
    groups: dict[int, dict[str, list[int]]] = defaultdict(dict)
    for prompt in prompts:
        row = tokenizer.encode(prompt).ids
        groups[len(row)][prompt] = row
    texts = {}
    for length, members in groups.items():
        ids = torch.tensor(list(members.values()))
        rows = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, do_sample=False)
        for prompt, row in zip(members, rows[:, length:].tolist(), strict=True):
            # Without an end there is no exact match, hence the mark.
            answer = row[: row.index(end)] if end in row else [*row, end]
            texts[prompt] = tokenizer.decode(answer, skip_special_tokens=False)
    return [texts[prompt] for prompt in prompts]


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
    samples = demo_text.SEED_SAMPLES + demo_text.read_heldout()
    texts = complete([prompt for prompt, _ in samples])
    wrong = [(*sample, text) for sample, text in zip(samples, texts, strict=True) if sample[1] != text]
    assert not {prompt for prompt, _, _ in wrong} & {prompt for prompt, _ in demo_text.SEED_SAMPLES}
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
