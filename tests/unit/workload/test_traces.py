"""Loads: arrival times, lengths and shared prefixes; traces of three formats, and their errors."""

from itertools import islice, pairwise
from pathlib import Path
from random import Random
from statistics import mean, pstdev

import pytest

from baton.bench.lengths import Lengths
from baton.bench.traces import Arrival, Trace, cached_share, read_trace
from baton.bench.workload import Prompts, Times, arrivals
from baton.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
MOONCAKE = '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": %s}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
NINES = "9" * 5000


def published(name: str) -> Path:
    """Return a third-party trace outside this repository: `../shared/data/traces`."""
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


def test_conversations_are_left_out_as_a_whole(file: Path):
    rows = [[0, 1], [0, 2, 3], [0], [0, 1, 4], [0, 5], [0], [0, 2]]
    file.write_text("".join(MOONCAKE % (at, 2000, 1, blocks) for at, blocks in enumerate(rows)))
    kept = [list(one.blocks) for one in read_trace(file, every=2).arrivals]
    assert kept == [[0, 1], [0], [0, 1, 4], [0]], "conversations 0, 2 and 4: short prompts are their own"
    assert len(read_trace(file, every=2, limit=3).arrivals) == 3
    with pytest.raises(ConfigError, match="every: must be a whole number above 0, got 0"):
        read_trace(file, every=0)


AZURE_TIME = f"{AZURE}2023-11-16 18:15:46"
BOUNDLESS = {
    "digits of a table": (f"{AZURE_TIME},3,{NINES}\n", r":2: GeneratedTokens: .* got '9+\.\.\."),
    "tokens of a table": (
        f"{AZURE_TIME},{NINES[:4000]},3\n",
        r":2: ContextTokens: must be at most 10{7}, got 9+\.\.\.",
    ),
    "a field": (f"{AZURE_TIME},3,4\n{NINES * 30},3,4\n", ":3: not CSV: field larger than"),
    "digits": ('{"prompt_tokens": ' + NINES + "}", ":1: not JSON: Exceeds the limit"),
    "nesting": ('{"prompt": "a"}\n' + "[" * 100_000, ":2: not JSON: maximum recursion"),
    "a timestamp": (f'{{"prompt_tokens": 1, "timestamp": {NINES[:400]}}}', r":1: timestamp: .* finite .* got 9+\.\.\."),
}


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
        ('{"prompt": [5, -1]}', ":1: prompt: token ids must be from 0 to 4294967295, got -1"),
        ('{"prompt": "a"}\n{"prompt": [4294967296]}', ":2: prompt: token ids must be from 0 .* got 4294967296"),
        (r'{"prompt": "a\ud800"}', r":1: prompt: must have no lone surrogate, got 'a\\ud800'"),
        ('{"prompt_tokens": 1, "timestamp": -1}', "timestamp: must be finite milliseconds of at least 0, got -1"),
        ('{"prompt_tokens": 1, "timestamp": 1}\n{"prompt_tokens": 1}', "timestamp: must be in all requests or in none"),
        (MOONCAKE % (0, 10, 1, [0]) + MOONCAKE % (0, 10, 0, [0]), ":2: output_length: .* got 0"),
        (MOONCAKE % (0, 10, 1, [-3]), r":1: hash_ids: .* got \[-3\]"),
        ('{"input_length": 3}', "timestamp: must be finite milliseconds of at least 0, got None"),
        (AZURE_TIME + ",3,4\n2023-11-16 18:15:47,x,4", ":3: ContextTokens: .* above 0, got 'x'"),
        (AZURE + "yesterday,3,4", ":2: TIMESTAMP: must be a date and time, got 'yesterday'"),
        (AZURE_TIME + ",3", ":2: GeneratedTokens: .* got None"),
        (AZURE, "has no requests"),
        ("\n", "has no requests"),
        *(pytest.param(text, says, id=name) for name, (text, says) in BOUNDLESS.items()),
    ],
)
def test_what_is_wrong_is_named(file: Path, text: str, says: str):
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
def test_published_traces_have_the_published_figures(name, requests, span_s, prompt, answer, shared):
    """The shared part exceeds that of whole blocks (36.6 and 64 %), because equal last ones count too."""
    load = read_trace(published(name)).arrivals
    assert (len(load), round(load[-1].at_s - load[0].at_s)) == (requests, span_s)
    assert round(sum(one.prompt_tokens for one in load) / requests) == pytest.approx(prompt, abs=1)
    assert round(sum(one.max_tokens for one in load) / requests) == answer
    assert round(cached_share(load), 2) == shared


LENGTHS = Lengths.parse("uniform:1-9", "4")
NO_TIMES = ("", "gamma", "gamma:0", "gamma:x", "gamma:1e-200", "gamma:1001", "gamma:inf", "poisson:2", "uniform")
TRACE = Trace(Path("t"), (Arrival(0.0, 8, 2, (0, 1), 4), Arrival(1.0, 6, 0, (0, 2), 4), Arrival(1.0, 0, 3)), timed=True)


