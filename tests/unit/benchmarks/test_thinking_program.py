"""benchmarks/thinking.py: its prompts, its figures, and the program as a user runs it, on a few prompts."""

import json
import random
import subprocess
import sys

import pytest

from baton.engine.engine import Engine
from baton.engine.model.build import load_model
from baton.tokenizer import OracleTokenizer, load_tokenizer
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import fill
from benchmarks.lib.thinking_figures import (
    ALONE,
    OFF,
    SEQUENTIAL,
    THINKS,
    TOGETHER,
    Agreement,
    Case,
    Measured,
    Prompts,
    Score,
    agreement,
    figures,
    needed_rounds,
)
from benchmarks.lib.thinking_measure import turn
from benchmarks.lib.thinking_plot import plot
from benchmarks.lib.thinking_prompts import LOADS, Load, mixed
from benchmarks.lib.thinking_run import Answer, Took, ask, one_by_one, thinker_of
from benchmarks.lib.thinking_table import tables
from tests.unit.model.checkpoints import VOCAB
from tests.unit.model.thinking import thinking_checkpoint

MAIN, DENSE = Load(30, 1.0), Load(60, 0.0)


def took(*seconds, rounds=1):
    return [Took(each, rounds, []) for each in seconds]


def everything():
    measured = Measured()
    measured.scores = {
        THINKS: {10: Score(200, 198, 200), 60: Score(190, 150, 200)},
        OFF: {10: Score(100, 0, 200), 60: Score(98, 0, 200)},
    }
    measured.agreements = {"fast": Agreement(500, 500, 500), "auto": Agreement(499, None, 500)}
    measured.prompts = {MAIN: Prompts(2, 900, 450, 60), DENSE: Prompts(2, 800, 400, 120)}
    alone = {
        "sequential": took(1.0, 1.2, 1.1, rounds=450),
        "fast": took(2.0, 2.0, 2.2, rounds=62),
        "auto 8": took(0.5, 0.3, 0.55, rounds=90),
        "auto": took(0.5, 0.4, 1.1, rounds=72),
        "off": took(0.1, 0.1, 0.1),
    }
    dense = {mode: took(4.0, rounds=100) for mode in alone}
    measured.runs = {Case(MAIN, ALONE): alone, Case(MAIN, TOGETHER): alone, Case(DENSE, ALONE): dense}
    measured.swept = {8: "auto 8", 16: "auto"}
    return measured


def test_figures_are_medians_of_ratios_within_rounds():
    found = figures(everything())
    assert (found["accuracy_10"], found["accuracy_60"], found["control_accuracy_60"]) == (1.0, 0.95, 0.49)
    assert found["thoughts_right_60"] == 0.75
    assert (found["equal_fast"], found["equal_auto"], found["equal_auto_of"]) == (500, 499, 500)
    assert found["rounds_per_chunk"] == round(72 / 450, 4)
    assert found["rounds_per_chunk_fast"] == round(62 / 450, 4)
    assert found["rounds_per_chunk_dense"] == found["rounds_per_chunk_dense_fast"] == 0.25
    assert found["fast_prefill_speedup"] == 2.0  # of 2, 3 and 1
    assert found["30 flips, with filler, alone: fast to sequential"] == 0.5  # of 0.5, 0.6 and 0.5
    assert found["30 flips, with filler, at once: time of auto to off"] == 5.0
    assert found["sweep: 8"] == round((2.0 * 2.0 * 1.0) ** (1 / 3), 4)  # of 2, 4 and 2; the dense one has 1
    assert found["sweep: 16"] == found["sweep: 8"]


def test_what_was_not_measured_is_null():
    measured = Measured(scores=everything().scores)
    found = figures(measured)
    assert found["rounds_per_chunk"] is found["fast_prefill_speedup"] is None
    assert not [name for name in found if name.startswith("sweep")]


def test_tables_show_all_that_was_measured():
    text = tables(everything())
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert [THINKS, "100.0% (200 of 200)", "95.0% (190 of 200)"] in rows
    assert ["all thoughts right", "99.0%", "75.0%"] in rows
    assert ["fast", "500 of 500", "500 of 500"] in rows
    assert ["auto", "499 of 500", "-"] in rows
    assert ["30 flips, with filler", "450", "225", "30", "0.138", "0.160"] in rows
    speed = ["550.0", "1,000.0", "250.0", "50.0", "0.50 (0.50 to 0.60)", "2.00 (1.00 to 3.00)", "5.00 (4.00 to 11.00)"]
    assert ["30 flips, with filler, alone", *speed] in rows
    at_once = next(row for row in rows if row[0] == "30 flips, with filler, at once" and len(row) > 4)
    assert at_once[1] == "1,100.0"
    assert ["", "8", "16*"] in rows
    assert ["mean", "1.59", "1.59"] in rows


