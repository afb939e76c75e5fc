"""The programs of benchmarks/ as a user runs them, on toy models: options, figures of the last line, nulls, pages."""

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.kernels.cpu.compiler import load_library, machine
from benchmarks import engine, thinking
from benchmarks.lib import report, thinking_measure, thinking_tasks
from benchmarks.lib.environments import PEERS, peer_for
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import fill
from benchmarks.lib.thinking_measure import Plan
from benchmarks.lib.thinking_prompts import Load
from models.tasks.registry import TASKS
from router.placement.policy import POLICIES
from tests.support.compiled_kernels import compiled_or_skip

PROGRAMS = sorted((ROOT / "benchmarks").glob("*.py"))
PAGES = "determinism disaggregation engine experts flashdecoding local-prefill overload quantized router".split()
PAGES += "simulator thinking traces transfer".split()
PAGE_OF = {name: name for name in PAGES} | dict.fromkeys(("disaggregation-1b", "disaggregation-vllm"), "disaggregation")
PAGE_OF |= dict.fromkeys(("soak-soak", "soak-control"), "faults") | {
    "kv_int8": "kv_int8",
    "engine-dtypes": "engine",
    "quantized-quality": "quantized",
    "revisions": "engine",
}
PAGE_OF |= dict.fromkeys(("determinism-levels", "determinism-agreement"), "determinism")
slow = pytest.mark.slow
program_run = pytest.mark.sample(1, of="programs of benchmarks/")


