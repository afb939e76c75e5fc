"""Models quantised while they load, and quantised checkpoints, against transformers with the widened weights."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import structlog
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, disable_quantization
from safetensors.torch import load_file, save_file

from baton.cli.setup.quantize import Bits
from baton.cli.setup.quantize import quantize as write_copy
from baton.engine.kernels.quantized import SCHEMES, Quantize, quantize
from baton.engine.models.loading import load_model
from baton.errors import CheckpointError, ConfigError
from tests.unit.model.checkpoints import (
    MIXTRAL,
    NATIVE,
    QWEN,
    RECURRENT,
    V3,
    limited,
    parameter_of,
    random_checkpoint,
)
from tests.unit.model.harness import check_equal, greedy, prompts

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}  # in whole groups
ROUTERS = (".mlp.gate", ".block_sparse_moe.gate")


def widen(model: Any, name: str) -> None:
    """Replace the weights of all linear layers and experts by their quantised values. Routers keep theirs."""

    def widened(weight: torch.Tensor) -> torch.Tensor:
        return quantize(weight, SCHEMES[name]).widened()

    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, torch.nn.Linear) and parameter.ndim == 2 and not path.endswith(ROUTERS):
                parameter.copy_(widened(parameter))
            elif path.endswith(".experts"):
                parameter.copy_(torch.stack([widened(each) for each in parameter]))


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("level", ["none", "native"])
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_logits_are_those_of_the_widened_weights(family: str, name: Quantize, level: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("BATON_CPU_LEVEL", level)
    reference = random_checkpoint(tmp_path, family)
    backend, plain = load_model(tmp_path, quantize=name), load_model(tmp_path)
    assert backend.fingerprint != plain.fingerprint
    widen(reference, name)
    for row in greedy(backend, prompts((1, 9, 40)), 6, Random(3)):
        expected = reference(torch.tensor([row.tokens[:-1]])).logits[0]
        scale = expected.std().item()
        # Compiled kernels round activations to int8 too. The models are random, so errors do not cancel.
        bound = 1e-4 if backend.model.kernels.name == "torch" else 0.25
        for position, logits in row.logits.items():
            assert (logits - expected[position]).std().item() < bound * scale


def compress(folder: Path, form: str, weights: dict[str, Any], reference: Any, *, head: bool = False) -> None:
    """Rewrite a checkpoint in a format of compressed-tensors by its own compressor, with its head if `head`.
    `reference` gets the weights of its decompressor.
    """
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights})
    compressor, tensors = BaseCompressor.get_value_from_registry(form), load_file(folder / "model.safetensors")
    for name in [
        name for name in tensors if re.search(r"(_proj(_\w+)?|\.w[123])\.weight$", name) or (head and "lm_head" in name)
    ]:
        weight, layer = tensors.pop(name), name.removesuffix("weight")
        grouped = weight.unflatten(1, (-1, weights.get("group_size", weight.shape[1])))
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        if weights["symmetric"]:
            scale, zero = torch.maximum(-low, high) / (2 ** (weights["num_bits"] - 1) - 1), torch.zeros(low.shape)
        else:
            scale = (high - low) / (2 ** weights["num_bits"] - 1)
            zero = (-low / scale).round() - 2 ** (weights["num_bits"] - 1)
        state = {"weight": weight, "weight_scale": scale.half().float(), "weight_zero_point": zero.to(torch.int8)}
        packed = compressor.compress(state, scheme)
        parameter_of(reference, name).copy_(compressor.decompress(packed, scheme)["weight"])
        tensors |= {layer + part: value for part, value in packed.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    section = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    section |= {"sparsity_config": {"format": "dense", "sparsity_structure": "unstructured"}}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))


FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
    ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": True}),
    ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True}),
    ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False}),
    ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 32, "symmetric": False}),
    ("pack-quantized", {"num_bits": 6, "strategy": "group", "group_size": 16, "symmetric": True}),
]


@pytest.mark.parametrize(("form", "weights"), FORMATS, ids=str)
def test_checkpoints_of_compressed_tensors(form: str, weights: dict[str, Any], tmp_path: Path, monkeypatch):
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    reference = random_checkpoint(tmp_path, "qwen2", **SIZES)
    compress(tmp_path, form, weights | {"type": "int"}, reference)
    check_equal(tmp_path, reference)


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN | {"moe_intermediate_size": 32},
    "deepseek_v3": V3 | {"moe_intermediate_size": 32, "q_lora_rank": 32},
}


@pytest.mark.parametrize(("form", "weights"), [FORMATS[0], FORMATS[3]], ids=str)
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_of_compressed_tensors(family: str, form: str, weights: dict[str, Any], tmp_path: Path, monkeypatch):
    """Latent attention takes two matrices from one projection, which is widened."""
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    reference = random_checkpoint(tmp_path, family, **SIZES | EXPERTS[family])
    compress(tmp_path, form, weights | {"type": "int"}, reference)
    with structlog.testing.capture_logs() as logs:
        check_equal(tmp_path, reference)
    widened = [line["layers"] for line in logs if line["event"] == "weights_widened"]
    assert widened == (["kv_b_proj"] if family == "deepseek_v3" else [])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_quantised_copy_of_experts(family: str, tmp_path: Path, monkeypatch):
    """It computes as the model that is quantised while it loads. Routers stay."""
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    model = random_checkpoint(tmp_path / "m", family, **SIZES | EXPERTS[family])
    write_copy(tmp_path / "m", tmp_path / "copy", Bits.int4)
    backends = load_model(tmp_path / "m", quantize="int4"), load_model(tmp_path / "copy")
    one, other = (greedy(backend, prompts((1, 9, 40)), 6, Random(3)) for backend in backends)
    assert all(torch.equal(a.logits[at], b.logits[at]) for a, b in zip(one, other, strict=True) for at in a.logits)
    assert [row.tokens for row in one] == [row.tokens for row in other]
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    with pytest.raises(ConfigError, match=r"experts.* cannot be quantised"):
        write_copy(tmp_path / "fused", tmp_path / "again")


def test_experts_that_a_family_always_stores_as_one_are_not_quantised(tmp_path: Path):
    RECURRENT["granite-hybrid-experts"].write(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"block_sparse_moe.input_linear.weight: fused experts cannot be quantised"):
        write_copy(tmp_path / "m", tmp_path / "copy")


def read_by_transformers(folder: Path) -> Any:
    """Return a quantised copy as transformers reads it, with activations that are not rounded."""
    found = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    return limited(found.apply(disable_quantization))


@pytest.mark.parametrize("name", ["lfm2", "nemotron_h"])
def test_a_quantised_copy_with_convolutions(name: str, tmp_path: Path, monkeypatch):
    """The weights of convolutions stay, and all linear layers are quantised."""
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    RECURRENT[name].write(tmp_path / "m", hidden_size=96, intermediate_size=96)
    write_copy(tmp_path / "m", tmp_path / "copy", Bits.int8)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("m", "copy"))
    convolutions = [path for path, weight in before.items() if weight.ndim == 3]
    assert convolutions
    assert all(torch.equal(before[path], after[path]) for path in convolutions)
    linear = [path for path, weight in before.items() if weight.ndim == 2 and "embed" not in path]
    assert all(after[path].dtype == torch.int8 for path in linear)
    check_equal(tmp_path / "copy", read_by_transformers(tmp_path / "copy"))


PHI = ["mlp.fc1", "mlp.fc2", "self_attn.dense"]


@pytest.mark.parametrize(("name", "layers", "tied"), [("phi", PHI, []), ("starcoder2", ["mlp.c_fc"], ["lm_head"])])
def test_layers_that_keep_their_weights_are_ignored(
    name: str, layers: list[str], tied: list[str], tmp_path: Path, monkeypatch
):
    """Otherwise transformers would look for their scales."""
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    NATIVE[name].write(tmp_path / "m", hidden_size=96, intermediate_size=96)
    write_copy(tmp_path / "m", tmp_path / "copy", Bits.int8)
    scheme = json.loads((tmp_path / "copy" / "config.json").read_text())["quantization_config"]
    assert scheme["ignore"] == tied + [f"model.layers.{i}.{layer}" for i in range(2) for layer in layers]
    check_equal(tmp_path / "copy", read_by_transformers(tmp_path / "copy"))


@pytest.mark.parametrize("bits", list(Bits))
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_a_quantised_copy(bits: Bits, tied: bool, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    random_checkpoint(tmp_path / "m", "llama", shard="40KB", tie_word_embeddings=tied, **SIZES)
    write_copy(tmp_path / "m", tmp_path / "copy", bits)
    check_equal(tmp_path / "copy", read_by_transformers(tmp_path / "copy"))
    with pytest.raises(ConfigError, match="exists already"):
        write_copy(tmp_path / "m", tmp_path / "copy", bits)
    with pytest.raises(ConfigError, match="if it is not quantised"):
        write_copy(tmp_path / "copy", tmp_path / "again", bits)
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    (tmp_path / "m" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        write_copy(tmp_path / "m", tmp_path / "again", bits)
    assert {path.name for path in tmp_path.iterdir()} == {"m", "copy"}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_quantised_copy_of_indexed_files_with_more_templates(shards: int, tmp_path: Path, monkeypatch):
    random_checkpoint(tmp_path / "m", "llama", **SIZES)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "model.safetensors").unlink()
    places = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name, at in places.items() if at == file}, tmp_path / "m" / file)
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for path in ("m/additional_chat_templates/tool_use.jinja", "copy.part/mine"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("x")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"OUT: must be a new folder, not the current one, got '\.'"):
        write_copy(tmp_path / "m", Path())
    write_copy(tmp_path / "m", tmp_path / "copy")
    load_model(tmp_path / "copy")
    assert (tmp_path / "copy" / "additional_chat_templates" / "tool_use.jinja").read_text() == "x"
    assert (tmp_path / "copy.part" / "mine").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"m", "copy", "copy.part", "empty"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "float-quantized"}, "'float-quantized' of integers is not supported"),
        ({"transform_config": {"r1": {}}}, "transform_config"),
        ({"config_groups": {}}, "config_groups must have one entry"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            r"sparsity_config: format 'sparse-24-bitmask' is not supported \(supported: dense\)",
        ),
        ({"sparsity_config": {"targets": []}}, "sparsity_config: format is missing"),
        ({"weights": {"num_bits": 1}}, "num_bits"),
        ({"weights": {"strategy": "token"}}, "strategy"),
        ({"weights": {"strategy": "tensor", "symmetric": False}}, "strategy"),
        ({"weights": {"actorder": "input"}}, "actorder"),
        ({"input_activations": {"num_bits": 8, "type": "float"}}, "input_activations: type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_schemes_are_rejected_by_name(change: dict[str, Any], named: str, tmp_path: Path):
    random_checkpoint(tmp_path, "llama", **SIZES)
    group: dict[str, Any] = {"targets": ["Linear"]}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | change.pop("weights", {})
    group |= {"weights": weights, "input_activations": change.pop("input_activations", None)}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section | change}))
    with pytest.raises(CheckpointError, match=named):
        load_model(tmp_path)


def test_gpus_reject_weights_to_be_quantised(tmp_path: Path):
    random_checkpoint(tmp_path, "llama", **SIZES)
    with pytest.raises(ConfigError, match="quantize: int8 is not supported on cuda:0"):
        load_model(tmp_path, quantize="int8", device="cuda:0")
