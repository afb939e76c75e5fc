"""benchmarks/determinism.py: its loads, its figures, and the program as a user runs it, on a toy model."""

import json
import random
import subprocess
import sys

import pytest

from baton.engine.fixed import FixedShapes
from baton.engine.outcome import Counters
from benchmarks import determinism
from benchmarks.lib.determinism_run import Took
from benchmarks.lib.determinism_table import figures, table
from benchmarks.lib.lengths import read_trace, sampled
from benchmarks.lib.protocol import ROOT

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def took(seconds, ttft_s, recomputed=0):
    return Took(seconds, 100, ttft_s, [1.0, 2.0], [0.01] * 4, Counters(recomputed_tokens=recomputed))


def trace_of(tmp_path, *rows):
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "".join(f"2023-11-16 18:15:46.68,{prompt},{answer}\n" for prompt, answer in rows))
    return path


def test_a_trace_is_cut_to_what_fits(tmp_path):
    rows = (374, 44), (9000, 700), (512, 256), (513, 1), (0, 5)
    assert read_trace(trace_of(tmp_path, *rows)) == ((374, 44), (512, 256), (512, 256), (512, 2))


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", HEADER, HEADER + "t,x,1\n", HEADER + "t,1\n"])
def test_what_is_no_trace(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError):
        read_trace(path)


def test_a_sample_follows_its_seed():
    trace = tuple((n, n) for n in range(1, 100))
    first, again, other = (sampled(trace, 20, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 20
    assert len(sampled(trace[:3], 20, random.Random(1))) == 20


def test_ratios_are_of_one_round_and_so_is_the_slowest_first_token():
    runs = {
        "none": [took(1.0, [0.1, 0.1]), took(2.0, [0.2, 0.2]), took(1.0, [0.1, 0.1])],
        "all": [took(2.0, [0.1, 0.3], 10), took(2.5, [0.2, 0.2], 10), took(4.0, [0.1, 0.2], 10)],
        "few": [took(4.0, [0.1])] * 3,
    }
    found = figures(runs, "azure: ")
    assert found["azure: none"] == found["azure: none, p99 TTFT"] == 1.0
    assert found["azure: all"] == 0.5  # of 0.5, 0.8 and 0.25
    assert found["azure: all, p99 TTFT"] == pytest.approx(1.99, abs=0.001)  # of 2.98, 1.0 and 1.99
    assert "azure: few" in found
    assert "azure: few, p99 TTFT" not in found  # not as many waited
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(runs).splitlines()[2:]]
    assert [line[0] for line in lines] == list(runs)
    assert lines[1][1:5] == ["40", "0.500 (0.250 to 0.800)", "0", "10.0%"]
    assert [line[-1] for line in lines] == ["1.00", "1.99", "-"]


def cells_of(line):
    """Of a line with figures."""
    cells = line.split("|")[1:-1]
    return cells if len(cells) == 9 and cells[3].strip().isdigit() else None


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_ends_with_all_figures(tmp_path):
    rows = [(n, 10 + n % 7) for n in range(20, 60)]
    options = ["--tiny", "--requests", "16", "--rounds", "1", "--answer", "8", "--cache", str(tmp_path)]
    command = [sys.executable, "benchmarks/determinism.py", *options, "--trace", str(trace_of(tmp_path, *rows))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["benchmark"] == "determinism"
    assert min(last["ratios"][f"throughput_{share}"] for share in (10, 50, 100)) > 0
    assert {key for key, value in last["ratios"].items() if value is None} <= {"control_diverged", "ttft_p99_ratio_100"}
    for key in ("fixed shape", "one at a time", "100% deterministic, verify passes, all wait"):
        assert last["figures"][key] > 0
    exact = "No decode step is exact here" not in done.stdout
    for prefix in ("", "azure: "):
        assert (f"{prefix}100% deterministic" in last["figures"]) == exact
        assert last["figures"][f"{prefix}0% deterministic"] == 1.0
        assert last["figures"][f"{prefix}100% deterministic, verify passes"] > 0
    assert last["figures"]["sweep: 100%, 2 x 32"] > 0
    passes = {cells[0].strip(): int(cells[3]) for line in done.stdout.splitlines() if (cells := cells_of(line))}
    assert (
        passes["100% deterministic, verify passes"] > passes["0% deterministic"] == passes.get("100% deterministic", 0)
    )


def test_shares_of_both_modes_as_far_as_steps_are_exact():
    names = [(variant.name, variant.verify) for variant in determinism.shares(FixedShapes(exact_rows=16), 32)]
    both = [(f"{share} deterministic", "auto") for share in ("2%", "10%", "50%", "100%")]
    passes = [(f"{share} deterministic, verify passes", "always") for share in ("10%", "50%", "100%")]
    assert names[1:] == both + passes
    without = determinism.shares(FixedShapes(), 32)
    assert [variant.name for variant in without[1:]] == [name for name, _ in passes]
    assert "2% deterministic" not in {variant.name for variant in determinism.shares(FixedShapes(exact_rows=16), 24)}


@pytest.mark.slow
def test_azure_lengths_need_a_file(tmp_path):
    for options in ([], ["--trace", str(tmp_path / "absent.csv")]):
        command = [sys.executable, "benchmarks/determinism.py", "--lengths", "azure", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "--trace" in done.stderr.splitlines()[-1]
