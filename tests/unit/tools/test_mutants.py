"""The mutation program: its changes, and the test runs that detect them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutants.__main__ import main

ROOT = Path(__file__).parents[3]
TARGETS = ("--targets", "tools/gen_sync_client.py")  # neither of these suites imports torch
SUITE, BLIND = "tests/guards/test_source.py", "tests/guards/test_constraints.py"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--targets", "router/none.py"], "--targets: there is no 'router/none.py'"),
        (["--targets", "router/admission/fair_queue.py", "--count", "9999"], "--count: must be from 1 to"),
        (["--suites", "tests/none"], "--suites: nothing matches 'tests/none'"),
        (["--again", "README.md"], "--again: README.md has no results"),
        (["--again", "none.jsonl"], "--again: none.jsonl has no results"),
    ],
)
def test_wrong_arguments_are_named_before_anything_runs(monkeypatch, capsys, tmp_path, options: list[str], named: str):
    monkeypatch.setattr("sys.argv", ["mutants", str(tmp_path / "out.jsonl"), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, named in capsys.readouterr().err) == (2, True)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
def test_what_was_killed_before_must_be_killed_again(tmp_path: Path) -> None:
    before, again = tmp_path / "before.jsonl", tmp_path / "again.jsonl"
    drawn = mutants(*TARGETS, "--suites", SUITE, "--count", "8", out=before)
    killed = [line["name"] for line in map(json.loads, before.read_text().splitlines()) if line["outcome"] == "killed"]
    assert (drawn.returncode, len(killed) > 0) == (0, True), drawn.stdout + drawn.stderr

    same = mutants(*TARGETS, "--suites", SUITE, "--again", str(before), out=again)
    last = json.loads(same.stdout.splitlines()[-1])
    assert (same.returncode, last["lost"], last["missing"], last["gone"]) == (0, 0, 0, 0), same.stdout

    blind = mutants(*TARGETS, "--suites", BLIND, "--again", str(before), out=again)
    assert blind.returncode == 1
    assert set(killed) <= set(blind.stdout.splitlines())


def mutants(*options: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.mutants", str(out), "--jobs", "1", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
