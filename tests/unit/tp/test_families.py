"""Models of all families on two and four ranks, which are threads, against one rank: tokens, logits, and handoffs."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.engine import Engine
from baton.engine.models.config import read_config
from baton.engine.models.families import FAMILIES
from baton.engine.models.loading import load_model
from baton.engine.tp.sharding import divided
from baton.errors import ConfigError
from baton.gguf.folder import gguf_folder
from baton.tokenizer import OracleTokenizer
from baton.worker.engine_factory import generate
from tests.support.compiled_kernels import share_kernels
from tests.support.engines import hand_over, ids, key_of, numbers, spec_of
from tests.unit.model import checkpoints
from tests.unit.model.checkpoints import DENSE, LATENT, NATIVE, RECURRENT, SPARSE, V3, VOCAB, random_checkpoint
from tests.unit.model.harness import greedy, prompts
from tests.unit.tp.support import gpus, on_threads

# Sizes that two or four ranks divide, or share: groups of Mamba 2.
SIZES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_groups": 1},
    "nemotron_h-biases": {"n_groups": 2},
    "granite-hybrid": {"mamba_n_heads": 8},
    "gemma4-same": {"num_key_value_heads": 4, "num_global_key_value_heads": 2},
}
VARIANTS = {
    name: each._replace(settings=each.settings | SIZES.get(name, {}))
    for name, each in (DENSE | SPARSE | LATENT | NATIVE | RECURRENT).items()
}
LENGTHS = (1, 17, 40)
MAMBA = {"mamba_n_heads": 6, "mamba_n_groups": 3}
GLOBAL = {"num_attention_heads": 8, "num_key_value_heads": 2, "per_layer_config": ...}
# Four ranks share two KV heads, two key heads of gated delta nets, and two groups of Mamba 2.
FOUR = (
    "mixtral qwen3_moe v2 v3 v32 gemma2 gemma3 olmo2 olmo3 exaone4 cohere cohere2 glm4 minimax_m2 gpt_oss llama4 "
    "granite seed_oss apertus phi3 starcoder2 nemotron lfm2 qwen3_next qwen3_5 granite-hybrid gemma4"
).split()
CASES = [(name, 2) for name in VARIANTS] + [(name, 4) for name in FOUR]
REJECTED = {
    "quantised experts": ("mixtral", {"quantize": "int8"}),
    "layer norms over all heads": ("olmo2", {"kind": "layer"}),
}


@pytest.mark.parametrize("words", REJECTED)
def test_what_cannot_be_divided_is_rejected_by_name(tmp_path: Path, words: str) -> None:
    name, changes = REJECTED[words]
    VARIANTS[name].write(tmp_path)
    config = read_config(tmp_path)
    if "kind" in changes:
        norm = config.spec.attention[0].head_norm
        assert norm is not None
        of_layers = replace(norm, norm=replace(norm.norm, kind="layer"))
        config = replace(config, spec=config.spec.with_attention(head_norm=of_layers))
    with pytest.raises(ConfigError, match=f"decode.tensor_parallel: 2 is not supported for {words}; set"):
        divided(config, 2, "decode.tensor_parallel", "int8" if "quantize" in changes else "none")


def test_widths_of_experts_must_be_divisible(tmp_path: Path) -> None:
    settings: dict[str, Any] = V3 | {"moe_intermediate_size": 21}
    random_checkpoint(tmp_path, "deepseek_v3", **settings)
    with pytest.raises(ConfigError, match=r"2 does not divide .* width of experts \(21\) and width of shared experts"):
        divided(read_config(tmp_path), 2, "tp")


@pytest.mark.parametrize(
    ("name", "changes", "size", "words"),
    [
        (
            "qwen3_5",
            {"linear_num_value_heads": 6, "linear_num_key_heads": 3},
            4,
            r"linear_num_value_heads \(6\) and linear_num_key_heads \(3\)",
        ),
        ("granite-hybrid", MAMBA | {"mamba_d_head": "auto"}, 4, r"mamba_n_heads \(6\) and mamba_n_groups \(3\)"),
        ("nemotron_h", {"mamba_num_heads": 6, "n_groups": 3}, 4, r"mamba_num_heads \(6\) and n_groups \(3\)"),
        ("gemma4-same", GLOBAL | {"num_global_key_value_heads": 4}, 4, r"num_key_value_heads \(2\)"),
        ("gemma4-same", GLOBAL | {"num_global_key_value_heads": 1}, 2, r"num_global_key_value_heads \(1\)"),
        ("gemma4-same", {}, 4, r"num_key_value_heads in per_layer_config \(2\)"),  # as transformers 5 spells it
    ],
)
def test_heads_of_single_layers_must_be_divisible(
    tmp_path: Path, name: str, changes: dict[str, Any], size: int, words: str
) -> None:
    VARIANTS[name].write(tmp_path)
    checkpoints.edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=f"^tp: {size} does not divide the model's {words}; allowed are"):
        divided(read_config(tmp_path), size, "tp")


def test_every_family_is_tried() -> None:
    assert {VARIANTS[name].family for name, _ in CASES} == FAMILIES.keys()


@pytest.mark.slow
@pytest.mark.sample(12)
@pytest.mark.parametrize(("name", "size"), CASES)
def test_tokens_are_those_of_one_rank(plan_of, tmp_path: Path, name: str, size: int) -> None:
    VARIANTS[name].write(tmp_path / "m", vocab_size=VOCAB)
    """The prompts are always the same: ranks add in another order, which decides near ties."""
    alone, backend = load_model(tmp_path / "m", block_size=8), on_threads(plan_of(size, str(tmp_path / "m")), [])
    assert backend.layout == alone.layout
    rows = zip(*(greedy(each, prompts(LENGTHS), 12, random.Random(3)) for each in (alone, backend)), strict=True)
    for one, many in rows:
        assert one.tokens == many.tokens
        torch.testing.assert_close(many.logits[len(one.tokens) - 2], one.logits[len(one.tokens) - 2], atol=2e-4, rtol=0)
    backend.close()


@pytest.mark.slow
def test_ranks_read_a_gguf_file(plan_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of q and k have another order there, and biases too."""
    from tests.support.gguf_files import Export

    monkeypatch.setenv("BATON_HOME", str(share_kernels(tmp_path / "home")))
    monkeypatch.setattr("baton.gguf.folder._tokenizer", lambda header: "{}")
    random_checkpoint(tmp_path, "llama", attention_bias=True)
    Export(tmp_path, tmp_path / "m.gguf", "llama", "F16")
    folder = gguf_folder(tmp_path / "m.gguf")
    alone, backend = load_model(folder, block_size=8), on_threads(plan_of(4, str(folder)), [])
    found = [[row.tokens for row in greedy(each, prompts(LENGTHS), 12, random.Random(3))] for each in (alone, backend)]
    assert found[0] == found[1]
    backend.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"), [("gpt_oss", 2), ("minimax_m2", 4), ("gemma4", 2), ("gemma4", 4), ("gemma4-same", 2)]
)
def test_one_rank_and_several_hand_over(plan_of, tmp_path: Path, name: str, size: int) -> None:
    VARIANTS[name].write(tmp_path / "m", vocab_size=259)
    rng = random.Random(7)
    alone, backend = (
        load_model(tmp_path / "m", block_size=8),
        on_threads(plan_of(size, str(tmp_path / "m")), [] if "gemma" in name else gpus(size)[0]),
    )
    one, many = (Engine(b, OracleTokenizer(), total_blocks=24, prefix_cache=False) for b in (alone, backend))
    for _ in range(2):
        spec = spec_of(numbers(rng, rng.randint(20, 60), 250), max_tokens=6)
        expected = ids(generate(one, spec).tokens)
        assert ids(generate(many, spec).tokens) == expected
        for giver, taker in ((one, many), (many, one)):
            assert hand_over(giver, taker, spec).ids(key_of()) == expected
    backend.close()
