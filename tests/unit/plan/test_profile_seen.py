"""What `baton profile --live` leaves out: measurements that were disturbed, and prompts beside nobody."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from baton.cli.profile_fitted import fitted
from baton.cli.profile_live import DECODED, LEAST_MODEL_LEN, TRIES, Live
from baton.cli.profile_seen import AS_USUAL, BESIDE, Measured, Prompts, Seen, usual
from baton.client import AsyncClient
from baton.client.types import ClusterStatus, Model
from baton.clock import FakeClock
from baton.core import Role
from baton.errors import ConfigError
from baton.load import Load, Pace
from simulator.profile_fit import Gaps
from tests.unit.plan.plan_support import cluster

PAIR = (Role.DECODE, 100), (Role.DECODE, 100)  # that do both
TOKEN_S = 0.01  # of a clock that only requests move
PROMPT_S = 0.002
ROUNDS = 3  # the first is left out


def gaps(rows: int, *seconds: float) -> list[Gaps]:
    """A round each."""
    return [Gaps(rows, 40 * rows, (one, one)) for one in seconds]


def prompts(length: int, *seconds: float) -> list[Prompts]:
    context = length * (length + 1) // 2
    return [Prompts(length, (Seen(0.0, [one, one + 0.02]),), Pace(1, length, context, one)) for one in seconds]


def measured(*slow: float) -> Measured:
    """Two rounds like each other, and others so many times as long."""
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
        ((1.0, 6.9, 7.0), (1.0, 6.9, 7.0)),  # most rounds say so: it is so
        ((0.0, 0.0, 1.0), (0.0, 0.0, 1.0)),  # no time is none to compare with
        ((), ()),
    ],
)
def test_slow_is_what_is_far_slower_than_the_median_round(seconds, kept):
    assert usual(seconds, float) == list(kept)


class Served:
    """Two workers that do both: a clock that requests move, and prompts that go to the idle one, or never do."""

    def __init__(self, *, to_the_idle: bool, model_len: int = LEAST_MODEL_LEN) -> None:
        self.clock, self._model_len = FakeClock(), model_len
        self.paces, self.running = [Pace(), Pace()], [0, 0]
        self.beside_prompts = 0  # requests that decode meanwhile
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
    """With the layout that it writes, and what it tells people."""
    said, both = io.StringIO(), cast("AsyncClient", served)
    live = Live(both, both, served.clock, Console(file=said, width=200))
    found = asyncio.run(live.whole(0.0, 1, "here"))
    return live, found.layouts[0], said.getvalue()


def test_a_model_that_is_too_short_is_named():
    with pytest.raises(ConfigError, match=r"max_model_len: must be at least 208 .* got 207 of tiny"):
        profiled(Served(to_the_idle=True, model_len=207))


@pytest.mark.parametrize("to_the_idle", [True, False])
def test_prompts_count_where_another_worker_computes_them(to_the_idle):
    """A router that expects the idle worker to be slower than its SLO allows gives it none: the user is told, and what
    is not known is taken from workers that decode.
    """
    served = Served(to_the_idle=to_the_idle)
    live, layout, said = profiled(served)
    assert len(live.seen.busy) == len(live.seen.busy_prompts) == (ROUNDS - 1 if to_the_idle else 0)
    assert served.beside_prompts == ROUNDS * (2 * BESIDE + (1 if to_the_idle else TRIES))
    assert (layout.beside_prompts == layout.beside_decode) == (not to_the_idle)
    assert ("no worker computed prompts beside one that decodes" in said) == (not to_the_idle)
    assert to_the_idle or layout.busy_prompt == 1.0
