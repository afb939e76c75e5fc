"""Shapes, points and ratios: the arithmetic between measured seconds and published figures."""

import pytest

from benchmarks.lib.points import FULL, QUICK, Point
from benchmarks.lib.ratios import BATON, LIMIT, Measured, Sample, Setting, ratios
from benchmarks.lib.shapes import SIZES, Shape

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
    assert shape.linears == ((8, 16), (8, 8), (8, 32), (16, 8))
    assert shape.layer_params == 2 * (8 * 16 + 8 * 8 + 8 * 32 + 16 * 8)
    assert shape.read_params == shape.layer_params + 800
    assert shape.kv_bytes(3, 2) == 2 * 2 * 2 * 2 * 2 * 3
    assert shape.decode_bytes(4, 5, 2) == 2 * shape.read_params + shape.kv_bytes(20, 2)
    assert shape.prefill_flops(3) == 2 * shape.layer_params * 3 + 4 * 2 * 8 * (1 + 2 + 3) + 2 * 800


@pytest.mark.parametrize(("size", "millions"), [("S", 15), ("M", 100), ("L", 1034)])
def test_models_have_the_sizes_they_are_named_for(size: str, millions: float) -> None:
    assert SIZES[size].read_params / 1e6 == pytest.approx(millions, rel=0.03)


def test_points_say_what_they_are() -> None:
    assert [str(Point.parse(str(point))) for point in FULL] == [str(point) for point in FULL]
    assert set(QUICK) <= set(FULL)
    assert (P512.produced, P512.positions, B16.produced, B16.positions) == (512, 512, 16, 2048)
    with pytest.raises(ValueError, match="B0@128"):
        Point.parse("B0@128")


def test_engines_are_compared_within_rounds() -> None:
    measured = Measured(samples(L1, B1, baton=[1.0, 10.0, 2.0], peer=[2.0, 20.0]))  # the second round was a busy one
    assert measured.speed(L1, B1, "peer") == 2.0
    assert measured.speed(L1, B1, "nobody") is None
    assert measured.speed(L2, B1, "peer") is None


def test_limits_are_the_worst_over_thread_counts() -> None:
    measured = Measured(
        samples(L1, B1, baton=[1.0], limit=[0.9])
        + samples(L2, B1, baton=[1.0], limit=[0.8])
        + samples(L1, P512, baton=[2.0], limit=[1.5])
        + samples(M1, B1, baton=[1.0], limit=[0.1])
    )
    figures = ratios(measured, with_peers=False)
    assert figures["decode_vs_bandwidth_1b"] == 0.8
    assert figures["prefill_vs_gemm_1b"] == 0.75


def test_the_best_peer_is_chosen_at_each_point() -> None:
    measured = Measured(
        samples(M1, B1, baton=[1.0], vllm_cpu=[1.2], openvino_genai=[3.0], transformers=[4.0])
        + samples(M2, B1, baton=[1.0], vllm_cpu=[3.0], openvino_genai=[1.1], transformers=[1.5])
        + samples(L1, B1, baton=[1.0], vllm_cpu=[0.7])
    )
    figures = ratios(measured, with_peers=True)
    assert figures["vs_best_peer_125m_min"] == 1.1
    assert figures["vs_best_peer_1b_min"] == 0.7
    assert figures["vs_best_peer_15m_min"] is None
    assert figures["vs_transformers_min"] == 1.5


def test_transformers_alone_is_no_best_peer() -> None:
    measured = Measured(samples(M1, B1, baton=[1.0], transformers=[2.0]))
    for with_peers in (False, True):
        figures = ratios(measured, with_peers=with_peers)
        assert figures["vs_best_peer_125m_min"] is None
        assert figures["vs_transformers_min"] == 2.0


def test_overhead_is_what_the_forward_leaves() -> None:
    shares = [(M1, B16, 0.97), (M1, B16, 0.96), (M1, B16, 0.5), (M2, B16, 0.94), (M1, B1, 0.1), (L1, B16, 0.1)]
    measured = Measured(Sample(s, BATON, p, i, 1.0, share) for i, (s, p, share) in enumerate(shares))
    assert measured.overhead(M1, B16) == pytest.approx(0.04)
    assert ratios(measured, with_peers=False)["overhead_share_125m_b16"] == pytest.approx(0.06)
    assert measured.overhead(M1, P512) is None


def test_peers_are_neither_baton_nor_the_limit() -> None:
    measured = Measured(samples(M1, B1, **{BATON: [1.0], LIMIT: [1.0], "x": [1.0]}))
    assert measured.peers == ["x"]
