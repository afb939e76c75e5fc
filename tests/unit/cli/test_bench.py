"""The requests that `baton bench` sends, the numbers that it computes, and a comparison of two reports."""

import json
import math
import os
import random
import re
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.bench.report import KIND, Generator, report, table
from baton.bench.requests import BenchPlan, Load, served
from baton.bench.sample import NOT_SENT, Goals, Sample, percentile
from baton.cli.app import app
from baton.client import Model
from baton.errors import ConfigError, InvalidRequest, UnknownModel

MODEL = Model("m", max_model_len=64, vocab_size=256)
MOONCAKE = '{"timestamp": %d, "input_length": %d, "output_length": 16, "hash_ids": %s}\n'


def asks(model: Model = MODEL, **options: Any) -> list[Any]:
    lengths = {} if "trace" in options else {"prompt_tokens": "8", "max_tokens": "4"}
    return list(Load.read(BenchPlan(**lengths | options)).requests(model))


def written(folder: Path, text: str) -> Path:
    """Write a trace and return its file."""
    (file := folder / "t.jsonl").write_text(text)
    return file


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """A trace of two requests at half a second's distance, with a common first half."""
    return written(tmp_path, MOONCAKE % (0, 1024, [0, 1]) + MOONCAKE % (500, 1024, [0, 2]))


def test_the_same_seed_gives_the_same_requests():
    first, again, other = (asks(seed=seed, requests=5) for seed in (1, 1, 2))
    assert first == again != other
    assert [(len(ask.prompt), ask.max_tokens, ask.at_s) for ask in first] == [(8, 4, 0.0)] * 5
    assert len({tuple(ask.prompt) for ask in first}) == 5
    assert all(isinstance(token, int) and 0 <= token < 256 for ask in first for token in ask.prompt)


def test_a_trace_is_repeated(tmp_path: Path):
    file = written(tmp_path, '{"prompt": "a", "max_tokens": 2}\n\n{"prompt_tokens": 3}\n{"prompt": [1, 2]}\n')
    assert len(asks(trace=file, max_tokens="4")) == 3
    found = asks(trace=file, max_tokens="4", requests=4)
    lengths = [(ask.prompt if isinstance(ask.prompt, str) else len(ask.prompt), ask.max_tokens) for ask in found]
    assert lengths == [("a", 2), (3, 4), (2, 4), ("a", 2)]
    assert found[2].prompt == (1, 2)


@pytest.mark.parametrize(
    ("options", "count", "last_s"),
    [
        ({}, 100, 0.0),
        ({"rate": 4}, 100, None),
        ({"rate": 4, "arrivals": "constant"}, 100, 25.0),
        ({"rate": 4, "arrivals": "constant", "duration": 3}, 11, 2.75),  # each before 3 s
        ({"rate": 4, "arrivals": "constant", "duration": 3, "requests": 5}, 5, 1.25),
    ],
)
def test_how_many_and_when(options: dict[str, Any], count: int, last_s: float | None):
    found = asks(**options)
    assert len(found) == count
    assert last_s is None or found[-1].at_s == pytest.approx(last_s)
    assert [ask.at_s for ask in found] == sorted(ask.at_s for ask in found)


@pytest.mark.parametrize(("options", "times"), [({}, [0, 0.5]), ({"speed": 2}, [0, 0.25]), ({"rate": 10}, [0, 0.1])])
def test_a_trace_at_its_own_times(mooncake: Path, options: dict[str, Any], times: list[float]):
    found = asks(trace=mooncake, scale=32, arrivals="trace", **options)
    assert [ask.at_s for ask in found] == pytest.approx(times)
    assert [(len(ask.prompt), ask.max_tokens) for ask in found] == [(32, 1)] * 2
    first, second = (ask.prompt for ask in found)
    assert (first[:16] == second[:16], first[16:] == second[16:]) == (True, False)


def test_some_are_deterministic():
    marked = [ask.deterministic for ask in asks(deterministic_share=0.3, requests=1000)]
    assert sum(marked) == pytest.approx(300, abs=60)
    assert not any(ask.deterministic for ask in asks())
    assert all(ask.deterministic for ask in asks(deterministic_share=1))


