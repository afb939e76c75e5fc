"""What benchmarks/local_prefill.py makes of its rounds."""

from __future__ import annotations

import math

import pytest

from benchmarks import local_prefill as bench

CASE = bench.cases()[0]


@pytest.mark.parametrize("count", range(1, 40))
def test_the_interval_leaves_out_as_many_as_it_may(count):
    """The true median is outside when no more than those left out at an end are on its side."""
    outside = bench.sign_interval(count)

    def risk(left_out):
        return 2 * sum(math.comb(count, k) for k in range(left_out + 1)) / 2**count

    assert 2 * outside < count
    assert outside == 0 or risk(outside) <= 0.05
    assert risk(outside + 1) > 0.05


def rounds(*ttfts):
    return [bench.Round({CASE: [bench.Sample(ttft, 0.01, False)]}, {CASE: [0.01]}) for ttft in ttfts]


def test_rounds_are_compared_with_their_own_kind():
    """The machine became slower and slower; the ratio knows nothing of it."""
    speeds = [1.0 + number for number in range(12)]
    compared = bench.ratio(CASE, {"never": rounds(*speeds), "auto": rounds(*(1.2 * speed for speed in speeds))})
    assert list(compared.values()) == pytest.approx([1.2] * 3)
    assert bench.slower({"a": compared, "b": {**compared, "ratio_low": 1.04}}) == ["a"]


def test_one_round_that_went_wrong_is_no_difference():
    compared = bench.ratio(CASE, {"never": rounds(*[1.0] * 12), "auto": rounds(9.0, *[1.0] * 11)})
    assert compared == {"ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
