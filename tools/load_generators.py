"""Run unmodified guidellm and aiperf against `configs/local.yaml`, and write their reports.

    python tools/load_generators.py                both; environments in build/load-generators, reports in docs/reports
    python tools/load_generators.py aiperf         one of them

The first run creates an environment for each with pip (TORCH_INDEX as for `make setup`). The demo model's folder is the
tokenizer, so nothing else is downloaded. The exit code is 1 if a tool or some of its requests failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILD, REPORTS, MODEL = ROOT / "build" / "load-generators", ROOT / "docs" / "reports", ROOT / "models" / "demo"
NAME = "load-generators"
REQUESTS, STREAMS, PROMPT, ANSWER = 100, 4, 128, 32
PORTS = ("router.grpc", "router.http", "router.metrics")


@dataclass(frozen=True)
class Tool:
    """A load generator. `arguments` and `failed` take the folder of its results, `table` its output."""

    requirement: str
    arguments: Callable[[str, Path], list[str]]
    table: Callable[[str], str]
    failed: Callable[[Path], int]
    remark: str
    env: Mapping[str, str] = field(default_factory=dict)


def _guidellm(http: str, folder: Path) -> list[str]:
    return [
        "run",
        *("--backend", f"kind=openai_http,target=http://{http}"),
        *("--profile", f"kind=concurrent,streams={STREAMS}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODEL}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}"),
        *("--output", "kind=console", "--output", f"kind=json,path={folder / 'report.json'}", "--disable-progress"),
    ]


def _guidellm_failed(folder: Path) -> int:
    requests = _read(folder / "report.json")["benchmarks"][0]["requests"]
    return REQUESTS - len(requests["successful"])


def _guidellm_table(printed: str) -> str:
    """Return the second copy of the tables, which are printed twice."""
    return printed[printed.rindex("ℹ Run Summary Info") :].partition("✔ Benchmarking")[0]  # noqa: RUF001


def _aiperf(http: str, folder: Path) -> list[str]:
    return [
        *("profile", "--model", MODEL.name, "--url", f"http://{http}", "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", str(MODEL), "--concurrency", str(STREAMS), "--request-count", str(REQUESTS)),
        *("--synthetic-input-tokens-mean", str(PROMPT), "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(ANSWER), "--extra-inputs", f"min_tokens:{ANSWER}"),
        *("--ui", "none", "--output-artifact-dir", str(folder)),
    ]


def _aiperf_failed(folder: Path) -> int:
    return REQUESTS - int(_read(folder / "profile_export_aiperf.json")["request_count"]["avg"])


def _aiperf_table(printed: str) -> str:
    found = re.search(r"^ *NVIDIA AIPerf \| LLM Metrics *$.*?^└[─┴]*┘$", printed, re.MULTILINE | re.DOTALL)
    return found.group() if found else printed[-4000:]


TOOLS = {
    "guidellm": Tool(
        "guidellm==0.8.1",
        _guidellm,
        _guidellm_table,
        _guidellm_failed,
        "It asks for usage in each chunk (`stream_options.continuous_usage_stats`) and for answers of the full length "
        "(`ignore_eos`).",
        {"HF_HUB_OFFLINE": "1"},
    ),
    "aiperf": Tool(  # with HF_HUB_OFFLINE it accepts no folder as tokenizer
        "aiperf==0.13.0",
        _aiperf,
        _aiperf_table,
        _aiperf_failed,
        "`min_tokens` has each answer be of the full length. With aiperf's `ignore_eos:true` instead, the demo model "
        "repeats its end of text, which has no text, and aiperf counts an answer of nothing else as failed.",
    ),
}


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def installed(name: str) -> Path:
    """Return the program of a tool. Creates its environment if needed, with this project's version of torch."""
    folder, requirement = BUILD / name, TOOLS[name].requirement
    mark = folder / f"{requirement}.installed"
    if not mark.is_file():
        print(f"{name}: installing {requirement} into {folder.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        torch = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
        limits = folder / "constraints.txt"
        limits.write_text("\n".join(torch) + "\n")
        index = os.environ.get("TORCH_INDEX")
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        more = ["--extra-index-url", index] if index else []
        subprocess.run([*pip, *more, "-c", str(limits), requirement], check=True)
        mark.touch()
    return folder / "bin" / name


@contextmanager
def cluster() -> Iterator[str]:
    """Run `configs/local.yaml` on free ports and yield the address of its HTTP API."""
    baton = [sys.executable, "-m", "baton"]
    sets = [f"--set={port}=127.0.0.1:0" for port in PORTS]
    up = [*baton, "up", "-c", "configs/local.yaml", f"--set=name={NAME}", *sets, "--detach", "--json"]
    started = subprocess.run(up, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    try:
        yield json.loads(started.stdout)["http"]
    finally:
        subprocess.run([*baton, "down", "--name", NAME], cwd=ROOT, check=True)


def measured(name: str, http: str) -> bool:
    """Run one tool, write its report, and return whether all its requests succeeded."""
    tool, program, folder = TOOLS[name], installed(name), BUILD / f"{name}-results"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    arguments = tool.arguments(http, folder)
    env = {**os.environ, **tool.env, "COLUMNS": "140"}
    env.pop("PYTHONPATH", None)
    run = subprocess.run([str(program), *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False)
    (folder / "printed.log").write_text(run.stdout + run.stderr)
    if run.returncode != 0:
        print(f"{name}: ended with {run.returncode}\n{(run.stdout + run.stderr)[-4000:]}")
        return False
    failed = tool.failed(folder)
    REPORTS.mkdir(parents=True, exist_ok=True)
    (REPORTS / f"{name}.md").write_text(report(name, shlex.join([name, *arguments]), failed, run.stdout))
    print(f"{name}: {REQUESTS} requests, {failed} failed; docs/reports/{name}.md")
    return failed == 0


def report(name: str, command: str, failed: int, printed: str) -> str:
    """Return the report in Markdown, without the paths of this machine."""
    tool = TOOLS[name]
    shown = command.replace(str(BUILD / f"{name}-results"), "RESULTS").replace(f"{ROOT}/", "")
    table = "\n".join(line.rstrip() for line in tool.table(printed).strip().splitlines())
    return f"""# {name}
`{tool.requirement}` against `configs/local.yaml` (demo model), {date.today()}, {os.cpu_count()} CPU cores, no GPU:
**{REQUESTS} requests, {failed} failed**. Made by `python tools/load_generators.py {name}`; the tool
is not changed in any way.
{tool.remark}

Tool and server share the cores, and the model is a toy: this shows that they understand each other, not how fast the
server is ([performance.md](../performance.md) does).
```
{shown}
```
What it printed, less its settings:
```
{table}
```
"""


def main() -> None:
    """Parse the command line and run the tools."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tools", nargs="*", choices=[*TOOLS, "all"], default="all")
    given = parser.parse_args().tools
    names = list(TOOLS) if "all" in given else given
    for name in names:
        installed(name)
    with cluster() as http:
        good = [measured(name, http) for name in names]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
