"""Text in the values stays text whatever it looks like, and a null is an empty value or is rejected by name.

The cases come from values.yaml and values.schema.json, so they include each new value.
"""

import itertools
import json
import re
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.checks import load
from tests.helm.conftest import CHART, CI, MINIMAL, NAMES, Helm, Schemas

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
ODD = """a: "b" #c, {it's [d"""
WORDS = ("on", "null", "1e3", "0x10", "yes", "012", "2026-01-02")
WAYS: dict[str, Callable[[int], tuple[str, ...]]] = {  # candidates of the n-th text
    "plain": lambda n: (f"q{n}q", f"{5000 + n}Ti"),
    "digits": lambda n: (f"{70000 + n}",),
    "words": lambda n: (ODD, *WORDS[n % len(WORDS) :], *WORDS),
}
MADE = re.compile("[A-Za-z0-9+/]{54}==|[0-9a-f]{64}")  # the password of Redis in base64, and a checksum
OPTED_OUT = {  # replace other values; filled where an installation of `ci` has them
    *("image.digest", "redis.image.digest", "redis.auth.existingSecret", "model.existingClaim"),
    *("redis.external.host", "redis.external.tls.existingSecret"),
    *("security.tls.existingSecret", "security.tokens.existingSecret", "security.receiptKey.existingSecret"),
    "kernelCache.existingClaim",
    *("prefill.affinity", "decode.affinity"),
}
FEATURES = [f"{name}.enabled=true" for name in ("network.rdma", "metrics.podMonitor", "metrics.rules")]
Tree = dict[str, Any]


class KubeLoader(yaml.SafeLoader):
    """Reads plain scalars as Kubernetes: `1e3` is a number (goyaml.v2 resolve.go, yamlStyleFloat), unlike in PyYAML."""


KubeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def resolved(node: Tree) -> Tree:
    return SCHEMA["definitions"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


class Filling:
    """Replaces each free text of the values by another one. `texts`: the new text of each path, in order."""

    def __init__(self, way: str) -> None:
        self._way, self._count = WAYS[way], itertools.count(1)
        self._keys = WAYS["plain" if way == "plain" else "digits"]
        self.texts: dict[str, str] = {}

    def fill(self, node: Tree, value: Any, path: str = "") -> Any:
        """Return the value for this node of the schema with each free text in it replaced."""
        node = resolved(node)
        if path[1:] in OPTED_OUT and not value:
            return value
        if path in {".config", ".extraObjects"}:
            return self._free(value, path)
        if properties := node.get("properties"):
            known = value or dict.fromkeys(properties, "")
            return {key: self.fill(properties[key], inner, f"{path}.{key}") for key, inner in known.items()}
        if node.get("type") == "array" and "enum" not in node["items"]:
            item = node["items"].get("properties", {"key": {"type": "string"}})
            return [
                self.fill({"properties": {key: part for key, part in item.items() if key != "valueFrom"}}, {}, path)
            ]
        if node.get("type") == "object":
            inner = node.get("additionalProperties", {"type": "string"})
            return {**(value or {}), self._text({}, "", f"{path} key", self._keys): self.fill(inner, "", path)}
        return self._text(node, value, path) if _is_text(node) else value

    def _free(self, value: Any, path: str) -> Any:
        """Return a cluster file with a free text, or objects with one that is a template."""
        if path == ".config":
            return merged(value, {"router": {"http_names": [self._text({}, "", path, self._keys)]}})
        text = self._text({}, "", path) + '{{ print "" }}'
        return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "extra"}, "data": {"text": text}}]

    def _text(self, node: Tree, value: Any, path: str, way: Callable[[int], Any] | None = None) -> Any:
        pattern = next((part["pattern"] for part in (node, *node.get("anyOf", ())) if "pattern" in part), "")
        start = next((start for start in ("hf:", "/") if str(value).startswith(start)), "")
        fitting = (start + text for text in (way or self._way)(next(self._count)) if re.search(pattern, start + text))
        if (text := next(fitting, None)) is not None:
            self.texts[f"{path} {len(self.texts)}"] = value = text
        return value


def _is_text(node: Tree) -> bool:
    return "enum" not in node and "string" in [part.get("type") for part in (node, *node.get("anyOf", ()))]


def merged(base: Tree, over: Tree) -> Tree:
    inner = {key: merged(base[key], value) for key, value in over.items() if isinstance(base.get(key), dict) and value}
    return base | over | inner


