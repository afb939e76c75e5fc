"""The numbers that `baton bench` computes, and a comparison of two reports."""

import json
import os
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.bench.report import KIND, Generator, report, table
from baton.bench.sample import NOT_SENT, Goals, Sample, percentile
from baton.cli.app import app

OWN = Generator(began=1e9, cpu_share=0.25, lags_s=[0.001, 0.003])


@pytest.mark.parametrize("size", [2, 3, 10, 101])
def test_percentiles_are_those_of_the_statistics_module(size: int, seed: int):
    draw = random.Random(f"{seed}/{size}")
    values = sorted(draw.random() for _ in range(size))
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(values, p) for p in (50, 90, 95, 99)] == pytest.approx([cuts[p - 1] for p in (50, 90, 95, 99)])
    assert (percentile(values, 0), percentile(values, 100), percentile([3.0], 99)) == (values[0], values[-1], 3.0)


SAMPLES = [
    Sample(start=10.0, end=10.5, times=[10.1, 10.2, 10.4], prompt_tokens=8, tokens=4),
    Sample(start=10.0, end=11.0, times=[10.3, 10.9], prompt_tokens=8, tokens=2),
    Sample(start=11.0, end=11.5, times=[11.2], prompt_tokens=8, tokens=1),
    Sample(start=11.0, end=12.0, times=[11.05], error="WorkerLost"),
]


def test_the_numbers_of_a_run():
    found = report(SAMPLES, Goals(ttft_ms=250, itl_ms=200), {"seed": 3}, OWN)
    assert (found["seconds"], found["completed"], found["errors"]) == (2.0, 3, {"WorkerLost": 1})
    assert (found["prompt_tokens"], found["completion_tokens"], found["tokens_per_s"]) == (24, 7, 3.5)
    assert (found["requests_per_s"], found["total_tokens_per_s"]) == (1.5, 15.5)
    assert found["ttft_ms"]["p50"] == pytest.approx(200)  # of 100, 200, 300
    assert (found["ttft_ms"]["mean"], found["ttft_ms"]["max"]) == pytest.approx((200, 300))
    assert found["itl_ms"]["p50"] == pytest.approx(200)  # of 100, 200, 600
    assert found["tpot_ms"]["p50"] == pytest.approx(350)  # of 100 and 600
    assert found["e2e_ms"]["p50"] == pytest.approx(500)  # of 500, 500, 1000
    goodput = {"ttft_ms": 250, "itl_ms": 200, "requests_per_s": 1.0, "share": 0.5}
    assert found["goodput"] == goodput | {"attained": {"ttft_ms": 0.5, "itl_ms": 0.5}}
    assert found["plan"] == {"seed": 3}
    assert "3 requests completed, 1 failed" in table(found)
    assert "1 WorkerLost" in table(found)
    empty = report(SAMPLES[3:], Goals(), {}, OWN)
    assert (empty["completed"], empty["ttft_ms"], empty["itl_ms"], empty["tokens_per_s"]) == (0, None, None, 0.0)


@pytest.mark.parametrize(
    ("goals", "met"),
    [
        (Goals(ttft_ms=150), 1),
        (Goals(itl_ms=150), 2),
        (Goals(gap_ms=250), 2),
        (Goals(gap_ms=150, gap_percentile=0), 2),
        (Goals(gap_ms=150, gap_percentile=51), 1),
        (Goals(e2e_ms=600), 2),
        (Goals(ttft_ms=250, gap_ms=250), 2),
        (Goals(), None),
    ],
)
def test_goodput_asks_only_for_what_is_named(goals: Goals, met: int | None):
    found = report(SAMPLES, goals, {}, OWN)["goodput"]
    assert found is None if met is None else found["share"] == met / 4


def test_latencies_count_from_when_a_request_was_to_be_sent():
    late = Sample(start=10.0, sent=10.4, end=11.0, times=[10.5], prompt_tokens=1, tokens=1)
    never = Sample(start=10.2, end=10.2, error=NOT_SENT)
    found = report([late, never], Goals(ttft_ms=200), {}, OWN)
    assert (found["ttft_ms"]["max"], found["e2e_ms"]["max"]) == pytest.approx((500, 1000))
    assert found["generator"]["late_p99_s"] == pytest.approx(0.4)
    assert (found["goodput"]["share"], found["errors"]) == (0.0, {NOT_SENT: 1})
    assert "1 NotSent (more than --max-in-flight would have been in flight)" in table(found)


