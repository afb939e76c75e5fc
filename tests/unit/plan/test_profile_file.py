"""Profiles: Baton's own, files, errors in a file, and the step from measurements to a profile."""

import json
import random

import numpy as np
import pytest

from baton.core import Pace
from baton.errors import ConfigError
from baton.planner.live_fit import Gaps, Slower, Steps, fit_decode, fit_joint, fit_line, fit_spread, seconds_of
from baton.planner.profile import Layout, Line, Piece, load_profile, names
from baton.planner.sim.scenario import Contention, Pool, Slowed
from tests.unit.plan.plan_support import EASY, profile

LAYOUT = {"tensor_parallel": 1, "kv_tokens": 10, "prompt": EASY, "decode": [EASY]}


@pytest.mark.parametrize("name", names())
def test_each_profile_that_comes_along_names_its_source_and_all_that_it_says_costs_time(name):
    found = load_profile(name)
    assert found.name == name
    assert len(found.source) > 50
    for size in found.sizes:
        cost = found.layout(size).cost()
        assert 0.005 < cost.seconds(0, 0, 1, 500) < 0.2
        assert cost.seconds(512, 512 * 513 // 2, 0, 0) > cost.seconds(0, 0, 1, 500)
        assert cost.seconds(512, 512 * 513 // 2, 8, 4096) > cost.seconds(512, 512 * 513 // 2, 0, 0)


def test_the_published_numbers_are_those_of_the_source():
    """DistServe: 18.10 + .1019 L + 7.12e-6 L^2 ms of a prompt; 7.17 + 5.8e-4 context + .158 rows from 95 rows on."""
    cost = load_profile("opt-13b-a100").layout(1).cost()
    prompt_ms = 18.10 + 0.1019 * 512 + 7.12e-6 * 512**2
    assert cost.seconds(512, 512 * 513 // 2, 0, 0) * 1e3 == pytest.approx(prompt_ms, rel=1e-3)
    small_ms = 19.93 + 6.27e-4 * 94 * 500 + 0.0385 * 94
    assert cost.seconds(0, 0, 94, 94 * 500) * 1e3 == pytest.approx(small_ms, rel=1e-3)
    large_ms = 7.17 + 5.8e-4 * 95 * 500 + 0.158 * 95
    assert cost.seconds(0, 0, 95, 95 * 500) * 1e3 == pytest.approx(large_ms, rel=2e-3)


def test_a_step_of_both_kinds_costs_what_was_measured_more_and_a_pool_has_the_blocks_of_the_profile():
    layout = Layout.model_validate(LAYOUT | {"joint_extra_s": 0.005})
    assert layout.cost().seconds(10, 55, 4, 40) == pytest.approx(0.01 + 0.005 + 10e-4 + 4e-4)
    pool = profile().pool(3, 1, Pool(0, block_size=32, max_running=7))
    assert (pool.workers, pool.kv_blocks, pool.max_running) == (3, 100_000 // 32, 7)


def test_workers_of_one_host_slow_each_other_as_was_measured():
    layout = profile().layout(1)
    assert layout.contention is None, "of one worker nothing is known"
    beside = Slowed(factor=1.2, spread=(0.9, 1.1))
    shared = layout.model_copy(update={"host_workers": 2, "busy_prompt": 1.5, "beside_prompts": beside})
    assert shared.contention == Contention(2, 1.5, beside, beside), "as beside prompts where nothing else was seen"
    more = shared.model_copy(update={"beside_decode": Slowed(factor=1.4)})
    assert more.contention == Contention(2, 1.5, beside, Slowed(factor=1.4))
    found = profile().model_copy(update={"layouts": (more,)})
    assert found.pool(3, 1, Pool(0)).contention == more.contention


def test_sizes_and_profiles_that_are_not_there_are_refused_and_those_that_are_named():
    with pytest.raises(ConfigError, match=r"tensor_parallel: profile opt-13b-a100 has 1, 2, 4, got 8"):
        load_profile("opt-13b-a100").layout(8)
    with pytest.raises(ConfigError, match=r"opt-13b-a100, .*'opt-13'"):
        load_profile("opt-13")
    layout = profile().layout(1).model_dump()
    with pytest.raises(ValueError, match="tensor_parallel must differ between layouts, got 1, 1"):
        profile(layouts=[layout, layout])


def test_what_is_wrong_in_a_file_is_named_with_its_place(tmp_path):
    file = tmp_path / "p.json"
    file.write_text(profile().model_dump_json(exclude_defaults=True))
    assert load_profile(str(file)) == profile()
    wrong = json.loads(file.read_text())
    wrong["layouts"][0]["prompt"]["token_s"] = -1
    file.write_text(json.dumps(wrong | {"extra": 1}))
    with pytest.raises(ConfigError, match=r"layouts\.0\.prompt\.token_s: .*greater than or equal to 0") as caught:
        load_profile(str(file))
    assert "extra: " in str(caught.value)


def _decode(*pieces: tuple[int | None, float]) -> list[dict[str, float | None]]:
    """Return decode pieces from pairs of `rows_below` and the seconds of a step. Each row takes 1 ms more."""
    return [{"rows_below": rows, "step_s": step_s, "token_s": 1e-3, "context_s": 0.0} for rows, step_s in pieces]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": EASY | {"step_s": -0.1}}, "prompt\n.*step_s must be at least 0, got -0.1"),
        ({"decode": _decode((9, 0.1), (9, 0.1), (None, 0.1))}, "1: rows_below must be above 9, got 9"),
        ({"decode": _decode((None, 0.1), (None, 0.1))}, "0: rows_below must be left out in the last .* got None"),
        ({"decode": _decode((9, 0.1), (20, 0.1))}, "1: rows_below must be left out in the last .* got 20"),
        ({"decode": _decode((9, 0.1), (None, -0.01))}, "1: a step of 9 rows must take at least 0 s, got -0.001"),
    ],
)
def test_costs_that_cannot_be_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        Layout.model_validate(LAYOUT | changes)
    falling = Layout.model_validate(LAYOUT | {"decode": _decode((9, 0.1), (None, -0.008))})
    assert falling.cost().seconds(0, 0, 9, 9) == pytest.approx(0.001)


TRUE = Line(step_s=0.002, token_s=2e-5, context_s=1e-8)


def _steps(length: int, line: Line = TRUE, factor: float = 1.0) -> Steps:
    context = length * (length + 1) / 2
    return Steps(length, context, factor * seconds_of(line, Steps(length, context, 0.0)))


def test_a_line_is_found_again():
    found = fit_line([_steps(length) for length in (16, 64, 256, 1024, 4096)])
    assert (found.step_s, found.token_s, found.context_s) == pytest.approx((0.002, 2e-5, 1e-8), rel=1e-6)
    assert seconds_of(fit_line([_steps(256)]), _steps(256)) == pytest.approx(_steps(256).seconds), "of one length"
    # Chunks of 16: a last one of 4 tokens takes about as long.
    chunks = [Steps(16, context, 0.012 + 1e-7 * context) for context in (136, 520, 2056)]
    found = fit_line(chunks)
    assert (found.step_s, found.token_s, found.context_s) == pytest.approx((0.012, 0.0, 1e-7), rel=1e-6)
    assert fit_line([*chunks, Steps(4, 10, 0.006)]).token_s > 0, "where some had fewer, it is seen"


def test_noise_makes_no_number_negative_and_predictions_stay_near(seed):
    draw = random.Random(seed)
    steps = [_steps(length, factor=draw.uniform(0.9, 1.1)) for length in (16, 64, 256, 1024) for _ in range(5)]
    found = fit_line(steps)
    assert min(found.step_s, found.token_s, found.context_s) >= 0
    for length in (16, 100, 1024):
        assert seconds_of(found, _steps(length)) == pytest.approx(_steps(length).seconds, rel=0.15)


def test_decode_steps_go_through_what_was_measured_and_straight_between():
    took = {1: 0.001, 2: 0.0011, 4: 0.003, 8: 0.0031}
    points = [Gaps(rows, rows * 20, (seconds + 1e-7 * rows * 20,)) for rows, seconds in took.items()]
    points += [Gaps(rows, rows * 500, (took[rows] + 1e-7 * rows * 500,)) for rows in (1, 8)]
    pieces = fit_decode(points)
    for rows in (1, 2, 4, 8):
        piece = next(one for one in pieces if one.rows_below is None or rows < one.rows_below)
        seconds = seconds_of(piece, Steps(rows, rows * 20, 0.0))
        assert seconds == pytest.approx(took[rows] + 1e-7 * rows * 20, rel=0.25)
    between = next(one for one in pieces if one.rows_below is None or one.rows_below > 3)
    assert took[2] < seconds_of(between, Steps(3, 60, 0.0)) < took[4] + 1e-5


def test_what_more_rows_cost_does_not_hide_what_context_costs():
    took = {1: 0.009, 4: 0.009, 16: 0.015, 32: 0.026}  # flat, then steep
    points = [Gaps(rows, rows * 40, (seconds + 1e-6 * rows * 40,)) for rows, seconds in took.items()]
    points += [Gaps(rows, rows * 608, (took[rows] + 1e-6 * rows * 608,)) for rows in (1, 4)]
    assert [one.context_s for one in fit_decode(points)] == pytest.approx([1e-6] * 3, rel=0.01)
    cheaper = [Gaps(4, 160, (0.009,)), Gaps(4, 2432, (0.0089,))]  # by noise
    assert fit_decode(cheaper)[0].context_s == 0.0
    assert fit_decode([Gaps(4, 80, (0.002, 0.004))])[0].rows_below is None, "one number of rows is a constant"


def test_the_spread_keeps_the_percentiles_and_has_a_mean_of_1(seed):
    draw = np.random.default_rng(seed)
    gaps = [Gaps(rows, 0.0, tuple(rows * draw.lognormal(0, 0.5, 5000))) for rows in (1.0, 4.0)]
    factors = np.array(fit_spread(gaps))
    assert factors.mean() == pytest.approx(1.0, abs=1e-3)
    seen = np.array(gaps[0].seconds) / gaps[0].mean
    for share in (0.5, 0.9, 0.99):
        assert np.quantile(factors, share) == pytest.approx(np.quantile(seen, share), rel=0.1)


def test_each_point_has_the_same_part_in_the_spread():
    """Two rows give twice as many gaps as one, but have the same weight."""
    factors = fit_spread([Gaps(1, 0.0, (1.0,) * 10), Gaps(32, 0.0, (0.5, 1.5) * 500)])
    assert {factor: factors.count(factor) for factor in (0.5, 1.0, 1.5)} == {0.5: 50, 1.0: 100, 1.5: 50}


def test_steps_of_both_kinds_tell_what_they_take_more():
    decode = Piece(step_s=0.01, token_s=1e-3, context_s=0.0)
    more = 0.004
    seconds = 10 * (0.01 + 4 * 1e-3 + 100 * TRUE.token_s + more)
    joint, beside = Pace(10, 1000, 0, seconds), Pace(10, 40, 0, 0.0)
    assert fit_joint(TRUE, decode, joint, beside, Slower()) == pytest.approx(more)
    assert fit_joint(TRUE, decode, Pace(), Pace(), Slower()) is None
    busy = joint.since(Pace(0, 0, 0, -10 * (0.1 * 0.014 + 0.5 * (100 * TRUE.token_s + more))))
    assert fit_joint(TRUE, decode, busy, beside, Slower(prompts=1.5, decode=1.1)) == pytest.approx(more)
