"""benchmarks/engine.py as a user runs it, on toy models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib.protocol import ROOT

KEYS = {
    "decode_vs_bandwidth_1b",
    "prefill_vs_gemm_1b",
    "vs_transformers_min",
    "vs_best_peer_125m_min",
    "vs_best_peer_1b_min",
    "vs_best_peer_15m_min",
    "overhead_share_125m_b16",
}


def run(tmp_path: Path, *options: str) -> tuple[str, dict[str, float | None]]:
    command = [sys.executable, "benchmarks/engine.py", "--quick", "--tiny", "--threads", "1", "--rounds", "1", *options]
    folders = ["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    done = subprocess.run([*command, *folders], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["benchmark"] == "engine"
    return done.stdout, last["ratios"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_quick_run_ends_with_all_figures(tmp_path: Path) -> None:
    text, ratios = run(tmp_path, "--sizes", "L,M", "--points", "P512,B1@128,B16@128", "--peers", "none")
    assert set(ratios) == KEYS
    measured = {key for key, value in ratios.items() if value is not None}
    assert measured == {"decode_vs_bandwidth_1b", "prefill_vs_gemm_1b", "overhead_share_125m_b16"}
    assert all(0 < value < 1 for value in ratios.values() if value is not None)
    assert "### 1b, 1 thread" in text
    assert "the figures mean nothing" in text
    raw = json.loads((tmp_path / "out" / "engine.json").read_text())
    assert {(result["engine"], result["point"]) for result in raw["results"] if result["size"] == "L"} == {
        (engine, point) for engine in ("baton", "limit") for point in ("P512", "B1@128", "B16@128")
    }


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_transformers_is_compared_where_it_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    _, ratios = run(tmp_path, "--sizes", "S", "--points", "B1@128")
    assert ratios["vs_transformers_min"] is not None
    assert ratios["vs_best_peer_15m_min"] is None


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_runs_of_a_size_each_are_put_together(tmp_path: Path) -> None:
    files = []
    for size in ("L", "M"):
        run(tmp_path / size, "--sizes", size, "--points", "P512,B1@128,B16@128", "--peers", "none")
        files.append(str(tmp_path / size / "out" / "engine.json"))
    alone = [json.loads(Path(file).read_text()) for file in files]
    text, ratios = run(tmp_path, "--merge", *files)
    measured = {key: value for one in alone for key, value in one["ratios"].items() if value is not None}
    assert {key: value for key, value in ratios.items() if value is not None} == measured
    assert len(measured) == 3
    assert all(one["facts"]["command"] in text for one in alone)