def test_what_warms_up_has_the_same_lengths_and_other_tokens(mooncake: Path):
    load = Load.read(BenchPlan(trace=mooncake, scale=32, warmup=2, deterministic_share=1))
    warm, real = list(load.warmup(MODEL)), list(load.requests(MODEL))
    assert [(len(ask.prompt), ask.max_tokens) for ask in warm] == [(32, 1)] * 2
    assert not any(ask.deterministic for ask in warm)
    assert len({tuple(ask.prompt[:16]) for ask in (*warm, *real)}) == 3  # only the real ones have a common beginning


def test_lengths_that_the_model_cannot_have_are_refused_at_once_or_cut():
    with pytest.raises(InvalidRequest, match="60 and 5 new ones are more than the 64 tokens of m: 1 of 1 requests"):
        asks(prompt_tokens="60", max_tokens="5", requests=1)
    assert [ask.clipped for ask in asks(prompt_tokens="60", requests=1)] == [False]
    cut = asks(prompt_tokens="60", max_tokens="5", requests=1, clip=True)
    assert [(len(ask.prompt), ask.max_tokens, ask.clipped) for ask in cut] == [(59, 5, True)]
    assert len(asks(Model("m", 0, 0), prompt_tokens="600", requests=1)[0].prompt) == 600  # the model's limit is unknown


@pytest.mark.parametrize("clip", [False, True])
def test_prompts_that_are_written_out_are_checked_and_never_cut(tmp_path: Path, clip: bool):
    file = written(tmp_path, json.dumps({"prompt": [1] * 60, "max_tokens": 5}))
    with pytest.raises(InvalidRequest, match=r"1 of 1 requests .* text or token ids \(1 of these\) are never cut"):
        asks(trace=file, clip=clip)
    file.write_text(json.dumps({"prompt": [1] * 60, "max_tokens": 4}) + '\n{"prompt": "the server knows its length"}')
    assert [ask.clipped for ask in asks(trace=file, clip=clip, max_tokens="4")] == [False, False]


def test_which_token_ids_are_drawn():
    def most(model: Model, **options: Any) -> int:
        return max(max(ask.prompt) for ask in asks(model, requests=200, **options))

    assert 200 < most(Model("m", 64, 0)) < 256
    assert 900 < most(Model("m", 64, 1000)) < 1000
    assert most(Model("m", 64, 1000), vocab_size=10) == 9


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rate": 1, "concurrency": 2}, "--concurrency: for a closed loop only; --max-in-flight limits an open one"),
        ({"arrivals": "trace"}, "--arrivals trace: needs --trace"),
        ({"arrivals": "poisson"}, "--arrivals poisson: needs --rate"),
        ({"speed": 2}, "--speed: needs --arrivals trace"),
        ({"scale": 2}, "--scale: needs --trace"),
        ({"every": 2}, "--every: needs --trace"),
        ({"max_in_flight": 2}, "--max-in-flight: for an open loop only; --concurrency limits a closed one"),
        ({"vocab_size": 2**32 + 1}, "--vocab-size: must be at most 4294967296"),
        ({"duration": math.nan}, "--duration: must be a number, got nan"),
        ({"deterministic_share": math.nan}, "--deterministic-share: must be a number, got nan"),
        ({"promise_ms": (math.nan, 0.0)}, "--promise-ms: must be a number, got nan"),
        ({"rate": 0}, "rate: must be requests per second, a number above 0, got 0"),
        ({"prompt_tokens": "many"}, "prompt_tokens: must be N, fixed:N"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        asks(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_tokens": "8"}, "--prompt-tokens: for random prompts only, all requests of --trace have their own"),
        ({"max_tokens": "8"}, r"--max-tokens: all requests of .*t\.jsonl have their own"),
    ],
)
def test_lengths_that_a_trace_has_itself(mooncake: Path, options: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        asks(trace=mooncake, scale=32, **options)


@pytest.mark.parametrize(
    ("line", "lengths", "taken"), [({}, "5 9", True), ({}, "5", False), ({"max_tokens": 3}, "5 9", False)]
)
def test_only_pairs_have_lengths_for_a_trace_without_them(
    tmp_path: Path, line: dict[str, int], lengths: str, taken: bool
):
    (trace := tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "a", **line}) + "\n")
    (file := tmp_path / "lengths").write_text(lengths + "\n")
    with nullcontext() if taken else pytest.raises(ConfigError, match="--prompt-tokens: for random prompts only"):
        asks(trace=trace, prompt_tokens=f"file:{file}")


