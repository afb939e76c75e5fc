"""`baton quantize`: a copy of a checkpoint with linear layers in 8 or 4 bits, in the format of compressed-tensors."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "lm_head.weight"
RECURRENT = (".conv.", ".mamba.", ".mixer.", ".linear_attn.")
LAYERS = (".self_attn.", ".mlp.", ".block_sparse_moe.experts.", ".feed_forward.", ".shared_mlp.", *RECURRENT)
ENDINGS = ("_proj.weight", "_linear.weight", ".w1.weight", ".w2.weight", ".w3.weight")
FUSED = re.compile(r"\.experts\.|\.block_sparse_moe\.(in|out)put_linear\.")  # tensors of all experts of a layer
NOT_LISTED = re.compile(r"(embed_tokens\w*|embeddings|norm\w*|\.gate)\.weight$")  # routers have a pattern


class Bits(StrEnum):
    """The schemes of `model.quantize`."""

    int8 = "int8"
    int4 = "int4"


Source = Annotated[Path, typer.Argument(metavar="FOLDER", help="the checkpoint")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="a new folder for the copy")]
To = Annotated[Bits, typer.Option(help="int8: one scale per output; int4: one per 32 inputs of an output")]


Compare = Annotated[
    Path | None, typer.Option(help="a text: print how far the copy's predictions of its tokens are from the original's")
]


def quantize(folder: Source, out: Out, to: To = Bits.int8, compare: Compare = None) -> None:
    """Write a copy of a checkpoint with weights in 8 or 4 bits. Baton reads it, and transformers if it is dense."""
    from baton.cli.setup.quantised_quality import compare_checkpoints, pieces_of
    from baton.engine.models.checkpoint import weight_files
    from baton.engine.models.config import read_config

    config = read_config(folder)
    if config.quantised is not None or config.latent is not None:
        why = f"it is not quantised and has no latent attention (here: {config.family})"
        raise ConfigError(f"{folder}: a model can be quantised if {why}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: exists already")
    if (place := out.resolve()) == Path.cwd():
        raise ConfigError(f"OUT: must be a new folder, not the current one, got {str(out)!r}")
    pieces = None if compare is None else pieces_of(compare, folder)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f"{place.name}.") as scratch:
            (part := Path(scratch) / place.name).mkdir()
            names = {file.name: _convert(file, part / file.name, to.value) for file in weight_files(folder)}
            _write_others(folder, part, names, to.value)
            size, before = (sum(file.stat().st_size for file in weight_files(one)) for one in (part, folder))
            if place.exists():
                place.rmdir()
            part.rename(place)
    except OSError as error:
        raise ConfigError(f"{out}: cannot write there: {error.strerror or error}") from None
    typer.echo(f"{out} has {size / 1e6:,.1f} MB of weights instead of {before / 1e6:,.1f} MB")
    if pieces is not None:
        typer.echo(f"{compare}: {compare_checkpoints(folder, out, pieces)}")


def _convert(source: Path, target: Path, to: str) -> dict[str, Tensor]:
    """Convert one file of weights. Return its tensors by name, without their values."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(source, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping: it has no iterator)
                tensors |= _converted(name, file.get_tensor(name), to)
    except SafetensorError as error:
        raise CheckpointError(f"{source}: not a complete safetensors file: {error}") from error
    try:
        save_file(tensors, target, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def _converted(name: str, tensor: Tensor, to: str) -> dict[str, Tensor]:
    import torch

    from baton.engine.kernels import quantized
    from baton.engine.models.formats.base import packed_words

    linear = name.endswith(ENDINGS) and any(part in name for part in LAYERS)
    if tensor.ndim == 3 and FUSED.search(name):
        remedy = "save the model with save_original_format=True, if its original format has them one by one"
        raise ConfigError(f"{name}: fused experts cannot be quantised; {remedy}")
    if not (linear or name == HEAD) or tensor.ndim != 2:
        return {name: tensor}
    layer, weight = name.removesuffix(".weight"), quantized.quantize(tensor, quantized.SCHEMES[to])
    levels = weight.levels[:, : weight.k]
    if weight.scales is None:
        signed = (levels.int() - 128).to(torch.int8)
        return {name: signed, f"{layer}.weight_scale": weight.factors[:, None].contiguous()}
    return {
        f"{layer}.weight_packed": packed_words(levels, weight.bits),
        f"{layer}.weight_scale": weight.scales.float() * weight.factors[:, None],
        f"{layer}.weight_shape": torch.tensor(tensor.shape),
    }


def _write_others(folder: Path, out: Path, names: dict[str, dict[str, Tensor]], to: str) -> None:
    """Write the index, config.json with the scheme, and copies of all other files."""
    weights = {"model.safetensors.index.json", *names}
    for file in folder.iterdir():
        if file.is_file() and file.name not in weights:
            shutil.copyfile(file, out / file.name)
    if (templates := folder / "additional_chat_templates").is_dir():
        shutil.copytree(templates, out / templates.name, copy_function=shutil.copyfile)
    if set(names) != {"model.safetensors"}:
        total = sum(tensor.nbytes for tensors in names.values() for tensor in tensors.values())
        places = {name: file for file, tensors in names.items() for name in tensors}
        _write(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
    config = json.loads((folder / "config.json").read_text())
    whole = {name: tensor for tensors in names.values() for name, tensor in tensors.items()}
    _write(out / "config.json", config | {"quantization_config": _scheme(to) | {"ignore": _ignored(whole)}})


def _ignored(tensors: dict[str, Tensor]) -> list[str]:
    """Return the names of linear layers that kept their weights, and a pattern for routers."""
    tied = [] if f"{HEAD}_scale" in tensors else ["lm_head"]  # the head is the embedding
    routers = ["re:.*[.]gate$"] if any(name.endswith(".gate.weight") for name in tensors) else []
    kept = (name for name, tensor in tensors.items() if tensor.ndim == 2 and f"{name}_scale" not in tensors)
    linear = (name for name in kept if name.endswith(".weight") and not NOT_LISTED.search(name))
    return tied + routers + sorted(name.removesuffix(".weight") for name in linear)


def _scheme(to: str) -> dict[str, Any]:
    """Return `quantization_config` in the format of compressed-tensors 0.20."""
    from baton.engine.kernels.quantized import SCHEMES

    bits, group = SCHEMES[to]
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    tokens = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if group else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None if group else tokens}
        },
    }


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
