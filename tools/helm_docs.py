"""Generates parts of helm/baton: the table of values in README.md, and `config` in values.schema.json.

    python tools/helm_docs.py            # write both
    python tools/helm_docs.py --check    # exit code 1 if one is stale

The table has the format of helm-docs. A comment `# -- ` in values.yaml describes the key below it. The subkeys of that
key are its default and have no rows. Lines are read as text because YAML drops comments. `config` comes from
configs/schema.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART, CLUSTER_FILE = ROOT / "helm/baton", ROOT / "configs/schema.json"
HEADING = "## Values"
PREFIX = "Cluster"  # distinguishes definitions of the cluster file from those of the chart
_COMMENT = re.compile(r" *# -- (.*)")
_KEY = re.compile(r"( *)([A-Za-z0-9]+):")
_DROPPED = ("$id", "$schema", "default", "title")


@dataclass(frozen=True, slots=True)
class Row:
    """A key of values.yaml by its path, with its comment."""

    path: tuple[str, ...]
    text: str

    def line(self, values: object) -> str:
        """Return the table line. Raises KeyError for a path that `values` does not have."""
        for part in self.path:
            values = dict(values)[part]  # type: ignore[call-overload]
        kind = {dict: "object", list: "list", str: "string", bool: "bool", int: "int", type(None): "null"}[type(values)]
        text = self.text.replace("|", "\\|")
        return f"| {'.'.join(self.path)} | {kind} | `{json.dumps(values)}` | {text} |"


def rows(text: str) -> Iterator[Row]:
    """Yield the keys with a comment, in order. Raises ValueError with the line of a comment without a key."""
    path: list[tuple[int, str]] = []
    comment = ""
    for number, line in enumerate(text.splitlines(), 1):
        if found := _COMMENT.fullmatch(line):
            comment = found[1]
        elif found := _KEY.match(line):
            indent = len(found[1])
            path = [*(part for part in path if part[0] < indent), (indent, found[2])]
            if comment:
                yield Row(tuple(name for _, name in path), comment)
            comment = ""
        elif comment:
            raise ValueError(f"values.yaml:{number}: a key must stand below the comment {comment!r}")


def table() -> str:
    """Return the values section of README.md."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    head = f"{HEADING}\n\n| Key | Type | Default | Description |\n|-----|------|---------|-------------|\n"
    return head + "".join(f"{row.line(values)}\n" for row in sorted(rows(text), key=lambda row: row.path))


def readme() -> str:
    """Return README.md with a fresh table."""
    before, _, _ = (CHART / "README.md").read_text(encoding="utf-8").partition(HEADING)
    return before + table()


def schema() -> str:
    """Return values.schema.json with `config` as the cluster file's loader accepts it."""
    chart = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    cluster = _draft7(json.loads(CLUSTER_FILE.read_text(encoding="utf-8")))
    own = {name: value for name, value in chart["definitions"].items() if not name.startswith(PREFIX)}
    chart["definitions"] = own | {PREFIX + name: value for name, value in cluster.pop("$defs").items()}
    chart["properties"]["config"] = cluster
    return json.dumps(chart, indent=1) + "\n"


def _draft7(node: Any) -> Any:
    """Return the schema for Helm 3: draft-7 references, and no defaults because the loader has them."""
    if isinstance(node, list):
        return [_draft7(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _draft7(value) for key, value in node.items() if key not in _DROPPED or isinstance(value, dict)}
    if isinstance(kept.get("$ref"), str):
        return {"$ref": kept["$ref"].replace("#/$defs/", f"#/definitions/{PREFIX}")}
    return kept


def main(arguments: list[str]) -> int:
    """Write or check the files and return the exit code."""
    wanted = {CHART / "README.md": readme(), CHART / "values.schema.json": schema()}
    stale = {path: text for path, text in wanted.items() if path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        if "--check" in arguments:
            print(f"{path}: stale; run python tools/helm_docs.py")
        else:
            path.write_text(text, encoding="utf-8")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
