"""The requests that `baton bench` sends."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.bench.requests import BenchPlan, Load, served
from baton.client import Model
from baton.errors import ConfigError, InvalidRequest, UnknownModel

MODEL = Model("m", max_model_len=64, vocab_size=256)
MOONCAKE = '{"timestamp": %d, "input_length": %d, "output_length": 16, "hash_ids": %s}\n'


def asks(model: Model = MODEL, **options: Any) -> list[Any]:
    return list(Load.read(BenchPlan(**{"prompt_tokens": "8", "max_tokens": "4", **options})).requests(model))


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
    assert len(asks(trace=file)) == 3
    found = asks(trace=file, requests=4)
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
    assert [ask.clipped for ask in asks(trace=file, clip=clip)] == [False, False]


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
        ({"rate": 0}, "rate: must be requests per second, a number above 0, got 0"),
        ({"prompt_tokens": "many"}, "prompt_tokens: must be N, fixed:N"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        asks(**options)


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
    other = Model("n", 1, 1)
    assert (served([MODEL, other], ""), served([MODEL, other], "n")) == (MODEL, other)
    with pytest.raises(UnknownModel, match="'x'"):
        served([MODEL], "x")
