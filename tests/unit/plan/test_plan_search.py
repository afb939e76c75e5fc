"""The planner's search over a fake simulation."""

import math
from dataclasses import replace
from typing import Any

import pytest

from baton.bench.lengths import Lengths
from baton.errors import ConfigError
from baton.planner.profile import Profile
from baton.planner.search import Shape, Workload, kind, least_decode, least_prefill
from tests.unit.plan.plan_support import Fake, planner, profile


def plan(fake: Fake, rate: float, **options: Any) -> Any:
    return planner(fake, **options).plan(rate)


@pytest.mark.parametrize("rate", [1.0, 24.9, 39.9, 77.1])
@pytest.mark.parametrize("fake", [Fake(10, 20, 4), Fake(7, 30, 12), Fake(30, 5, 6)])
def test_the_fewest_workers_of_each_kind_are_found(fake, rate):
    answer = plan(fake, rate, gpus=64)
    apart, together = answer.disaggregated.shape, answer.colocated.shape
    carried = (fake.prefill, fake.decode, fake.colocated)
    assert (apart.prefill, apart.decode, together.decode) == tuple(math.ceil(rate / each) for each in carried)


def test_the_cheaper_one_is_the_best_and_goodput_is_for_each_gpu():
    answer = plan(Fake(10, 20, 4), 20.0)
    assert answer.best is answer.disaggregated
    assert answer.disaggregated.shape == Shape(1, 2)
    assert answer.goodput == pytest.approx({"disaggregated": 20 / 3, "colocated": 4.0}, rel=0.06)
    other = plan(Fake(10, 20, 12), 20.0)
    assert other.best is other.colocated, "they carry more"
    assert kind(other.best.shape) == "colocated"
    sizes = plan(Fake(10, 20, 4), 9.0, gpus=8, name="opt-13b-a100")
    assert sizes.disaggregated.shape == Shape(1, 1), "several sizes: these workers do not gain by more GPUs"
    fake = Fake(1, 1, 1)
    assert plan(fake, 100.0, gpus=6).best is None
    assert all(scenario.prefill.workers <= 16 and scenario.decode.workers <= 16 for scenario in fake.asked)


def test_phases_are_looked_at_without_local_prefills_and_pairs_as_production_has_it():
    fake = Fake(10, 20, 4)
    found = planner(fake)
    found.plan(20.0)
    reasons = [tried.why for tried in found.tried.values()]
    assert {"prefill phase", "decode phase", "pair", "colocated", "goodput"} <= set(reasons)
    alone = [scenario for scenario in fake.asked if not scenario.router.local_prefill]
    assert len(alone) == sum(why.endswith("phase") for why in reasons)


def test_the_search_is_short_and_simulates_nothing_twice():
    fake = Fake(3, 11, 2)
    found = planner(fake, gpus=256)
    found.plan(300.0)
    assert len(fake.asked) == len(found.tried) < 70


def test_the_least_is_a_bound_that_holds_work_at_full_use():
    found = planner(Fake(1, 1, 1))
    site, load = found.site, found.workload
    assert least_prefill(site, load, 250.0, 1) == 3  # 100 tokens of 0.1 ms each
    assert least_decode(site, load, 250.0, 1) == 1  # 10 tokens, in batches of 64, at 0.26 ms
    assert least_decode(site, load, 2500.0, 1) == 6


def test_a_goodput_that_does_not_exist_is_0():
    assert planner(Fake(0, 0, 0)).goodput(Shape(1, 1), 1.0) == pytest.approx(0.0, abs=2e-3)
    with pytest.raises(ConfigError, match=r"rate: must be requests per second, .* got -1"):
        planner(Fake(1, 1, 1)).attempt(Shape(1, 1), -1.0, "pair")


def test_a_rate_is_not_raised_until_all_requests_are_one_burst():
    """A tiny model meets the goal even for a burst of all requests."""
    answer = plan(Fake(math.inf, math.inf, 4), 1.0)
    assert answer.at_least == {"disaggregated"}
    assert 2 * answer.goodput["disaggregated"] == pytest.approx(512)  # 500 requests at most
    assert answer.goodput["colocated"] == pytest.approx(4.0, rel=0.06)


def test_workers_that_share_a_host_slow_each_other_down_in_each_layout():
    found = planner(fake := Fake(10, 20, 4))
    busy = profile().layout(1).model_copy(update={"host_workers": 2, "busy_prompt": 2.0})
    found.site = replace(found.site, profile=profile().model_copy(update={"layouts": (busy,)}))
    for shape in (Shape(1, 1), Shape(1)):
        found.attempt(shape, 1.0, "some")
    for asked in fake.asked:
        assert asked.decode.contention == busy.contention
    assert fake.asked[0].prefill.contention == busy.contention
    assert len(fake.asked) == 2, "each is simulated once"


def _sized(*layouts: dict[str, object]) -> Profile:
    return profile(layouts=[profile().layout(1).model_dump() | changes for changes in layouts])


def test_batches_are_of_any_size_within_the_goal_and_no_larger_than_the_room_for_kv():
    """Three rows cost 1 ms each. From four on a step takes 1 s, which exceeds the goal."""
    found, load = planner(Fake(1, 1, 1)), Workload(Lengths.parse("100", "11"))
    free = {"token_s": 0.0, "context_s": 0.0}
    decode = [{"rows_below": 4, "step_s": 0.003} | free, {"rows_below": 9, "step_s": 1.0} | free]
    site = replace(found.site, profile=_sized({"decode": [*decode, {"step_s": 1.0} | free]}))
    assert least_decode(site, load, 500.0, 1) == 5
    larger = replace(found.site, profile=_sized({"decode": [*decode, {"step_s": 0.0045} | free]}))
    assert least_decode(larger, load, 5000.0, 1) == 4  # 64 rows at 4.5 ms
    small = replace(found.site, profile=_sized({"kv_tokens": 1040}))
    assert small.room(1) == 1040
    assert least_decode(small, found.workload, 250.0, 1) == 3  # ten rows of 105.5 tokens, at 1.1 ms each


@pytest.mark.parametrize(("room", "size"), [(112, 1), (111, 2), (16, 2)])
def test_the_other_pool_of_a_phase_has_room_for_the_requests(room, size):
    """Requests have 111 tokens, in blocks of 16."""
    found = planner(Fake(10, 20, 4))
    found.site = replace(found.site, profile=_sized({"kv_tokens": room}, {"tensor_parallel": 2}))
    found.plan(20.0)
    phases = [tried for tried in found.tried.values() if tried.why.endswith("phase")]
    others = {tried.shape.decode_tp if "prefill" in tried.why else tried.shape.prefill_tp for tried in phases}
    assert others == {size}


def test_room_is_for_as_many_requests_as_must_be_good():
    load = Workload(Lengths.parse("uniform:1-100", "1"))
    assert load.tokens(1.0) == 101
    assert load.tokens(0.5) == pytest.approx(51, abs=3)
    assert load.tokens(1e-9) == 2


def test_the_files_own_layout_counts_where_the_search_found_none_as_small():
    """By arithmetic, 250 requests per second need three workers, but this simulation takes no time."""
    found = planner(Fake(math.inf, math.inf, math.inf))
    assert found.plan(250.0).colocated == found.tried[Shape(3, chunk=256), 250.0, ""]
    own = found.attempt(Shape(1, chunk=300), 250.0, "the file")
    found.attempt(Shape(1, chunk=200), 125.0, "the file")
    assert found.plan(250.0).colocated is own
    found.gpus = 0
    assert found._or_own(None, "colocated", 250.0) is None
