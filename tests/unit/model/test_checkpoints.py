"""Loading: the supported checkpoints, models that think among them, and the error for each unsupported one."""

import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.models.config import REFUSED, ModelConfig, quantised_tensor, read_config
from baton.engine.models.loading import TransformerBackend, load_model
from baton.engine.models.thinking import KEPT_STATES
from baton.errors import CheckpointError, ConfigError
from tests.unit.model import checkpoints
from tests.unit.model.checkpoints import NATIVE, SETTINGS, VOCAB, edit_config, edit_tensors, random_checkpoint, reload
from tests.unit.model.harness import greedy

PROMPT = [5, 17, 3, 101, 44, 8, 9]


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama") / "tiny"
    random_checkpoint(folder, "llama")
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def tokens(backend: TransformerBackend) -> list[int]:
    return greedy(backend, [PROMPT], 8, random.Random(0))[0].tokens


def test_backend_says_what_it_is(original: Path):
    backend = load_model(original, block_size=8)
    assert (backend.name, backend.vocab_size, backend.max_model_len) == ("tiny", VOCAB, 512)
    assert (backend.layout.layers, backend.layout.kv_heads, backend.layout.head_dim) == (2, 2, 12)
    assert (backend.layout.block_size, backend.layout.dtype, str(backend.device)) == (8, "float32", "cpu")
    assert load_model(original, max_model_len=100).max_model_len == 100


def test_shards_are_the_same_model(original: Path, tmp_path: Path):
    random_checkpoint(tmp_path / "tiny", "llama", shard="40KB")
    assert len(list((tmp_path / "tiny").glob("*.safetensors"))) > 2
    single, sharded = load_model(original), load_model(tmp_path / "tiny")
    assert sharded.fingerprint == single.fingerprint
    assert tokens(sharded) == tokens(single)


def test_fingerprints_cover_the_order_in_rows_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    NATIVE["gemma4"].write(tmp_path)
    first = load_model(tmp_path).fingerprint
    monkeypatch.setattr(ModelConfig, "cache_order", ())
    assert load_model(tmp_path).fingerprint != first


def test_fingerprint_tells_models_apart(folder: Path):
    prints = {load_model(folder).fingerprint}
    prints.add(load_model(folder, dtype="bfloat16").fingerprint)
    assert load_model(folder, block_size=32).fingerprint in prints  # the fingerprint does not cover block sizes
    edit_config(folder, rms_norm_eps=1e-5)
    prints.add(load_model(folder).fingerprint)
    edit_tensors(folder, lambda t: t["model.layers.1.mlp.down_proj.weight"][3, 3].add_(1e-3))
    prints.add(load_model(folder).fingerprint)
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": t["model.layers.0.input_layernorm.weight"].clone()}))
    prints.add(load_model(folder).fingerprint)
    assert len(prints) == 5
    assert load_model(folder).fingerprint in prints


def test_model_does_not_follow_its_file(folder: Path):
    backend = load_model(folder)
    before = tokens(backend)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(4096)
        file.write(bytes(100_000))
    assert tokens(backend) == before


