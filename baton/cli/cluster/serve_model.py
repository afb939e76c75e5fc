"""`baton serve MODEL`: one model by one command. Its options become settings over `serve.yaml` or a given file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import typer

from baton.cli.cluster import launch
from baton.cli.options import SHIPPED
from baton.cli.target import TOKEN_VARIABLE
from baton.cluster.signals import Stop
from baton.cluster.state_dir import ClusterState, StateFolder, writing
from baton.config import ClusterConfig, load_config
from baton.config.values import HUB_NAME, HUB_PREFIX, is_loopback_host, parse_host
from baton.core import sizes_text
from baton.errors import ConfigError
from baton.model_hub import model_folder
from baton.rpc.channel import from_here

PRESET = Path(__file__).with_name("serve.yaml")
DEMO = "models/demo"
ORACLE = "oracle"
HTTP = "127.0.0.1", 8000  # as in the preset
KEY_VARIABLE = "BATON_API_KEY"
PROMPT = "The color of dog"
_PRESET_LINE = re.compile(rf"{re.escape(str(PRESET))}: (?:line \d+: )?([\w.]+): ")
_OPTIONS = {"name": "--name", "router.http": "--port"}  # by key of the preset


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `baton serve`; None means that the preset, or `config`, decides."""

    model: str | None
    config: Path | None
    sets: tuple[str, ...]
    name: str | None = None
    host: str | None = None
    port: int | None = None
    api_key: str | None = None
    keys: tuple[tuple[str, str, str | int | list[str] | None], ...] = ()  # option, key of the cluster file, value


def serve(options: ServeOptions, stop: Stop, *, detach: bool) -> None:
    """Start the cluster, print how to reach it, and return when it has ended, or with `detach` when it is ready.
    Raises ConfigError that names the option, and what `baton up` raises.
    """
    file = options.config or PRESET
    spelled = dict(_settings(options))
    sets = [*spelled, *options.sets]
    began = time.monotonic()
    try:
        if options.api_key is not None:
            sets += [f"security.tokens={_token_file(load_config(file, sets, os.environ).name, options.api_key)}"]

        def announce(state: ClusterState, config: ClusterConfig) -> None:
            key = options.api_key
            variable = TOKEN_VARIABLE if key is None else KEY_VARIABLE
            exported = variable in os.environ and key in {None, os.environ[variable]}
            text = _ready(state, config, time.monotonic() - began, variable, exported=exported)
            down = f"`baton down --name {state.name}`"
            typer.echo(f"{text}\n{down if detach else f'Ctrl-C or {down}'} stops it.")

        launch.up(file, sets, stop, detach=detach, announce=announce)
    except ConfigError as error:
        raise ConfigError(_by_option(str(error), spelled)) from error


def _settings(options: ServeOptions) -> Iterator[tuple[str, str]]:
    """Yield `key=value` and the words of the command line that it comes from."""
    if options.model is not None or options.config is None:
        yield _setting("model.path", _path(options.model)), options.model or "MODEL"
    if options.name is not None:
        yield _setting("name", options.name), f"--name {options.name}"
    for option, key, value in options.keys:
        if value is not None:
            yield _setting(key, value), f"{option} {' '.join(value) if isinstance(value, list) else value}"
    yield from _listener(options)


def _setting(key: str, value: str | int | list[str]) -> str:
    """Return an item of `--set`, whose value is YAML. A length of digits is a number."""
    number = isinstance(value, int) or (key == "model.max_model_len" and str(value).isdecimal())
    return f"{key}={value if number else json.dumps(value, ensure_ascii=False)}"


def _path(model: str | None) -> str:
    """Return `model.path`. A Hub name may lack its prefix, unless it could be a folder with a mistake in its name."""
    if model in {None, DEMO}:  # outside a repository, the documents' models/demo is the wheel's, and no Hub name
        shipped = SHIPPED / DEMO
        return str(shipped) if shipped.exists() and not Path(DEMO).exists() else DEMO
    if not Path(model).parent.exists() and HUB_NAME.fullmatch(HUB_PREFIX + model):
        return HUB_PREFIX + model
    return model if model == ORACLE or model.startswith(HUB_PREFIX) else str(Path(model).absolute())


