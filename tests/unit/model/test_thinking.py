"""Checkpoints of models that think: errors name the mistake."""

import pytest
import torch

from baton.engine.models.config import read_config
from baton.engine.models.loading import load_model
from baton.engine.models.thinking import KEPT_STATES
from baton.errors import CheckpointError
from tests.unit.model.checkpoints import HIDDEN, VOCAB, edit_config, random_checkpoint
from tests.unit.model.thinking import SETTINGS, thinking_checkpoint

WITHOUT_CHUNKS = {name: value for name, value in SETTINGS.items() if name != "chunk_size"}


@pytest.fixture
def folder(tmp_path):
    thinking_checkpoint(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (SETTINGS | {"chunk_size": 0}, "chunk_size must be a whole number from 1 to 1024, got 0"),
        (WITHOUT_CHUNKS, "chunk_size is missing"),
        (SETTINGS | {"input_layer": 5}, "input_layer must be a whole number from 1 to 4, got 5"),
        (SETTINGS | {"input_layer": 3, "output_layer": 2}, "output_layer must be a whole number from 3 to 4, got 2"),
        (SETTINGS | {"max_thought_tokens": "8"}, "max_thought_tokens must be a whole number"),
        (SETTINGS | {"eos_token_id": VOCAB}, f"eos_token_id must be a whole number from 0 to {VOCAB - 1}"),
        (SETTINGS | {"bos_token_id": -1}, "bos_token_id"),
        (SETTINGS | {"chunksize": 4}, "chunksize is not supported"),
        (4, "thinking must be an object"),
        (..., r"unexpected tensors: compression\.block"),
    ],
)
def test_wrong_settings(folder, settings, named):
    edit_config(folder, thinking=settings)
    with pytest.raises(CheckpointError, match=named):
        load_model(folder)


def test_other_models_are_refused(tmp_path):
    random_checkpoint(tmp_path, "mixtral", num_local_experts=2)
    edit_config(tmp_path, thinking=SETTINGS)
    with pytest.raises(CheckpointError, match=r"thinking is supported only for dense models.*not for mixtral"):
        read_config(tmp_path)


def test_states_have_one_shape_and_are_kept(folder):
    """A thought's state is computed alone, so its bits are the same even after an eviction."""
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
