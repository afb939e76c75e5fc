"""configs/: each file loads, and the editors' schema accepts it and rejects the same mistakes as the loader."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from baton.cli.setup.certs import certs
from baton.config import load_config
from baton.config.loading import known_keys
from baton.errors import ConfigError
from tools.gen_schema import SCHEMA, is_stale

CONFIGS = SCHEMA.parent
FILES = sorted(CONFIGS.glob("*.yaml"))
MODELINE = "# yaml-language-server: $schema=schema.json"
tree = json.loads(SCHEMA.read_text())
validator = jsonschema.Draft7Validator(tree)


def problems(text: str) -> list[str]:
    """Return the paths that an editor would underline in `text`."""
    return [error.json_path for error in validator.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_file_loads_and_an_editor_finds_its_schema(file: Path, tmp_path: Path):
    sets = ["model.path=oracle"] if file.stem in {"single-node-8gpu", "multi-node", "kubernetes"} else []
    if file.stem == "multi-node":
        certs(tmp_path, [], 30)
        sets.append(f"security.tls={tmp_path}")
    assert load_config(file, sets).name == file.stem
    text = file.read_text()
    assert text.splitlines()[0] == MODELINE
    assert problems(text) == []


def test_the_schema_is_fresh_and_a_schema():
    assert not is_stale(), "run: make fmt"
    jsonschema.Draft7Validator.check_schema(tree)
    jsonschema.Draft202012Validator.check_schema(tree)


def described(section: dict[str, Any], prefix: str = "") -> dict[str, bool]:
    """Return every key of the cluster file, dotted, and whether it has a description."""
    found: dict[str, bool] = {}
    for name, value in section["properties"].items():
        refs = [part["$ref"] for part in (value, *value.get("anyOf", ())) if "$ref" in part]
        inner = tree["$defs"][refs[0].rsplit("/", 1)[1]] if refs else {}
        found[prefix + name] = bool(value.get("description") or inner.get("description"))
        if "properties" in inner:
            found |= described(inner, f"{prefix}{name}.")
    return found


def test_every_key_is_in_the_schema_and_described():
    found = described(tree)
    assert set(found) == set(known_keys())
    assert [key for key, is_described in found.items() if not is_described] == []


RIGHT = """
ray: {address: auto}
prefill: {kv_memory: auto, autoscale: {min: 1, max: 4}, node_labels: {pool: prefill}}
decode: {kv_memory: 1.5 GB, advertise: '[::1]'}
thinking: {prefill: off}
security: {allow_insecure: true}
---
prefill: {kv_memory: 64MiB}
decode: {kv_memory: 4096}
model: {path: 'hf:Qwen/Qwen3-0.6B@main', max_model_len: auto}
security: {allow_insecure: [router.metrics]}
---
model: {path: hfolder}
redis: {url: 'rediss://user:secret@host:6379/0'}
router: {http: null, tenants: {a: 2}}
""".split("---")


@pytest.mark.parametrize("text", RIGHT)
def test_what_is_right_is_taken(text: str, tmp_path: Path):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    load_config(file, ["model.path=oracle"])
    assert problems(text) == []


def test_certificates_are_a_folder_or_files():
    """Only the schema is tested, because the loader reads the files."""
    assert problems("security: {tls: /etc/tls}") == problems("security: {tls: {cert: a, key: b, ca: c}}") == []


WRONG = {
    "$": "modle: {path: x}",
    "$.decode": "decode: {max_runing: 5}",
    "$.prefill": "prefill: 5",
    "$.prefill.kv_memory": "prefill: {kv_memory: automatic}",
    "$.decode.kv_memory": "decode: {kv_memory: 64M}",
    "$.decode.replicas": "decode: {replicas: two}",
    "$.prefill.replicas": "prefill: {replicas: 0}",
    "$.prefill.device": "prefill: {device: gpu}",
    "$.prefill.node_labels.pool": "prefill: {node_labels: {pool: [a]}}",
    "$.prefill.autoscale": "prefill: {autoscale: 4}",
    "$.model.path": "model: {path: 'hf:Qwen'}",
    "$.redis.url": "redis: {url: 'http://host'}",
    "$.router.grpc": "router: {grpc: localhost}",
    "$.router.policy": "router: {policy: random}",
    "$.router.tenants.a": "router: {tenants: {a: 0}}",
    "$.thinking.prefill": "thinking: {prefill: never}",
    "$.security.tls": "security: {tls: {cert: a, key: b}}",
    "$.security.allow_insecure": "security: {allow_insecure: [router.htpp]}",
    "$.name": "name: Big Cluster",
}


@pytest.mark.parametrize("where", WRONG)
def test_what_is_wrong_is_refused_by_both(where: str, tmp_path: Path):
    file = tmp_path / "cluster.yaml"
    file.write_text(WRONG[where])
    with pytest.raises(ConfigError):
        load_config(file)
    assert problems(WRONG[where]) == [where]
