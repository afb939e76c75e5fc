"""Tensors from the safetensors or GGUF files of a checkpoint, and the weights of a model in their final memory.

Other files are rejected, so nothing is unpickled. Weights are read without a second copy, except rows in another
order (`Weights.picked`) and widened layers. Layers of a quantised checkpoint have their plain names here: each is
widened when it is taken, or taken packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.clock import SystemClock
from baton.engine.kernels.quantized import QuantizedWeight, Scheme
from baton.engine.memory.huge_pages import Arena, drop_pages
from baton.engine.models.config import REFUSED, quantised_tensor
from baton.engine.models.formats.base import FLOATS, Levels, WeightFormat, joined
from baton.engine.models.formats.gguf import GgufFile
from baton.engine.models.json_fields import Fields, read_json_object
from baton.engine.models.uploads import CudaLane, Uploads
from baton.errors import CheckpointError
from baton.model_hub import check_file

SINGLE = "model.safetensors"
GGUF = ".gguf"
INDEX = "model.safetensors.index.json"
OTHER_FORMATS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack"})
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of loading: bytes in their size on disk, tensors taken, seconds since the start."""

    bytes_done: int
    bytes_total: int
    tensors: int
    seconds: float


Progress = Callable[[LoadProgress], None]


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: the single file, else the shards in the index, sorted by name. A
    folder that was made of GGUF files has these instead.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        if found := sorted(folder.glob(f"*{GGUF}")):
            return found
        raise _no_weights(folder)
    fields = Fields(str(index), read_json_object(index)).section("weight_map")
    if not fields.values:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    names = sorted({fields.text(tensor) for tensor in fields.values})
    for name in names:
        # The index is untrusted, so a shard must be in its folder.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {name!r} is not the name of a safetensors file in this folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{index}: lists shard {name}, which does not exist")
    return [folder / name for name in names]


def _no_weights(folder: Path) -> CheckpointError:
    others = sorted(file.name for file in folder.iterdir() if file.suffix in OTHER_FORMATS)
    if others:
        return CheckpointError(f"{folder / others[0]}: only safetensors are supported; convert it to {SINGLE}")
    return CheckpointError(f"{folder}: no {SINGLE} and no {INDEX}")


