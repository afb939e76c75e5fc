"""The arithmetic from benchmarks' measurements to the published figures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.engine.step_result import Counters
from benchmarks import local_prefill, overload
from benchmarks.lib import thinking_figures, transfer_figures
from benchmarks.lib.determinism_run import Took
from benchmarks.lib.determinism_table import figures
from benchmarks.lib.points import Point
from benchmarks.lib.ratios import BATON, LIMIT, Measured, Sample, Setting, ratios
from benchmarks.lib.shapes import SIZES, Shape
from benchmarks.lib.thinking_figures import ALONE, OFF, THINKS, Agreement, Case, Prompts, Score
from benchmarks.lib.thinking_prompts import Load
from benchmarks.lib.thinking_run import Took as Thought
from benchmarks.lib.transfer_figures import GOAL_BYTES, OURS, RAW, WHOLE, Figures, Moved, Prompt, Way

L1, L2, M1, M2 = Setting("L", 1), Setting("L", 2), Setting("M", 1), Setting("M", 2)
B1, P512, B16 = Point(128, 1), Point(512), Point(128, 16)


def samples(setting: Setting, point: Point, **seconds: list[float]) -> list[Sample]:
    return [
        Sample(setting, engine.replace("_", "-"), point, number, value)
        for engine, values in seconds.items()
        for number, value in enumerate(values)
    ]


def test_shape_counts_what_a_step_reads() -> None:
    shape = Shape(hidden=8, ffn=16, layers=2, heads=4, kv_heads=2, vocab=100)
    assert shape.layer_params == 2 * (8 * 16 + 8 * 8 + 8 * 32 + 16 * 8)
    assert shape.read_params == shape.layer_params + 800
    assert shape.decode_bytes(4, 5, 2) == 2 * shape.read_params + 2 * 2 * 2 * 2 * 2 * 20
    assert shape.prefill_flops(3) == 2 * shape.layer_params * 3 + 4 * 2 * 8 * (1 + 2 + 3) + 2 * 800
    for size, millions in (("S", 15), ("M", 100), ("L", 1034)):
        assert SIZES[size].read_params / 1e6 == pytest.approx(millions, rel=0.03)


def test_engines_are_compared_within_rounds() -> None:
    busy = samples(L1, B1, baton=[1.0, 10.0, 2.0], peer=[2.0, 20.0], limit=[0.9])
    measured = Measured(busy + samples(L2, B1, baton=[1.0], limit=[0.8]) + samples(L1, P512, baton=[2.0], limit=[1.5]))
    assert measured.speed(L1, B1, "peer") == 2.0
    assert measured.speed(L1, B1, "absent") is measured.speed(L2, B1, "peer") is None
    assert measured.peers == ["peer"], "neither Baton nor the limit"
    found = ratios(measured, with_peers=False)
    assert (found["decode_vs_bandwidth_1b"], found["prefill_vs_gemm_1b"]) == (0.8, 0.75)


def test_the_best_peer_is_chosen_at_each_point() -> None:
    measured = Measured(
        samples(M1, B1, baton=[1.0], vllm_cpu=[1.2], openvino_genai=[3.0], transformers=[4.0])
        + samples(M2, B1, baton=[1.0], vllm_cpu=[3.0], openvino_genai=[1.1], transformers=[1.5])
        + samples(L1, B1, baton=[1.0], vllm_cpu=[0.7])
    )
    found = ratios(measured, with_peers=True)
    assert (found["vs_best_peer_125m_min"], found["vs_best_peer_1b_min"]) == (1.1, 0.7)
    assert (found["vs_best_peer_15m_min"], found["vs_transformers_min"]) == (None, 1.5)
    alone = ratios(Measured(samples(M1, B1, baton=[1.0], transformers=[2.0])), with_peers=True)
    assert (alone["vs_best_peer_125m_min"], alone["vs_transformers_min"]) == (None, 2.0)


def test_overhead_is_what_the_forward_leaves() -> None:
    shares = [(M1, B16, 0.97), (M1, B16, 0.96), (M1, B16, 0.5), (M2, B16, 0.94), (M1, B1, 0.1), (L1, B16, 0.1)]
    measured = Measured(Sample(s, BATON, p, i, 1.0, share) for i, (s, p, share) in enumerate(shares))
    assert measured.overhead(M1, B16) == pytest.approx(0.04)
    assert ratios(measured, with_peers=False)["overhead_share_125m_b16"] == pytest.approx(0.06)
    assert Measured(samples(M1, P512, **{BATON: [1.0], LIMIT: [1.0]})).overhead(M1, P512) is None


PROMPT = Prompt("gloo", 512, True, 0, 1.0, 0.003, 0.001, 0.5, 0.1, 1 << 20, 3)


def moved(transport: str, kind: str, nominal: int, *seconds: float) -> list[Moved]:
    return [Moved(Way(transport, kind), nominal, nominal, number, value) for number, value in enumerate(seconds)]


def whole(prompt: Prompt, transfer_s: float) -> Prompt:
    return replace(prompt, streams=False, transfer_s=transfer_s, exposed_s=2 * transfer_s)


def test_transfers_are_compared_with_the_raw_way_of_their_round() -> None:
    transfers = [
        *moved("gloo", OURS, GOAL_BYTES, 0.04, 0.5, 0.05, 9.0),
        *moved("gloo", RAW, GOAL_BYTES, 0.03, 0.4, 0.05),
        *moved("shm", OURS, GOAL_BYTES, 0.01),
        *moved("shm", RAW, GOAL_BYTES, 0.005),
        *moved("gloo", WHOLE, 884_736, 0.0025, 0.0016),
        *moved("gloo", RAW, 884_736, 0.0005, 0.0006),
    ]
    long = replace(PROMPT, tokens=2048, exposed_s=0.002, transport="shm")
    prompts = [PROMPT, whole(PROMPT, 0.02), whole(replace(PROMPT, round=1), 0.5), long, whole(long, 0.05)]
    assert transfer_figures.ratios(Figures(transfers, prompts)) == {
        "gloo_vs_raw_64mb": 0.8,
        "shm_vs_memcpy_64mb": 0.5,
        "exposed_share_512": 0.1,
        "exposed_share_2048": 0.02,
        "small_handoff_ms_over_raw": 1.5,
    }
    assert set(transfer_figures.ratios(Figures()).values()) == {None}
    negative = Figures(prompts=[replace(PROMPT, exposed_s=0.0005), whole(PROMPT, 0.01)])
    assert transfer_figures.ratios(negative)["exposed_share_512"] == -0.05, "not rounded up: nothing was left to send"
    assert PROMPT.of_second == pytest.approx(0.003 / 1.103)


def thought(*seconds: float, rounds: int = 1) -> list[Thought]:
    return [Thought(each, rounds, []) for each in seconds]


def test_figures_of_thinking_are_medians_of_ratios_within_rounds() -> None:
    main = Load(30, 1.0)
    measured = thinking_figures.Measured()
    measured.scores = {THINKS: {60: Score(190, 150, 200)}, OFF: {60: Score(98, 0, 200)}}
    unmeasured = thinking_figures.figures(measured)
    assert unmeasured["rounds_per_chunk"] is unmeasured["fast_prefill_speedup"] is None
    measured.agreements = {"auto": Agreement(499, None, 500)}
    measured.prompts = {main: Prompts(2, 900, 450, 60)}
    measured.runs[Case(main, ALONE)] = {
        "sequential": thought(1.0, 1.2, 1.1, rounds=450),
        "fast": thought(2.0, 2.0, 2.2, rounds=62),
        "auto": thought(0.5, 0.4, 1.1, rounds=72),
        "off": thought(0.1, 0.1, 0.1),
    }
    found = thinking_figures.figures(measured)
    assert (found["accuracy_60"], found["thoughts_right_60"], found["control_accuracy_60"]) == (0.95, 0.75, 0.49)
    assert (found["equal_auto"], found["equal_auto_of"]) == (499, 500)
    assert (found["rounds_per_chunk"], found["rounds_per_chunk_fast"]) == (round(72 / 450, 4), round(62 / 450, 4))
    assert found["fast_prefill_speedup"] == 2.0  # of 2, 3 and 1
    assert found["30 flips, with filler, alone: fast to sequential"] == 0.5  # of 0.5, 0.6 and 0.5
    assert found["30 flips, with filler, alone: time of auto to off"] == 5.0


def took(seconds: float, ttft_s: list[float], recomputed: int = 0) -> Took:
    return Took(seconds, 100, ttft_s, [1.0, 2.0], [0.01] * 4, Counters(recomputed_tokens=recomputed))


def test_determinism_is_compared_round_by_round() -> None:
    runs = {
        "none": [took(1.0, [0.1, 0.1]), took(2.0, [0.2, 0.2]), took(1.0, [0.1, 0.1])],
        "all": [took(2.0, [0.1, 0.3], 10), took(2.5, [0.2, 0.2], 10), took(4.0, [0.1, 0.2], 10)],
        "few": [took(4.0, [0.1])] * 3,
    }
    found = figures(runs, "azure: ")
    assert found["azure: none"] == found["azure: none, p99 TTFT"] == 1.0
    assert found["azure: all"] == 0.5  # of 0.5, 0.8 and 0.25
    assert found["azure: all, p99 TTFT"] == pytest.approx(1.99, abs=0.001)  # of 2.98, 1.0 and 1.99
    assert "azure: few, p99 TTFT" not in found  # too few requests waited


def load(**fields: object) -> overload.Phase:
    given = {"offered": 100, "finished": 100, "lasted_s": 10.0, "ttft": [0.1] * 100, **fields}
    return overload.Phase(**given)  # type: ignore[arg-type]


def test_ratios_of_an_overload_are_to_one_time_and_null_where_nothing_was_seen() -> None:
    over = load(offered=500, finished=90, ttft=[0.2] * 89 + [1.0], refused=[0.004] * 410, delays=[0.5] * 409 + [0.0])
    over.rss = [50, 100, 100, 110]
    assert overload.ratios({"capacity": load(), "1x": load(ttft=[0.1] * 99 + [0.8]), "5x": over}) == pytest.approx(
        {
            "ttft_ratio_p50": 2.0,
            "ttft_ratio_p99": 1.25,
            "goodput_ratio": 0.9,
            "refused_share": 0.82,
            "refusal_ms_p50": 4.0,
            "refusals_without_delay": 1.0,
            "rss_growth": 1.1,
        }
    )
    found = overload.ratios({"capacity": load(), "1x": load(ttft=[]), "5x": load(refused=[])})
    unseen = {"ttft_ratio_p50", "ttft_ratio_p99", "refusal_ms_p50", "rss_growth"}
    assert {name for name, value in found.items() if value is None} == unseen


def test_an_interval_leaves_out_as_many_rounds_as_it_may() -> None:
    """The true median is outside only if no more than the omitted rounds of one end are on its side."""

    def risk(count: int, left_out: int) -> float:
        return 2 * sum(math.comb(count, k) for k in range(left_out + 1)) / 2**count

    for count in range(1, 40):
        outside = local_prefill.sign_interval(count)
        assert 2 * outside < count
        assert outside == 0 or risk(count, outside) <= 0.05
        assert risk(count, outside + 1) > 0.05


@pytest.mark.parametrize(
    ("never", "auto", "expected"),
    [([1.0 + n for n in range(12)], [1.2 * (1.0 + n) for n in range(12)], 1.2), ([1.0] * 12, [9.0, *[1.0] * 11], 1.0)],
    ids=["the machine became slower", "one round went wrong"],
)
def test_local_prefill_is_compared_round_by_round(never: list[float], auto: list[float], expected: float) -> None:
    case = local_prefill.cases()[0]
    found = {
        mode: [local_prefill.Round({case: [local_prefill.Sample(s, 0.01, False)]}, {case: [0.01]}) for s in ttfts]
        for mode, ttfts in (("never", never), ("auto", auto))
    }
    compared = local_prefill.ratio(case, found)
    assert list(compared.values()) == pytest.approx([expected] * 3)
    assert local_prefill.slower({"a": compared, "b": {**compared, "ratio_low": 1.04}}) == ["a"] * (expected > 1.05)
