"""The arithmetic from benchmarks' measurements to the published figures."""

from benchmarks.lib.flash_table import Results
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


def test_dtypes_and_levels_are_compared_in_their_own_rounds() -> None:
    int8, fp32 = M1._replace(dtype="int8"), M1._replace(dtype="fp32")
    found = samples(M1, B1, baton=[1.0], vllm_cpu=[0.9]) + samples(fp32, B1, baton=[2.0], vllm_cpu=[0.8])
    for level, times in {"": (0.5, 1.0), " avx2": (1.0, 3.0)}.items():
        names = (f"baton{level}", f"baton bf16{level}")
        found += [Sample(int8, name, B1, 0, value) for name, value in zip(names, times, strict=True)]
    figures = ratios(Measured([*found, Sample(int8, "llama.cpp", B1, 0, 0.25)]), with_peers=True)
    assert figures["int8_vs_bf16_125m_1t_native_B1@128"] == 2.0
    assert figures["int8_vs_bf16_125m_1t_avx2_B1@128"] == 3.0
    assert figures["int8_vs_llama.cpp_125m_1t_native_B1@128"] == 0.5
    assert figures["vs_best_peer_125m_min"] == figures["vs_best_peer_125m_min_bf16"] == 0.8, "of 16 or 32 bits"
    assert figures["vs_best_peer_125m_min_fp32"] == 0.4


def test_an_idea_helps_if_its_ratio_is_above_1_and_a_profile_is_judged_by_other_rounds() -> None:
    shape = {"width": 8, "k": 4}
    times = {"flat": [9.0, 1.0], "tall": [9.0, 3.0], "torch": [9.0, 9.0], "padded": [9.0, 6.0], "single": [9.0, 4.0]}
    tall, flat = ({"flat_rows": rows, "tall": True} for rows in (0, 96))
    records = [
        {"part": "attention", "context": 64, "rows": 1, "seconds": {"running": [4.0, 8.0], "unified": [2.0, 4.0]}},
        {"part": "linear", "model": "x", "rows": 4, **shape, "seconds": times},
        {"part": "choice", **shape, "measured": tall, "static": flat},
        {"part": "demo", "count": 3, "of": 10, "lowest": -1.0, "highest": 2.0},
        {"part": "skipped", "context": 64, "rows": 9, "why": "KV of 9 GiB"},
    ]
    results = Results({("avx2", "bf16"): records})
    text, found = results.shown(), results.ratios()
    assert (found["unified_max"], found["unified_max avx2 bf16"]) == (2.0, 2.0)
    assert (found["flat_gemm"], found["flat_gemm_vs_single"]) == (2.0, 2.5), "over all rounds"
    assert (found["dispatch"], found["dispatch_vs_tall"], found["dispatch_vs_static"]) == (0.333, 1.0, 0.333)
    assert results.counts() == {"fall-backs of demo, avx2, bf16": 3}
    assert "3 of 10" in text
    assert "- not measured: avx2, bf16, 9 rows at 64: KV of 9 GiB" in text