class Checkpoint:
    """The tensors of a checkpoint by name. A model takes each tensor once, then calls `finish`. Files stay mapped until
    `finish`. All methods raise CheckpointError with the file or the tensor; the constructor also raises it for
    weights that are quantised, unless `stored` is their format. `packs` allows to take their layers packed. `progress`
    is called at the start and after each tensor.
    """

    def __init__(
        self,
        folder: Path,
        progress: Progress | None = None,
        *,
        digests: bool = True,
        stored: WeightFormat | None = None,
        packs: bool = False,
    ) -> None:
        self.folder, self._progress, self._with_digests = folder, progress, digests
        self._stored, self._packs = stored, packs
        self._clock = SystemClock()
        self._began = self._clock.monotonic()
        self._files: dict[str, Path] = {}
        self._dtypes: dict[str, str] = {}
        self._digests: dict[str, str] = {}
        self._views: set[int] = set()  # addresses of tensors that are views of files
        self.widened: set[str] = set()  # names of layers that were taken widened
        self._bytes_done = 0
        files = weight_files(folder)
        self._mapped: dict[Path, Any] = {file: _opened(file) for file in files}
        self._bytes_total = sum(file.stat().st_size for file in files)
        for file in files:
            self._list(file)
        if stored is None and (name := quantised_tensor(self._dtypes)):
            raise CheckpointError(f"{self._files[name]}: {name} ({self._dtypes[name]}): {REFUSED}")
        wide = {stored.wide_name(*each): each[0] for each in self._dtypes.items()} if stored else {}
        self._wide = {name: main for name, main in wide.items() if name is not None}
        self._report()

    def __contains__(self, name: str) -> bool:
        return name in self._files or name in self._wide

    def stored_dtype(self, name: str) -> str:
        if name in self._wide:
            return DTYPES.get(self._dtypes[self._wide[name]], "bfloat16")
        self._file(name)
        return DTYPES.get(self._dtypes[name], "unknown")

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of this shape, to be copied, then released: a read-only view of the file, or a layer of a
        quantised checkpoint in float32.
        """
        if name not in self._wide:
            return self._view(name, shape, FLOATS)
        assert self._stored is not None
        if len(shape) not in self._stored.dimensions:
            raise CheckpointError(f"{self.folder}: {name} must not be quantised in the format {self._stored.summary}")
        if self._dtypes[self._wide[name]] not in FLOATS:
            self.widened.add(name)
        found = self._stored.read(self, name, shape)
        return found.widened() if isinstance(found, Levels) else found

    def scheme(self, names: Sequence[str]) -> Scheme | None:
        """Return how all these layers can be taken packed as one, or None."""
        if not self._packs or not names or not self._wide.keys() >= set(names):
            return None
        assert self._stored is not None
        if self._stored.scheme_of is None:
            return self._stored.scheme
        found = {self._stored.scheme_of(self, name) for name in names}
        return found.pop() if len(found) == 1 else None

    def packed(self, names: Sequence[str], outs: Sequence[int], k: int, dtype: torch.dtype) -> QuantizedWeight:
        """Return layers [outs[i], k] with a `scheme` as one weight for kernels of `dtype`."""
        scheme, stored = self.scheme(names), self._stored
        assert scheme is not None
        assert stored is not None
        found = [stored.read(self, name, (out, k)) for name, out in zip(names, outs, strict=True)]
        return joined([each for each in found if isinstance(each, Levels)], scheme, k, dtype)

    def part(self, name: str, shape: Sequence[int] | None, dtypes: Sequence[str]) -> Tensor:
        """See `baton.engine.models.formats.base.Source`, which this implements for the formats."""
        view = self._view(name, None if shape is None else tuple(shape), dtypes)
        copied = view.clone()
        self.release(view)
        return copied

    def shape(self, name: str) -> list[int]:
        return list(self._mapped[self._file(name)].get_slice(name).get_shape())

    def stored(self, name: str) -> str:
        return self._wide[name]

    def dtype(self, name: str) -> str:
        self._file(name)  # raises CheckpointError
        return self._dtypes[name]

    def metadata(self, name: str) -> str:
        found = ((mapped.metadata() or {}).get(name) for mapped in self._mapped.values())
        return next((text for text in found if text is not None), "")

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._file(name)}: {name} {problem}")

    def _view(self, name: str, shape: tuple[int, ...] | None, dtypes: Sequence[str]) -> Tensor:
        file = self._file(name)
        try:
            tensor: Tensor = self._mapped[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: {name} cannot be read: {error}") from error
        if shape is not None and tensor.shape != shape:
            raise CheckpointError(f"{file}: {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if self._dtypes[name] not in dtypes:
            expected = "a float type" if dtypes is FLOATS else " or ".join(dtypes)
            raise CheckpointError(f"{file}: {name} has dtype {tensor.dtype}, expected {expected}")
        self._digests[name] = _digest(tensor) if self._with_digests else ""
        self._views.add(tensor.data_ptr())
        return tensor

    def release(self, taken: Tensor) -> None:
        """Count a copied tensor from `take`, and free its pages. Parts of a widened layer were counted before."""
        if taken.data_ptr() not in self._views:
            return
        self._views.discard(taken.data_ptr())
        drop_pages(taken)
        self._bytes_done += taken.nbytes
        self._report()

    def finish(self, unread: tuple[str, ...] = (), apart: tuple[str, ...] = ()) -> str:
        """Unmap the files, and return a digest of the tensors taken, except those with a name prefix in `apart`.
        Raises CheckpointError if other tensors exist, except those with a name prefix in `unread`.
        """
        left = sorted(self._files.keys() - self._digests.keys())
        endings = ("rotary_emb.inv_freq", *(self._stored.unread if self._stored else ()))
        left = [name for name in left if not name.startswith(unread) and not name.endswith(endings)]
        left = [name for name in left if not self._is_zero_bias(name)]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(f"{self._files[left[0]]}: unexpected tensors: {', '.join(left[:3])}{more}")
        self._mapped.clear()
        named = sorted(name for name in self._digests if not name.startswith(apart))
        lines = "".join(f"{name}={self._digests[name]}\n" for name in named)
        return xxhash.xxh3_128_hexdigest(lines.encode())

    def _is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is zero and a bias of GPTQ. AutoGPTQ writes it for a layer without a bias."""
        is_bias = f"{name.removesuffix('.bias')}.qweight" in self._files
        return is_bias and not bool(self._mapped[self._files[name]].get_tensor(name).any())

    def _list(self, file: Path) -> None:
        mapped = self._mapped[file]
        for name in mapped.keys():  # noqa: SIM118  (not a mapping: it has no iterator)
            if name in self._files:
                raise CheckpointError(f"{file}: tensor {name} is also in {self._files[name].name}")
            self._files[name] = file
            self._dtypes[name] = str(mapped.get_slice(name).get_dtype())

    def _file(self, name: str) -> Path:
        if name not in self._files:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing")
        return self._files[name]

    def _report(self) -> None:
        if self._progress is not None:
            seconds = self._clock.monotonic() - self._began
            self._progress(LoadProgress(self._bytes_done, self._bytes_total, len(self._digests), seconds))


