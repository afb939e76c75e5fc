"""The oracle that promises are compared with."""

import math
from dataclasses import replace

from baton.bench.traces import Arrival
from baton.planner.sim.scenario import Contention, Slo, Slowed
from benchmarks.lib.promises_oracle import oracle, poisson, without_noise
from benchmarks.promises import LENGTHS, SIMULATED


def test_it_accepts_all_that_fits_and_no_more():
    calm = [Arrival(float(number), 64, 8) for number in range(5)]
    crowd = [replace(one, at_s=9.0) for one in calm]
    tight = replace(without_noise(SIMULATED), slo=Slo(0.02, math.inf))
    found = oracle(tight, [*calm, *crowd])
    assert 5 < found.accepted < 10


def test_it_goes_on_after_many_accepted_requests():
    load = poisson(80, 20.0, LENGTHS, seed=1)
    found = oracle(replace(SIMULATED, slo=Slo(0.1, 0.012)), load)
    assert 25 < found.accepted == found.kept < 40


def test_mean_times_have_no_noise():
    busy = Contention(2, beside_decode=Slowed(factor=2.0, spread=(0.5, 1.5)))
    pool = without_noise(replace(SIMULATED, decode=replace(SIMULATED.decode, contention=busy))).decode
    assert not pool.spread
    assert pool.contention == replace(busy, beside_decode=Slowed(factor=2.0))
