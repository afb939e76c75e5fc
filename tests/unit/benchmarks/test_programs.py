"""The programs of benchmarks/ as a user runs them, on toy models: options, figures of the last line, nulls, pages."""

import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.kernels.cpu.compiler import load_library
from benchmarks import thinking
from benchmarks.lib import report, thinking_measure
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import fill
from benchmarks.lib.thinking_measure import Plan
from benchmarks.lib.thinking_prompts import Load
from router.placement.policy import POLICIES
from tests.support.compiled_kernels import compiled_or_skip

PROGRAMS = sorted((ROOT / "benchmarks").glob("*.py"))
PAGES = "determinism disaggregation engine local-prefill overload quantized router simulator thinking transfer".split()
PAGE_OF = {name: name for name in PAGES} | dict.fromkeys(("disaggregation-1b", "disaggregation-vllm"), "disaggregation")
PAGE_OF |= dict.fromkeys(("soak-soak", "soak-control"), "faults") | {
    "kv_int8": "kv_int8",
    "quantized-quality": "quantized",
}
PAGE_OF |= dict.fromkeys(("determinism-levels", "determinism-agreement"), "determinism")
slow = pytest.mark.slow
program_run = pytest.mark.sample(3, of="programs of benchmarks/")


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


@slow
@program_run
def test_choose_has_a_figure_for_each_policy() -> None:
    _, last = run("choose", "--quick", "--workers", "100", "--blocks", "3000")
    assert min(last["ratios"].values()) > 0
    assert {name.split(",")[0] for name in last["ratios"]} == {*POLICIES, "naming", "report"}


@slow
@program_run
def test_quantized_has_a_figure_for_each_point(tmp_path: Path) -> None:
    text, last = run("quantized", "--tiny", "--rounds", "1", "--cache", str(tmp_path))
    assert min(last["ratios"].values()) > 0
    assert len(last["ratios"]) == 8
    assert "level " in text


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
def test_kv_int8_has_all_figures(tmp_path: Path) -> None:
    _, last = run("kv_int8", "--tiny", "--rounds", "1", "--cache", str(tmp_path))
    ratios = last["ratios"]
    assert ratios["bytes moved for 300 tokens"] == ratios["bytes of a token in the cache"] < 0.6
    assert len(ratios) == 5
    assert min(last["figures"].values()) >= 196


