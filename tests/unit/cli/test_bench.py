"""What `baton bench` sends, and the numbers that it makes of what it has seen."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from baton.cli.bench_load import Lengths, asks, served, trace
from baton.cli.bench_report import Goals, Sample, percentile, report, table
from baton.client import Model
from baton.errors import ConfigError, InvalidRequest, UnknownModel

MODEL = Model("m", max_model_len=64, vocab_size=256)
LENGTHS = Lengths(prompt_tokens=8, max_tokens=4)


def test_the_same_seed_gives_the_same_requests():
    first, again, other = (list(asks([{}], LENGTHS, MODEL, seed, 5)) for seed in (1, 1, 2))
    assert first == again != other
    assert [(len(ask.prompt), ask.max_tokens) for ask in first] == [(8, 4)] * 5
    assert len({tuple(ask.prompt) for ask in first}) == 5
    assert all(isinstance(token, int) and 0 <= token < 256 for ask in first for token in ask.prompt)


def test_a_trace_is_repeated(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 2}\n\n{"prompt_tokens": 3}\n{"prompt": [1, 2]}\n')
    found = list(itertools.islice(asks(trace(file), LENGTHS, MODEL, 0, None), 4))
    assert [(ask.prompt if isinstance(ask.prompt, str) else len(ask.prompt), ask.max_tokens) for ask in found] == [
        ("a", 2),
        (3, 4),
        (2, 4),
        ("a", 2),
    ]
    assert found[2].prompt == [1, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", r":1: not JSON"),
        ('{"prompt": "a"}\n[]', r":2: must be an object"),
        ('{"promt": "a"}', "prompt, prompt_tokens, max_tokens and nothing else"),
        ('{"prompt": "a", "prompt_tokens": 3}', "one of prompt and prompt_tokens"),
        ('{"max_tokens": 3}', "one of prompt and prompt_tokens"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens: must be a whole number above 0, got 0"),
        ('{"prompt_tokens": true}', "prompt_tokens: must be a whole number"),
        ('{"prompt": ["a"]}', "prompt: must be text or a list of token ids"),
        ("\n", "has no requests"),
    ],
)
def test_a_trace_that_is_wrong_is_named(tmp_path, text, says):
    file = tmp_path / "t.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        trace(file)


def test_a_trace_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nothing"):
        trace(tmp_path / "nothing")


def test_lengths_that_the_model_cannot_have_are_refused_at_once():
    with pytest.raises(InvalidRequest, match="60 and 5 new ones are more than the 64 tokens of m"):
        asks([{}], Lengths(60, 5), MODEL, 0, 1)
    assert len(list(asks([{}], Lengths(60, 4), MODEL, 0, 1))) == 1


def test_which_model_is_meant():
    other = Model("n", 1, 1)
    assert (served([MODEL, other], ""), served([MODEL, other], "n")) == (MODEL, other)
    with pytest.raises(UnknownModel, match="'x'"):
        served([MODEL], "x")


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
    found = report(SAMPLES, Goals(ttft_ms=250, itl_ms=200), {"seed": 3})
    assert (found["seconds"], found["completed"], found["errors"]) == (2.0, 3, {"WorkerLost": 1})
    assert (found["prompt_tokens"], found["completion_tokens"], found["tokens_per_s"]) == (24, 7, 3.5)
    assert (found["requests_per_s"], found["total_tokens_per_s"]) == (1.5, 15.5)
    assert found["ttft_ms"]["p50"] == pytest.approx(200)  # of 100, 200, 300
    assert (found["ttft_ms"]["mean"], found["ttft_ms"]["max"]) == pytest.approx((200, 300))
    assert found["itl_ms"]["p50"] == pytest.approx(200)  # of 100, 200, 600
    assert found["tpot_ms"]["p50"] == pytest.approx(350)  # of 100 and 600
    assert found["e2e_ms"]["p50"] == pytest.approx(500)  # of 500, 500, 1000
    assert found["goodput"] == {"ttft_ms": 250, "itl_ms": 200, "requests_per_s": 1.0, "share": 0.5}
    assert found["plan"] == {"seed": 3}


@pytest.mark.parametrize(("goals", "met"), [(Goals(ttft_ms=150), 1), (Goals(itl_ms=150), 2), (Goals(), None)])
def test_goodput_asks_only_for_what_is_named(goals: Goals, met: int | None):
    found = report(SAMPLES, goals, {})["goodput"]
    assert found is None if met is None else found["share"] == met / 4


def test_a_run_without_an_answer_has_no_distributions():
    found = report(SAMPLES[3:], Goals(), {})
    assert (found["completed"], found["ttft_ms"], found["itl_ms"], found["tokens_per_s"]) == (0, None, None, 0.0)
    assert "0 requests completed, 1 failed" in table(found)
    assert "1 WorkerLost" in table(found)


def test_the_table():
    text = table(report(SAMPLES, Goals(ttft_ms=250), {}))
    assert "3 requests completed, 1 failed, in 2.00 s" in text
    assert "goodput 1.00 requests/s, 50.0% of all, with TTFT <= 250 ms" in text
    assert [line.split()[0] for line in text.splitlines() if line[:4] in {"TTFT", "ITL ", "TPOT"}] == [
        "TTFT",
        "ITL",
        "TPOT",
    ]
