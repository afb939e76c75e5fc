"""A GGUF file as a folder of the Hub's form, under `$BATON_HOME/gguf`, with links to the file itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import xxhash

from baton.errors import CheckpointError
from baton.gguf import config
from baton.gguf.conversion import output_of
from baton.gguf.header import INSTALL, GgufHeader, read_header
from baton.home import baton_home

SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def gguf_folder(path: Path) -> Path:
    """Return the folder of a file, or of the first part of a split one. The first call writes it. Raises
    CheckpointError with the file and the field if the file is broken, or not supported.
    """
    files = _parts(path)
    target = baton_home() / "gguf" / _key(files) / path.name.removesuffix(SUFFIX)
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent.parent))
        try:
            (new / target.name).mkdir()
            _write(new / target.name, files)
            _publish(new, target)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be unpacked to {target}: {error.strerror or error}") from error
    return target


def _publish(new: Path, target: Path) -> None:
    try:
        new.rename(target.parent)
    except OSError:
        if not target.is_dir():  # else another process was faster
            raise


def _key(files: list[Path]) -> str:
    """Return a name for the content of these files and for this code, as far as that shows without reading them."""
    facts = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    code = [file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))]
    return xxhash.xxh3_128_hexdigest(repr((facts, code)).encode())[:16]


def _parts(path: Path) -> list[Path]:
    """Return the files of a model. Raises CheckpointError if one is missing, or if `path` is not the first one."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    names = [f"{found[1]}-{i + 1:05}-of-{found[3]}.gguf" for i in range(int(found[3]))]
    if not names:
        raise CheckpointError(f"{path}: is a part of {found[3]} parts, but a model has at least 1")
    if path.name != names[0]:
        raise CheckpointError(f"{path}: is not the first part of the model: set model.path to {names[0]}")
    if missing := next((name for name in names if not (path.parent / name).is_file()), None):
        raise CheckpointError(f"{path}: the part {missing} is missing in this folder")
    return [path.parent / name for name in names]


def _write(folder: Path, files: list[Path]) -> None:
    """Write the small files and the links. config.json is the last one, because it shows that all are there."""
    header = _joined([read_header(file) for file in files])
    made, words = config.config_of(header), config.tokenizer_config_of(header)
    (folder / "tokenizer.json").write_text(_tokenizer(header), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(words), encoding="utf-8")
    for name, text in config.templates_of(header.metadata).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for file in files:
        (folder / file.name).symlink_to(os.path.realpath(file))
    (folder / "config.json").write_text(json.dumps(made), encoding="utf-8")


def _joined(found: list[GgufHeader]) -> GgufHeader:
    """Return the header of all parts. Only the first one has all metadata."""
    tensors = {name: info for each in found for name, info in each.tensors.items()}
    return replace(found[0], tensors=tensors)


def _tokenizer(header: GgufHeader) -> str:
    if not header.metadata.get("tokenizer.ggml.tokens"):
        raise header.error("tokenizer.ggml.tokens", "is missing: this file has no tokenizer")
    problem = f"{header.path}: its tokenizer cannot be converted"
    return output_of(("-m", "baton.gguf.convert_tokenizer", str(header.path)), problem, INSTALL)