@pytest.mark.parametrize(
    ("stored", "wanted", "used"),
    [
        (torch.float32, "auto", "float32"),
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.float16, "auto", "float32"),
        (torch.bfloat16, "float32", "float32"),
        (torch.float32, "bfloat16", "bfloat16"),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_dtype(stored: torch.dtype, wanted: str, used: str, key: str | None, tmp_path: Path):
    random_checkpoint(tmp_path, "llama", dtype=stored)
    spelt = {key: str(stored).removeprefix("torch.")} if key else {}
    edit_config(tmp_path, **({"dtype": ..., "torch_dtype": ...} | spelt))
    backend = load_model(tmp_path, dtype=wanted)
    assert backend.layout.dtype == used
    assert len(tokens(backend)) == len(PROMPT) + 8


def test_tied_with_a_head_of_its_own_uses_it(folder: Path):
    edit_config(folder, tie_word_embeddings=True)
    mine = tokens(load_model(folder))
    logits = reload(folder, "llama", torch.float32)(torch.tensor([mine])).logits[0]
    assert mine[len(PROMPT) :] == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()


def test_what_is_not_read(folder: Path):
    """Rotary buffers of old checkpoints, an index next to a single file, and a GGUF file next to any, are ignored."""
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    (folder / "model.safetensors.index.json").write_text("not read")
    (folder / "m.gguf").write_text("not read")
    load_model(folder)
    add_index(folder, {"weight_map": {"all": "w.safetensors"}})
    load_model(folder)


TEXTS = [
    (None, "no such file"),
    ("", "not valid JSON"),
    ('{"a": ', "not valid JSON"),
    ("[" * 100_000, "not valid JSON"),
    ("[1]", "must be a JSON object, got list"),
    ("{}", "architectures is missing .*LlamaForCausalLM"),
]
VALUES: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported .*Llama.*Mistral.*Qwen2.*Qwen3"),
    ({"architectures": ..., "model_type": "gpt2"}, "model_type 'gpt2' is not supported .*llama, mistral"),
    ({"model_type": "mistral"}, "model_type 'mistral' contradicts architectures 'LlamaForCausalLM'"),
    ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings, got 'LlamaForCausalLM'"),
    ({"hidden_size": ...}, "hidden_size is missing"),
    ({"hidden_size": "48"}, "hidden_size must be a whole number from 1 to .*, got '48'"),
    ({"vocab_size": True}, "vocab_size must be a whole number"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 4096"),
    ({"rms_norm_eps": -1}, "rms_norm_eps must be a number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
    ({"hidden_act": "xielu"}, "hidden_act 'xielu' is not supported .*silu"),
    ({"head_dim": ..., "num_attention_heads": 5}, r"hidden_size \(48\) must be divisible by num_attention_heads"),
    ({"head_dim": 13}, "head_dim must be even"),
    ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be divisible by num_key_value_heads \(3\)"),
    ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
    ({"layer_types": ["full_attention"]}, "layer_types must have 2 entries, one per layer, got 1"),
    ({"layer_types": ["linear_attention"] * 2}, "layer_types 'linear_attention' is not supported"),
    ({"layer_types": ["sliding_attention"] * 2}, "layer_types must be full_attention in all llama layers"),
    ({"attention_bias": True}, r"tensor model.layers.0.self_attn.q_proj.bias is missing"),
    ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
    ({"num_hidden_layers": 1}, "unexpected tensors: model.layers.1.input_layernorm.weight.* and 6 more"),
    ({"vocab_size": 200}, r"model.embed_tokens.weight has shape \[199, 48\], expected \[200, 48\]"),
    ({"head_dim": 14}, r"self_attn.q_proj.weight has shape \[48, 48\], expected \[56, 48\]"),
]
TENSORS: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
    (lambda t: t.pop("model.norm.weight"), "tiny: tensor model.norm.weight is missing"),
    (lambda t: t.pop("lm_head.weight"), "tiny: tensor lm_head.weight is missing"),
    (lambda t: t.update(extra=torch.ones(2)), "model.safetensors: unexpected tensors: extra"),
    (lambda t: t.update({"model.norm.weight": torch.ones(49)}), r"norm.weight has shape \[49\], expected \[48\]"),
    (lambda t: t.update({"model.norm.weight": torch.ones(48).short()}), "norm.weight has dtype torch.int16"),
]
INDICES: list[tuple[dict[str, Any], str]] = [
    ({}, "weight_map is missing or empty"),
    ({"weight_map": []}, "weight_map must be an object"),
    ({"weight_map": {"a": 7}}, "a must be a string, got 7"),
    ({"weight_map": {"a": "model-00001.safetensors"}}, "lists shard model-00001.safetensors, which does not exist"),
    ({"weight_map": {"a": "../tiny/w.safetensors"}}, "is not the name of a safetensors file"),
    ({"weight_map": {"a": "pytorch_model.bin"}}, "'pytorch_model.bin' is not the name of a safetensors file"),
    ({"weight_map": {"a": "w.safetensors", "b": "v.safetensors"}}, "is also in v.safetensors"),
]
FORMATS = [("pytorch_model.bin", "only safetensors"), ("model.pt", "only")]


def write_config(folder: Path, text: str | None) -> None:
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)


def rename_weights(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)


def truncate(folder: Path, size: int) -> None:
    os.truncate(folder / "model.safetensors", size)


