"""Models that run in `transformers` over Baton's KV: exactness, guards, the engine around them, and the choice."""

import json
import random
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from baton.config import load_config
from baton.core import Constraint, Role
from baton.engine.determinism.checks import checked_shapes
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.engine import Engine
from baton.engine.models.config import quantised_tensor
from baton.engine.models.fallback import choice, guard, self_check
from baton.engine.models.fallback.attention import is_causal
from baton.engine.models.fallback.loading import VERSION, FallbackBackend, load_transformers
from baton.engine.models.loading import load_model
from baton.errors import CheckpointError, ConfigError
from baton.tokenizer import OracleTokenizer
from baton.worker.engine_factory import load_backend, served_by
from baton.worker.settings import from_config
from tests.support.engines import engine_of, hand_over, key_of, numbers, run, spec_of
from tests.unit.model.checkpoints import edit_config, edit_tensors, random_checkpoint
from tests.unit.model.harness import greedy, prompts
from tools import fallback_models

EXACT = (
    "cohere2 gemma2 gemma3_text gemma3n_text glm4 gpt2 gpt_neox gpt_oss granite longcat_flash minicpm3 mimo_v2_flash "
    "olmo2 opt persimmon phi phi3 stablelm starcoder2"
).split()
load = partial(load_transformers, dtype="float32")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a soft cap, and a sliding window in every second layer."""
    folder = tmp_path_factory.mktemp("gemma2")
    fallback_models.write("gemma2", folder, vocab_size=259)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_tokens_and_logits_are_those_of_transformers(name: str):
    assert fallback_models.tried(name) == ("exact", "")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_with_a_state_of_its_own_is_refused_at_each_step(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The config, the modules and the self-check each refuse Qwen3-Next. Without all three, it is wrong."""
    oracle = fallback_models.write("qwen3_next", tmp_path)
    with pytest.raises(CheckpointError, match="layer_types has linear_attention, which is not full or sliding"):
        load(tmp_path)
    monkeypatch.setattr(guard, "LAYER_TYPES", guard.LAYER_TYPES | {"linear_attention"})
    with pytest.raises(CheckpointError, match=r"Qwen3NextForCausalLM is not supported: .*keeps a state outside"):
        load(tmp_path)
    monkeypatch.setattr(guard, "_stateful_module", lambda model: "")
    with pytest.raises(CheckpointError, match=r"Qwen3NextForCausalLM .* check at load: .* position \d+ .* differs"):
        load(tmp_path, dtype=dtype)
    monkeypatch.setattr(self_check, "check", lambda *_: None)
    assert fallback_models.difference(load(tmp_path), oracle)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mamba", "keeps a state outside attention"),
        ("falcon", "does not use the attention interface"),
        ("llama4_text", "layer_types has chunked_attention"),
        ("minimax_m3_vl_text", "MiniMaxM3VLAttention counts positions by itself"),
        ("bert", "a mask that is neither causal nor a sliding window"),
        ("gemma3", "vision_config is not supported for models that run in transformers"),
        ("bart", "is not a decoder of text alone"),
    ],
)
def test_other_models_are_refused_by_name(name: str, why: str):
    found, text = fallback_models.tried(name)
    assert found == "refused"
    assert why in text


