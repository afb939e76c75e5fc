"""Latent attention against `transformers`: DeepSeek-V2 and V3, their cached KV, and its handoff."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from baton.engine.kv_cache import KVCache
from baton.engine.models.deepseek import LatentAttention
from baton.engine.models.loading import TransformerBackend, load_model
from baton.errors import CheckpointError
from kvtransfer.frames import Progress
from tests.unit.model import harness
from tests.unit.model.checkpoints import edit_tensors
from tests.unit.model.harness import Row, Variant, make_batch, poisoned_cache, prompts

pytestmark = pytest.mark.slow

NEW = 16
LENGTHS = (1, 2, 16, 17, 33, 64, 90, 150)
SHAPE = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
SHAPE |= {"num_hidden_layers": 3, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3}
SHAPE |= {"first_k_dense_replace": 1}
LITE = SHAPE | {"q_lora_rank": None}
V2 = SHAPE | {"q_lora_rank": 20, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
V3 = SHAPE | {"q_lora_rank": 20, "n_group": 4, "topk_group": 2}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
V2_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
V3_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16}

VARIANTS: dict[str, Variant] = {
    "v2-lite": Variant("deepseek_v2", LITE, 3),
    "v2-lite-yarn": Variant("deepseek_v2", LITE | {"rope_parameters": V2_YARN, "n_shared_experts": 1}, 1),
    "v2": Variant("deepseek_v2", V2 | {"routed_scaling_factor": 1.5}, 1),
    "v2-biases": Variant(
        "deepseek_v2", V2 | {"attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 0}, 10
    ),
    "v2-eps": Variant("deepseek_v2", LITE | {"rms_norm_eps": 0.1, "num_hidden_layers": 2, "hidden_act": "gelu"}, 0),
    "v3": Variant("deepseek_v3", V3, 0),
    "v3-many-groups": Variant("deepseek_v3", V3 | {"n_routed_experts": 24, "n_group": 8, "topk_group": 3}, 1),
    "v3-plain": Variant(
        "deepseek_v3",
        V3 | {"norm_topk_prob": False, "rope_interleave": False, "q_lora_rank": None, "kv_lora_rank": 24},
        1,
    ),
    "v3-one-group": Variant("deepseek_v3", V3 | {"n_group": 1, "topk_group": 1, "attention_bias": True}, 2),
    "v3-yarn": Variant("deepseek_v3", V3 | {"rope_parameters": V3_YARN}, 0),
    "v3-dense": Variant("deepseek_v3", V3 | {"first_k_dense_replace": 3, "tie_word_embeddings": True}, 0),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_transformers(variant: str, tmp_path: Path, seed: int):
    harness.check_logits(VARIANTS[variant], tmp_path, LENGTHS, NEW, seed)


@pytest.mark.parametrize("variant", ["v2-lite", "v2", "v3"])
def test_equals_generate(variant: str, tmp_path: Path, seed: int):
    harness.check_generate(VARIANTS[variant], tmp_path, (16, 64), NEW, seed)


@pytest.mark.parametrize("variant", ["v2-lite", "v2", "v3", "v3-dense"])
def test_bfloat16_is_as_good_as_transformers(variant: str, tmp_path: Path, seed: int):
    harness.check_bfloat16(VARIANTS[variant], tmp_path, LENGTHS, NEW, seed)


def test_one_vector_per_token_and_layer_is_cached(tmp_path: Path):
    VARIANTS["v2"].write(tmp_path)
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


@pytest.mark.parametrize("variant", ["v2-lite", "v3"])
@pytest.mark.parametrize("frame_size", [1, 5000, 1 << 20])
def test_handed_over(variant: str, frame_size: int, tmp_path: Path):
    """One worker computes the prompt, another one the rest: the tokens of transformers, without repeated work."""
    oracle, [prompt] = VARIANTS[variant].write(tmp_path), prompts((33,))
    prefill, decode = load_model(tmp_path), load_model(tmp_path)
    source, target = poisoned_cache(prefill, 9), poisoned_cache(decode, 9)
    there, here = Row(list(prompt), 0, blocks=[6, 0, 3]), Row(list(prompt), 0, len(prompt), blocks=[1, 8, 4, 7])
    progress = Progress(prefill.layout, 0, len(prompt))
    for chunk in (20, len(prompt) - 20):
        logits = advance(prefill, source, there, chunk)
        progress.computed(prefill.layout.layers, there.computed)
        while (frame := progress.next(frame_size)) is not None:
            data = torch.empty(frame.nbytes, dtype=torch.uint8)
            source.gather(frame.layers, there.blocks, frame.begin, frame.end, data)
            target.scatter(frame.layers, here.blocks, frame.begin, frame.end, data)
            progress.took(frame)
    assert progress.complete
    here.tokens.append(int(logits.argmax()))
    while len(here.tokens) < len(prompt) + NEW:
        here.tokens.append(int(advance(decode, target, here, 1).argmax()))
    logits = oracle(torch.tensor([here.tokens])).logits[0]
    assert here.tokens[len(prompt) :] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_expanded_and_absorbed_agree(tmp_path: Path):
    """A prompt without a past uses keys and values per head; all other batches use latent rows."""
    VARIANTS["v3"].write(tmp_path)
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
    VARIANTS["v3"].write(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(2, 2)}))
    load_model(tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"model.layers.4.eh_proj.weight": torch.ones(2, 2)}))
    with pytest.raises(CheckpointError, match=r"unexpected tensors: model\.layers\.4\.eh_proj\.weight"):
        load_model(tmp_path)
