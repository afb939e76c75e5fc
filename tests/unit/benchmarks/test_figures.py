"""The arithmetic from benchmarks' measurements to the published figures."""

import pytest

from benchmarks import local_prefill, overload
from benchmarks.lib.points import Point
from benchmarks.lib.ratios import Measured, Sample, Setting, ratios

L1, L2, M1, M2 = Setting("L", 1), Setting("L", 2), Setting("M", 1), Setting("M", 2)
B1, P512 = Point(128, 1), Point(512)


def samples(setting: Setting, point: Point, **seconds: list[float]) -> list[Sample]:
    return [
        Sample(setting, engine.replace("_", "-"), point, number, value)
        for engine, values in seconds.items()
        for number, value in enumerate(values)
    ]


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
    """The critical values of the two-sided sign test at 5 %, as tables have them."""
    critical = {1: 0, 8: 0, 9: 1, 11: 1, 12: 2, 15: 3, 17: 4, 20: 5, 25: 7, 30: 9, 39: 12, 40: 13}
    assert {count: local_prefill.sign_interval(count) for count in critical} == critical


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
