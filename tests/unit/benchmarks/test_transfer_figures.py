"""From measured transfers to published figures, tables and pictures."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import fill
from benchmarks.lib.transfer_exposure import prompt_of
from benchmarks.lib.transfer_figures import (
    GOAL_BYTES,
    OURS,
    RAW,
    VERIFIED,
    WHOLE,
    Figures,
    FrameTimes,
    Moved,
    Prompt,
    Way,
    ratios,
    timeline,
)
from benchmarks.lib.transfer_handoffs import best
from benchmarks.lib.transfer_measure import schedule
from benchmarks.lib.transfer_plot import plot, plot_timeline
from benchmarks.lib.transfer_report import ratio_table, sweep_table, tables, timeline_table

SMALL = 884_736
PROMPT = Prompt(
    transport="gloo",
    tokens=512,
    streams=True,
    round=0,
    ttft_s=1.0,
    exposed_s=0.003,
    round_trip_s=0.001,
    transfer_s=0.5,
    step_s=0.1,
    nbytes=1 << 20,
    frames=3,
)


def moved(transport: str, kind: str, nominal: int, *seconds: float) -> list[Moved]:
    return [Moved(Way(transport, kind), nominal, nominal, number, value) for number, value in enumerate(seconds)]


def whole(prompt: Prompt, transfer_s: float) -> Prompt:
    return replace(prompt, streams=False, transfer_s=transfer_s, exposed_s=2 * transfer_s)


def everything() -> Figures:
    transfers = [
        *moved("gloo", RAW, GOAL_BYTES, 0.03, 0.04, 0.05),
        *moved("gloo", OURS, GOAL_BYTES, 0.04, 0.05, 0.05),
        *moved("gloo", VERIFIED, GOAL_BYTES, 0.06, 0.08, 0.1),
        *moved("shm", RAW, GOAL_BYTES, 0.005, 0.006, 0.007),
        *moved("shm", OURS, GOAL_BYTES, 0.01, 0.012, 0.014),
        *moved("gloo", RAW, SMALL, 0.0005, 0.0006),
        *moved("gloo", WHOLE, SMALL, 0.0025, 0.0016),
        *moved("shm", RAW, SMALL, 0.0001),
        *moved("shm", WHOLE, SMALL, 0.0011),
    ]
    long = replace(PROMPT, tokens=2048, exposed_s=0.002)
    over_shm = replace(long, transport="shm", exposed_s=0.0015)
    prompts = [PROMPT, whole(PROMPT, 0.02), long, whole(long, 0.05), over_shm, whole(over_shm, 0.01)]
    return Figures(transfers, prompts)


def test_the_figures_that_others_rely_on() -> None:
    assert ratios(everything()) == {
        "gloo_vs_raw_64mb": 0.8,
        "shm_vs_memcpy_64mb": 0.5,
        "exposed_share_512": 0.1,
        "exposed_share_2048": 0.05,  # the worse one: 0.02 over gloo
        "small_handoff_ms_over_raw": 1.5,
    }


def test_what_was_not_measured_is_null_and_has_a_reason() -> None:
    found = ratios(Figures())
    assert set(found.values()) == {None}
    assert list(found) == list(ratios(everything()))
    text = ratio_table(found, {"shm, Baton": "no memory"})
    assert text.count("null") == len(found)
    assert text.count("was not measured") == len(found)
    assert text.endswith("- not measured: shm, Baton: no memory")


def test_ratios_are_taken_within_rounds() -> None:
    figures = Figures([*moved("gloo", OURS, 8, 1.0, 10.0, 4.0), *moved("gloo", RAW, 8, 0.9, 1.0)])
    assert figures.share(Way("gloo"), 8) == pytest.approx((0.9 + 0.1) / 2)
    assert figures.share(Way("shm"), 8) is None


def test_exposed_shares_of_two_wholes() -> None:
    figures = Figures(prompts=[PROMPT, whole(PROMPT, 0.02), whole(replace(PROMPT, round=1), 0.5)])
    assert figures.exposed("gloo", 512) == pytest.approx(0.002 / 0.02)
    assert figures.exposed("gloo", 512, by_own_transfer=True) == pytest.approx(0.002 / 0.5)
    assert figures.exposed("gloo", 2048) is None
    assert PROMPT.of_first == 0.003
    assert PROMPT.of_second == pytest.approx(0.003 / 1.103)


def test_a_negative_share_stays_one() -> None:
    """The round trip was slower than the commit: nothing was left, and nobody rounds that up."""
    figures = Figures(prompts=[replace(PROMPT, exposed_s=0.0005), whole(PROMPT, 0.01)])
    assert ratios(figures)["exposed_share_512"] == -0.05


def test_the_best_raw_way_is_the_limit() -> None:
    assert best({"ways": {"1 in flight": [3.0, 1.0, 2.0], "4 in flight": [1.5, 1.6, 9.0]}}) == 1.6
    assert best({"seconds": [1.0, 3.0, 2.0]}) == 2.0


def test_every_way_is_first_once() -> None:
    runs = list(schedule(3, ["x"], ["a", "b", "c"]))
    assert [way for _, _, way in runs] == list("abcbcacab")
    assert [number for number, _, _ in runs] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert list(schedule(2, ["x"], [])) == []


def test_a_timeline_puts_both_processes_together() -> None:
    computed = [(10.1, 1, 64), (10.2, 2, 64), (10.3, 1, 96), (10.4, 2, 96)]
    announced = [(10.25, 0, 2, 0, 64), (10.35, 0, 1, 64, 96), (10.45, 1, 2, 64, 96)]
    frames = timeline(10.0, computed, announced, [10.3, 10.4, 10.5])
    assert [round(frame.ready_s, 6) for frame in frames] == [0.2, 0.3, 0.4]
    assert [round(frame.landed_s - frame.sent_s, 6) for frame in frames] == [0.05, 0.05, 0.05]
    assert timeline_table(frames).splitlines()[2].split("|")[2:4] == [" 0..1   ", " 0..63     "]
    with pytest.raises(ValueError, match="shorter"):
        timeline(10.0, computed, announced, [10.3])


def test_tables_show_all_that_was_measured() -> None:
    text = tables(everything())
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "1.68 (53%)" in rows["raw gloo"]
    assert "0.800" in rows["gloo, Baton / raw gloo"]
    assert "0.500" in rows["gloo, Baton, digest of all KV / raw gloo"]
    assert "| gloo      | 0.88 | 2.05        | 0.55    | 1.50          |" in text
    assert "0.30%" in next(line for line in text.splitlines() if line.startswith("| gloo      | 512"))
    assert tables(Figures()) == ""


def test_a_sweep_has_its_own_columns() -> None:
    assert sweep_table([]) == ""
    text = sweep_table([{"transport": "shm", "slots": 4, "GB/s": 1.234}])
    assert text.splitlines()[-1] == "| shm       | 4     | 1.23 |"


def test_an_answer_becomes_a_sample() -> None:
    names = ("ttft_s", "exposed_s", "round_trip_s", "transfer_s", "step_s", "frames")
    answer = {name: getattr(PROMPT, name) for name in names} | {"kv_bytes": PROMPT.nbytes, "announced": []}
    assert prompt_of(("gloo", 512, True, 0), answer) == PROMPT


def test_pictures_are_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: no pictures")
    assert plot(everything(), tmp_path / "speeds.svg")
    assert plot(Figures(), tmp_path / "empty.svg")
    assert plot_timeline([FrameTimes((0, 2), (0, 64), 0.1, 0.2, 0.3)], tmp_path / "timeline.svg")
    assert not plot_timeline([], tmp_path / "none.svg")
    assert {path.name for path in tmp_path.iterdir()} == {"speeds.svg", "empty.svg", "timeline.svg"}


def test_the_page_has_a_section_for_transfers() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    filled = fill(page, "new figures", "transfer")
    assert "<!-- transfer:begin -->\nnew figures\n<!-- transfer:end -->" in filled
    assert fill(filled, "x").count("new figures") == 1
