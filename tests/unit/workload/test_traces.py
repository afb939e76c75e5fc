"""Traces of three formats, and what is wrong with those that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.workload import Arrival, read_trace, summary

ROOT = Path(__file__).resolve().parents[3]
MOONCAKE = '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": %s}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
NINES = "9" * 5000


def published(name: str) -> Path:
    """A trace of others, which is no part of this repository: `../shared/data/traces`."""
    places = [base / "shared/data/traces" / name for base in (ROOT, ROOT.parent)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        pytest.skip(f"{name} is not at {' or '.join(map(str, places))}")
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_mooncake_and_azure_in_any_order_of_columns_and_times(file: Path):
    file.write_text(MOONCAKE % (500, 1000, 20, [7, 8]) + MOONCAKE % (2500, 513, 3, [7, 9]))
    found = read_trace(file)
    assert found.arrivals == (Arrival(0.0, 1000, 20, (7, 8), 512), Arrival(2.0, 513, 3, (7, 9), 512))
    assert (found.timed, found.period_s) == (True, 4.0)
    rows = "3,2023-11-16 18:15:46.5000000,100,x\n4,2023-11-16 18:15:44.0000000,200,x\n"
    file.write_text("GeneratedTokens,TIMESTAMP,ContextTokens,Other\n" + rows)
    assert read_trace(file).arrivals == (Arrival(0.0, 200, 4), Arrival(2.5, 100, 3))


def test_our_own(file: Path):
    file.write_text('{"prompt": "a", "max_tokens": 2}\n\n{"prompt_tokens": 3}\n{"prompt": [1, 2]}\n')
    found = read_trace(file)
    assert found.arrivals == (Arrival(0.0, 0, 2, prompt="a"), Arrival(0.0, 3, 0), Arrival(0.0, 2, 0, prompt=(1, 2)))
    assert not found.timed
    file.write_text('{"prompt_tokens": 3, "timestamp": 1500}\n{"prompt_tokens": 4, "timestamp": 1000.0}\n')
    assert [(one.at_s, one.prompt_tokens) for one in read_trace(file).arrivals] == [(0.0, 4), (0.5, 3)]


def test_lengths_and_blocks_shrink_together_and_times_are_faster(file: Path):
    file.write_text(MOONCAKE % (0, 1536, 32, [1, 2, 3]) + MOONCAKE % (0, 513, 1, [1, 4]))
    scaled = (Arrival(0.0, 96, 2, (1, 2, 3), 32), Arrival(0.0, 32, 1, (1, 4), 32))
    assert read_trace(file, scale=16).arrivals == scaled
    file.write_text("".join(MOONCAKE % (at, 10, 1, []) for at in (0, 1000, 4000)) + "what comes later is not read")
    assert [one.at_s for one in read_trace(file, limit=3).faster(2).arrivals] == [0.0, 0.5, 2.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", ":1: not JSON"),
        ("time,tokens\n1,2\n", ":1: not JSON"),
        ('{"prompt": "a"}\n[]', ":2: must be an object with prompt, prompt_tokens, max_tokens, timestamp and nothing"),
        ('{"promt": "a"}', "and nothing else"),
        ('{"prompt": "a", "prompt_tokens": 3}', "one of prompt and prompt_tokens"),
        ('{"max_tokens": 3}', "one of prompt and prompt_tokens"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens: must be a whole number above 0, got 0"),
        ('{"prompt_tokens": true}', "prompt_tokens: must be a whole number above 0, got True"),
        ('{"prompt": ["a"]}', "prompt: must be text or a list of token ids"),
        ('{"prompt_tokens": 1, "timestamp": -1}', "timestamp: must be milliseconds, finite and not below 0, got -1"),
        ('{"prompt_tokens": 1, "timestamp": 1}\n{"prompt_tokens": 1}', "timestamp: must be in all requests or in none"),
        (MOONCAKE % (0, 10, 1, [0]) + MOONCAKE % (0, 10, 0, [0]), ":2: output_length: .* got 0"),
        (MOONCAKE % (0, 10, 1, [-3]), r":1: hash_ids: .* got \[-3\]"),
        ('{"input_length": 3}', "timestamp: must be milliseconds, finite and not below 0, got None"),
        (AZURE + "2023-11-16 18:15:46,3,4\n2023-11-16 18:15:47,x,4", ":3: ContextTokens: .* above 0, got 'x'"),
        (AZURE + "yesterday,3,4", ":2: TIMESTAMP: must be a date and time, got 'yesterday'"),
        (AZURE + "2023-11-16 18:15:46,3", ":2: GeneratedTokens: .* got None"),
        (AZURE, "has no requests"),
        ("\n", "has no requests"),
    ],
)
def test_what_is_wrong_is_named(file: Path, text: str, says: str):
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_trace(file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{AZURE}2023-11-16 18:15:46,3,{NINES}\n", r":2: GeneratedTokens: .* got '9+\.\.\."),
        (f"{AZURE}2023-11-16 18:15:46,{NINES[:4000]},3\n", r":2: ContextTokens: must be at most 10{7}, got 9+\.\.\."),
        (f"{AZURE}2023-11-16 18:15:46,3,4\n{NINES * 30},3,4\n", ":3: not CSV: field larger than"),
        ('{"prompt_tokens": ' + NINES + "}", ":1: not JSON: Exceeds the limit"),
        ('{"prompt": "a"}\n' + "[" * 100_000, ":2: not JSON: maximum recursion"),
        ('{"prompt_tokens": 1, "timestamp": ' + NINES[:400] + "}", r":1: timestamp: .* finite .* got 9+\.\.\."),
    ],
    ids=["digits of a table", "tokens of a table", "a field", "digits", "nesting", "a timestamp"],
)
def test_what_has_no_bounds_is_named_too(file: Path, text: str, says: str):
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_trace(file)


def test_a_trace_that_is_not_there_or_cannot_be_scaled(file: Path):
    with pytest.raises(ConfigError, match=r"cannot read .*nothing"):
        read_trace(file.with_name("nothing"))
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(file)
    with pytest.raises(ConfigError, match="scale: must be a number above 0, got 0"):
        read_trace(file, scale=0)


@pytest.mark.parametrize(
    ("name", "requests", "span_s", "prompt", "answer", "shared"),
    [
        ("conversation_trace.jsonl", 12031, 3537, 12035, 343, 0.37),
        ("synthetic_trace.jsonl", 3993, 1022, 15325, 149, 0.65),
        ("azure_code.csv", 8819, 3436, 2048, 28, 0),
        ("azure_conv.csv", 19366, 3502, 1155, 211, 0),
    ],
)
def test_published_traces_have_the_published_figures(
    name: str, requests: int, span_s: int, prompt: int, answer: int, shared: float
):
    """What is shared is a little more than of whole blocks alone (36.6 and 64 %): equal last ones count too."""
    found = summary(read_trace(published(name)).arrivals)
    assert (found.requests, round(found.span_s)) == (requests, span_s)
    assert round(found.prompt_tokens / requests) == pytest.approx(prompt, abs=1)
    assert (round(found.max_tokens / requests), round(found.shared, 2)) == (answer, shared)


def test_what_is_shared_stays_shared_when_it_is_scaled():
    path = published("synthetic_trace.jsonl")
    whole, scaled = (summary(read_trace(path, scale=scale, limit=1000).arrivals).shared for scale in (1, 32))
    assert scaled == pytest.approx(whole, abs=0.005)
