"""Profiles: those that come with Baton, files, and what is wrong in one."""

from __future__ import annotations

import json

import pytest

from baton.errors import ConfigError
from simulator.profile import Busy, Layout, load_profile, names
from simulator.scenario import Contention, Pool, Slowed
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
    beside = Busy(factor=1.2, spread=(0.9, 1.1))
    shared = layout.model_copy(update={"host_workers": 2, "busy_prompt": 1.5, "beside_prompts": beside})
    slowed = Slowed(1.2, (0.9, 1.1))
    assert shared.contention == Contention(2, 1.5, slowed, slowed), "as beside prompts where nothing else was seen"
    more = shared.model_copy(update={"beside_decode": Busy(factor=1.4)})
    assert more.contention == Contention(2, 1.5, slowed, Slowed(1.4))
    found = profile().model_copy(update={"layouts": (more,)})
    assert found.pool(3, 1, Pool(0)).contention == more.contention


def test_sizes_and_profiles_that_are_not_there_are_refused_and_those_that_are_named():
    with pytest.raises(ConfigError, match=r"tensor_parallel: profile opt-13b-a100 has 1, 2, 4, got 8"):
        load_profile("opt-13b-a100").layout(8)
    with pytest.raises(ConfigError, match=r"opt-13b-a100, .*'opt-13'"):
        load_profile("opt-13")
    layout = profile().layout(1).model_dump()
    with pytest.raises(ValueError, match="tensor_parallel must be another one in each, got 1, 1"):
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
    """Of rows below so many: seconds of a step; each row takes 1 ms more."""
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
