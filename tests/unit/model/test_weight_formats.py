"""Weight formats of quantised checkpoints, against transformers with the widened weights."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.engine.kernels.quantized import Scheme
from baton.engine.models.checkpoint import Checkpoint, LoadProgress
from baton.engine.models.formats.select import declared_format
from baton.engine.models.json_fields import Fields
from baton.engine.models.loading import load_model
from baton.errors import CheckpointError
from tests.support import weight_formats as formats
from tests.unit.model.checkpoints import (
    DENSE,
    LATENT,
    MIXTRAL,
    NATIVE,
    RECURRENT,
    SPARSE,
    V3,
    edit_config,
    edit_tensors,
    parameter_of,
    random_checkpoint,
    reload,
)
from tests.unit.model.harness import check_equal

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
LAYERS = r"(_proj|\.w[123])\.weight$"
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL,
    "deepseek_v3": V3 | {"moe_intermediate_size": 32, "q_lora_rank": 32},
}
Write = Callable[[torch.Tensor], formats.Layer]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
MXFP4 = formats.NVFP4 | {"strategy": "group", "group_size": 32}


def of_compressed(form: str, weights: dict[str, Any]) -> tuple[dict[str, Any], Write]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    section = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return section, partial(formats.compressed, form=form, weights=weights)


# Name: `quantization_config`, the writer of a layer, and whether kernels hold its layers packed.
FORMATS: dict[str, tuple[dict[str, Any], Write, bool]] = {
    "fp8 block": (
        {"quant_method": "fp8", "weight_block_size": [16, 32]}, partial(formats.fp8, block=[16, 32]), False,
    ),
    "fp8 tensor": ({"quant_method": "fp8"}, partial(formats.fp8, block=None), False),
    "fp8 with names of vLLM": ({"quant_method": "fp8", "activation_scheme": "static"}, formats.modelopt_fp8, False),
    "float by tensor": (*of_compressed("float-quantized", FP8 | {"strategy": "tensor"}), False),
    "float by channel": (*of_compressed("float-quantized", FP8 | {"strategy": "channel"}), False),
    "float by block": (
        *of_compressed("float-quantized", FP8 | {"strategy": "block", "block_structure": [40, 40]}), False,
    ),
    "int4 in bytes": (*of_compressed("int-quantized", INT4), True),
    "nvfp4": (*of_compressed("nvfp4-pack-quantized", formats.NVFP4), False),
    "mxfp4": (*of_compressed("mxfp4-pack-quantized", MXFP4), False),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, formats.modelopt_fp8, False),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, formats.modelopt_nvfp4, False),
    "gptq": (GPTQ, partial(formats.gptq, bits=4, group=32), True),
    "gptq symmetric": (GPTQ | {"sym": True}, partial(formats.gptq, bits=4, group=32, symmetric=True), True),
    "gptq with biases": (GPTQ, partial(formats.gptq, bits=4, group=32, biases=True), True),
    "gptq v2 of 2 bits": (
        GPTQ | {"bits": 2, "checkpoint_format": "gptq_v2"}, partial(formats.gptq, bits=2, group=32, version=2), True,
    ),
    "gptq of 3 bits": (GPTQ | {"bits": 3}, partial(formats.gptq, bits=3, group=32, symmetric=True), True),
    "gptq of 8 bits by row": (GPTQ | {"bits": 8, "group_size": -1}, partial(formats.gptq, bits=8, group=-1), True),
    "gptq in any order": (GPTQ | {"desc_act": True}, partial(formats.gptq, bits=4, group=32, ordered=True), False),
    "gptq in groups of 16": (GPTQ | {"group_size": 16}, partial(formats.gptq, bits=4, group=16), False),
    "awq": (AWQ, partial(formats.awq, group=32), True),
    "nf4": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        partial(formats.bitsandbytes_4bit, kind="nf4", nested=False), False,
    ),
    "nf4 in words": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
        partial(formats.bitsandbytes_4bit, kind="nf4", nested=False, storage=torch.bfloat16), False,
    ),
    "fp4 with quantised scales": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        partial(formats.bitsandbytes_4bit, kind="fp4", nested=True), False,
    ),
    "bitsandbytes int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, formats.bitsandbytes_8bit, True,
    ),
}  # fmt: skip


def write(
    folder: Path, section: dict[str, Any], layer: Write, family: str = "qwen2", layers: str = LAYERS, **settings: Any
) -> Any:
    """Write a checkpoint with quantised layers. Return transformers' model with the values that they stand for."""
    reference = random_checkpoint(folder, family, **SIZES | settings)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if re.search(layers, name)]:
        found, values = layer(tensors.pop(name))
        parameter_of(reference, name).copy_(values)
        tensors = {name.removesuffix("weight") + part: tensor for part, tensor in found.items()} | tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config=section)
    return reference


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_the_widened_weights(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    section, layer, packed = FORMATS[name]
    reference = write(tmp_path, section, layer)
    with structlog.testing.capture_logs() as logs:
        check_equal(tmp_path, reference)
    widened = [line["layers"] for line in logs if line["event"] == "weights_widened"]
    every = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert widened == ([] if packed else [every])


def test_versions_of_gptq_are_other_models(tmp_path: Path):
    """The tensors are the same, and their meaning is another. Each part counts once in the progress."""
    section, layer, _ = FORMATS["gptq in any order"]
    write(tmp_path, section, layer)
    steps = list[LoadProgress]()
    first = load_model(tmp_path, progress=steps.append).fingerprint
    assert steps[-1].bytes_done == sum(each.nbytes for each in load_file(tmp_path / "model.safetensors").values())
    edit_config(tmp_path, quantization_config=section | {"checkpoint_format": "gptq_v2"})
    assert load_model(tmp_path).fingerprint != first


@pytest.mark.parametrize("packs", [False, True], ids=["GPU", "CPU"])
def test_layers_stay_packed_only_where_kernels_are(packs: bool, tmp_path: Path):
    section, layer, _ = FORMATS["gptq"]
    write(tmp_path, section, layer)
    stored = declared_format(Fields("c", {"quantization_config": section}))
    scheme = Checkpoint(tmp_path, stored=stored, packs=packs).scheme(["model.layers.0.self_attn.q_proj.weight"])
    assert scheme == (Scheme(4, 32) if packs else None)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_experts_and_latent_attention(family: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    for name in ("fp8 block", "gptq", "bitsandbytes int8"):
        section, layer, packed = FORMATS[name]
        reference = write(tmp_path / name, section, layer, family, **EXPERTS[family])
        with structlog.testing.capture_logs() as logs:
            check_equal(tmp_path / name, reference)
        widened = [line["layers"] for line in logs if line["event"] == "weights_widened"]
        assert not packed or widened == ["kv_b_proj"] * (family == "deepseek_v3")


OTHERS = DENSE | SPARSE | LATENT | NATIVE | RECURRENT
DESCRIBED = [name for name, variant in OTHERS.items() if variant.family not in ("llama", "mistral", "qwen2", "qwen3")]


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["float by block", "int4 in bytes", "bitsandbytes int8"])
@pytest.mark.parametrize("variant", DESCRIBED)
def test_all_matrices_of_all_families(variant: str, name: str, tmp_path: Path, monkeypatch):
    """Also routers, and fused, grouped and recurrent projections, but not embeddings. Transformers reads a copy in
    which they are widened.
    """
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    family, (section, layer, _) = OTHERS[variant].family, FORMATS[name]
    tensors, wide = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for folder in ("packed", "wide"):
        OTHERS[variant].write(tmp_path / folder)
    for path, weight in load_file(tmp_path / "wide" / "model.safetensors").items():
        if weight.dim() != 2 or not path.endswith(".weight") or re.search(r"embed|lm_head|norm\.", path):
            tensors[path] = wide[path] = weight
            continue
        found, wide[path] = layer(weight)
        tensors |= {path.removesuffix("weight") + part: tensor for part, tensor in found.items()}
    for folder, each in (("packed", tensors), ("wide", wide)):
        whole = {path: tensor.contiguous() for path, tensor in each.items()}
        save_file(whole, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path / "packed", quantization_config=section)
    check_equal(tmp_path / "packed", reload(tmp_path / "wide", family, torch.float32))


@pytest.mark.parametrize("kind", ["int8", "int4", "float8", "int8 and int4", "int4 of mslk"])
def test_torchao(kind: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    reference = random_checkpoint(tmp_path, "llama", **SIZES)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [name for name in tensors if re.search(LAYERS, name)]
    if kind == "int4 of mslk":
        metadata: dict[str, str] = {}
        for name in names:
            parts, entry, values = formats.torchao_int4(tensors.pop(name), name)
            tensors, metadata = tensors | parts, metadata | entry
            parameter_of(reference, name).copy_(values)
    else:
        pytest.importorskip("torchao", reason="torchao is not installed")
        plain = dict(tensors)
        tensors, metadata = formats.torchao(plain, names, kind)
        for name in names:
            parameter_of(reference, name).copy_(plain[name])
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    edit_config(tmp_path, quantization_config={"quant_method": "torchao", "quant_type": {"default": {"_type": kind}}})
    check_equal(tmp_path, reference)
    wrong = {name: spoilt(each) if name.endswith("_scale") else each for name, each in tensors.items()}
    save_file(wrong, tmp_path / "model.safetensors", metadata=metadata)
    with pytest.raises(CheckpointError, match=r"proj._weight_scale has a scale that is not a finite number"):
        load_model(tmp_path)


def test_gpt_oss_in_mxfp4(tmp_path: Path, seed: int):
    """Its experts are stored as blocks, outputs before inputs. Transformers has inputs before outputs."""
    reference, made = NATIVE["gpt_oss"].write(tmp_path, **SIZES), torch.Generator().manual_seed(seed)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, n_in, n_out = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, n_out, n_in // 32, 16), dtype=torch.uint8, generator=made)
        scales = torch.randint(119, 123, blocks.shape[:3], dtype=torch.uint8, generator=made)
        reference.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    check_equal(tmp_path, reference)
    edited("_scales", spoilt)(tmp_path)
    with pytest.raises(CheckpointError, match=r"experts.*_scales has a scale that is not a finite number"):
        load_model(tmp_path)


def float8_stack(weight: torch.Tensor, name: str, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Quantise experts [count, k, n] as `FbgemmFp8Llama4TextExperts` of transformers, or with one scale for all."""
    scale = weight.abs().amax(1, keepdim=True) / 448 if kind == "fbgemm_fp8" else weight.abs().max() / 448
    levels, ending = (weight / scale).to(torch.float8_e4m3fn), {"fp8": "_scale_inv", "modelopt": "_weight_scale"}
    stored = scale.transpose(1, 2).contiguous() if name.endswith("down_proj") and scale.dim() else scale
    return {name: levels, name + ending.get(kind, "_scale"): stored}, levels.float() * scale


@pytest.mark.parametrize("kind", ["fbgemm_fp8", "fp8", "modelopt"])
def test_stacks_of_llama_4_in_float8(kind: str, tmp_path: Path):
    reference = NATIVE["llama4"].write(tmp_path)

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if tensors[name].dim() == 3]:
            parts, values = float8_stack(tensors.pop(name), name, kind)
            reference.get_parameter(name).copy_(values)
            tensors |= parts | ({f"{name}_input_scale": torch.ones(())} if kind == "modelopt" else {})

    edit_tensors(tmp_path, quantise)
    edit_config(tmp_path, quantization_config={"quant_method": kind, "quant_algo": "FP8"})
    check_equal(tmp_path, reference)


@pytest.mark.parametrize("name", ["float by channel", "int4 in bytes"])
def test_experts_of_llama_4_that_are_stored_one_by_one(name: str, tmp_path: Path, monkeypatch):
    """llm-compressor and transformers replace the stacks by networks, before they quantise."""
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    reference, (section, layer, _) = NATIVE["llama4"].write(tmp_path), FORMATS[name]

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for stack in [name for name in tensors if tensors[name].dim() == 3]:
            parts = ("gate_proj", "up_proj") if "gate_up" in stack else ("down_proj",)
            for number, expert in enumerate(tensors.pop(stack)):
                own = reference.get_parameter(stack)[number].chunk(len(parts), -1)
                for part, weight, place in zip(parts, expert.chunk(len(parts), -1), own, strict=True):
                    found, values = layer(weight.t().contiguous())
                    place.copy_(values.t())
                    prefix = f"{stack.rpartition('.')[0]}.{number}.{part}."
                    tensors.update((prefix + ending, tensor) for ending, tensor in found.items())

    edit_tensors(tmp_path, quantise)
    edit_config(tmp_path, quantization_config=section)
    check_equal(tmp_path, reference)


def test_biases_of_zeros_for_layers_without_one(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    section, layer, _ = FORMATS["gptq with biases"]
    check_equal(tmp_path, write(tmp_path, section, layer, "llama"))
    assert "model.layers.0.self_attn.o_proj.bias" in load_file(tmp_path / "model.safetensors")


def test_layers_that_gptq_leaves_out(tmp_path: Path, monkeypatch):
    """As in the checkpoints of Qwen3.5 by its authors."""
    monkeypatch.setenv("BATON_CPU_LEVEL", "none")
    section, layer, _ = FORMATS["gptq"]
    section = section | {"dynamic": {"lm_head": {}, "-:.*attn.*": {}}}
    check_equal(tmp_path, write(tmp_path, section, layer, layers=r"(gate|up|down)_proj\.weight$"))


def edited(ending: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    """Return a change of all tensors with names that end so. None removes one."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(ending)]:
            if (made := change(tensors.pop(name))) is not None:
                tensors[name] = made.contiguous()

    return lambda folder: edit_tensors(folder, edit)


def declared(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(
        folder, quantization_config=json.loads((folder / "config.json").read_text())["quantization_config"] | changes
    )


WRONG: list[tuple[str, Callable[[Path], None], str]] = [
    ("gptq", edited(".qweight", lambda each: each[:-1]), r"model.safetensors: .*proj.qweight has shape"),
    ("gptq", edited(".qzeros", lambda _: None), "tensor .*proj.qzeros is missing"),
    ("gptq", edited(".scales", lambda each: each.int()), "proj.scales has dtype torch.int32"),
    ("gptq", edited(".g_idx", lambda each: each.flip(0)), "g_idx has groups in another order"),
    ("gptq in any order", edited(".g_idx", lambda each: each - 1), "g_idx has a group outside 0 to 1"),
    ("gptq in any order", edited(".g_idx", lambda each: each + 1), "g_idx has a group outside 0 to 1"),
    ("int4 in bytes", edited("k_proj.weight", lambda each: each + 8), "k_proj.weight has a level outside int4"),
    ("gptq", edited(".qzeros", lambda each: each | -1), "qzeros has the zero level 15, which is ambiguous"),
    (
        "gptq with biases",
        edited("1.mlp.up_proj.bias", lambda each: each + 1),
        "unexpected tensors: .*1.mlp.up_proj.bias",
    ),
    ("gptq", declared(bits=5), "bits must be 2, 3, 4 or 8, got 5"),
    ("gptq", declared(checkpoint_format="marlin"), "checkpoint_format 'marlin' is not supported"),
    ("gptq", declared(dynamic={"+:.*up.*": {"bits": 8}}), r"dynamic with settings of its own for '\+:.\*up.\*'"),
    ("awq", declared(version="gemv"), "version 'gemv' is not supported, only gemm"),
    ("awq", declared(bits=3), "bits must be 4, got 3"),
    ("fp8 block", edited("_scale_inv", lambda each: each[:, :1]), r"weight_scale_inv has shape .*, expected \[4, 2\]"),
    ("fp8 block", edited("_scale_inv", lambda _: None), "tensor .*weight_scale_inv is missing"),
    ("fp8 block", declared(weight_block_size=[128]), "weight_block_size must be two sizes, got .128."),
    ("fp8 tensor", edited("o_proj.weight", lambda each: each.float()), "unexpected tensors: .*o_proj.weight_scale_inv"),
    ("nvfp4", edited("_global_scale", lambda each: each.repeat(2)), "global_scale has shape .2., expected one number"),
    ("modelopt fp8", declared(quant_algo="W4A8"), "quant_algo 'W4A8' is not supported"),
    ("modelopt nvfp4", edited("norm.weight", lambda each: each.byte()), "must not be quantised in the format nvfp4"),
    ("nf4", edited("__nf4", lambda each: each[:-9]), "bitsandbytes__nf4 is not valid JSON"),
    ("nf4", edited("k_proj.weight", lambda each: each[:-1]), r"k_proj.weight has \d+ bytes, expected \d+"),
    ("nf4", edited(".absmax", lambda each: each[1:]), "absmax has shape"),
    ("fp4 with quantised scales", declared(load_in_4bit=False), "load_in_8bit or load_in_4bit must be true"),
    ("bitsandbytes int8", edited(".SCB", lambda each: each[None]), r"SCB has shape \[1, "),
    ("awq", declared(quant_method="quark"), "quant_method 'quark' is not supported .*awq, .*torchao"),
    ("fp8 tensor", declared(quant_method="torchao"), "has dtype torch.float8_e4m3fn, expected a float type"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), WRONG)
def test_wrong_checkpoints_are_rejected(name: str, spoil: Callable[[Path], None], message: str, tmp_path: Path):
    write(tmp_path, *FORMATS[name][:2], "llama")
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def spoilt(scale: torch.Tensor) -> torch.Tensor:
    """Return scales of which the last one is NaN. In 8 bits, this is E4M3 and E8M0 with all bits."""
    scale = scale.clone()
    flat = scale.view(-1).view(torch.uint8) if scale.element_size() == 1 else scale.view(-1)
    flat[-1] = 255 if flat.dtype == torch.uint8 else torch.nan
    return scale


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("fp8 tensor", "_scale_inv"),
        ("fp8 block", "_scale_inv"),
        ("int4 in bytes", ".weight_scale"),
        ("nvfp4", ".weight_scale"),
        ("nvfp4", "_global_scale"),
        ("mxfp4", ".weight_scale"),
        ("modelopt nvfp4", ".weight_scale_2"),
        ("gptq", ".scales"),
        ("awq", ".scales"),
        ("nf4", ".absmax"),
        ("nf4", ".quant_map"),
        ("fp4 with quantised scales", ".nested_absmax"),
        ("bitsandbytes int8", ".SCB"),
    ],
)
def test_scales_must_be_finite(name: str, ending: str, tmp_path: Path):
    write(tmp_path, *FORMATS[name][:2], "llama")
    edited(ending, spoilt)(tmp_path)
    shown = ending.replace("nested_", "")
    with pytest.raises(CheckpointError, match=rf"model.safetensors: .*proj.*{shown} has a scale that is not a finite"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("", "no valid entry 'model.layers.0.self_attn.q_proj.weight' in the metadata"),
        ("{", "no valid entry"),
        ('{"_type": "NVFP4Tensor"}', "_type NVFP4Tensor is not supported"),
        ('{"_type": "Int4Tensor", "_data": {"block_size": [2, 32]}}', r"block_size \[2, 32\] is not supported"),
        ('{"_type": "Int8Tensor", "_tensor_data_names": ["act_pre_scale"]}', "without act_pre_scale"),
    ],
)
def test_wrong_metadata_of_torchao(entry: str, message: str, tmp_path: Path):
    random_checkpoint(tmp_path, "llama", **SIZES)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.self_attn.q_proj.weight"
    parts, _, _ = formats.torchao_int4(tensors.pop(name), name)
    save_file(tensors | parts, tmp_path / "model.safetensors", metadata={name: entry} if entry else {})
    edit_config(tmp_path, quantization_config={"quant_method": "torchao"})
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)
