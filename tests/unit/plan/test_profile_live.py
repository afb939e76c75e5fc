"""The result of `baton profile --live`, and its omitted measurements. tests/e2e has a real cluster."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

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
from baton.planner.live_fit import (
    AS_USUAL,
    BESIDE,
    Gaps,
    Measured,
    Prompts,
    Seen,
    Steps,
    fitted,
    seconds_of,
    together,
    usual,
)
from baton.testing import FakeClock
from tests.unit.plan.plan_support import cluster

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
    seen = measured(AS_USUAL + 0.01)
    kept = seen.undisturbed()
    assert kept == measured()
    assert (seen.parts, kept.parts) == (21, 14)
    usually = fitted(measured(), cluster(*PAIR), 1, "here")
    assert fitted(kept, cluster(*PAIR), 1, "here") == usually
    assert fitted(seen, cluster(*PAIR), 1, "here") != usually


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
    assert usual(seconds, float) == list(kept)


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
    assert served.beside_prompts == ROUNDS * (2 * BESIDE + (1 if to_the_idle else TRIES))
    assert (layout.beside_prompts == layout.beside_decode) == (not to_the_idle)
    assert ("no prompt was computed by an idle worker" in said) == (not to_the_idle)
    assert to_the_idle or layout.busy_prompt == 1.0


def test_kv_is_that_of_the_whole_model_and_of_a_worker_that_decodes():
    whole = measured()
    seen = Measured(single=whole.single, together=whole.together, busy=whole.busy)
    found = fitted(seen, cluster((Role.PREFILL, 10), (Role.DECODE, 30)), 4, "here")
    assert found.token_bytes == 3 * 2 * 2 * 8 * 2
    assert (found.layouts[0].tensor_parallel, found.layouts[0].kv_tokens) == (4, 30 * 16)
    assert fitted(seen, cluster((Role.DECODE, 20)), 1, "here").layouts[0].kv_tokens == 20 * 16
    with pytest.raises(NoWorker):
        fitted(seen, cluster(), 1, "here")


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
    (layout,) = fitted(seen, cluster((Role.DECODE, 30)), 1, "here").layouts
    assert layout.host_workers == 1
    assert layout.beside_decode is not None
    assert (layout.beside_decode.factor, layout.beside_prompts.factor) == pytest.approx((1.2, 1.1))
    assert layout.beside_prompts.spread != layout.spread
    assert seconds_of(layout.decode[0], Steps(1, 40, 0.0)) == pytest.approx(0.010)
    assert seconds_of(layout.decode[-1], Steps(2, 80, 0.0)) == pytest.approx(0.015)
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


def test_only_gaps_in_which_all_decoded_count():
    """The second stream lasts from 1.0 to 1.3. Before and after it, fewer rows decoded."""
    first = Seen(0.0, [0.1, 0.2, 1.0, 1.1, 1.2, 1.3, 9.0])
    second = Seen(0.0, [1.0, 1.1, 1.2, 1.3])
    gaps = together([first, second], rows=2, length=16)
    assert gaps.seconds == pytest.approx([0.1] * 5)
    assert (gaps.rows, gaps.context) == (2, 2 * (16 + 5.5 / 2))
    never_met = together([Seen(0.0, [0.1, 0.2]), Seen(0.0, [5.0, 5.3])], rows=2, length=16)
    assert never_met.seconds == pytest.approx([0.1, 0.3])
