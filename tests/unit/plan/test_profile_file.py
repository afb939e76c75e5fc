"""Profiles: Baton's own, files, errors in a file, and the steps from measurements and a running cluster to one."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.sizing.profile_live import DECODED, LEAST_MODEL_LEN, TRIES, Live, one_size
from baton.client import AsyncClient
from baton.client.types import ClusterStatus, Model
from baton.config import ClusterConfig
from baton.core import Load, Pace, Role
from baton.errors import ConfigError, NoWorker
from baton.planner import live_fit
from baton.planner.live_fit import Gaps, Measured, Prompts, Seen, Slower, Steps
from baton.planner.profile import Layout, Line, Piece, load_profile, names
from baton.planner.sim.scenario import Contention, Pool, Slowed
from baton.testing import FakeClock
from tests.unit.plan.plan_support import EASY, cluster, profile

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
    return Steps(length, context, factor * live_fit.seconds_of(line, Steps(length, context, 0.0)))


def test_a_line_is_found_again():
    found = live_fit.fit_line([_steps(length) for length in (16, 64, 256, 1024, 4096)])
    assert (found.step_s, found.token_s, found.context_s) == pytest.approx((0.002, 2e-5, 1e-8), rel=1e-6)
    one = _steps(256)
    assert live_fit.seconds_of(live_fit.fit_line([one]), one) == pytest.approx(one.seconds), "of one length"
    # Chunks of 16: a last one of 4 tokens takes about as long.
    chunks = [Steps(16, context, 0.012 + 1e-7 * context) for context in (136, 520, 2056)]
    found = live_fit.fit_line(chunks)
    assert (found.step_s, found.token_s, found.context_s) == pytest.approx((0.012, 0.0, 1e-7), rel=1e-6)
    assert live_fit.fit_line([*chunks, Steps(4, 10, 0.006)]).token_s > 0, "where some had fewer, it is seen"


def test_noise_makes_no_number_negative_and_predictions_stay_near(seed):
    draw = random.Random(seed)
    steps = [_steps(length, factor=draw.uniform(0.9, 1.1)) for length in (16, 64, 256, 1024) for _ in range(5)]
    found = live_fit.fit_line(steps)
    assert min(found.step_s, found.token_s, found.context_s) >= 0
    for length in (16, 100, 1024):
        assert live_fit.seconds_of(found, _steps(length)) == pytest.approx(_steps(length).seconds, rel=0.15)


def test_decode_steps_go_through_what_was_measured_and_straight_between():
    took = {1: 0.001, 2: 0.0011, 4: 0.003, 8: 0.0031}
    points = [Gaps(rows, rows * 20, (seconds + 1e-7 * rows * 20,)) for rows, seconds in took.items()]
    points += [Gaps(rows, rows * 500, (took[rows] + 1e-7 * rows * 500,)) for rows in (1, 8)]
    pieces = live_fit.fit_decode(points)
    for rows in (1, 2, 4, 8):
        piece = next(one for one in pieces if one.rows_below is None or rows < one.rows_below)
        seconds = live_fit.seconds_of(piece, Steps(rows, rows * 20, 0.0))
        assert seconds == pytest.approx(took[rows] + 1e-7 * rows * 20, rel=0.25)
    between = next(one for one in pieces if one.rows_below is None or one.rows_below > 3)
    assert took[2] < live_fit.seconds_of(between, Steps(3, 60, 0.0)) < took[4] + 1e-5


def test_what_more_rows_cost_does_not_hide_what_context_costs():
    took = {1: 0.009, 4: 0.009, 16: 0.015, 32: 0.026}  # flat, then steep
    points = [Gaps(rows, rows * 40, (seconds + 1e-6 * rows * 40,)) for rows, seconds in took.items()]
    points += [Gaps(rows, rows * 608, (took[rows] + 1e-6 * rows * 608,)) for rows in (1, 4)]
    assert [one.context_s for one in live_fit.fit_decode(points)] == pytest.approx([1e-6] * 3, rel=0.01)
    cheaper = [Gaps(4, 160, (0.009,)), Gaps(4, 2432, (0.0089,))]  # by noise
    assert live_fit.fit_decode(cheaper)[0].context_s == 0.0
    assert live_fit.fit_decode([Gaps(4, 80, (0.002, 0.004))])[0].rows_below is None, "one number of rows is a constant"


def test_the_spread_keeps_the_percentiles_and_has_a_mean_of_1(seed):
    draw = np.random.default_rng(seed)
    gaps = [Gaps(rows, 0.0, tuple(rows * draw.lognormal(0, 0.5, 5000))) for rows in (1.0, 4.0)]
    factors = np.array(live_fit.fit_spread(gaps))
    assert factors.mean() == pytest.approx(1.0, abs=1e-3)
    seen = np.array(gaps[0].seconds) / gaps[0].mean
    for share in (0.5, 0.9, 0.99):
        assert np.quantile(factors, share) == pytest.approx(np.quantile(seen, share), rel=0.1)


def test_each_point_has_the_same_part_in_the_spread():
    """Two rows give twice as many gaps as one, but have the same weight."""
    factors = live_fit.fit_spread([Gaps(1, 0.0, (1.0,) * 10), Gaps(32, 0.0, (0.5, 1.5) * 500)])
    assert {factor: factors.count(factor) for factor in (0.5, 1.0, 1.5)} == {0.5: 50, 1.0: 100, 1.5: 50}


def test_steps_of_both_kinds_tell_what_they_take_more():
    decode = Piece(step_s=0.01, token_s=1e-3, context_s=0.0)
    more = 0.004
    seconds = 10 * (0.01 + 4 * 1e-3 + 100 * TRUE.token_s + more)
    joint, beside = Pace(10, 1000, 0, seconds), Pace(10, 40, 0, 0.0)
    assert live_fit.fit_joint(TRUE, decode, joint, beside, Slower()) == pytest.approx(more)
    assert live_fit.fit_joint(TRUE, decode, Pace(), Pace(), Slower()) is None
    busy = joint.since(Pace(0, 0, 0, -10 * (0.1 * 0.014 + 0.5 * (100 * TRUE.token_s + more))))
    assert live_fit.fit_joint(TRUE, decode, busy, beside, Slower(prompts=1.5, decode=1.1)) == pytest.approx(more)


# --- profiles of a running cluster

PAIR = (Role.DECODE, 100), (Role.DECODE, 100)  # colocated workers
TOKEN_S = 0.01  # on a clock that only requests advance
PROMPT_S = 0.002
ROUNDS = 3  # the first is ignored


def gaps(rows: int, *seconds: float) -> list[Gaps]:
    return [Gaps(rows, 40 * rows, (one, one)) for one in seconds]


def prompts(length: int, *seconds: float) -> list[Prompts]:
    context = length * (length + 1) // 2
    return [Prompts(length, (Seen(0.0, [one, one + 0.02]),), Pace(1, length, context, one)) for one in seconds]


def measured(*slow: float) -> Measured:
    """Return two equal rounds, and more rounds that take so many times as long."""
    times = 1.0, 1.0, *slow
    return Measured(
        single={16: prompts(16, *(0.01 * one for one in times)), 64: prompts(64, *(0.02 * one for one in times))},
        together={(1, 16): gaps(1, *(0.010 * one for one in times)), (2, 16): gaps(2, *(0.012 * one for one in times))},
        busy=gaps(1, *(0.015 * one for one in times)),
        busy_prompts=[Pace(2, 128, 4160, 0.05 * one) for one in times],
        alone=gaps(1, *(0.009 * one for one in times)),
        joint=Pace(3, 48, 400, 0.06),
        beside=Pace(3, 12, 480, 0.0),
    )


def test_a_round_in_which_the_machine_had_other_work_is_in_no_figure():
    seen = measured(live_fit.AS_USUAL + 0.01)
    kept = seen.undisturbed()
    assert kept == measured()
    assert (seen.parts, kept.parts) == (21, 14)
    usually = live_fit.fitted(measured(), cluster(*PAIR), 1, "here")
    assert live_fit.fitted(kept, cluster(*PAIR), 1, "here") == usually
    assert live_fit.fitted(seen, cluster(*PAIR), 1, "here") != usually


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [
        ((1.0, 1.2, 0.9), (1.0, 1.2, 0.9)),  # as much as machines differ
        ((1.0, 1.3), (1.0,)),
        ((1.0, 6.9, 7.0), (1.0, 6.9, 7.0)),  # most rounds agree, so it is real
        ((0.0, 0.0, 1.0), (0.0, 0.0, 1.0)),  # nothing can be compared with zero time
        ((), ()),
    ],
)
def test_slow_is_what_is_far_slower_than_the_median_round(seconds, kept):
    assert live_fit.usual(seconds, float) == list(kept)


class Served:
    """Two colocated workers with a clock that requests advance. Prompts go to the idle one, or never do."""

    def __init__(self, *, to_the_idle: bool, model_len: int = LEAST_MODEL_LEN) -> None:
        self.clock, self._model_len = FakeClock(), model_len
        self.paces, self.running = [Pace(), Pace()], [0, 0]
        self.beside_prompts = 0  # requests that decode during prompts
        self._to_the_idle = to_the_idle

    async def __aenter__(self) -> Served:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def models(self) -> list[Model]:
        return [Model("tiny", self._model_len, 100)]

    async def cluster(self) -> ClusterStatus:
        return cluster(*PAIR, loads=[Load(prefill_pace=pace) for pace in self.paces])

    @asynccontextmanager
    async def stream(self, prompt: list[int], *, max_tokens: int, **_: Any) -> AsyncIterator[Any]:
        worker = self.running.index(min(self.running)) if self._to_the_idle else 0
        self.running[worker] += 1
        self.beside_prompts += max_tokens == 4 * DECODED
        self.paces[worker] = self.paces[worker].plus(len(prompt), len(prompt) * (len(prompt) + 1) // 2, PROMPT_S)
        yield _Stream(self, max_tokens, f"decode-{worker}")
        self.running[worker] -= 1


class _Stream:
    def __init__(self, served: Served, tokens: int, worker: str) -> None:
        self._served, self._tokens, self._worker = served, tokens, worker

    async def __aiter__(self) -> AsyncIterator[Any]:
        for _ in range(self._tokens):
            await asyncio.sleep(0)
            self._served.clock.advance(TOKEN_S)
            yield SimpleNamespace(tokens=(1,))

    async def collect(self) -> Any:
        return SimpleNamespace(placement=SimpleNamespace(prefill_worker=self._worker))


def profiled(served: Served) -> tuple[Live, Any, str]:
    said, both = io.StringIO(), cast("AsyncClient", served)
    live = Live(both, both, served.clock, Console(file=said, width=200))
    found = asyncio.run(live.whole(0.0, 1, "here"))
    return live, found.layouts[0], said.getvalue()


@pytest.mark.parametrize("to_the_idle", [True, False])
def test_prompts_count_where_another_worker_computes_them(to_the_idle):
    """A router that expects the idle worker to miss its SLO gives it no prompt. The output has a warning, and
    the missing costs are those of workers that decode.
    """
    served = Served(to_the_idle=to_the_idle)
    live, layout, said = profiled(served)
    assert len(live.seen.busy) == len(live.seen.busy_prompts) == (ROUNDS - 1 if to_the_idle else 0)
    assert served.beside_prompts == ROUNDS * (2 * live_fit.BESIDE + (1 if to_the_idle else TRIES))
    assert (layout.beside_prompts == layout.beside_decode) == (not to_the_idle)
    assert ("no prompt was computed by an idle worker" in said) == (not to_the_idle)
    assert to_the_idle or layout.busy_prompt == 1.0


def test_kv_is_that_of_the_whole_model_and_of_a_worker_that_decodes():
    whole = measured()
    seen = Measured(single=whole.single, together=whole.together, busy=whole.busy)
    found = live_fit.fitted(seen, cluster((Role.PREFILL, 10), (Role.DECODE, 30)), 4, "here")
    assert found.token_bytes == 3 * 2 * 2 * 8 * 2
    assert (found.layouts[0].tensor_parallel, found.layouts[0].kv_tokens) == (4, 30 * 16)
    assert live_fit.fitted(seen, cluster((Role.DECODE, 20)), 1, "here").layouts[0].kv_tokens == 20 * 16
    with pytest.raises(NoWorker):
        live_fit.fitted(seen, cluster(), 1, "here")


def test_workers_that_do_both_slow_each_other_as_much_as_one_alone_is_faster():
    """Two of them decoded at 12 ms for one row each, and one alone at 10 ms."""
    seen = Measured(
        single=measured().single,
        together={(1, 16): [Gaps(1, 40, (0.012, 0.012))], (2, 16): [Gaps(2, 80, (0.0168, 0.0192))]},
        busy=[Gaps(1, 40, (0.010, 0.012))],  # while another one computed prompts
        busy_prompts=[Pace(2, 128, 4160, 0.06)],
        alone=[Gaps(1, 40, (0.009, 0.011))],
        joint=Pace(1, 64, 2080, 1.5 * 0.021 + 1.2 * 0.015),
        beside=Pace(1, 2, 80, 0.0),
    )
    (layout,) = live_fit.fitted(seen, cluster((Role.DECODE, 30)), 1, "here").layouts
    assert layout.host_workers == 1
    assert layout.beside_decode is not None
    assert (layout.beside_decode.factor, layout.beside_prompts.factor) == pytest.approx((1.2, 1.1))
    assert layout.beside_prompts.spread != layout.spread
    assert live_fit.seconds_of(layout.decode[0], Steps(1, 40, 0.0)) == pytest.approx(0.010)
    assert live_fit.seconds_of(layout.decode[-1], Steps(2, 80, 0.0)) == pytest.approx(0.015)
    assert (min(layout.spread), max(layout.spread)) == pytest.approx((0.9, 1.1), rel=0.01)
    assert layout.busy_prompt == pytest.approx(1.5, rel=0.01)
    new = layout.prompt.token_s * 64 + layout.prompt.context_s * 2080
    assert layout.joint_extra_s == pytest.approx(0.021 - new), "without what the other one cost it"


def test_a_profile_is_of_one_size_and_of_a_model_that_is_long_enough():
    with pytest.raises(ConfigError, match=r"max_model_len: must be at least 208 .* got 207 of tiny"):
        profiled(Served(to_the_idle=True, model_len=207))
    two = {"model": {"path": "oracle"}, "decode": {"tensor_parallel": 2}}
    with pytest.raises(ConfigError, match=r"prefill.tensor_parallel: must be .* which is 2: .* one size, got 1"):
        one_size(ClusterConfig.model_validate(two))
    for more in ({"prefill": {"tensor_parallel": 2}}, {"mode": "colocated"}):
        assert one_size(ClusterConfig.model_validate(two | more)) == 2


@pytest.mark.parametrize(("args", "got"), [(("--set", "a=b"), "--set a=b"), (("-c", "x.yaml"), "-c x.yaml")])
def test_a_running_cluster_is_as_it_is(args, got):
    done = CliRunner().invoke(app, ["profile", "--live", "p.json", *args])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).endswith(f"got {got}")


@pytest.mark.parametrize("args", [("--target", "h:1", "--admin", "h:2"), ("--name", "n", "--tensor-parallel", 2)])
def test_the_devices_of_a_worker_are_given_where_the_cluster_file_is_elsewhere(monkeypatch, args):
    monkeypatch.setattr("baton.cli.sizing.profile_live.find_cluster", lambda name: name)
    done = CliRunner().invoke(app, ["profile", "--live", "p.json", *map(str, args)])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith("--tensor-parallel: must be the devices of each worker")


def test_only_gaps_in_which_all_decoded_count():
    """The second stream lasts from 1.0 to 1.3. Before and after it, fewer rows decoded."""
    first = Seen(0.0, [0.1, 0.2, 1.0, 1.1, 1.2, 1.3, 9.0])
    second = Seen(0.0, [1.0, 1.1, 1.2, 1.3])
    gaps = live_fit.together([first, second], rows=2, length=16)
    assert gaps.seconds == pytest.approx([0.1] * 5)
    assert (gaps.rows, gaps.context) == (2, 2 * (16 + 5.5 / 2))
    never_met = live_fit.together([Seen(0.0, [0.1, 0.2]), Seen(0.0, [5.0, 5.3])], rows=2, length=16)
    assert never_met.seconds == pytest.approx([0.1, 0.3])
