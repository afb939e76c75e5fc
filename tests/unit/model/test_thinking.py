"""Checkpoints of models that think: what is wrong with one is said by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.model.build import load_model
from baton.engine.model.config import read_config
from baton.engine.model.thinking import KEPT_STATES
from baton.errors import CheckpointError
from tests.unit.model.checkpoints import HIDDEN, VOCAB, random_checkpoint
from tests.unit.model.thinking import SETTINGS, change_config, thinking_checkpoint


@pytest.fixture
def folder(tmp_path):
    thinking_checkpoint(tmp_path)
    return tmp_path


def test_the_form(folder):
    found = read_config(folder).thinking
    assert found is not None
    assert (found.chunk_size, found.input_layer, found.output_layer, found.max_thought_tokens) == (4, 1, 3, 3)
    assert (found.bos, found.eos, found.pad) == (5, 6, 7)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"chunk_size": 0}, "thinking: chunk_size must be a whole number from 1 to 1024, got 0"),
        ({"chunk_size": None}, "thinking: chunk_size is missing"),
        ({"input_layer": 5}, "thinking: input_layer must be a whole number from 1 to 4, got 5"),
        ({"input_layer": 3, "output_layer": 2}, "thinking: output_layer must be a whole number from 3 to 4, got 2"),
        ({"max_thought_tokens": "8"}, "thinking: max_thought_tokens must be a whole number"),
        ({"eos_token_id": VOCAB}, f"thinking: eos_token_id must be a whole number from 0 to {VOCAB - 1}"),
        ({"bos_token_id": -1}, "thinking: bos_token_id"),
        ({"chunksize": 4}, "thinking: chunksize is not known"),
    ],
)
def test_wrong_settings(folder, changed, named):
    change_config(folder, thinking=SETTINGS | changed)
    with pytest.raises(CheckpointError, match=named):
        load_model(folder)


def test_it_must_be_an_object(folder):
    change_config(folder, thinking=4)
    with pytest.raises(CheckpointError, match="thinking must be an object"):
        load_model(folder)


def test_other_models_are_refused(tmp_path):
    random_checkpoint(tmp_path, "mixtral", num_local_experts=2)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"thinking": SETTINGS}))
    with pytest.raises(CheckpointError, match=r"thinking is served with dense models.*not with mixtral"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "thinking.norm.weight",
        "thinking.lm_head.weight",
        "thinking.block.mlp.up_proj.weight",
        "compression.block.self_attn.q_proj.weight",
    ],
)
@pytest.mark.parametrize("shape", [None, (3, 5)])
def test_weights_that_are_missing_or_of_another_shape(folder, name, shape):
    tensors = load_file(folder / "model.safetensors")
    assert name in tensors
    del tensors[name]
    if shape:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} {'has shape' if shape else 'is missing'}"):
        load_model(folder)


def test_blocks_without_a_word_in_the_config_are_unexpected(folder):
    change_config(folder, thinking=None)
    with pytest.raises(CheckpointError, match=r"unexpected tensors: compression\.block"):
        load_model(folder)


def test_states_have_one_shape_and_are_kept(folder):
    """The state of a thought is computed alone: its bits follow from the thought, also when it was let go meanwhile."""
    thinker = load_model(folder).thinker
    assert thinker is not None
    first = thinker.state((9, 10))
    assert first.shape == (4, HIDDEN)
    assert thinker.state((9, 10)) is first
    for number in range(KEPT_STATES):
        thinker.state((number % VOCAB, number // VOCAB))
    again = thinker.state((9, 10))
    assert again is not first
    assert torch.equal(again, first)
    assert not torch.equal(thinker.state(()), thinker.zeros)
