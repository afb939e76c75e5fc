"""Merges cluster file < environment (`BATON__A__B=c`) < `--set a.b=c`, and checks it. Errors name line and key."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from baton.config.schema import ClusterConfig
from baton.config.tls_check import check_tls
from baton.config.values import HUB_PREFIX
from baton.errors import ConfigError

ENV_PREFIX = "BATON__"
Tree = dict[str, Any]
_KIND = re.compile(r"input should be a valid (string|list),")
_TYPE = re.compile(r"constrained-\w+|int|tuple\[.*\]|literal\['auto'\]")  # of pydantic, in places of alternatives
_TUPLE = re.compile(r"Tuple should have (at least \d+ item)s? after validation, not \d+")
_SHOULD = "input should be "
_KEYED = re.compile(rf"^( *(?:baton: ConfigError: )?)(?:{ENV_PREFIX}\w+: )?(([a-z_.]+): .*)$", re.MULTILINE)

# PyYAML raises these besides YAMLError if a value does not fit its tag or kind: a 99th month, a list as a key.
NO_VALUE = (AttributeError, IndexError, KeyError, TypeError, ValueError)


class _LineLoader(yaml.SafeLoader):
    """A safe loader that rejects duplicate keys and reports the line of an invalid value."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._checked: dict[int, yaml.Node] = {}  # by id; a kept node keeps its id

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except NO_VALUE as error:
            raise ConfigError(f"line {node.start_mark.line + 1}: invalid value: {error}") from None

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Check the keys of a mapping once, before those that it merges (`<<: *name`) are written into it."""
        if id(node) not in self._checked:
            self._checked[id(node)] = node
            self._check_keys(node)
        super().flatten_mapping(node)

    def _check_keys(self, node: yaml.MappingNode) -> None:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                raise ConfigError(f"line {line}: a key must be a string, got a list or a mapping")
            if key in seen:
                raise ConfigError(f"line {line}: {key}: duplicate key")
            seen.add(key)


def _key_lines(node: yaml.Node | None, path: tuple[str, ...] = ()) -> dict[str, int]:
    lines: dict[str, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            lines[".".join(here)] = key.start_mark.line + 1
            lines |= _key_lines(value, here)
    return lines


def _parse_yaml(text: str) -> tuple[Tree, dict[str, int]]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        tree, lines = _LineLoader(text).get_single_data(), _key_lines(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"line {line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, *NO_VALUE) as error:
        raise ConfigError(f"not YAML: {error}") from None
    except RecursionError:
        raise ConfigError("not YAML: nested too deeply, or a value contains itself") from None
    if tree is None:
        return {}, {}
    if not isinstance(tree, dict):
        raise ConfigError(f"a cluster file must be a mapping of keys, got a {type(tree).__name__}")
    return tree, lines


def _put(tree: Tree, path: Sequence[str], value: object, source: str) -> None:
    for key in path[:-1]:
        inner = tree.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{source}: {key} is a value, not a section")
        tree = inner
    tree[path[-1]] = value


def _overlay(tree: Tree, sets: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Merge the environment and `sets` into `tree`. Return where each key was written."""
    origins: dict[str, str] = {}
    for name in sorted(env):
        if name.startswith(ENV_PREFIX):
            path = name.removeprefix(ENV_PREFIX).lower().split("__")
            _put(tree, path, _scalar(env[name], name), name)
            origins[".".join(path)] = name
    for item in sets:
        key, separator, value = item.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"--set {item}: must be key=value, such as --set decode.replicas=2")
        path = key.strip().split(".")
        known = path[0] in ClusterConfig.model_fields and path[0] != "redis"  # its URL may contain a password
        source = f"--set {item}" if known else f"--set {key}"
        _put(tree, path, _scalar(value, f"--set {key}"), source)
        origins[".".join(path)] = source
    return origins