def _digest(tensor: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _opened(file: Path) -> safe_open | GgufFile:
    check_file(file)
    if file.suffix == GGUF:
        return GgufFile(file)
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a complete safetensors file: {error}") from error


PIECE = 8 * 2**20  # elements per copy


class Weights:
    """Tensors of a checkpoint in the model's dtype, on its device. All methods raise like `Checkpoint.take`."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.rank, self.size = 0, 1  # of tensor parallelism
        self._arena = Arena()
        self._uploads: Uploads | None = None

    def settle(self) -> None:
        """Wait until all tensors have their values, which a GPU gets later. Raises the error of a copy."""
        if self._uploads is not None:
            self._uploads.settle()

    def close(self) -> None:
        """Free what copies to a GPU need. Tensors without values stay so."""
        if self._uploads is not None:
            self._uploads.close()

    def tensor(self, name: str, *shape: int) -> Tensor:
        place = self._place(shape)
        self._fill(place, name)
        return place

    def joined(self, names: tuple[str, ...], outs: tuple[int, ...], *rest: int) -> Tensor:
        """Return tensors [outs[i], *rest] as one [sum(outs), *rest], so that projections of one input are one product.
        Biases have no `rest`. One name may stand for all `outs`, if the file has one tensor with all rows.
        """
        place = self._place((sum(outs), *rest))
        self._fill_parts(place, names, outs)
        return place

    def picked(self, names: Sequence[str], wholes: Sequence[int], rows: Sequence[Tensor], *rest: int) -> Tensor:
        """Return `rows[i]`, int64 and not empty, of tensors [wholes[i], *rest] as one tensor. Rows that are not
        consecutive are copied before, one tensor at a time.
        """
        place = self._place((sum(map(len, rows)), *rest))
        for name, size, own, part in zip(names, wholes, rows, torch.split(place, [*map(len, rows)]), strict=True):
            stored, first, end = self.checkpoint.take(name, (size, *rest)), int(own[0]), int(own[0]) + len(own)
            if torch.equal(own, torch.arange(first, end)):
                self._copy(part, stored[first:end], stored)
                continue
            taken = stored[own]
            self.checkpoint.release(stored)
            self._copy(part, taken, taken)
        return place

    def stack(self, names: Sequence[tuple[str, ...]], outs: tuple[int, ...], n_in: int) -> Tensor:
        """Return a matrix, as from `joined`, for each entry of `names` as one tensor: [len(names), sum(outs), n_in]."""
        place = self._place((len(names), sum(outs), n_in))
        for matrix, parts in zip(place, names, strict=True):
            self._fill_parts(matrix, parts, outs)
        return place

    def down(self, names: Sequence[str], out: int, n_in: int) -> Tensor:
        """Return matrices [out, n_in], whose inputs ranks divide, as one tensor."""
        return self.stack([(name,) for name in names], (out,), n_in)

    def whole(self, size: int) -> int:
        """Return the size in the file of a dimension that ranks divide."""
        return size

    def own(self, tensor: Tensor, dim: int, parts: int = 1) -> Tensor:
        """Return this rank's share of a tensor, whose `parts` equal parts in dimension `dim` are divided each."""
        return tensor

    def once(self, tensor: Tensor) -> Tensor:
        """Return a bias of results that ranks sum."""
        return tensor

    def float32_rows(self, name: str, *shape: int) -> Tensor:
        """Return the rows [*shape] that belong to this rank's heads."""
        return self.float32(name, *shape)

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of any dtype in memory for weights."""
        if self.device.type != "cpu":
            return tensor.to(self.device, copy=True)
        return self._arena.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def float32(self, name: str, *shape: int) -> Tensor:
        place = torch.empty(shape, dtype=torch.float32, device=self.device)
        self._fill(place, name)
        return place

    def _fill_parts(self, place: Tensor, names: tuple[str, ...], outs: tuple[int, ...]) -> None:
        if len(names) < len(outs):
            return self._fill(place, *names)
        for name, part in zip(names, torch.split(place, list(outs)), strict=True):
            self._fill(part, name)
        return None

    def _place(self, shape: tuple[int, ...]) -> Tensor:
        if self.device.type == "cpu":
            return self._arena.empty(shape, self.dtype)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _fill(self, place: Tensor, name: str) -> None:
        stored = self.checkpoint.take(name, tuple(place.shape))
        self._copy(place.view(-1), stored.view(-1), stored)

    def _copy(self, place: Tensor, source: Tensor, stored: Tensor) -> None:
        """Copy `source`, a part of `stored`, then release that. On a GPU, both happen later."""
        rows = max(1, PIECE * len(place) // max(1, place.numel()))
        pieces = zip(torch.split(place, rows), torch.split(source, rows), strict=True)
        if self.device.type == "cpu" or source.device.type != "cpu":
            for target, piece in pieces:
                target.copy_(piece)
            return self.checkpoint.release(stored)
        self._uploads = self._uploads or self._start_uploads()
        self._uploads.copy(pieces, partial(self.checkpoint.release, stored))

    def _start_uploads(self) -> Uploads:
        return Uploads(CudaLane(self.device), PIECE * torch.float32.itemsize)
