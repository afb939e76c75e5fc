"""Locates a model's files: a folder, or a snapshot from the Hugging Face Hub. No torch."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from baton.config.values import HubName, parse_hub_name
from baton.errors import CheckpointError
from baton.gguf.folder import SUFFIX, gguf_folder

SMALL_FILES = ("*.json", "*.jinja", "tokenizer*", "tiktoken.model", "merges.txt")
WEIGHT_FILES = ("*.safetensors",)
# Subfolders other than `additional_chat_templates` hold other forms of the same model, and `consolidated` is Mistral's
# second copy of it.
IGNORED = ("[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "*/*/*", "*/*.safetensors", "consolidated*")
_POINTER = b"version https://git-lfs"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def model_folder(path: Path | str, *, weights: bool = True) -> Path:
    """Return the folder of a `model.path`. For `hf:org/name[@revision]` it is the snapshot in the local cache. Missing
    files are downloaded, without `weights` only the small ones. A GGUF file, also that of `hf:org/name:kind`, is
    unpacked into a folder with links to its weights. Raises CheckpointError with the cause and a remedy.
    """
    try:
        name = parse_hub_name(str(path))
    except ValueError as error:
        raise CheckpointError(f"model.path: {path} {error}") from None
    if name is not None:
        return gguf_folder(_gguf_of(name)) if name.kind else _snapshot(name, SMALL_FILES + WEIGHT_FILES * weights)
    if Path(path).is_file():
        if str(path).endswith(SUFFIX):
            check_file(Path(path))
            return gguf_folder(Path(path))
        text = "must be a folder with config.json and safetensors, or a GGUF file"
        raise CheckpointError(f"model.path: {path} is a file: {text}")
    if Path(path).is_dir() and (form := other_form([file.name for file in Path(path).iterdir()])):
        raise CheckpointError(f"{path}: {form}")
    return Path(path)


def check_file(path: Path) -> None:
    """Raise CheckpointError if a file of a checkpoint is missing, or only its git-lfs pointer is there."""
    try:
        with path.open("rb") as file:
            pointer = file.read(len(_POINTER)) == _POINTER
    except OSError as error:
        text = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise CheckpointError(f"{path}: {text}") from None
    if pointer:
        text = "git lfs install, then git lfs pull in this folder"
        raise CheckpointError(f"{path}: is a git-lfs pointer, not the file itself: run {text}")


def other_form(names: Collection[str], model: str = "") -> str:
    """Return what a checkpoint with files of these names is, and a remedy, if it is not the form that is served.
    `model` is its name on the Hub, if it is there.
    """
    if any(name.endswith(".safetensors") and not name.startswith("adapter_") for name in names):
        return ""
    if "adapter_config.json" in names:
        return "this is an adapter, not a model: merge it into its base model with peft, and serve the result"
    gguf = next((name for name in sorted(names) if name.endswith(SUFFIX)), "")
    if gguf:
        one = f"{model}:KIND, for a file NAME-KIND.gguf" if model else "one of them in a local folder,"
        return f"only GGUF files: set model.path to {one} such as {gguf}"
    pickle = next((name for name in sorted(names) if name.endswith(_PICKLES)), "")
    text = "is a pickle, which can run code, and is never read: convert it to safetensors with save_pretrained"
    return f"{pickle}: {text} of transformers" if pickle else ""


def hub_files(path: str) -> Sequence[str]:
    """Return the names of a Hub model's files, or none for another path or a GGUF file. Raises CheckpointError like
    `model_folder`.
    """
    from huggingface_hub import HfApi

    name = parse_hub_name(path)
    if name is None or name.kind:
        return ()
    with _translated(name):
        return HfApi().list_repo_files(name.repo, revision=name.revision)


def pinned(path: str, folder: Path) -> str:
    """Return the `hf:` name of exactly the content of `folder`, which later pushes do not change."""
    name = parse_hub_name(path)
    return path if name is None else f"hf:{name.repo}@{folder.name}" + (f":{name.kind}" if name.kind else "")


def downloaded(path: str) -> Path:
    """Return the snapshot of a Hub model, complete. Raises CheckpointError like `model_folder`."""
    name = parse_hub_name(path)
    return _gguf_of(name).parent if name is not None and name.kind else model_folder(path)


def _gguf_of(name: HubName) -> Path:
    """Return the GGUF file of a kind, or its first part. Raises CheckpointError if there is none, or several."""
    kinds = {name.kind or "", (name.kind or "").lower(), (name.kind or "").upper()}
    patterns = tuple(f"*[-.]{kind}{part}.gguf" for kind in sorted(kinds) for part in ("", "-?????-of-?????"))
    folder = _snapshot(name, patterns)
    firsts = (pattern.replace("?????-of", "00001-of") for pattern in patterns)
    found = {file.name for first in firsts for file in folder.glob(first) if not file.name.startswith("mmproj")}
    if len(found) != 1:
        text = f"no GGUF file of this kind, which would be named like NAME-{name.kind}.gguf, in the top folder"
        if found:
            text = f"several models of this kind: {', '.join(sorted(found))}; set model.path to a local file of one"
        raise CheckpointError(f"model.path: hf:{name.repo}:{name.kind}: {text}")
    return folder / found.pop()


def _snapshot(name: HubName, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and not needed for a folder

    wanted, ignored = list(patterns), list(IGNORED)
    with _translated(name):
        return Path(
            snapshot_download(name.repo, revision=name.revision, allow_patterns=wanted, ignore_patterns=ignored)
        )


@contextmanager
def _translated(name: HubName) -> Generator[None]:
    """Turn an error of the library into one line with a remedy."""
    try:
        yield
    except Exception as error:  # the library raises dozens of kinds, including those of its HTTP client
        revision = f"@{name.revision}" if name.revision else ""
        raise CheckpointError(f"model.path: hf:{name.repo}{revision}: {_why(name, error)}") from error


def _why(name: HubName, error: Exception) -> str:
    from huggingface_hub import constants, errors

    cache, hub = constants.HF_HUB_CACHE, constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return f"gated: accept its conditions at {hub}/{name.repo}, then set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no such model at {hub}, or a private one: correct the name, or set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the model has no revision {name.revision or 'main'!r}; set a branch, tag or commit of it"
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason'}"
    if not isinstance(error, errors.LocalEntryNotFoundError):
        return f"cannot be downloaded from {hub} to {cache}: {reason}"
    partly = "only partly" if type(error).__name__ == "IncompleteSnapshotError" else "not"  # not in all versions
    if constants.HF_HUB_OFFLINE:
        return f"{partly} in the cache {cache}, and HF_HUB_OFFLINE is set: unset it, or set model.path to a folder"
    return f"{partly} in the cache {cache}, and {hub} cannot be reached ({reason}): set model.path to a folder"