def test_no_code_of_a_checkpoint_runs(tmp_path: Path):
    (tmp_path / "modeling_x.py").write_text("raise SystemExit('ran')")
    config = {"model_type": "x", "architectures": ["X"], "auto_map": {"AutoConfig": "modeling_x.C"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"model_type 'x' is not in transformers; its own code .* is never run"):
        load(tmp_path)


@pytest.mark.slow
def test_incomplete_or_quantised_checkpoints_are_refused(gemma: Path, tmp_path: Path):
    fallback_models.write("phi3", tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.norm\.weight"):
        load(tmp_path)
    edit_config(tmp_path, architectures=["Phi3ForSequenceClassification"])
    with pytest.raises(
        CheckpointError, match="architectures 'Phi3ForSequenceClassification' is no causal language model"
    ):
        load(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(CheckpointError, match=r"quantization_config \(gptq int4 group 128\): not supported"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="between 1 and 512 for this model; got 513"):
        load(gemma, max_model_len=513)


def add_masks(folder: Path, prefix: str, layers: str, dtype: torch.dtype) -> None:
    """Add the buffers that transformers before 4.31 saved."""
    mask = torch.ones(1, 1, 512, 512).tril().to(dtype)
    names = [f"{prefix}.{layer}.{layers}" for layer in range(4)]
    masks = {f"{name}.bias": mask.clone() for name in names} | {f"{n}.masked_bias": torch.tensor(-1e4) for n in names}
    edit_tensors(folder, lambda tensors: tensors.update(masks))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize(("name", "at"), [("gpt_neox", ("gpt_neox.layers", "attention")), ("gpt2", ("h", "attn"))])
def test_masks_of_older_checkpoints_are_no_weights(name: str, at: tuple[str, str], dtype: torch.dtype, tmp_path: Path):
    oracle = fallback_models.write(name, tmp_path)
    if name == "gpt2":  # the names of the original checkpoint
        edit_tensors(tmp_path, lambda t: [t.update({key.removeprefix("transformer."): t.pop(key)}) for key in list(t)])
    add_masks(tmp_path, *at, dtype)
    edit_config(tmp_path, dtype=..., torch_dtype=...)
    found = load(tmp_path, dtype="auto")
    assert found.layout.dtype == "float32"
    assert not fallback_models.difference(found, oracle)


def test_only_masks_may_be_of_bytes():
    mask, weight = "h.0.attn.bias", "h.0.attn.c_attn.bias"
    assert quantised_tensor({mask: "U8", f"{mask}.x": "F32"}) is None
    assert [quantised_tensor({mask: "U8", weight: "U8"}), quantised_tensor({mask: "I8"})] == [weight, mask]


@pytest.mark.slow
@pytest.mark.parametrize("load", [load_transformers, load_model])
def test_a_dtype_that_is_not_supported_is_named_with_its_origin(load: Any, tmp_path: Path):
    random_checkpoint(tmp_path, "llama")
    edit_config(tmp_path, dtype=..., torch_dtype="float64")
    remedy = "'float64' is not supported; set model.dtype to float32 or bfloat16"
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, dtype="auto")
    assert str(caught.value) == f"{tmp_path}/config.json: torch_dtype {remedy}"
    edit_config(tmp_path, torch_dtype=...)
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: each.double() for name, each in tensors.items()}))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, dtype="auto")
    assert str(caught.value) == f"{tmp_path}/config.json: no dtype, and that of the tensors {remedy}"
    with pytest.raises((CheckpointError, ConfigError), match=r"^(model\.)?dtype .*auto, float32, bfloat16"):
        load(tmp_path, dtype="int4")
    assert load(tmp_path, dtype="float32").layout.dtype == "float32"


