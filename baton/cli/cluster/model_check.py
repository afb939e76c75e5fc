"""Checks of the model's folder and sizes before `baton up` starts anything. They must be quick, so torch is not loaded.

A worker checks more when it loads the model. Here is only what a wrong config file usually has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import typer
from safetensors import SafetensorError, safe_open

from baton.cluster.gpus import ON_THIS_HOST, gpu_pools
from baton.config import ClusterConfig
from baton.config.values import HUB_PREFIX
from baton.core import Role
from baton.engine.memory.host_memory import total_bytes
from baton.engine.models.fallback.choice import REFUSED, chosen_backend
from baton.errors import CheckpointError, ConfigError
from baton.model_hub import check_file, model_folder, other_form
from baton.tokenizer import ORACLE_MODEL, TOKENIZERS

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
OPTIONAL = {"generation_config.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"}


def check_model(config: ClusterConfig, gpus: Sequence[str]) -> None:
    """Raise ConfigError with the key if the model's folder is incomplete, or if a size cannot be. The folder must be on
    this host, because the routers read its tokenizer, but its weights only if the workers are. `gpus` are those of
    this host.
    """
    path = config.model.path
    if path.startswith(HUB_PREFIX):
        return  # not here yet
    here = config.ray.address in ON_THIS_HOST
    if path != ORACLE_MODEL:
        folder = _folder(Path(path))
        if folder == Path(path):
            _check_folder(folder, weights=here)
        _check_length(folder, config.model.max_model_len)
    if here:
        _check_memory(config, set(gpu_pools(config, len(gpus))))


def check_architecture(config: ClusterConfig, run: Callable[[Sequence[str]], tuple[int, str]]) -> None:
    """Raise ConfigError if nothing serves the architecture of a folder with the libraries of this host, if the workers
    are here. Models through transformers are checked in another process, because the import is large. `run` returns the
    exit code and the output of Python with arguments. The last line is the reason if the code is REFUSED.
    """
    path, code, output = config.model.path, 0, ""
    if path == ORACLE_MODEL or path.startswith(HUB_PREFIX) or config.ray.address not in ON_THIS_HOST:
        return  # before the download, `baton pull` checks a Hub model
    folder = _folder(Path(path))
    try:
        if chosen_backend(folder, config.model.backend) == "transformers" and config.model.backend == "auto":
            typer.echo("checking the model in transformers ...", err=True)  # takes seconds
            code, output = run(("-m", "baton.engine.models.fallback.choice", str(folder)))
    except CheckpointError as error:
        raise ConfigError(f"model.path: {error}") from None
    if code == REFUSED and output:  # another code is a crash, which the worker reports
        raise ConfigError(f"model.path: {output.splitlines()[-1]}")


def _folder(path: Path) -> Path:
    """Return the folder of the model. A GGUF file is unpacked now, so that all processes find its folder."""
    try:
        return model_folder(path) if path.is_file() else path
    except CheckpointError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("model.path") else f"model.path: {text}") from None


def _check_folder(folder: Path, *, weights: bool) -> None:
    try:
        found = {file.name for file in folder.iterdir()}
    except OSError as error:
        raise ConfigError(f"model.path: cannot read the folder {str(folder)!r}: {error.strerror}") from None
    tokenizer = next((name for name in TOKENIZERS if name in found), TOKENIZERS[0])
    needed = ("config.json", tokenizer)  # read by routers and workers
    if form := other_form(found):
        raise ConfigError(f"model.path: {str(folder)!r}: {form}")
    if missing := [name for name in needed if name not in found]:
        raise ConfigError(f"model.path: {str(folder)!r} has no {' and no '.join(missing)}")
    try:
        for name in (*needed, *(name for name in sorted(OPTIONAL & found) if (folder / name).is_file())):
            check_file(folder / name)
        for name in _weight_files(folder, found) if weights else ():
            check_file(folder / name)
            _check_complete(folder / name)
    except CheckpointError as error:
        raise ConfigError(f"model.path: {error}") from None


def _check_complete(file: Path) -> None:
    """Raise CheckpointError unless the header is whole, and the file as long as it demands, as after a download."""
    try:
        with safe_open(file, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a complete safetensors file: {error}") from None


def _weight_files(folder: Path, found: Collection[str]) -> Sequence[str]:
    """Return the safetensors files that a worker loads, no others. Raise ConfigError if there are none, or if the index
    lists one that is missing.
    """
    if SINGLE in found:
        return [SINGLE]
    if INDEX not in found:
        raise ConfigError(f"model.path: {str(folder)!r} has no {SINGLE} and no {INDEX}")
    try:
        listed = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return []  # loading the model raises a better error
    shards = sorted(name for name in listed if isinstance(name, str))
    if missing := [name for name in shards if name not in found]:
        raise ConfigError(f"model.path: {folder / INDEX} lists {missing[0]}, which does not exist")
    return shards


def _check_length(folder: Path, wanted: int | str) -> None:
    try:
        fields = json.loads((folder / "config.json").read_bytes())
        keys = ["max_position_embeddings"] + ["model_max_length"] * (fields.get("model_type") in ("cohere", "cohere2"))
        known = max((fields[key] for key in keys if isinstance(fields.get(key), int)), default=None)
        scaled = fields.get("rope_scaling") or fields.get("rope_parameters")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.path: {folder / 'config.json'} is not a readable JSON object: {error}") from None
    if scaled:
        return  # may extend the length; the worker applies the rules
    if known is not None and isinstance(wanted, int) and wanted > known:
        raise ConfigError(f"model.max_model_len: must be at most {known}, the model's maximum, got {wanted}")


def _check_memory(config: ClusterConfig, on_gpus: Collection[Role]) -> None:
    total = total_bytes()
    for role, pool in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
        wanted = pool.kv_memory
        if role not in on_gpus and isinstance(wanted, int) and wanted * pool.replicas > total:
            text = f"{wanted} bytes for each of {pool.replicas} workers, but this machine has {total}"
            raise ConfigError(f"{role.value}.kv_memory: {text}; set fewer, or auto")
