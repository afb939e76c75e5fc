"""`baton config validate | show | schema`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import typer
import yaml

from baton.cli.credentials import check_tokens
from baton.config import ClusterConfig, load_config
from baton.core import sizes_text
from baton.network import redacted


def validate(file: Path, sets: Sequence[str]) -> None:
    """Check a cluster file. Raises ConfigError with one line per mistake."""
    config = load_config(file, sets, os.environ)
    check_tokens(config)
    sizes = sizes_text(config.prefill.replicas, config.decode.replicas)
    typer.echo(f"{file}: ok (cluster {config.name!r}, {sizes})")


def show(file: Path, sets: Sequence[str], *, as_json: bool) -> None:
    """Print the effective config."""
    tree = effective(load_config(file, sets, os.environ))
    typer.echo(json.dumps(tree, indent=2) if as_json else yaml.safe_dump(tree, sort_keys=False).rstrip())


def schema() -> None:
    """Print the JSON Schema."""
    typer.echo(schema_text())


def schema_text() -> str:
    """Return the cluster file's JSON Schema. It declares draft 7, which every editor reads, and fits later ones."""
    tree = {"$schema": "http://json-schema.org/draft-07/schema#", **ClusterConfig.model_json_schema()}
    return json.dumps(tree, indent=2)


def effective(config: ClusterConfig) -> dict[str, object]:
    """Return the config as plain values. Passwords are replaced by `***`."""
    tree: dict[str, object] = config.model_dump(mode="json")
    tree["redis"] = {"url": redacted(config.redis.url)}
    return tree
