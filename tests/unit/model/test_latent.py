"""Latent attention: its cached KV, both of its computations, and tensors that it does not read."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from baton.engine.kv_cache import KVCache
from baton.engine.models.deepseek import LatentAttention
from baton.engine.models.loading import TransformerBackend, load_model
from baton.errors import CheckpointError
from tests.unit.model.checkpoints import edit_tensors
from tests.unit.model.harness import Row, make_batch, poisoned_cache, prompts
from tests.unit.model.variants import LATENT

pytestmark = pytest.mark.slow


def test_one_vector_per_token_and_layer_is_cached(tmp_path: Path):
    LATENT["v2"].write(tmp_path)
    layout = load_model(tmp_path).layout
    assert (layout.tensors, layout.kv_heads, layout.head_dim) == (("latent",), 1, 32 + 8)
    assert layout.block_bytes == 3 * 16 * (32 + 8) * 4
    kv = KVCache(layout, 5)
    assert kv.k.shape == (3, 5, 16, 1, 40)
    assert kv.v.numel() == 0
    assert sum(tensor.nbytes for tensor in kv.tensors) == 5 * layout.block_bytes


def advance(backend: TransformerBackend, kv: KVCache, row: Row, chunk: int) -> torch.Tensor:
    """Compute the next `chunk` tokens of a row and return the logits of the last one."""
    logits = backend.forward(make_batch([row], [chunk], [[chunk - 1]], backend.layout.block_size), kv)[0].clone()
    row.computed += chunk
    return logits


def test_expanded_and_absorbed_agree(tmp_path: Path):
    """A prompt without a past uses keys and values per head; all other batches use latent rows."""
    LATENT["v3"].write(tmp_path)
    backend, [prompt] = load_model(tmp_path), prompts((64,))
    kv, row = poisoned_cache(backend, 8), Row(list(prompt), 0, blocks=[4, 5, 6, 7])
    absorbed, expanded = (
        patch.object(LatentAttention, name, autospec=True, side_effect=getattr(LatentAttention, name))
        for name in ("_absorbed", "_expanded")
    )
    with absorbed as other, expanded as used:
        whole = advance(backend, kv, Row(list(prompt), 0, blocks=[0, 1, 2, 3]), len(prompt))
        assert used.called > other.called
    with absorbed as used, expanded as other:
        advance(backend, kv, row, 1)
        pieces = advance(backend, kv, row, len(prompt) - 1)
        assert used.called > other.called
    torch.testing.assert_close(whole, pieces, atol=1e-4, rtol=0)


def test_layers_that_predict_further_ahead_are_not_read(tmp_path: Path):
    LATENT["v3"].write(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(2, 2)}))
    load_model(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"model.layers.4.eh_proj.weight": torch.ones(2, 2)}))
    with pytest.raises(CheckpointError, match=r"unexpected tensors: model\.layers\.4\.eh_proj\.weight"):
        load_model(tmp_path)
