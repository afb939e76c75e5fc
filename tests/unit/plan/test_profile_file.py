"""Profiles: those that come with Baton, files, and what is wrong in one."""

from __future__ import annotations

import json

import pytest

from baton.errors import ConfigError
from simulator.profile import Layout, Profile, load_profile, names
from simulator.scenario import Pool
from tests.unit.plan.plan_support import EASY, profile


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


def test_a_step_of_both_kinds_costs_what_was_measured_more():
    layout = Layout.model_validate(
        {"tensor_parallel": 1, "kv_tokens": 10, "prompt": EASY, "decode": [EASY], "joint_extra_s": 0.005}
    )
    assert layout.cost().seconds(10, 55, 4, 40) == pytest.approx(0.01 + 0.005 + 10e-4 + 4e-4)


def test_a_pool_has_the_blocks_of_the_profile_and_the_bounds_of_what_it_is_like():
    pool = profile().pool(3, 1, Pool(0, block_size=32, max_running=7))
    assert (pool.workers, pool.kv_blocks, pool.max_running) == (3, 100_000 // 32, 7)


def test_steps_are_longer_where_the_other_pool_is_busy():
    layout = profile().layout(1).model_copy(update={"busy_decode": 1.5})
    assert layout.cost(0.4).seconds(0, 0, 4, 9) == pytest.approx(1.2 * layout.cost().seconds(0, 0, 4, 9))
    assert layout.cost(0.4).seconds(4, 9, 0, 0) == layout.cost().seconds(4, 9, 0, 0)


def test_a_size_that_nobody_measured_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"tensor_parallel: profile opt-13b-a100 has 1, 2, 4, got 8"):
        load_profile("opt-13b-a100").layout(8)


def test_a_profile_that_is_not_there_names_those_that_are():
    with pytest.raises(ConfigError, match=r"opt-13b-a100, .*'opt-13'"):
        load_profile("opt-13")


def test_what_is_wrong_in_a_file_is_named_with_its_place(tmp_path):
    file = tmp_path / "p.json"
    file.write_text(profile().model_dump_json())
    assert load_profile(str(file)) == profile()
    wrong = json.loads(file.read_text())
    wrong["layouts"][0]["prompt"]["token_s"] = -1
    file.write_text(json.dumps(wrong | {"extra": 1}))
    with pytest.raises(ConfigError, match=r"layouts\.0\.prompt\.token_s: .*greater than or equal to 0") as caught:
        load_profile(str(file))
    assert "extra: " in str(caught.value)


def test_a_profile_survives_being_written():
    assert Profile.model_validate_json(profile().model_dump_json(exclude_defaults=True)) == profile()