def _located(line: str, file: Path, lines: Mapping[str, int], origins: Mapping[str, str]) -> str:
    """Put where it was written in front of an error that begins with a key, or with an origin already."""
    key = line.partition(": ")[0].partition(" (")[0]  # a listener's address may follow its key
    parents = [key[: len(key) - len(tail)] for tail in _tails(key)]
    parents += [path for path in origins if path.startswith(f"{key}.") and key not in lines]
    if (origin := next((origins[parent] for parent in parents if parent in origins), None)) is not None:
        return f"{origin}: {line}"
    if line.startswith(("--set ", ENV_PREFIX)):
        return line
    if (other := next((path for path in origins if "." in path and f" {path}" in line), None)) is not None:
        return f"{origins[other]}: {line}"  # a limit that depends on two keys
    return f"{file}: line {lines[key]}: {line}" if key in lines else f"{file}: {line}"


def _tails(key: str) -> list[str]:
    """Return what to cut from `key` for itself and each of its parents, the nearest first."""
    parts = key.split(".")
    return ["".join(f".{part}" for part in parts[n:]) for n in range(len(parts), 0, -1)]


def _scalar(text: str, source: str) -> object:
    if re.fullmatch(r"\[[0-9A-Fa-f:.]+\]:\d+", text):
        return text  # an IPv6 address with a port; YAML would begin a list
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, *NO_VALUE):
        shown = "the value" if "redis" in source.lower() else repr(text[:200])  # a URL may have a password
        raise ConfigError(f"{source}: {shown} is not a YAML value") from None


def load_config(path: str | Path, sets: Sequence[str] = (), env: Mapping[str, str] | None = None) -> ClusterConfig:
    """Read a cluster file. A relative `model.path` is resolved against the current folder, then the file's folder and
    its parent. Raises ConfigError with one line per mistake: its place, key, value and the allowed values.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{file}: cannot be read: {reason}") from None
    lines, origins = dict[str, int](), dict[str, str]()
    try:
        tree, lines = _parse_yaml(text)
        origins = _overlay(tree, sets, env or {})
        config = _validated(tree)
        config = _with_security(_with_model_path(_with_history(config), file), file).by_mode()
        check_tls(config.security.tls)
    except ConfigError as error:
        found = [_located(line, file, lines, origins) for line in str(error).splitlines()]
        raise ConfigError("\n".join(found)) from None
    return config


@contextmanager
def located(path: str | Path, sets: Sequence[str], env: Mapping[str, str]) -> Iterator[None]:
    """Name the place of each key in a ConfigError that later steps raise about `load_config(path, sets, env)`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(with_places(str(error), path, sets, env)) from error


def with_places(text: str, path: str | Path, sets: Sequence[str], env: Mapping[str, str]) -> str:
    """Put its place in front of each line about a key, also in the output of a process. A process that got `sets` in
    its environment names variables, which are replaced.
    """
    tree, lines = _parse_yaml(Path(path).read_text(encoding="utf-8"))
    origins, known = _overlay(tree, sets, env), known_keys()

    def placed(found: re.Match[str]) -> str:
        return found[1] + _located(found[2], Path(path), lines, origins) if found[3] in known else found[0]

    return _KEYED.sub(placed, text)


def config_from_json(text: str) -> ClusterConfig:
    """Return the config that another process of this cluster wrote with `model_dump_json`."""
    return ClusterConfig.model_validate_json(text)


def _with_history(config: ClusterConfig) -> ClusterConfig:
    """Make `history` absolute: one folder for all processes, wherever they run."""
    if config.history is None:
        return config
    return config.model_copy(update={"history": str(Path(config.history).absolute())})


def _with_model_path(config: ClusterConfig, file: Path) -> ClusterConfig:
    given = Path(config.model.path)
    if config.model.path == "oracle" or config.model.path.startswith(HUB_PREFIX) or given.is_absolute():
        return config
    places = (Path.cwd(), file.resolve().parent, file.resolve().parent.parent)
    found = next((place / given for place in places if _is_model(place / given)), None)
    if found is None:
        tried = ", ".join(str(place / given) for place in places)
        raise ConfigError(f"model.path: no folder {config.model.path!r} (looked for {tried})")
    whole = found.resolve() if ".." in given.parts else found.absolute()  # a link keeps its name, which clients see
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(whole)})})


