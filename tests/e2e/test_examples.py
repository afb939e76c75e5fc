"""The programs of examples/ run against one cluster, and the systemd unit names commands that exist."""

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer

from baton.cli.app import app
from baton.cli.exit_codes import exit_code
from baton.errors import Cancelled
from tests.support.cluster_process import ROOT
from tests.support.time_factor import scaled
from tests.support.waiting import eventually

EXAMPLES = ROOT / "examples"
SHOWN = {  # program: what it prints
    "curl.sh": r'"object":"list".*can vary widely.*data: \[DONE\].*"object":"chat.completion"',
    "sdk.py": r"can vary widely\nfirst token after [\d.]+ ms.*prefill on prefill-0, decode on decode-., [1-9]\d* bytes",
    "openai_chat.py": r"Paris.*\n\d+ prompt tokens, \d+ new ones",
    "structured_output.py": r"(Paris|Rome) (True|False)\n[A-Z][a-z]{3,8}\n",
    "tools.py": r'weather \{.*\} -> \{"city".*\}\n',
    "audit.py": r"digest alone      ([0-9a-f]{64})\ndigest under load \1\n",
}


@pytest.mark.slow
@pytest.mark.xdist_group("demo")
@pytest.mark.parametrize("name", SHOWN)
def test_an_example_runs(demo_cluster, name):
    eventually(lambda: len(demo_cluster.connected()) == 3, within_s=60)
    state = demo_cluster.state()
    command = ["bash"] if name.endswith(".sh") else [sys.executable]
    address = state.grpc if name == "sdk.py" else f"http://{state.http}"
    argv = [*command, str(EXAMPLES / name), address]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(SHOWN[name], done.stdout, re.DOTALL), done.stdout


def test_each_file_is_listed_and_run_or_compiled():
    files = {path.name for path in EXAMPLES.iterdir()} - {"README.md"}
    listed = set(re.findall(r"\| \[([\w./]+)\]", (EXAMPLES / "README.md").read_text()))
    assert {name.rstrip("/") for name in listed} == files
    assert files == set(SHOWN) | {"langchain_chat.py", "node", "systemd"}
    compile((EXAMPLES / "langchain_chat.py").read_text(), "langchain_chat.py", "exec")


def test_the_unit_names_commands_that_exist_and_starts_again_after_any_error():
    unit = (EXAMPLES / "systemd/baton.service").read_text()
    commands = re.findall(r"^Exec\w+=/opt/baton/bin/baton (.*)$", unit, re.MULTILINE)
    assert commands
    for line in commands:
        command: Any = typer.main.get_command(app)
        for word in (words := shlex.split(line)):
            if word not in getattr(command, "commands", {}):
                break
            command, words = command.commands[word], words[1:]
        with command.make_context("baton", words):
            pass
    assert "\nRestart=on-failure\n" in unit
    assert "RestartPreventExitStatus" not in unit  # a Hub without a network and a wrong file have the same exit code
    assert f"SuccessExitStatus={exit_code(Cancelled())}\n" in unit
