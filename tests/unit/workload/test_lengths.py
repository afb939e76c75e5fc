"""How long requests are."""

from __future__ import annotations

from pathlib import Path
from random import Random
from statistics import mean, pstdev

import pytest

from baton.errors import ConfigError
from baton.workload import Lengths


def drawn(prompt: str, answer: str | None = None, count: int = 20000) -> tuple[list[int], list[int]]:
    lengths, draw = Lengths.parse(prompt, answer), Random(7)
    pairs = [lengths.draw(draw) for _ in range(count)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def test_numbers_and_ranges():
    assert drawn("128", count=2) == ([128, 128], [64, 64])
    assert drawn("fixed:5", "6", count=2) == ([5, 5], [6, 6])
    prompts, answers = drawn("uniform:3-5", "uniform:7-7")
    assert (set(prompts), set(answers)) == ({3, 4, 5}, {7})
    assert mean(prompts) == pytest.approx(4, abs=0.03)


def test_lognormal_has_the_mean_and_the_variation_of_tokens_and_zipf_its_shares():
    prompts, answers = drawn("lognormal:200,0.5", "lognormal:200,2,300")
    assert mean(prompts) == pytest.approx(200, rel=0.02)
    assert pstdev(prompts) / mean(prompts) == pytest.approx(0.5, rel=0.05)
    assert (min(answers) >= 1, max(answers)) == (True, 300)
    prompts, _ = drawn("zipf:1,4")
    shares = [prompts.count(length) / len(prompts) for length in (1, 2, 3, 4)]
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.02)


def test_pairs_of_a_file_stay_pairs_and_two_files_are_independent(tmp_path: Path):
    pairs, file, other = tmp_path / "pairs", tmp_path / "a", tmp_path / "b"
    pairs.write_text("1,10\n2 20\n\n3, 30\n")
    prompts, answers = drawn(f"file:{pairs}")
    assert set(zip(prompts, answers, strict=True)) == {(1, 10), (2, 20), (3, 30)}
    with pytest.raises(ConfigError, match=r"max_tokens: .* has pairs, which say it already, got '5' too"):
        Lengths.parse(f"file:{pairs}", "5")
    file.write_text("1\n2\n")
    other.write_text("3\n")
    prompts, answers = drawn(f"file:{file}", f"file:{other}")
    assert (set(prompts), set(answers)) == ({1, 2}, {3})
    with pytest.raises(ConfigError, match=r"max_tokens: must have one length on each line, .* got 'file:.*/pairs'"):
        Lengths.parse("5", f"file:{pairs}")


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-1", "x", "normal:3", "uniform:5-3", "uniform:5", "lognormal:1", "zipf:0,3"),
        *("10000001", "zipf:1,1000001", "lognormal:9,1e200", "lognormal:9,1e-4", "lognormal:1e300,1"),
    ],
)
def test_what_is_no_length_is_named(text: str):
    with pytest.raises(ConfigError, match=f"max_tokens: must be N, fixed:N, uniform:LOW-HIGH, .*, got '{text}'"):
        Lengths.parse("1", text)


@pytest.mark.parametrize(
    ("text", "says"),
    [("1 2 3\n", ":1: must be one or two"), ("1\n0\n", ":2: .* got '0'"), ("1\n2 3\n", "on each line")],
)
def test_files_that_are_wrong(tmp_path: Path, text: str, says: str):
    file = tmp_path / "lengths"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        Lengths.parse(f"file:{file}", None)
    with pytest.raises(ConfigError, match="prompt_tokens: cannot read"):
        Lengths.parse(f"file:{file}s", None)