def filled(helm: Helm, ci: Path, way: str, folder: Path) -> tuple[list[Tree], dict[str, str]]:
    """Return the objects and the texts of one installation, the former as Kubernetes and Baton read them."""
    filling, file = Filling(way), folder / f"{way}.yaml"
    file.write_text(json.dumps(filling.fill(SCHEMA, merged(VALUES, yaml.safe_load(ci.read_text())))))
    output = helm.run("template", "12345", str(CHART), "-n", "678", "-f", str(file)).stdout
    return [one for one in yaml.load_all(MADE.sub("made", output), KubeLoader) if one], filling.texts


def normal(node: Any, new: Callable[[str], str]) -> Any:
    """Return the node with its texts replaced, with inner YAML as a tree, and without the order of names."""
    if isinstance(node, dict):
        inner = {key: yaml.load(text, KubeLoader) for key, text in node.items() if key == "cluster.yaml"}
        return {new(key): normal(value, new) for key, value in (node | inner).items()}
    if isinstance(node, list):
        return sorted((normal(one, new) for one in node), key=lambda one: json.dumps(one, sort_keys=True, default=str))
    return new(node) if isinstance(node, str) else node


@pytest.mark.parametrize("way", ["digits", "words"])
@pytest.mark.parametrize("ci", CI, ids=NAMES)
def test_text_stays_text(helm: Helm, ci: Path, way: str, tmp_path: Path):
    """The objects for odd texts are those for plain words, with each word replaced."""
    plain, before = filled(helm, ci, "plain", tmp_path)
    odd, after = filled(helm, ci, way, tmp_path)
    new = dict(zip(before.values(), after.values(), strict=True))

    def replaced(text: str) -> str:
        quote = (lambda word: urllib.parse.quote(word, safe="")) if re.match("rediss?://:?q", text) else str
        return re.sub("|".join(map(re.escape, new)), lambda found: quote(new[found[0]]), text)

    assert normal(odd, str) == normal(plain, replaced)


def test_every_text_is_used(helm: Helm, tmp_path: Path):
    unused: set[str] = set()
    used: set[str] = set()
    for ci in CI:
        documents, texts = filled(helm, ci, "plain", tmp_path)
        output = json.dumps(documents, default=str)
        used |= {path.split()[0] for path, text in texts.items() if text in output}
        unused |= {path.split()[0] for path, text in texts.items() if text not in output}
    assert unused - used == set()


def keys(node: Tree, value: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield the path of each value, and whether null is rejected for it. An empty value has no inner paths."""
    node = resolved(node)
    for key, inner in value.items():
        required = key in node.get("required", ())
        yield (*path, key), required
        if required and isinstance(inner, dict):
            yield from keys(node["properties"][key], inner, (*path, key))


def with_nulls(file: Path, paths: Iterator[tuple[str, ...]]) -> Path:
    tree: Tree = {}
    for *sections, key in paths:
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = None
    file.write_text(json.dumps(tree))
    return file


def leaves(node: Any) -> Iterator[Any]:
    """Yield all scalars of a tree."""
    if not isinstance(node, dict | list):
        yield node
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from leaves(inner)


@pytest.mark.parametrize("ci", CI, ids=NAMES)
def test_null_is_empty(helm: Helm, known_schemas: Schemas | None, ci: Path, tmp_path: Path):
    file = with_nulls(tmp_path / "nulls.yaml", (path for path, required in keys(SCHEMA, VALUES) if not required))
    documents = helm.render(file, ci, sets=FEATURES)
    assert [leaf for leaf in leaves(documents) if leaf is None or re.search("<(nil|no value)>", str(leaf))] == []
    assert not known_schemas or [problem for one in documents for problem in known_schemas.problems(one)] == []
    load(documents, tmp_path)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_null_is_rejected_by_name(helm: Helm, depth: int, tmp_path: Path):
    paths = [path for path, required in keys(SCHEMA, VALUES) if required and len(path) == depth]
    assert paths
    said = helm.refuses(MINIMAL, with_nulls(tmp_path / "nulls.yaml", iter(paths)))
    assert [path for path in paths if not _named(path, said)] == [], said


def _named(path: tuple[str, ...], said: str) -> bool:
    """Return whether the error of helm 3 or helm 4 contains the path."""
    *sections, key = path
    helm3 = f"- {'.'.join(sections) or '(root)'}: {key} is required"
    return helm3 in said or bool(
        re.search(rf"at '{''.join('/' + name for name in sections)}': missing .*'{key}'", said)
    )