@slow
@program_run
def test_determinism_has_all_figures(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:46.68,{prompt},{10 + prompt % 7}\n" for prompt in range(20, 60)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    options = ["--tiny", "--requests", "16", "--rounds", "1", "--answer", "8", "--cache", str(tmp_path)]
    text, last = run("determinism", *options, "--trace", str(trace))
    ratios, figures = last["ratios"], last["figures"]
    assert min(ratios[f"throughput_{share}"] for share in (10, 50, 100)) > 0
    assert set(ratios) - measured(ratios) <= {"control_diverged", "ttft_p99_ratio_100"}
    for key in ("fixed shape", "one at a time", "100% deterministic, verify passes, all wait", "sweep: 100%, 2 x 32"):
        assert figures[key] > 0
    exact = "No decode step is exact here" not in text
    for prefix in ("", "azure: "):
        assert (f"{prefix}100% deterministic" in figures) == exact
        assert figures[f"{prefix}0% deterministic"] == 1.0
        assert figures[f"{prefix}100% deterministic, verify passes"] > 0


@slow
@program_run
def test_determinism_measures_levels_and_compares_them(tmp_path: Path) -> None:
    compiled_or_skip(lambda: load_library("bf16"))
    options = ["--tiny", "--requests", "2", "--rounds", "1", "--prompt", "8", "--answer", "4", "--cache", str(tmp_path)]
    _, last = run("determinism", *options, "--level", "avx2", "--quantize", "none,int8")
    assert set(last["figures"]) == {"avx2, bfloat16", "avx2, int8"}
    _, last = run("determinism", "--level", "avx2,avx512", "--agreement", "2")
    assert all(name.endswith(": avx2 = avx512") for name in last["figures"])


ENGINE = ("--quick", "--tiny", "--threads", "1", "--rounds", "1")
ENGINE_LIMITS = {"decode_vs_bandwidth_1b", "prefill_vs_gemm_1b", "overhead_share_125m_b16"}
ENGINE_PEERS = {"vs_transformers_min", *(f"vs_best_peer_{size}_min" for size in ("125m", "1b", "15m"))}


@slow
@program_run
def test_engine_has_all_figures_and_puts_runs_of_a_size_each_together(tmp_path: Path) -> None:
    """For `M`, transformers is measured too if it is installed."""
    points = {"L": ("P512", "B1@128"), "M": ("B16@128",)}
    parts = []
    for size, peers in (("L", ("--peers", "none")), ("M", ())):
        options = ("--sizes", size, "--points", ",".join(points[size]), *peers)
        text, last = run("engine", *ENGINE, *options, out=tmp_path / size)
        assert "the figures mean nothing" in text, "of a toy model"
        parts.append(last["ratios"])
    files = [tmp_path / size / "out" / "engine.json" for size in points]
    alone = [json.loads(file.read_text()) for file in files]
    seen = {(one["engine"], one["point"]) for one in alone[0]["results"]}
    assert seen == {(engine, point) for engine in ("baton", "limit") for point in points["L"]}
    text, last = run("engine", *ENGINE, "--merge", *map(str, files), out=tmp_path)
    compared = {"vs_transformers_min"} if find_spec("transformers") else set()
    assert set(last["ratios"]) == ENGINE_LIMITS | ENGINE_PEERS
    assert measured(last["ratios"]) == ENGINE_LIMITS | compared
    assert all(last["ratios"][key] > 0 for key in ENGINE_LIMITS)
    assert all(last["ratios"][key] == value for part in parts for key, value in part.items() if value is not None)
    assert all(one["facts"]["command"] in text for one in alone)


@slow
@program_run
def test_thinking_has_all_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(thinking, "configure_logging", lambda *_: None)  # would change other tests' logs
    monkeypatch.setattr(thinking, "LEAST", Plan(1, 2, 1, 1))
    monkeypatch.setattr(thinking_measure, "LOADS", (Load(30, 1.0),))
    monkeypatch.setattr(thinking_measure, "FLIPS", (20, 60, 100))
    thinking.main(["--least"])
    ratios = json.loads(capsys.readouterr().out.splitlines()[-1])["ratios"]
    for name in ("accuracy_20", "accuracy_60", "accuracy_100", "control_accuracy_60"):
        assert 0 <= ratios[name] <= 1
    assert 0 < ratios["rounds_per_chunk_fast"] <= ratios["rounds_per_chunk"] < 1
    assert ratios["fast_prefill_speedup"] > 0
    assert ratios["equal_fast"] == ratios["equal_auto"] == 2


TRANSFER = ("--quick", "--tiny", "--rounds", "2")
TRANSFER_KEYS = {
    *("gloo_vs_raw_64mb", "shm_vs_memcpy_64mb", "nixl_vs_raw_64mb", "small_handoff_ms_over_raw"),
    *("exposed_share_512", "exposed_share_2048", "prefill_slowdown"),
}
LACKING = {"nixl_vs_raw_64mb"} if find_spec("nixl") is None else set[str]()
LACKING |= {"prefill_slowdown"} if len(os.sched_getaffinity(0)) < 2 else set()


@slow
@program_run
def test_transfer_has_all_figures(tmp_path: Path) -> None:
    text, last = run("transfer", *TRANSFER, "--sizes", "1,64", "--prompts", "512,2048", out=tmp_path)
    assert measured(last["ratios"]) == TRANSFER_KEYS - LACKING
    assert min(last["ratios"]["gloo_vs_raw_64mb"], last["ratios"]["shm_vs_memcpy_64mb"]) > 0
    assert "the figures mean nothing" in text
    raw = json.loads((tmp_path / "out" / "transfer.json").read_text())
    assert {result["streams"] for result in raw["results"] if "tokens" in result} == {True, False}
    timeline = (tmp_path / "out" / "transfer-timeline.txt").read_text().splitlines()
    times = [[float(cell) for cell in line.split("|")[4:7]] for line in timeline[2:]]
    assert times
    assert all(ready <= sent <= landed for ready, sent, landed in times), times


@slow
@program_run
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_transfer_gives_null_and_a_reason_without_a_gpu(tmp_path: Path) -> None:
    text, last = run("transfer", *TRANSFER, "--sizes", "1", "--gpu", out=tmp_path)
    assert (set(last["ratios"]), measured(last["ratios"])) == (TRANSFER_KEYS, set())
    assert "- not measured: cuda_ipc, Baton: " in text


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
