"""The coin model: its two computations agree, a training step learns, the checkpoint answers. Also its text."""

import json
import random
import re
from pathlib import Path

import pytest
import torch

from models import demo_model, thinking_eval, thinking_model, thinking_text, train_thinking
from models.demo_model import Shape
from models.demo_tokenizer import load_tokenizer
from models.tasks.batches import Source
from models.thinking_eval import samples
from models.thinking_text import SEED_SAMPLE
from models.thinking_tokenizer import CHUNK, gold, thought_ids
from models.train_thinking import Training

COIN = Path(thinking_model.__file__).parent / "coin"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(COIN)


@pytest.fixture(scope="module")
def coin():
    return thinking_model.load(COIN)


def small(chunk_size=CHUNK, **options):
    torch.manual_seed(3)
    shape = Shape(1024, 32, 64, 3, 4, 2, max_position_embeddings=512)
    return thinking_model.ThinkingModel(shape, thinking_model.Thinking(chunk_size, **options), end=0)


def test_without_states_the_backbone_is_a_llama(coin, tokenizer):
    from transformers import LlamaForCausalLM

    ids = torch.tensor([tokenizer.encode(SEED_SAMPLE.prompt).ids])
    with torch.inference_mode():
        rows, _ = coin(ids, torch.zeros(*ids.shape, coin.shape.hidden_size))
        expected = LlamaForCausalLM.from_pretrained(COIN)(ids).logits
        torch.testing.assert_close(coin.logits(rows), expected, rtol=1e-4, atol=1e-4)


def test_the_parallel_forward_is_the_chunkwise_one_on_the_same_thoughts(coin, tokenizer):
    prompt, texts = gold(tokenizer, samples(10, 1, 4)[0])
    numbers = {"": 0, "heads": 1, "tails": 2}
    spelled = [thought_ids(tokenizer, text) for text in numbers]
    known = torch.tensor([[numbers[text] for text in texts]])
    ids = prompt[: CHUNK * len(texts)]
    with torch.inference_mode():
        out, read = coin(torch.tensor([ids]), train_thinking.states_of(coin, spelled, known))
        for chunk in range(len(texts)):
            stop = CHUNK * (chunk + 1)
            thoughts = [thought_ids(tokenizer, text) for text in texts[:chunk]]
            alone, rows = coin(torch.tensor([ids[:stop]]), coin.states(thoughts, stop))
            torch.testing.assert_close(rows[0, -CHUNK:], read[0, stop - CHUNK : stop], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(alone[0, -CHUNK:], out[0, stop - CHUNK : stop], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk_size", [1, 2, 4])
def test_thoughts_found_in_rounds_are_those_found_one_by_one(chunk_size):
    model = small(chunk_size)
    prompt = torch.randint(3, 1024, (23,)).tolist()
    _, thoughts = model.answer(prompt, 1)
    guess = [[0]] * (len(prompt) // chunk_size)
    assert len(thoughts) == 23 // chunk_size
    assert len(set(map(tuple, thoughts))) > 1
    assert thinking_eval.think_in_rounds(model, prompt, guess) == thoughts


def test_generated_chunks_are_thought_about_only_while_decoding():
    model = small(2)
    prompt = list(range(3, 10))
    tokens, thoughts = model.answer(prompt, 6)
    more_tokens, more = model.answer(prompt, 6, while_decoding=True)
    assert len(thoughts) == 3
    assert len(more) == 6
    assert more[:3] == thoughts
    assert more_tokens[:1] == tokens[:1]


@pytest.mark.parametrize(("task", "kind"), [("coin", "thinking"), ("variables", "cot")])
def test_training_lowers_the_loss_and_goes_on_after_a_stop(tokenizer, task, kind, tmp_path, monkeypatch):
    def training():
        return Training(small(), Source(tokenizer, task, kind, 1, 12), gaps=True, kept=tmp_path / "training.pt")

    monkeypatch.setattr(train_thinking, "SAVED_EVERY", 8)
    losses = training().run()
    assert sum(losses[-3:]) < sum(losses[:3])
    again = training()
    assert again.run() == losses[8:]


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    model = small(4, input_layer=2, output_layer=2, max_thought_tokens=7)
    thinking_model.save(model, tmp_path)
    again = thinking_model.load(tmp_path)
    assert (again.shape, again.config, again.end) == (model.shape, model.config, model.end)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_without_thinking_is_saved_as_a_plain_decoder(tmp_path):
    model, ids = small(), torch.arange(3, 14)[None]
    train_thinking.save_plain(model, tmp_path)
    plain = demo_model.load(tmp_path)
    with torch.inference_mode():
        rows, _ = model(ids, torch.zeros(*ids.shape, model.shape.hidden_size))
        torch.testing.assert_close(plain(ids), rows)
    assert "thinking" not in json.loads((tmp_path / "config.json").read_text())


def test_the_checkpoint_thinks_through_fresh_stories_chunk_by_chunk(coin, tokenizer):
    for sample in samples(10, 3, 12):
        prompt, texts = gold(tokenizer, sample)
        tokens, thoughts = coin.answer(prompt)
        assert thoughts == [thought_ids(tokenizer, text) for text in texts]
        assert tokenizer.decode(tokens, skip_special_tokens=False) == sample.answer


def test_the_checkpoint_answers_long_stories_by_thinking(coin, tokenizer):
    fresh = samples(60, 4, 11)
    assert thinking_eval.accuracy(coin, tokenizer, fresh, think=True) == (1.0, 1.0)
    silent, _ = thinking_eval.accuracy(coin, tokenizer, samples(10, 30, 11), think=False)
    assert silent < 0.8


def test_the_training_text_has_neither_the_phrasings_nor_more_than_ten_flips():
    rng = random.Random(5)
    training = [thinking_text.training_sample(rng, 70) for _ in range(3000)]
    assert {len(sample.thoughts) for sample in training} == set(range(11))
    rows = [json.loads(line) for line in thinking_eval.PHRASINGS_FILE.read_text(encoding="utf-8").splitlines()]
    texts = "\n".join(sample.prompt for sample in training)
    assert len({row["prompt"] for row in rows}) >= 10
    for row in rows:
        assert row["new"] in row["prompt"]
        assert row["new"] not in texts
    names = set(re.findall(r"Priya|Yusuf|Ingrid|Omar|Keiko|Mateo|Fatima|Sven", " ".join(row["prompt"] for row in rows)))
    assert len(names) == 8
    assert not [name for name in names if name in texts]