def _is_model(path: Path) -> bool:
    try:
        return path.is_dir() or (path.suffix == ".gguf" and path.is_file())
    except OSError:  # for example, the name is too long
        return False


def _with_security(config: ClusterConfig, file: Path) -> ClusterConfig:
    """Make paths absolute, so that every process of the cluster finds them."""
    security = config.security
    tls = security.tls and security.tls.model_copy(
        update={part: _resolved(path, file) for part, path in security.tls.files().items()}
    )
    files = {"tokens": security.tokens, "receipt_key": security.receipt_key}
    found = {key: path and _resolved(path, file) for key, path in files.items()}
    return config.model_copy(update={"security": security.model_copy(update={"tls": tls, **found})})


def _resolved(path: str, file: Path) -> str:
    """Resolve a relative path against the current folder, or, if it exists only there, the cluster file's folder."""
    here, there = Path(path).absolute(), file.resolve().parent / path
    return str(there if there.exists() and not here.exists() else here)


def _validated(tree: Tree) -> ClusterConfig:
    problems: dict[str, list[str]] = {}
    transfer = tree.get("transfer")
    if isinstance(transfer, dict) and transfer.get("transport") == "memory":  # for tests of one process
        problems["transfer.transport"] = ['"memory" is not implemented in this version; leave it out']
    try:
        config = ClusterConfig.model_validate(tree)
    except ValidationError as error:
        for detail in error.errors():
            key, text = _problem(dict(detail))
            problems.setdefault(key, []).append(text)
    if not problems:
        return config
    exact = {
        key: texts for key, texts in problems.items() if not any(other.startswith(f"{key}.") for other in problems)
    }
    raise ConfigError("\n".join(f"{key + ': ' if key else ''}{_alternatives(texts)}" for key, texts in exact.items()))


def _alternatives(texts: list[str]) -> str:
    """Join the messages about one value that fits none of several types: each ends with the value."""
    texts = [text for text in texts if not _KIND.match(text)] or texts  # those of its own type
    first, shown, value = texts[0].partition(", got ")
    others = [text.partition(", got ")[0].removeprefix(_SHOULD) for text in texts[1:]]
    if not all(text.startswith(_SHOULD) for text in texts):
        return "\n".join(texts)
    return " or ".join([first.partition(", unable to parse")[0], *others]) + shown + value


def _problem(detail: Mapping[str, Any]) -> tuple[str, str]:
    parts = [str(part) for part in detail["loc"] if not _TYPE.fullmatch(str(part))]
    key = ".".join(parts)
    if detail["type"] == "extra_forbidden":
        return key, _unknown(key)
    message = _TUPLE.sub(r"Input should have \1", str(detail["msg"]).removeprefix("Value error, "))
    message = message.replace("a valid tuple", "a valid list")
    hidden = parts[:1] == ["redis"] or isinstance(detail["input"], (dict, BaseModel))  # a URL may contain a password
    shown = "" if hidden else f", got {_as_json(detail['input'])}"
    return key, f"{message[0].lower()}{message[1:]}{shown}" if key else message


def _as_json(value: object) -> str:
    """Return JSON if possible: YAML also has dates as keys and cyclic values."""
    try:
        return json.dumps(value, default=str)
    except (RecursionError, TypeError, ValueError):
        return f"a {type(value).__name__}"


def _unknown(key: str) -> str:
    known = known_keys()
    near = difflib.get_close_matches(key, known, n=2, cutoff=0.6)
    if not near:
        last = difflib.get_close_matches(key.rpartition(".")[2], [name.rpartition(".")[2] for name in known], n=1)
        near = [name for name in known if name.rpartition(".")[2] in last][:2]
    return f"unknown key; did you mean {' or '.join(near)}?" if near else "unknown key"


def known_keys(model: type[BaseModel] = ClusterConfig, prefix: str = "") -> list[str]:
    """Return every key of the cluster file, dotted, sections included."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for section in _sections(field.annotation):
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [section for part in get_args(annotation) for section in _sections(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
