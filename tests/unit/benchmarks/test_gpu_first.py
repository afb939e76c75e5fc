"""The runner of a first run on a GPU: a step that fails, hangs or dies ends alone. The dry run of all steps."""

import json
import sys
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_first import runner
from benchmarks.gpu_first.runner import Run
from benchmarks.gpu_first.steps import STEPS, Step
from tests.support.time_factor import scaled
from tests.support.waiting import eventually

BODIES = {
    "good": "return Outcome('7 GB/s', {'rate': 7.0})",
    "raises": "raise ValueError('a shape is wrong')",
    "wrong": "require(False, 'the bits differ')",
    "lacks": "raise Skipped('too little memory')",
    "dies": "print('CUDA error: misaligned address', flush=True); os.kill(os.getpid(), signal.SIGABRT)",
    "leaves": "print('bye', flush=True); os._exit(3)",
    "hangs": "child = subprocess.Popen(['sleep', '600']); open(PIDS, 'w').write(str(child.pid)); child.wait()",
}
PROGRAM = """
import os, signal, subprocess
from benchmarks.gpu_first.at import Outcome, Skipped, require
PIDS = {pids!r}
def run(at):
    assert at.dry and at.device.type == "cpu" and os.environ["TRITON_INTERPRET"] == "1"
    {body}
"""
KEYS = {"benchmark", "date", "dry", "seconds", "steps", *runner.FACTS}
STEP_KEYS = {"step", "name", "status", "figure", "figures", "seconds", "cpu_s", "reason"}


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Step]:
    """A step for each body. Their processes get this path of modules."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name, body in BODIES.items():
        (tmp_path / f"step_{name}.py").write_text(PROGRAM.format(pids=str(tmp_path / "pids"), body=body))
    limits = {"hangs": scaled(10.0) / runner.DRY_FACTOR}  # longer than the start of a process
    return {
        name: Step(number, name, f"step_{name}", limits.get(name, 600.0), "all of it")
        for number, name in enumerate(BODIES, start=1)
    }


@pytest.mark.slow
def test_each_step_ends_alone(steps: dict[str, Step], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(dry=True, budget_s=3600.0)
    run.all([*steps.values(), steps["good"]])
    found = {result.name: result for result in run.results}
    statuses = {"good": "PASS", "lacks": "SKIP"}
    assert {name: result.status for name, result in found.items()} == {
        name: statuses.get(name, "FAIL") for name in BODIES
    }
    assert [run.results[0].figures, run.results[-1].status] == [{"rate": 7.0}, "PASS"]
    assert found["raises"].reason == "ValueError: a shape is wrong"
    assert found["wrong"].reason == "WrongResult: the bits differ"
    assert found["lacks"].reason == "too little memory"
    assert "ended by SIGABRT" in found["dies"].reason
    assert "misaligned address" in found["dies"].reason
    assert "with exit code 3 without a result. Last output: bye" in found["leaves"].reason
    assert "killed: no result within" in found["hangs"].reason
    sleeper = int((tmp_path / "pids").read_text())
    eventually(lambda: not psutil.pid_exists(sleeper) or psutil.Process(sleeper).status() == psutil.STATUS_ZOMBIE)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("PASS   1 good  7 GB/s  (")
    assert lines[1] == "       not shown by a dry run: all of it"
    report = run.report()
    assert set(report) == KEYS
    assert all(set(entry) == STEP_KEYS for entry in report["steps"])
    assert (report["torch"], report["device"]) == (torch.__version__, None)


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "code"), [("1", 0), ("1,4", 0), ("1,2", 1)])
def test_the_exit_code_is_1_after_a_failure(
    chosen: str, code: int, steps: dict[str, Step], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "STEPS", tuple(steps.values()))
    out = tmp_path / "new" / "first.json"
    assert gpu.main(["--first", "--dry", "--only", chosen, "--json", str(out)]) == code
    assert [entry["step"] for entry in json.loads(out.read_text())["steps"]] == [
        int(part) for part in chosen.split(",")
    ]


@pytest.mark.slow
def test_without_a_gpu_the_first_step_fails_and_the_others_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = Run(dry=False, budget_s=3600.0)
    run.all([STEPS[0], STEPS[7]])
    assert [result.status for result in run.results] == ["FAIL", "SKIP"]
    assert run.results[1].reason == "no GPU that this torch can use"


def test_a_run_on_a_gpu_compiles_and_keeps_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("BATON_HOME", "/home-of-baton")
    real = runner.environment(dry=False)
    assert "TRITON_INTERPRET" not in real
    assert real["TRITON_CACHE_DIR"] == "/home-of-baton/kernels/triton"
    assert runner.environment(dry=True)["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_dry_run_passes_each_step(step: Step, tmp_path: Path) -> None:
    """About 60 s of a processor in all: the interpreter, two clusters of tiny models, doubles of NCCL and of graphs."""
    pytest.importorskip("triton", reason="no triton here (the dev extra has it on Linux)")
    out, only = tmp_path / "first.json", ["--only", str(step.number)]
    code = gpu.main(["--first", "--dry", *only, "--budget-s", str(scaled(800.0)), "--json", str(out)])
    (entry,) = (report := json.loads(out.read_text()))["steps"]
    assert (entry["step"], entry["status"], entry["reason"]) == (step.number, "PASS", "")
    assert (code, report["dry"], report["device"]) == (0, True, None)