@pytest.mark.parametrize(
    ("goals", "says"),
    [
        (Goals(ttft_ms=math.nan), "--ttft-ms: must be finite milliseconds above 0, got nan"),
        (Goals(e2e_ms=-1), "--e2e-ms: must be finite milliseconds above 0, got -1"),
        (Goals(gap_percentile=99), "--gap-percentile: must be from 0 to 100, with --gap-ms, got 99"),
        (Goals(gap_ms=1, gap_percentile=math.nan), "--gap-percentile: must be from 0 to 100, with --gap-ms, got nan"),
    ],
)
def test_goals_that_no_request_can_be_judged_by(goals: Goals, says: str):
    with pytest.raises(ConfigError, match=says):
        goals.check()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--http", "http://127.0.0.1:1", "--target", "127.0.0.1:1"], "--http: cannot be combined with --target"),
        (["--http", "http://127.0.0.1:1", "--timeout", "-3"], "timeout: must be seconds above 0"),
        (["--target", "127.0.0.1:1", "--timeout", "nan"], "timeout: must be seconds above 0"),
        (["--target", "127.0.0.1:1", "--ttft-ms", "nan"], "--ttft-ms: must be finite"),
    ],
)
def test_options_that_no_server_is_asked_with(args: list[str], says: str):
    done = CliRunner().invoke(app, ["bench", *args])
    assert (type(done.exception), says in str(done.exception)) == (ConfigError, True)


def test_times_that_a_trace_does_not_have(tmp_path: Path, mooncake: Path):
    with pytest.raises(ConfigError, match=r"--speed: needs .* without --rate"):
        asks(trace=mooncake, arrivals="trace", rate=1, speed=2)
    file = written(tmp_path, '{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match="has no timestamps"):
        asks(trace=file, arrivals="trace")
    file.write_text(MOONCAKE % (3, 1024, [0, 1]) * 2)
    with pytest.raises(ConfigError, match=r"--rate: all requests of .* have the same timestamp"):
        asks(trace=file, arrivals="trace", rate=1)
    with pytest.raises(ConfigError, match=r"--duration: all requests of .* have the same timestamp"):
        asks(trace=file, arrivals="trace", duration=1)  # it would never end
    assert len(asks(MODEL, trace=file, arrivals="trace", duration=1, requests=2, clip=True)) == 2


def test_which_model_is_meant():
    other = Model("n", 1, 1, aliases=("also n",))
    found = [served([MODEL, other], name) for name in ("", "n", "also n")]
    assert found == [MODEL, other, other]
    with pytest.raises(UnknownModel, match="'x'"):
        served([MODEL], "x")


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
    assert "prefix cache" not in table(found)
    hits = [Sample(start=1.0, end=2.0, times=[1.5], prompt_tokens=8, tokens=1, cached_tokens=6, kv_bytes=2_500_000)]
    shown = table(report([*SAMPLES, *hits], Goals(), {}, OWN))
    assert "18.8% of prompt tokens from a prefix cache, 2.50 MB of KV moved" in shown
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


def test_an_answer_without_messages_counts_except_for_times_of_tokens():
    silent = Sample(start=10.0, end=12.0, prompt_tokens=9, tokens=3, cached_tokens=5, kv_bytes=7)
    found = report([silent], Goals(ttft_ms=1e6, e2e_ms=2500), {}, OWN)
    assert (found["completed"], found["prompt_tokens"], found["completion_tokens"]) == (1, 9, 3)
    assert (found["cached_tokens"], found["kv_bytes"], found["messages"]) == (5, 7, 0)
    assert [found[name] for name in ("ttft_ms", "itl_ms", "tpot_ms")] == [None] * 3
    assert found["e2e_ms"]["max"] == 2000
    assert found["goodput"]["attained"] == {"ttft_ms": 0.0, "e2e_ms": 1.0}


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