@pytest.mark.parametrize(("text", "cv"), [("poisson", 1), ("constant", 0), ("gamma:0.5", 0.5), ("gamma:3", 3)])
def test_times_have_the_rate_and_the_burstiness(text: str, cv: float):
    times = list(islice(Times.parse(text, 5).seconds(seed=1), 40000))
    gaps = [later - earlier for earlier, later in pairwise([0.0, *times])]
    assert mean(gaps) == pytest.approx(0.2, rel=0.04)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.04, abs=1e-6)


@pytest.mark.parametrize("text", NO_TIMES)
def test_times_that_are_none(text: str):
    with pytest.raises(ConfigError, match="arrivals: must be poisson, constant, or gamma:CV"):
        Times.parse(text, 1)
    with pytest.raises(ConfigError, match="rate: must be requests per second, a number above 0, got 0"):
        Times.parse("poisson", 0)


def test_the_same_seed_gives_the_same_load():
    times = Times(10)
    first, again, other = (list(islice(arrivals(LENGTHS, seed, times=times), 50)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(one.at_s != two.at_s for one, two in zip(first, other, strict=True))
    assert all(1 <= one.prompt_tokens <= 9 and one.max_tokens == 4 for one in first)


def test_a_trace_goes_on_with_new_beginnings():
    found = list(islice(arrivals(LENGTHS, 0, trace=TRACE), 6))
    assert [one.at_s for one in found] == [0.0, 1.0, 1.0, 1.5, 2.5, 2.5]
    assert [one.blocks for one in found] == [(0, 1), (0, 2), (), (3, 4), (3, 5), ()]
    assert [one.max_tokens for one in found] == [2, 4, 3] * 2
    assert found[2].prompt_tokens >= 1
    assert [one.at_s for one in islice(arrivals(LENGTHS, 0, trace=TRACE, times=Times(2, 0)), 3)] == [0.5, 1.0, 1.5]


def test_the_share_of_prompts_that_a_cache_hits():
    assert cached_share([]) == 0
    assert cached_share(TRACE.arrivals) == pytest.approx(4 / 14)
    again = [TRACE.arrivals[1], TRACE.arrivals[1]]
    assert cached_share(again) == pytest.approx(0.5)  # its second block is cut short, and found up to its end


def test_equal_blocks_are_equal_tokens_and_nothing_else_is():
    prompts = Prompts(vocab_size=1000, seed=3)
    first, second = (prompts.tokens(one, number) for number, one in enumerate(TRACE.arrivals[:2]))
    assert (len(first), len(second)) == (8, 6)
    assert first[:4] == second[:4]
    assert first[4:6] != second[4:]
    assert prompts.tokens(Arrival(0.0, 8, 2, (0, 2), 4), 5)[:6] == second
    assert prompts.tokens(TRACE.arrivals[0], 9) == first
    own = Arrival(0.0, 20, 1)
    assert prompts.tokens(own, 0) == prompts.tokens(own, 0) != prompts.tokens(own, 1)
    assert prompts.tokens(own, 0) != Prompts(1000, 4).tokens(own, 0)
    behind = Arrival(0.0, 10, 1, (0, 1), 4)
    assert prompts.tokens(behind, 0)[:8] == first
    assert prompts.tokens(behind, 0)[8:] != prompts.tokens(behind, 1)[8:]
    assert all(0 <= token < 1000 for token in first)


@pytest.mark.parametrize(("most", "lengths"), [(20, (10, 4)), (14, (10, 4)), (9, (5, 4)), (4, (1, 3)), (2, (1, 1))])
def test_within(most: int, lengths: tuple[int, int]):
    one = Arrival(0.0, 10, 4)
    cut = one.within(most)
    assert (cut.prompt_tokens, cut.max_tokens) == lengths
    assert (cut is one) == (lengths == (10, 4))
    written = Arrival(0.0, 10, 4, prompt=(1,) * 10)
    assert written.within(2) is written


def drawn(prompt: str, answer: str | None = None, count: int = 20000) -> tuple[list[int], list[int]]:
    lengths, draw = Lengths.parse(prompt, answer), Random(7)
    pairs = [lengths.draw(draw) for _ in range(count)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def test_lengths_have_the_distribution_that_is_asked_for():
    assert drawn("128", count=2) == ([128, 128], [64, 64])
    assert drawn("fixed:5", "6", count=2) == ([5, 5], [6, 6])
    prompts, answers = drawn("uniform:3-5", "uniform:7-7")
    assert (set(prompts), set(answers)) == ({3, 4, 5}, {7})
    assert mean(prompts) == pytest.approx(4, abs=0.03)
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
    with pytest.raises(ConfigError, match=r"max_tokens: .* has pairs, got '5'"):
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
