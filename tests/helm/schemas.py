"""JSON Schemas of Kubernetes' own kinds and of the chart's CRDs. They are third-party data outside this repository:
`../shared/data/k8s-schemas`, if available (Kubernetes 1.34 strict; KubeRay, prometheus-operator).
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

ROOT = Path(__file__).resolve().parents[2]
CORE = "core-v1.34-strict.json"


def find_folder() -> Path | None:
    places = (base / "shared/data/k8s-schemas" for base in (ROOT, ROOT.parent))
    return next((place for place in places if (place / CORE).is_file()), None)


class Schemas:
    """The checks of an object's form in an API server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._core = json.loads((folder / CORE).read_text(encoding="utf-8"))
        self._validator = cache(self._load)

    def problems(self, document: Mapping[str, Any]) -> list[str]:
        """Return the problems, each with its field's path. Raises LookupError for a kind without a schema."""
        validator = self._validator(document["apiVersion"], document["kind"])
        found = sorted(validator.iter_errors(document), key=lambda error: list(map(str, error.absolute_path)))
        return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in found]

    def _load(self, version: str, kind: str) -> jsonschema.Draft202012Validator:
        name = self._core["x-kinds"].get(f"{version}/{kind}")
        if name is not None:
            return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": self._core["$defs"]})
        group, _, bare = version.partition("/")
        path = self._folder / group / f"{kind.lower()}_{bare}.json"
        if not path.is_file():
            raise LookupError(f"no schema of {version} {kind}")
        return jsonschema.Draft202012Validator(json.loads(path.read_text(encoding="utf-8")))