def run(program: str, *options: str, out: Path | None = None) -> tuple[str, dict[str, Any]]:
    """Run a program and return its output and its last line. `out`: folder for converted models and measurements."""
    folders = [] if out is None else ["--out", str(out / "out"), "--cache", str(out / "cache")]
    command = [sys.executable, f"benchmarks/{program}.py", *options, *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["benchmark"] == program
    return done.stdout, last


def measured(ratios: dict[str, float | None]) -> set[str]:
    return {key for key, value in ratios.items() if value is not None}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_help(program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 0
    assert "--quick" in capsys.readouterr().out, "as `make bench` gives it"


TINY = ("--tiny", "--rounds", "1")
RUNS: dict[str, tuple[tuple[str, ...], int]] = {  # options, and how many ratios are measured without other engines
    "choose": (("--quick", "--workers", "100", "--blocks", "3000"), len(POLICIES) + 2),
    "quantized": (TINY, 8),
    "experts": (TINY, 10),
    "kv_int8": (TINY, 5),
    "flashdecoding": (("--tiny", "--levels", "avx2", "--dtypes", "fp32"), 18),
    "determinism": ((*TINY, "--requests", "16", "--answer", "8"), 3),
    "engine": (("--quick", *TINY, "--threads", "1", "--sizes", "L", "--points", "P512,B1@128", "--peers", "none"), 2),
    "revisions": ((*TINY, "--before", "HEAD", "--families", "llama,deepseek_v3"), 6),  # a clone may lack older ones
    "sampling": (("--quick", "--rounds", "1"), 8),
    "traces": (("--tiny",), 20),
    "transfer": (("--quick", "--tiny", "--rounds", "2", "--sizes", "1,64", "--prompts", "512,2048"), 5),
}
FOLDERS = {
    "choose": (),
    "flashdecoding": ("--out",),
    "sampling": (),
    "engine": ("--out", "--cache"),
    "transfer": ("--out", "--cache"),
}  # others have `--cache`


@slow
@program_run
@pytest.mark.timeout(900)  # some start several clusters
@pytest.mark.parametrize("program", RUNS)
def test_a_program_measures_what_it_says(program: str, tmp_path: Path) -> None:
    options, least = RUNS[program]
    if program in {"flashdecoding", "sampling"}:
        compiled_or_skip(lambda: load_library("bf16"))
    folders = [part for name in FOLDERS.get(program, ("--cache",)) for part in (name, str(tmp_path / name[2:]))]
    text, last = run(program, *options, *folders)
    assert len(measured(last["ratios"])) >= least, last["ratios"]
    assert min(value for value in last["ratios"].values() if value is not None) >= 0
    toys = {"engine", "revisions", "transfer"}
    assert program not in toys or "the figures mean nothing" in text, "of a toy model"
    assert program != "revisions" or text.count(" | yes          |") == 6, "equal logits"


@slow
@program_run
def test_all_processes_of_an_engine_run_are_restricted(tmp_path: Path) -> None:
    compiled_or_skip(lambda: load_library("bf16"))
    options = ("--threads", "1", "--sizes", "M", "--points", "B1@128", "--peers", "none", "--isa", "avx2")
    text, _ = run("engine", "--quick", *TINY, *options, out=tmp_path)
    assert "- instructions: avx2, forced on all processes" in text
    assert "- instructions of baton, bf16: level avx2" in text
    assert "- instructions of limit, bf16: torch AVX2, oneDNN Intel AVX2\n" in text


def test_an_instruction_set_decides_the_builds_and_the_level(capsys: pytest.CaptureFixture[str]) -> None:
    native, (peer, name) = peer_for("llama.cpp"), peer_for("llama.cpp", "avx2")
    assert native == (PEERS["llama.cpp"], "llama.cpp")
    assert name == "llama.cpp-avx2"
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_AVX512=OFF"} < set(peer.build["CMAKE_ARGS"].split())
    assert peer_for("openvino-genai", "avx2") == (PEERS["openvino-genai"], "openvino-genai"), "it chooses at run time"
    with pytest.raises(SystemExit):
        engine.parse(["--isa", "avx2", "--levels", "avx512"])
    assert "excludes --levels" in capsys.readouterr().err


@slow
@program_run
def test_quantized_judges_the_quality() -> None:
    """Against weights that are rounded otherwise than Baton's, KL of int4 would be that against the original ones."""
    _, last = run("quantized", "--tiny", "--quality")
    figures = last["figures"]
    assert figures["float32 none: KL to original"] < 1e-9
    assert figures["float32 int8: KL to widened"] < 1e-3
    assert 10 * figures["float32 int4: KL to widened"] < figures["float32 int4: KL to original"]
    assert figures["float32 int8: equal to widened"] >= 198
    assert figures["float32 int8: equal to original"] >= 198


@slow
@program_run
def test_determinism_measures_levels_and_compares_them(tmp_path: Path) -> None:
    compiled_or_skip(lambda: load_library("bf16"))
    options = ["--tiny", "--requests", "2", "--rounds", "1", "--prompt", "8", "--answer", "4", "--cache", str(tmp_path)]
    _, last = run("determinism", *options, "--level", "avx2", "--quantize", "none,int8")
    assert set(last["figures"]) == {"avx2, bfloat16", "avx2, int8"}
    _, last = run("determinism", "--level", "avx2,avx512", "--agreement", "2")
    assert all(name.endswith(": avx2 = avx512") for name in last["figures"])
    assert last["figures"] or "avx512f" not in machine().flags, "only one of the levels runs here"


@slow
@program_run
def test_thinking_has_all_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The place of a trained chain of thought is taken by models/coin, which writes none, so all its answers count."""
    (tmp_path / "coin-cot").symlink_to(ROOT / "models" / "coin")
    monkeypatch.setattr(thinking, "configure_logging", lambda *_: None)  # would change other tests' logs
    monkeypatch.setattr(thinking, "LEAST", Plan(1, 2, 1, 1))
    monkeypatch.setattr(thinking_measure, "LOADS", (Load(30, 1.0),))
    monkeypatch.setattr(thinking_measure, "FLIPS", (20, 60, 100))
    monkeypatch.setattr(thinking_tasks, "TIMED", (10,))
    monkeypatch.setitem(TASKS, "coin", replace(TASKS["coin"], lengths=(60,)))
    thinking.main(["--least", "--models", str(tmp_path)])
    told = capsys.readouterr().out
    ratios = json.loads(told.splitlines()[-1])["ratios"]
    assert ratios["cot_accuracy_60"] == ratios["coin_thinking_60"] == 1.0
    assert ratios["speedup_vs_cot"] == ratios["speedup_vs_cot_coin"] > 0
    assert ratios["speedup_vs_cot_variables"] is None
    assert told.count("not trained") == 9  # 7 models, one of them also in the table of times
    for name in ("accuracy_20", "accuracy_60", "accuracy_100", "control_accuracy_60"):
        assert 0 <= ratios[name] <= 1
    least = ratios["rounds_per_chunk_fast_unlimited"]
    assert 0 < least <= min(ratios["rounds_per_chunk_fast"], ratios["rounds_per_chunk"]) < 1
    assert ratios["fast_prefill_speedup"] > 0
    assert ratios["equal_fast"] == ratios["equal_fast_unlimited"] == ratios["equal_auto"] == 2
    assert ratios["fast_to_sequential_least"] > 0


def test_a_program_ends_with_its_figures_and_fills_its_section(tmp_path: Path, monkeypatch, capsys) -> None:
    page = tmp_path / "docs" / "measurements" / "router.md"
    page.parent.mkdir(parents=True)
    page.write_text("before <!-- router:begin --> old <!-- router:end --> after")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    for write in (False, True, True):
        report.finish("router", ["--quick", "a b"], 1.25, "a table", {"x": None}, {"y": 1.5}, write_docs=write)
        told = '{"benchmark": "router", "ratios": {"x": null}, "figures": {"y": 1.5}}'
        assert capsys.readouterr().out.splitlines() == ["a table", told]
        assert ("old" in page.read_text()) == (not write)
    text = page.read_text()
    assert "\n- command: python benchmarks/router.py --quick 'a b'\n- load at the start: 1.2\n- processor: " in text
    assert text.startswith("before <!-- router:begin -->\n")
    assert text.endswith("\n\na table\n<!-- router:end --> after")


@pytest.mark.parametrize(("section", "page"), PAGE_OF.items())
def test_a_page_has_a_section_for_each_program(section: str, page: str) -> None:
    text = fill((ROOT / f"docs/measurements/{page}.md").read_text(), "new figures", section)
    assert text.count(f"<!-- {section}:begin -->\nnew figures\n<!-- {section}:end -->") == 1
    with pytest.raises(ValueError, match=f"{section}:begin"):
        fill("nothing", "new", section)