def test_the_program_fails_unless_modes_agree():
    first, other = Answer([1], [(), (5,)]), Answer([1], [(), ()])
    assert agreement([first, other], [first, other], [(2, 2), (1, 1)]).full
    assert agreement([first, other], [first, other], [(2, 2), (2, 1)]) == Agreement(2, 1, 2)
    assert not agreement([first, other], [first, other], [(2, 2), (2, 1)]).full
    assert agreement([first, other], [first, first]) == Agreement(1, None, 2)
    assert not agreement([first, other], [first, first]).full


def test_a_thought_at_the_end_of_a_prompt_needs_no_forward():
    thoughts = [(5,), (), (5, 6), (7,)]
    assert needed_rounds(thoughts, 9, 2) == 4
    assert needed_rounds(thoughts, 8, 2) == 3
    assert needed_rounds([], 1, 2) == needed_rounds([()], 2, 2) == 1


def test_mixed_prompts_follow_their_seed():
    tokenizer = OracleTokenizer()
    first, again, other = (mixed(40, seed, tokenizer, 200) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 40
    assert all(prompt and max(prompt) < 256 for prompt in first)
    assert len({len(prompt) % 2 for prompt in first}) == 2


def test_engines_of_all_modes_answer_alike_and_give_back_their_rows(tmp_path):
    thinking_checkpoint(tmp_path)
    engines = {}
    for mode in ("sequential", "fast", "auto"):
        backend = load_model(tmp_path, block_size=8, thinking=mode)
        engines[mode] = Engine(backend, OracleTokenizer(), total_blocks=100, prefix_cache=False)
    rng = random.Random(2)
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(length)) for length in (27, 37)]
    wanted = one_by_one(engines[SEQUENTIAL], prompts, 3)
    assert wanted.rounds == 7 + 10
    assert ask(engines[SEQUENTIAL], prompts, 3).rounds == 10
    assert [len(answer.tokens) for answer in wanted.answers] == [3, 3]
    size, fast = thinker_of(engines["fast"]).config.chunk_size, one_by_one(engines["fast"], prompts, 3)
    predicted = [needed_rounds(a.thoughts, len(p), size) for a, p in zip(fast.answers, prompts, strict=True)]
    assert fast.rounds == sum(predicted)
    assert fast.answers == wanted.answers == one_by_one(engines["auto"], prompts, 3).answers
    own = thinker_of(engines["auto"]).cheap_rows
    few, many = (turn(engines, f"auto {rows}", prompts, ALONE) for rows in (1, 64))
    assert few.rounds > many.rounds == turn(engines, "fast", prompts, ALONE).rounds
    assert thinker_of(engines["auto"]).cheap_rows == own


def test_pictures_are_drawn_where_matplotlib_is(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no pictures")
    assert plot(everything(), tmp_path / "thinking.svg")
    assert (tmp_path / "thinking.svg").stat().st_size > 1000


def test_the_page_has_a_section_for_it():
    page = (ROOT / "docs" / "thinking.md").read_text()
    assert "<!-- thinking:begin -->\nnew figures\n<!-- thinking:end -->" in fill(page, "new figures", "thinking")


def test_stories_are_in_the_words_of_the_model():
    tokenizer = load_tokenizer(ROOT / "models" / "coin")
    assert len(LOADS) == 6
    assert {load.filler for load in LOADS} == {0.0, 1.0}
    assert tokenizer.decode(tokenizer.encode("A coin's state is heads.")) == "A coin's state is heads."


@pytest.mark.slow
@pytest.mark.timeout(300)  # 64 s on an AMD EPYC with AVX2 alone
def test_a_run_ends_with_all_figures():
    command = [sys.executable, "benchmarks/thinking.py", "--least"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["benchmark"] == "thinking"
    for name in ("accuracy_20", "accuracy_60", "accuracy_100", "control_accuracy_60"):
        assert 0 <= last["ratios"][name] <= 1
    assert 0 < last["ratios"]["rounds_per_chunk_fast"] <= last["ratios"]["rounds_per_chunk"] < 1
    assert last["ratios"]["fast_prefill_speedup"] > 0
    assert last["ratios"]["equal_fast"] == last["ratios"]["equal_auto"] == 4
