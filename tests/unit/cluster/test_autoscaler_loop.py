"""The autoscaler in a small cluster of made-up time: load changes, and the SLO is kept again soon, with few changes."""

import pytest

from baton.config import ClusterConfig
from tests.unit.cluster.scaling import Cluster

PROMPTS = {"rate": 7, "tokens": 1500, "output": 20}
ANSWERS = {"rate": 5, "tokens": 200, "output": 400}
IDLE = {"rate": 0.2, "tokens": 200, "output": 50}
TTFT_S, ITL_S = 1.0, 0.05
SOON_S = 60.0  # after which a load is served as it should be


def cluster(seed, blocks=3000):
    times = {"up_after_s": 3, "settle_s": 5, "down_after_s": 30}
    pool = {"replicas": 2, "autoscale": {"min": 1, "max": 4}}
    slo = {"ttft_ms": TTFT_S * 1000, "itl_ms": ITL_S * 1000}
    file = {"prefill": pool, "decode": pool, "scaling": times, "slo": slo}
    return Cluster(ClusterConfig.model_validate(file), seed, blocks)


def kept(done):
    good = [one.first - one.came <= TTFT_S and one.itl_s <= ITL_S for one in done]
    return sum(good) / len(good)


@pytest.mark.parametrize("case", range(5))
def test_the_slo_is_kept_soon_after_the_load_has_changed(case, seed):
    run = cluster(seed + case)
    sizes = []
    for load in (PROMPTS, ANSWERS, IDLE):
        began, before = run.now, len(run.done)
        run.run(180, **load)
        sizes.append((run.plan.prefill, run.plan.decode))
        assert kept([one for one in run.done[before:] if one.came > began + SOON_S]) > 0.85, run.outlook
    assert sizes[0][0] > sizes[0][1], sizes  # prompts
    assert sizes[1][0] < sizes[1][1], sizes  # answers
    assert sizes[2] == (1, 1)
    assert len(run.plans) <= 9, run.plans
    assert run.most <= 8
    assert all(1 <= size <= 4 for _, plan in run.plans for size in (plan.prefill, plan.decode))


@pytest.mark.parametrize("period_s", [4, 10, 60])
def test_a_load_that_swings_does_not_make_it_flap(period_s, seed):
    run = cluster(seed)
    for turn in range(600 // period_s):
        run.run(period_s / 2, **PROMPTS)
        run.run(period_s / 2, **ANSWERS)
        assert run.now < 2000, turn
    assert len(run.plans) <= 30, run.plans  # one in 20 s; they may be 8 s apart


@pytest.mark.parametrize("case", range(3))
def test_a_prefill_pool_that_is_too_small_is_not_taken_for_a_decode_pool_that_is(case, seed):
    """Decode workers of little memory are full of what is reserved for prompts that wait."""
    run = cluster(seed + case, blocks=600)
    run.run(60, rate=9, tokens=1500, output=10)
    first = run.plans[0][1]
    assert first.prefill > 2, first
    assert first.decode <= 2, first
    assert run.plan.prefill >= 3
