"""Reads tensors from the safetensors files of a checkpoint. Nothing is unpickled: other formats are refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from baton.engine.model.fields import Fields, read_json_object
from baton.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHER_FORMATS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack"})
FLOATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float64: "float64"}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the single one, else the shards that the index names, in order."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise _no_weights(folder)
    files = [_shard(index, name) for name in sorted(set(_weight_map(index).values()))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{index}: names shard {file.name}, which is not there")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    fields = Fields(str(index), read_json_object(index)).section("weight_map")
    if not fields.values:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    return {tensor: fields.text(tensor) for tensor in fields.values}


def _shard(index: Path, name: str) -> Path:
    # The index is untrusted: a shard lies beside it, or it is not a shard.
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise CheckpointError(f"{index}: {name!r} is not the name of a safetensors file in this folder")
    return index.parent / name


def _no_weights(folder: Path) -> CheckpointError:
    others = sorted(file.name for file in folder.iterdir() if file.suffix in OTHER_FORMATS)
    if others:
        return CheckpointError(f"{folder / others[0]}: only safetensors are loaded; convert it to {SINGLE}")
    return CheckpointError(f"{folder}: no {SINGLE} and no {INDEX}")


class Checkpoint:
    """The tensors of a checkpoint by name. A model takes each once; what is left over at the end is an error.

    All methods raise CheckpointError naming the file or the tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Path] = {}
        self._digests: dict[str, str] = {}
        for file in weight_files(folder):
            for name in self._names(file):
                if name in self._files:
                    raise CheckpointError(f"{file}: tensor {name} is in {self._files[name].name} as well")
                self._files[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def stored_dtype(self, name: str) -> str:
        """The dtype that a tensor has on disk."""
        return FLOATS.get(self._read(name).dtype, "unknown")

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this shape, as stored: a read-only view of the file, for the caller to convert."""
        tensor = self._read(name)
        if tensor.shape != shape:
            raise CheckpointError(f"{self._files[name]}: {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype not in FLOATS:
            raise CheckpointError(f"{self._files[name]}: {name} has dtype {tensor.dtype}, expected a float type")
        self._digests[name] = xxhash.xxh3_128_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return tensor

    def finish(self) -> str:
        """A digest of all the tensors taken. Others left over are an error: the model would not be itself."""
        left = sorted(n for n in self._files.keys() - self._digests.keys() if not n.endswith("rotary_emb.inv_freq"))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(f"{self._files[left[0]]}: unexpected tensors: {', '.join(left[:3])}{more}")
        lines = "".join(f"{name}={self._digests[name]}\n" for name in sorted(self._digests))
        return xxhash.xxh3_128_hexdigest(lines.encode())

    def _names(self, file: Path) -> list[str]:
        try:
            with safe_open(file, framework="pt") as opened:
                return list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a whole safetensors file: {error}") from error

    def _read(self, name: str) -> Tensor:
        if name not in self._files:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing")
        try:
            with safe_open(self._files[name], framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
                return tensor
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._files[name]}: {name} cannot be read: {error}") from error