@pytest.mark.parametrize(
    ("cpu_share", "lags_s", "busy"),
    [(0.25, [0.001, 0.003], False), (0.9, [0.001], True), (0.1, [0.03], True), (0.1, [], False)],
)
def test_a_busy_load_generator_is_seen(cpu_share: float, lags_s: list[float], busy: bool):
    last = table(report(SAMPLES, Goals(), {}, Generator(1e9, cpu_share, lags_s))).splitlines()[-1]
    assert last.startswith(f"load generator: {cpu_share:.0%} of a core")
    assert last.endswith(": TOO BUSY, latencies may be its own") == busy


# comparisons


def compared(*args: object) -> Any:
    return CliRunner().invoke(app, ["bench", "compare", *map(str, args)])


@pytest.fixture
def reports(tmp_path: Path) -> list[Path]:
    plans: list[dict[str, Any]] = [{"seed": 1, "rate": 2.0, "api": "grpc"}, {"seed": 1, "rate": 4.0}]
    runs: list[Any] = [(SAMPLES, Goals(ttft_ms=250)), (SAMPLES[:2], Goals(ttft_ms=310))]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, plan, (samples, goals) in zip(files, plans, runs, strict=True):
        file.write_text(json.dumps(report(samples, goals, plan, OWN)))
    return files


def test_two_reports_beside_each_other(reports: list[Path]):
    found = json.loads(compared(*reports, "--json").stdout)
    assert found["differs"] == {"rate": [2.0, 4.0], "api": ["grpc", None], "goal ttft_ms": [250, 310]}
    figures = {
        "end to end max, ms": [1000, 1000, 1],
        "requests/s": [1.5, 2.0, 4 / 3],
        "failed": [1, 0, 0],
        "goodput, requests/s": [1.0, 2.0, 2.0],
    }
    for name, values in figures.items():
        assert found["figures"][name] == pytest.approx(values)
    assert "  rate: 2.0 in A, 4.0 in B" in compared(*reports).stdout
    assert "same options" in compared(reports[0], reports[0]).stdout
    assert ["failed", "0", "1", "-"] in [line.split() for line in compared(*reversed(reports)).stdout.splitlines()]


def test_goals_that_differ_in_their_percentile_alone(reports: list[Path]):
    for file, tail in zip(reports, (99, 50), strict=True):
        file.write_text(json.dumps(report(SAMPLES, Goals(gap_ms=200, gap_percentile=tail), {}, OWN)))
    assert json.loads(compared(*reports, "--json").stdout)["differs"] == {"goal gap_percentile": [99, 50]}


NO_REPORTS = ["", "[]", '{"kind": "another"}', f'{{"kind": "{KIND}"}}', "{", "not there"]
NOT_WHOLE: list[dict[str, Any]] = [{"generator": {}}, {"plan": 3}, {"errors": []}, {"requests_per_s": "many"}]
WHOLE = report(SAMPLES, Goals(), {}, OWN)


@pytest.mark.parametrize("text", [*NO_REPORTS, *(json.dumps(WHOLE | change) for change in NOT_WHOLE)], ids=repr)
def test_what_is_no_report_or_not_whole_cannot_be_compared(reports: list[Path], text: str):
    reports[1].write_text(text)
    if text == "not there":
        reports[1].unlink()
    done = compared(*reports)
    assert (done.exit_code, "b.json" in re.sub(r"[\s│]", "", done.stderr)) == (2, True)  # a box breaks long names


# files


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--plot", "a.txt"], "must end in one of .png"),
        (["--out", "no/a"], "no folder no"),
        (["--out", "."], "is a folder"),
    ],
)
def test_files_that_cannot_be_are_named_before_anything_is_sent(args: list[str], says: str):
    done = CliRunner().invoke(app, ["bench", "--target", "127.0.0.1:1", *args])
    assert (done.exit_code, says in done.stderr) == (2, True)


@pytest.mark.parametrize("option", ["--out", "--plot"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_without_permission_is_left_as_it_is(tmp_path: Path, monkeypatch, option: str, is_there: bool):
    monkeypatch.chdir(tmp_path)
    file = Path("a.svg")
    if is_there:
        file.write_text("before")
    refused = file if is_there else Path()
    access = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (refused, os.W_OK) and access(path, mode))
    done = CliRunner().invoke(app, ["bench", "--target", "127.0.0.1:1", option, "a.svg"])
    assert (done.exit_code, f"{option}: no permission to write a.svg" in done.stderr) == (2, True)
    assert not is_there or file.read_text() == "before"
