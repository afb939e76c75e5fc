"""`baton config validate | show | schema`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import Json, Sets
from baton.core import sizes_text

if TYPE_CHECKING:
    from baton.config import ClusterConfig

File = Annotated[Path, typer.Argument(metavar="FILE", help="the cluster file")]
config_app = typer.Typer(help="Check, show and describe the cluster file.", no_args_is_help=True)


@config_app.command()
def validate(file: File, sets: Sets = None) -> None:
    """Check a cluster file and print each mistake with its line and key."""
    from baton.cli.target import check_secrets
    from baton.config import load_config, located

    config = load_config(file, sets or [], os.environ)
    with located(file, sets or [], os.environ):
        check_secrets(config)
    sizes = sizes_text(config.prefill.replicas, config.decode.replicas)
    typer.echo(f"{file}: ok (cluster {config.name!r}, {sizes})")


@config_app.command()
def show(file: File, sets: Sets = None, as_json: Json = False) -> None:
    """Print the effective config with its defaults. Secrets are hidden."""
    import yaml

    from baton.config import load_config

    tree = effective(load_config(file, sets or [], os.environ))
    typer.echo(json.dumps(tree, indent=2) if as_json else yaml.safe_dump(tree, sort_keys=False).rstrip())


@config_app.command()
def schema() -> None:
    """Print the JSON Schema of the cluster file."""
    typer.echo(schema_text())


def schema_text() -> str:
    """Return the cluster file's JSON Schema. It declares draft 7, which every editor reads, and fits later ones."""
    from baton.config import ClusterConfig

    tree = {"$schema": "http://json-schema.org/draft-07/schema#", **ClusterConfig.model_json_schema()}
    return json.dumps(tree, indent=2)


def effective(config: ClusterConfig) -> dict[str, object]:
    """Return the config as plain values. Passwords are replaced by `***`."""
    from baton.network import redacted

    tree: dict[str, object] = config.model_dump(mode="json")
    tree["redis"] = {"url": redacted(config.redis.url)}
    return tree
