"""Quantised checkpoints are rejected by the name of their method, whether or not config.json mentions it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.models.config import REFUSED, quantised_as
from baton.engine.models.loading import load_model
from baton.errors import CheckpointError

DEMO = Path(__file__).resolve().parents[3] / "models/demo"
CONFIGS = [
    ({"quant_method": "gptq", "bits": 4}, "gptq"),
    ({"quant_method": "awq"}, "awq"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"load_in_8bit": True}, "bitsandbytes"),
    ({"quant_method": "mxfp4"}, "mxfp4"),
    ({}, "unnamed"),
]
NAME = "model.layers.0.mlp.up_proj"
FP8 = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
INT8, INT32, SCALE = torch.zeros(4, 4, dtype=torch.int8), torch.zeros(4, 4, dtype=torch.int32), torch.ones(4)
GPTQ = {"qweight": INT32, "qzeros": INT32, "scales": SCALE, "g_idx": torch.zeros(4, dtype=torch.int32)}
TENSORS = [
    (GPTQ, "GPTQ"),
    ({"qweight": INT32, "qzeros": INT32, "scales": SCALE}, "AWQ"),
    ({"scales": SCALE}, "AWQ or GPTQ"),
    ({"weight": INT8, "SCB": SCALE}, "bitsandbytes"),
    ({"weight": torch.zeros(8, dtype=torch.uint8), "weight.quant_state.bitsandbytes__nf4": INT8}, "bitsandbytes"),
    ({"weight_packed": INT32, "weight_scale": SCALE}, "compressed-tensors"),
    ({"weight": FP8, "weight_scale_inv": SCALE}, "FP8"),
    ({"weight": FP8}, "FP8"),
    ({"weight": FP8.view(torch.float8_e5m2)}, "FP8"),
    ({"weight": INT8, "weight_scale": SCALE}, "int8"),
    ({"weight": INT8.view(torch.uint8)}, "uint8"),
    ({"weight": SCALE, "weight_scale": SCALE}, "compressed-tensors or ModelOpt"),
]


def folder_with(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    config = json.loads((DEMO / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(("section", "method"), CONFIGS)
def test_by_config(section: dict[str, Any], method: str, key: str, tmp_path: Path):
    folder = folder_with(tmp_path, {"a": SCALE}, **{key: section})
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert f"{folder / 'config.json'}: {key} ({method}): {REFUSED}" in str(caught.value)


@pytest.mark.parametrize(("tensors", "method"), TENSORS)
def test_by_tensors(tensors: dict[str, torch.Tensor], method: str, tmp_path: Path):
    folder = folder_with(tmp_path, {f"{NAME}.{name}": tensor.clone() for name, tensor in tensors.items()})
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert f"is {method}: {REFUSED}" in str(caught.value)
    assert f"model.safetensors: {NAME}." in str(caught.value)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F64", "I64", "I32", "BOOL"])
def test_others_are_not(dtype: str):
    names = ("model.norm.weight", "lm_head.weight", "model.layers.0.mlp.gate.e_score_correction_bias", "a.inv_freq")
    assert quantised_as(dict.fromkeys(names, dtype)) is None
