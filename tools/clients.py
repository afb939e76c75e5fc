"""Run unchanged clients against `baton serve` on the demo model, and write docs/reference/clients.md.

    python tools/clients.py [--only NAME ...] [--environments FOLDER] [--out FILE]

Each client has an environment of its own in FOLDER (by default build/clients), which is made once with pip. The rows of
clients that were not run are kept, so `--only` is cheap. The exit code is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, BUILD, PROGRAMS = ROOT / "docs/reference/clients.md", ROOT / "build" / "clients", ROOT / "tools/client_programs"
TIMEOUT_S = 600  # load generators take a minute to start
# A template with a place for tools, calls and results, in the Hermes form. That of the demo model has none.
TEMPLATE = """{%- if tools %}{{ tools | tojson }} {% endif -%}
{%- for message in messages -%}
{%- for call in message.tool_calls or [] -%}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{%- endfor -%}
{{ message.content or "" }}{% if not loop.last %} {% endif -%}
{%- endfor -%}"""


@dataclass(frozen=True)
class Client:
    """A client: the packages of its environment, the one whose version is shown first."""

    packages: tuple[str, ...]

    @property
    def main(self) -> str:
        """The distribution whose version is shown."""
        return re.split(r"[\[=<>]", self.packages[0])[0]


CLIENTS = {
    "openai": Client(("openai",)),
    "litellm": Client(("litellm",)),
    "langchain": Client(("langchain-openai",)),
    "llama-index": Client(("llama-index-llms-openai-like",)),
    "pydantic-ai": Client(("pydantic-ai-slim[openai]",)),
    "instructor": Client(("instructor",)),
    "outlines": Client(("outlines[openai]",)),
    "guidance": Client(("guidance", "openai")),
    "anthropic": Client(("anthropic",)),
    "lm-eval": Client(("lm-eval[api]", "transformers", "tokenizers", "accelerate")),
    "inspect-ai": Client(("inspect-ai", "openai")),
    "guidellm": Client(("guidellm",)),
    "aiperf": Client(("aiperf",)),
}


@dataclass(frozen=True)
class Found:
    """The outcome of one client: (check, "" or the reason of its failure), and the versions of its packages."""

    versions: str
    checks: tuple[tuple[str, str], ...]
    day: str


def model_with_tools(folder: Path) -> Path:
    """Copy the demo model to `folder`/demo, with a chat template that takes tools, and return the copy."""
    shutil.copytree(ROOT / "models/demo", folder / "demo")
    (folder / "demo/chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder / "demo"


@contextmanager
def served() -> Iterator[tuple[str, Path]]:
    """Run `baton serve` on any free ports. Yield the base URL of the HTTP API and the model's folder."""
    with tempfile.TemporaryDirectory(prefix="baton-clients-") as home:
        model = model_with_tools(Path(home))
        baton, env = [sys.executable, "-m", "baton"], {**os.environ, "BATON_HOME": home}
        ports = [f"--set=router.{name}=127.0.0.1:0" for name in ("grpc", "metrics")]
        started = subprocess.run(
            [*baton, "serve", str(model), "--port", "0", *ports, "--detach"],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        found = re.search(r"HTTP +(http://\S+)/v1", started.stdout)
        try:
            assert found is not None, started.stdout
            yield found[1], model
        finally:
            subprocess.run([*baton, "down", "--name", "serve"], cwd=ROOT, env=env, check=True)


def installed(name: str, folder: Path) -> Path:
    """Return the Python of a client's environment, which is made if it is missing or has other packages."""
    place, packages = folder / name, CLIENTS[name].packages
    mark = place / "packages.txt"
    if not (mark.is_file() and mark.read_text() == "\n".join(packages)):
        print(f"{name}: installing {' '.join(packages)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        pip = [str(place / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, *packages], check=True)
        mark.write_text("\n".join(packages))
    return place / "bin/python"


def run(name: str, python: Path, base: str, model: Path) -> Found:
    """Run a client's program, and return its checks. A program that breaks is one failed check."""
    program = PROGRAMS / f"run_{name.replace('-', '_')}.py"
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "BATON", "OPENAI"))}
    env |= {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "OTEL_SDK_DISABLED": "true"}
    command = [str(python), str(program), base, "demo", str(model)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, start_new_session=True, **pipes) as process:
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
            lines, broken = out.splitlines(), err.strip().splitlines()[-1:] if process.returncode else []
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # load generators have processes of their own
            lines, broken = [], [f"no end after {TIMEOUT_S} s"]
    given: list[Any] = [json.loads(line) for line in lines if line.startswith('{"check"')]
    checks = [(each["check"], "" if each["ok"] else short(each["reason"])) for each in given]
    checks += [("program", short(line)) for line in broken]
    return Found(version(python, CLIENTS[name].main), tuple(checks), date.today().isoformat())


def version(python: Path, distribution: str) -> str:
    """Return `NAME VERSION` of a distribution in an environment."""
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    shown = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return f"{distribution} {shown}"


def short(reason: str) -> str:
    """Return a reason for a cell: one line, no addresses or paths of this machine."""
    line = " ".join(reason.split()).replace("|", "/").replace("`", "'")
    line = re.sub(r"(https?://)?127\.0\.0\.1:\d+", "the server", line)
    line = re.sub(r"(/[\w.+-]+){3,}", "a file", line)
    message = re.search(r"'message': (['\"])(.*?)\1,", line)
    kind = line.partition(":")[0]
    return (f"{kind}: {message[2]}" if message else line)[:200]


def page(rows: Mapping[str, str]) -> str:
    """Return the page with a row for each client, in the order of `CLIENTS`."""
    table = "\n".join(rows[name] for name in CLIENTS if name in rows)
    return f"""# Clients
Unchanged clients against `baton serve` on the demo model, with a chat template that takes tools.
`python tools/clients.py` writes this page; do not edit it. Each client runs in an environment of its own, with a
program of [tools/client_programs](../../tools/client_programs). A failed check has its reason.
A check tests that client and server understand each other, and not the quality of the answer: the model is a toy.

| client | version | date | works | fails |
|---|---|---|---|---|
{table}

guidellm and aiperf generate load. `python tools/load_generators.py` writes the reports of longer runs:
[guidellm](../reports/guidellm.md), [aiperf](../reports/aiperf.md).
"""


def row(name: str, found: Found) -> str:
    """Return the row of one client."""
    works = ", ".join(check for check, reason in found.checks if not reason) or "-"
    fails = "; ".join(f"**{check}**: {reason}" for check, reason in found.checks if reason) or "-"
    return f"| {name} | {found.versions} | {found.day} | {works} | {fails} |"


def kept(text: str) -> dict[str, str]:
    """Return the rows of an earlier page by client."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the clients and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS), metavar="NAME")
    parser.add_argument("--environments", type=Path, default=BUILD, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE")
    options = parser.parse_args(arguments)
    pythons = {name: installed(name, options.environments.absolute()) for name in options.only}
    rows = kept(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {}
    failed = False
    with served() as (base, model):
        for name, python in pythons.items():
            found = run(name, python, base, model)
            rows[name] = row(name, found)
            failed = failed or any(reason for _, reason in found.checks)
            print(rows[name], flush=True)
    options.out.write_text(page(rows), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