def _listener(options: ServeOptions) -> Iterator[tuple[str, str]]:
    if options.host is None and options.port is None:
        return
    given = [f"--host {options.host}"] * (options.host is not None) + [f"--port {options.port}"] * (
        options.port is not None
    )
    host = HTTP[0] if options.host is None else options.host
    try:
        shown = parse_host(f"[{host}]" if ":" in host and not host.startswith("[") else host)
    except ValueError as error:
        raise ConfigError(f"--host {host}: {error}") from None
    port = HTTP[1] if options.port is None else options.port
    yield _setting("router.http", f"{shown}:{port}"), " ".join(given)
    if is_loopback_host(shown.strip("[]")) or options.config is not None:
        return
    if options.api_key is None:
        text = "an address off the loopback needs --api-key KEY; other hosts could send requests otherwise"
        raise ConfigError(f"--host {host}: {text}")
    if not any(item.startswith("security.tls") for item in options.sets):
        typer.echo(f"warning: HTTP on {host} has no TLS, so the key crosses the network in plain text", err=True)
    yield "security.allow_insecure=[router.http]", f"--host {host}"


def _token_file(name: str, key: str) -> Path:
    """Write the hash of an API key, for the routers of cluster `name`. The file's name is part of the hash, so that a
    running cluster keeps its own key.
    """
    if not key.strip() or key != key.strip():
        raise ConfigError("--api-key: must not be empty, nor begin or end with a space")
    digest = hashlib.sha256(key.encode()).hexdigest()
    path = StateFolder(name).path / f"api-key-{digest[:16]}.json"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.write_text(json.dumps({"tokens": [{"token_sha256": digest, "tenant": "default", "role": "admin"}]}))
    return path


def _by_option(text: str, spelled: dict[str, str]) -> str:
    """Name the option in place of the setting that was made from it, and no line of the preset, which is not the
    user's file.
    """
    for item, option in spelled.items():
        text = text.replace(f"--set {item}", option)
    return _PRESET_LINE.sub(lambda found: f"{_OPTIONS.get(found[1], f'--set {found[1]}=...')}: ", text)


def _ready(state: ClusterState, config: ClusterConfig, seconds: float, variable: str, *, exported: bool) -> str:
    """Return the addresses, a `curl` line and a snippet for the openai package. `variable` has the key, if any."""
    sizes = sizes_text(config.prefill.replicas, config.decode.replicas)
    lines = [f"{config.model.name} is ready after {seconds:.1f} s: {sizes}", f"  gRPC  {from_here(state.grpc)}"]
    if not state.http:
        return "\n".join([*lines, f"  baton generate {PROMPT!r} --name {state.name}"])
    security, chats = config.security, _chats(config)
    http = f"{'https' if security.tls else 'http'}://{from_here(state.http)}"
    lines += [f"  HTTP  {http}/v1", f"  page  {http}/", ""]
    asked = {"messages": [{"role": "user", "content": PROMPT}]} if chats else {"prompt": PROMPT}
    body = json.dumps({"model": config.model.name, **asked, "max_tokens": 32})
    path, keyed = ("chat/completions" if chats else "completions"), security.tokens is not None
    lines += [f"  export {variable}=...  # the key"] * (keyed and not exported)
    lines += [f"  export SSL_CERT_FILE={security.tls.ca}  # for Python"] if security.tls else []
    lines += [
        f"  curl -s {http}/v1/{path}{launch.curl_options(config, variable)} -H 'content-type: application/json' \\",
        f"    -d '{body}'",
        "",
    ]
    key = f'os.environ["{variable}"]' if keyed else '"none"'
    method, part = ("chat.completions", "message.content") if chats else ("completions", "text")
    fields = ", ".join(f"{name}={value!r}" for name, value in json.loads(body).items())
    lines += ["  import openai, os" if keyed else "  import openai"]
    lines += [f'  client = openai.OpenAI(base_url="{http}/v1", api_key={key})']
    lines += [f"  print(client.{method}.create({fields}).choices[0].{part})", ""]
    return "\n".join(lines)


def _chats(config: ClusterConfig) -> bool:
    """Return whether the model, if it is a local one, has a chat template."""
    folder = Path(config.model.path)
    folder = model_folder(folder) if folder.is_file() else folder
    found = (folder / "chat_template.jinja").exists()
    for name in ("tokenizer_config.json", "chat_template.json"):
        with suppress(OSError, ValueError):
            words = json.loads((folder / name).read_bytes())
            found |= isinstance(words, dict) and bool(words.get("chat_template"))
    return found