@pytest.mark.slow
def test_positions_end_where_rotary_frequencies_would_change(tmp_path: Path):
    """Beyond it, cached keys would have other frequencies than new ones, and one long sequence would change all."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    fallback_models.write("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=128)
    assert load(tmp_path).max_model_len == 128


@pytest.mark.parametrize(("section", "limit"), [({}, 262144), ({"original_max_position_embeddings": 128}, 128)])
def test_positions_end_where_dual_chunk_attention_would_begin(section: dict[str, Any], limit: int):
    config = Qwen2Config(max_position_embeddings=1010000, dual_chunk_attention_config=section)
    assert guard.positions_limit(config) == limit


def test_a_mask_is_read_at_all_its_edges():
    """A window of thousands of tokens is as well known as a short one, which the self-check could not show."""
    cpu = torch.device("cpu")

    def sliding(_batch, _head, query, key):
        return (key <= query) & (key > query - 4096)

    def chunked(_batch, _head, query, key):
        return (key <= query) & (key // 4096 == query // 4096)

    assert is_causal(sliding, 4096, cpu)
    assert not is_causal(sliding, 4095, cpu)
    assert not is_causal(chunked, 4096, cpu)
    assert is_causal(lambda _batch, _head, query, key: key <= query, None, cpu)
    assert not is_causal(lambda _batch, _head, query, key: key <= query + 1, None, cpu)


@pytest.mark.slow
def test_two_backends_do_not_disturb_each_other(gemma: Path, tmp_path: Path):
    """The second one computes in the middle of a forward of the first one."""
    fallback_models.write("gpt_oss", tmp_path)
    first, second, some = load(gemma), load(tmp_path), prompts((5, 40))
    alone = [row.tokens for row in greedy(first, some, 4, random.Random(1))]
    within = []

    class Both(FallbackBackend):
        def forward(self, batch: Any, kv: Any) -> torch.Tensor:
            batch = replace(batch, on_layer=lambda _: within.append(greedy(second, some, 4, random.Random(1))))
            return FallbackBackend.forward(self, batch, kv)

    names = [field.name for field in fields(FallbackBackend)]
    both = Both(**{name: getattr(first, name) for name in names})
    assert [row.tokens for row in greedy(both, some, 4, random.Random(1))] == alone
    expected = [row.tokens for row in greedy(second, some, 4, random.Random(1))]
    assert within
    assert all([row.tokens for row in rows] == expected for rows in within)


@pytest.mark.slow
def test_the_engine_serves_it(gemma: Path, seed: int):
    """Prompts in chunks, several choices of one prompt, a shared prefix and a constraint, together and each alone."""
    rng, backend = random.Random(seed), load(gemma, block_size=8)
    prompt = numbers(rng, 70, 250)
    specs = [spec_of(prompt, temperature=1.0, seed=n, max_tokens=12) for n in range(3)]
    specs += [spec_of((*prompt[:48], *numbers(rng, 20, 250)), max_tokens=12)]
    specs += [spec_of(prompt[:30], constraint=Constraint("regex", ("[a-c]{5}",)), max_tokens=12, ignore_eos=False)]
    alone = [run(engine_of(backend, 60), [spec]).ids(key_of(0)) for spec in specs]
    engine = engine_of(backend, 60, max_batched_tokens=25)
    found = run(engine, specs)
    assert [found.ids(key_of(n)) for n in range(len(specs))] == alone
    assert set(bytes(alone[-1][:5])) <= set(b"abc")
    assert run(engine, specs[:1]).ids(key_of(0)) == alone[0]
    assert engine.counters.cached_tokens > 0


@pytest.mark.slow
def test_another_worker_decodes_what_one_prefilled(gemma: Path, seed: int):
    """The receiver has blocks of another size, and computes nothing of the prompt."""
    alone, sender, receiver = (
        Engine(load(gemma, block_size=size), OracleTokenizer(), total_blocks=40, max_batched_tokens=20)
        for size in (8, 5, 8)
    )
    spec = spec_of(numbers(random.Random(seed), 63, 250), max_tokens=16)
    assert hand_over(sender, receiver, spec).ids(key_of()) == run(alone, [spec]).ids(key_of(0))
    assert receiver.counters.prefill_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_deterministic_requests_take_verify_passes(name: str, gemma: Path, tmp_path: Path, seed: int):
    """Models with experts reject them, because their rows are computed in groups."""
    fallback_models.write(name, tmp_path, vocab_size=259)
    backend, shapes = load(tmp_path), FixedShapes(2, 16)
    found = checked_shapes(backend, shapes)
    if name == "gpt_oss":
        assert found is None
        assert "experts" in backend.nondeterminism
        return
    assert found == FixedShapes(2, 16, exact_rows=0)
    rng = random.Random(seed)
    spec = spec_of(numbers(rng, 50, 250), max_tokens=20, temperature=1.0, seed=4, logprobs=0, deterministic=True)
    others = [spec_of(numbers(rng, length, 250), max_tokens=30) for length in (3, 90, 17)]
    alone, beside = (run(engine_of(backend, 90, shapes=found), some) for some in ([spec], [spec, *others]))
    assert alone.tokens[key_of(0)] == beside.tokens[key_of(0)]


@pytest.mark.slow
def test_padding_behind_the_last_position_is_no_fault(tmp_path: Path):
    """Fixed shapes pad to 512 rows, and the table of positions has 500."""
    fallback_models.write("opt", tmp_path, vocab_size=259, max_position_embeddings=500)
    backend = load(tmp_path)
    spec = spec_of(numbers(random.Random(1), 488, 250), max_tokens=12, deterministic=True)
    engine = engine_of(backend, 90, shapes=checked_shapes(backend, FixedShapes(2, 32)))
    assert len(run(engine, [spec]).ids(key_of(0))) == 12


@pytest.fixture
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("cluster") / "c.yaml"
    path.write_text("redis: {url: 'redis://h'}\n")
    return lambda *sets: from_config(load_config(path, sets), Role.DECODE, "decode-0")


@pytest.mark.slow
def test_a_native_family_is_preferred(tmp_path: Path, settings: Any):
    random_checkpoint(tmp_path, "llama")
    native, forced = (settings(f"model.path={tmp_path}", f"model.backend={kind}") for kind in ("auto", "transformers"))
    assert (served_by(native), served_by(forced)) == ("", VERSION)
    fallback_models.write("persimmon", folder := tmp_path / "other")
    edit_config(tmp_path, model_type="internlm3")  # the class of Llama, but another kind
    assert served_by(native) == VERSION
    other = settings(f"model.path={folder}", "model.dtype=float32")
    assert served_by(other) == VERSION
    assert isinstance(load_backend(other), FallbackBackend)
    with pytest.raises(CheckpointError, match="architectures 'PersimmonForCausalLM' is not supported"):
        load_backend(settings(f"model.path={folder}", "model.backend=native"))
    for option in ("model.quantize=int8", "model.kv_dtype=int8", "decode.tensor_parallel=2"):
        with pytest.raises(ConfigError, match=f"{option.split('=')[0]}: .* is not supported for .* in transformers"):
            load_backend(settings(f"model.path={folder}", option))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choice, "transformers_version", lambda: "")
    (tmp_path / "config.json").write_text('{"architectures": ["PersimmonForCausalLM"]}')
    with pytest.raises(CheckpointError, match=r"PersimmonForCausalLM .*LlamaForCausalLM.*baton-serve\[transformers\]"):
        choice.chosen_backend(tmp_path, "auto")
    with pytest.raises(ConfigError, match=r"not installed; pip install baton-serve\[transformers\]"):
        choice.chosen_backend(tmp_path, "transformers")


@pytest.mark.slow
def test_a_folder_that_is_a_link_keeps_its_name(gemma: Path, tmp_path: Path):
    (link := tmp_path / "link").symlink_to(gemma)
    assert load(link).name == "link"