def add_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / "model.safetensors").rename(folder / "w.safetensors")
    shutil.copy(folder / "w.safetensors", folder / "v.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


SPOILT = [
    *((partial(write_config, text=text), f"config.json: {message}") for text, message in TEXTS),
    *((partial(edit_config, **change), message) for change, message in VALUES),
    *((partial(edit_tensors, change=change), message) for change, message in TENSORS),
    *((partial(add_index, index=index), message) for index, message in INDICES),
    *((partial(truncate, size=size), "model.safetensors: not a complete safetensors") for size in (0, 5, 100, 50_000)),
    *((partial(rename_weights, name=name), f"{name}: {message}") for name, message in FORMATS),
]


@pytest.mark.parametrize(("spoil", "message"), SPOILT)
def test_what_is_refused(spoil: Callable[[Path], None], message: str, folder: Path):
    spoil(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(folder)
    assert "tiny" in str(caught.value) or "dtype" in message  # the error names the folder or the file


def test_no_folder_and_no_weights(folder: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        load_model(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tiny: no model.safetensors"):
        load_model(folder)


def test_settings_that_do_not_fit(folder: Path):
    with pytest.raises(ConfigError, match=r"model.dtype must be one of auto, float32, bfloat16, got 'int4'"):
        load_model(folder, dtype="int4")
    for wrong in (0, 513):
        with pytest.raises(ConfigError, match=f"model.max_model_len must be between 1 and 512.* got {wrong}"):
            load_model(folder, max_model_len=wrong)


QUANTISED_CONFIGS = [({"quant_method": "quark"}, "'quark'"), ({"bits": 4}, "''")]
NAME = "model.layers.0.mlp.up_proj"
FP8 = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
INT8, INT32, SCALE = torch.zeros(4, 4, dtype=torch.int8), torch.zeros(4, 4, dtype=torch.int32), torch.ones(4)
GPTQ = {"qweight": INT32, "qzeros": INT32, "scales": SCALE, "g_idx": torch.zeros(4, dtype=torch.int32)}
QUANTISED_TENSORS = [
    GPTQ,
    {"qweight": INT32, "qzeros": INT32, "scales": SCALE},
    {"scales": SCALE},
    {"weight": INT8, "SCB": SCALE},
    {"weight": torch.zeros(8, dtype=torch.uint8), "weight.quant_state.bitsandbytes__nf4": INT8},
    {"weight_packed": INT32, "weight_scale": SCALE},
    {"weight": FP8, "weight_scale_inv": SCALE},
    {"weight": FP8},
    {"weight": FP8.view(torch.float8_e5m2)},
    {"weight": INT8, "weight_scale": SCALE},
    {"weight": INT8.view(torch.uint8)},
    {"weight": SCALE, "weight_scale": SCALE},
]


@pytest.mark.parametrize(("section", "method"), QUANTISED_CONFIGS)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantised_by_config(section: dict[str, Any], method: str, key: str, folder: Path):
    edit_config(folder, **{key: section})
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert f"{folder / 'config.json'}: {key}: quant_method {method} is not supported" in str(caught.value)


@pytest.mark.parametrize("tensors", QUANTISED_TENSORS)
def test_quantised_by_tensors(tensors: dict[str, torch.Tensor], folder: Path):
    named = {f"{NAME}.{name}": tensor.clone() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert REFUSED in str(caught.value)
    assert f"model.safetensors: {NAME}." in str(caught.value)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F64", "I64", "I32", "BOOL"])
def test_dtypes_that_are_not_quantised(dtype: str):
    names = ("model.norm.weight", "lm_head.weight", "model.layers.0.mlp.gate.e_score_correction_bias", "a.inv_freq")
    assert quantised_tensor(dict.fromkeys(names, dtype)) is None


WITHOUT_CHUNKS = {name: value for name, value in SETTINGS.items() if name != "chunk_size"}


@pytest.fixture
def thinking_folder(tmp_path):
    checkpoints.thinking_checkpoint(tmp_path)
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
def test_wrong_settings_of_thinking(thinking_folder, settings, named):
    edit_config(thinking_folder, thinking=settings)
    with pytest.raises(CheckpointError, match=named):
        load_model(thinking_folder)


def test_thinking_of_other_models_is_refused(tmp_path):
    random_checkpoint(tmp_path, "mixtral", num_local_experts=2)
    edit_config(tmp_path, thinking=SETTINGS)
    with pytest.raises(CheckpointError, match=r"thinking is supported only for dense models.*not for mixtral"):
        read_config(tmp_path)


def test_thinking_states_have_one_shape_and_are_kept(thinking_folder):
    """A thought's state is computed alone, so its bits are the same even after an eviction."""
    thinker = load_model(thinking_folder).thinker
    assert thinker is not None
    first = thinker.state((9, 10))
    assert first.shape == (4, checkpoints.HIDDEN)
    assert thinker.state((9, 10)) is first
    for number in range(KEPT_STATES):
        thinker.state((number % VOCAB, number // VOCAB))
    again = thinker.state((9, 10))
    assert again is not first
    assert torch.equal(again, first)
    assert not torch.equal(thinker.state(()), thinker.zeros)
