"""The engine thread runs jobs in order between steps, waits without spinning, and reports a failure."""

import asyncio
import threading
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
import torch

from baton.core import HandoffId, Load, Pace, Role
from baton.engine.models.loading import load_model
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.engine.step_result import StepResult
from baton.errors import EngineFault
from baton.testing import FakeClock
from baton.worker import lifecycle
from baton.worker.engine_loop import EngineLoop
from baton.worker.lifecycle import Beats
from tests.support.sessions import BLOCK, D, prefill, reserve
from tests.support.time_factor import scaled
from tests.support.waiting import at_most, eventually
from tests.support.workers import DecodeSide, PrefillSide, info_of


class FakeEngine:
    """Has work while `work` is true. A step returns `bring()`."""

    def __init__(self):
        self.work, self.bring = False, StepResult
        self.steps = 0
        self.many = threading.Event()  # set after more steps than any of these tests needs

    def has_work(self):
        return self.work

    def step(self):
        self.steps += 1
        if self.steps > 20:
            self.many.set()
        return self.bring()


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def listener():
    """A mock that records its calls. `ticks` counts the ticks that no test has awaited."""
    made = Mock(ticks=threading.Semaphore(0))
    made.tick.side_effect = made.ticks.release
    return made


@pytest.fixture
def started(engine, listener):
    with ExitStack() as loops:

        def start(idle_s=60.0):
            loop = EngineLoop(engine, idle_s=idle_s)
            loops.callback(loop.stop)
            loop.start(listener)
            return loop

        yield start


def run_on(loop, job=lambda: None):
    done = threading.Event()
    loop.submit(job)
    loop.submit(done.set)
    assert done.wait(scaled(10))


def test_jobs_run_in_order_on_the_engine_thread(started):
    loop, seen = started(), []
    for number in range(50):
        loop.submit(lambda number=number: seen.append((number, threading.current_thread().name)))
    run_on(loop)
    assert seen == [(number, "engine") for number in range(50)]


async def test_an_error_in_a_call_reaches_its_caller_alone(started):
    loop = started()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wrap_future(loop.call(lambda: 1 / 0))
    assert await asyncio.wrap_future(loop.call(lambda: 5)) == 5
    assert loop.failure is None


async def test_an_error_while_the_role_leaves_reaches_the_host(started):
    role = Mock(busy=False)
    role.leave.side_effect = ValueError("broken")
    with pytest.raises(ValueError, match="broken"):
        await lifecycle._leave(started(), role, Mock(), asyncio.Event(), ordered=True)


async def test_a_stop_signal_ends_the_time_for_moves_and_routers_get_beats_until_then(started, monkeypatch):
    monkeypatch.setattr(lifecycle, "MOVE_S", 1e6)
    monkeypatch.setattr(lifecycle, "LEAVE_S", 0.0)
    stop, service = asyncio.Event(), Mock()
    service.beat.side_effect = stop.set
    async with at_most(10):
        await lifecycle._leave(started(), Mock(busy=True), service, stop, ordered=True)


def test_ticks_come_though_nothing_happens(started, listener):
    loop = started(idle_s=0.01)
    for _ in range(5):
        assert listener.ticks.acquire(timeout=scaled(10))
    assert (loop.iterations >= 4, loop.failure) == (True, None)


def test_work_that_computes_goes_on_without_waiting_and_jobs_run_between_its_steps(engine, listener, started):
    computed = StepResult(computed=1)
    engine.work, engine.bring = True, lambda: computed
    loop = started(idle_s=60.0)
    for _ in range(3):
        run_on(loop, listener.job)
    assert engine.many.wait(scaled(10))
    run_on(loop, lambda: setattr(engine, "work", False))
    loop.stop()
    log = [name for name, *_ in listener.mock_calls]
    for at in [i for i, what in enumerate(log) if what == "job"]:
        assert log[at - 1] in {"tick", "job"}  # never between a step and its tick


@pytest.mark.parametrize("work", [False, True])
def test_idle_it_runs_each_job_at_once_and_does_not_spin(engine, listener, started, work):
    engine.work = work  # a step computes nothing because others hold the pool
    loop = started(idle_s=60.0)
    for _ in range(3):
        run_on(loop)  # 10 s would be too late
        assert listener.ticks.acquire(timeout=scaled(10))
    assert not engine.many.wait(0.1)
    assert engine.steps <= 4


@pytest.mark.parametrize("where", ["job", "step", "tick", "stepped"])
def test_a_failure_ends_the_thread_and_is_told(engine, listener, where):
    broken = Mock(side_effect=AssertionError("the ledger does not add up"))
    loop = EngineLoop(engine, idle_s=0.01)
    if where == "job":
        loop.submit(broken)
    elif where == "tick":
        listener.tick = broken
    else:
        engine.work = True
        engine.bring = broken if where == "step" else StepResult
        listener.stepped = broken if where == "stepped" else listener.stepped
    loop.start(listener)
    assert loop._thread is not None
    loop._thread.join(scaled(10))
    assert isinstance(loop.failure, AssertionError)
    before = loop.iterations
    loop.submit(lambda: None)  # by a transfer thread that has not seen the failure: harmless
    assert loop.iterations == before
    loop.stop()


def test_what_was_submitted_before_the_stop_still_runs(engine, listener):
    seen: list[int] = []
    loop = EngineLoop(engine, idle_s=0.01)
    inside, stopping = threading.Event(), threading.Thread(target=loop.stop)
    gate = threading.Event()

    def hold():
        inside.set()
        gate.wait(scaled(10))

    loop.start(listener)
    loop.submit(hold)
    assert inside.wait(scaled(10))
    for number in range(5):
        loop.submit(partial(seen.append, number))
    stopping.start()
    gate.set()
    stopping.join(scaled(10))
    assert (seen, loop.failure) == (list(range(5)), None)
    EngineLoop(engine).stop()  # a loop that was never started


def test_what_steps_took_is_kept_by_kind_and_of_those_that_mix_kinds_each_part(engine, listener):
    clock = FakeClock()
    loop = EngineLoop(engine, clock=clock)
    results = [
        StepResult(computed=8, prefill=8, context=36, prefill_context=36),
        StepResult(computed=3, prefill=0, context=300),
        StepResult(computed=9, prefill=8, context=99, prefill_context=36),
        StepResult(),
        StepResult(computed=2, prefill=0, context=200),
        StepResult(computed=5, prefill=5, context=15, failed=[(HandoffId("r", 1), EngineFault("nan"))]),
    ]

    def bring():
        clock.advance(2.0 ** (engine.steps - 1))
        return results[engine.steps - 1]

    engine.work, engine.bring = True, bring
    for _ in results:
        loop._step(listener)
    assert loop.paces.prefill == Pace(1, 8, 36, 1.0)
    assert loop.paces.decode == Pace(2, 5, 500, 2.0 + 16.0)
    assert (loop.paces.joint, loop.paces.beside) == (Pace(1, 8, 36, 4.0), Pace(1, 1, 63, 0.0))
    load = loop.paces.into(Load(running=3))
    assert (load.running, load.prefill_pace, load.decode_pace) == (3, loop.paces.prefill, loop.paces.decode)
    assert (load.joint_pace, load.beside_pace) == (loop.paces.joint, loop.paces.beside)
    assert loop.paces.decode.since(Pace(1, 3, 300, 2.0)) == Pace(1, 2, 200, 16.0)


def test_who_hears_of_a_step_finds_what_it_took_and_telling_counts_with_the_next(engine, listener):
    clock, found = FakeClock(), []
    loop = EngineLoop(engine, clock=clock)

    def bring():
        clock.advance(1.0)
        return StepResult(computed=2, prefill=0, context=200)

    def stepped(result):
        found.append(loop.paces.decode)
        clock.advance(0.25)

    listener.stepped.side_effect = stepped
    engine.work, engine.bring = True, bring
    loop._step(listener)
    loop._step(listener)
    assert found == [Pace(1, 2, 200, 1.0), Pace(2, 4, 400, 2.25)]


class SlowBackend(OracleBackend):
    """A backend that stops in the middle of a forward until `go_on` is set."""

    def __init__(self):
        super().__init__(oracle_layout(block_size=BLOCK), max_model_len=64)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, batch, kv):
        if batch.on_layer is not None:
            batch.on_layer(0)
        self.inside.set()
        assert self.go_on.wait(scaled(10))
        return super().forward(batch, kv)


@pytest.mark.parametrize(
    ("make", "commands"), [(PrefillSide, [prefill()]), (DecodeSide, [reserve(), prefill(to=None)])]
)
def test_each_layer_counts_as_progress(router, make, commands):
    backend = SlowBackend()
    side = make(backend=backend, loop=partial(EngineLoop, idle_s=60.0))
    for command in commands:
        side.loop.submit(partial(side.role.command, router, command))
    side.loop.start(side.role)
    try:
        assert backend.inside.wait(scaled(10))
        assert side.loop.iterations > 0, "the step has not ended, but its first layer has"
    finally:
        backend.go_on.set()
        side.loop.stop()
    assert side.loop.failure is None


NEXT = HandoffId("next", 1)
FAULT = "CUDA error: an illegal memory access was encountered"
LOST = [
    torch.AcceleratorError(FAULT),
    torch.AcceleratorError("CUDA error: unspecified launch failure"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),  # of its launcher
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, ...)`"),
]
PASSING = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory"),  # of cudaMalloc outside the caching allocator
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ValueError("a shape is wrong"),
]


class FailingBackend(OracleBackend):
    """A backend with one forward that raises `error`."""

    def __init__(self, error):
        super().__init__(oracle_layout(block_size=BLOCK), max_model_len=64)
        self.errors, self.met = [error], threading.Event()

    def forward(self, batch, kv):
        self.met.set()
        if self.errors:
            raise self.errors.pop()
        return super().forward(batch, kv)


def side_after(error, router):
    """Return a decode worker that met `error` in its first step, and then served a second request if it could."""
    side = DecodeSide(backend=FailingBackend(error), loop=partial(EngineLoop, idle_s=0.01))
    ended = threading.Event()
    for command in (reserve(), prefill(to=None)):
        side.loop.submit(partial(side.role.command, router, command))
    side.loop.start(side.role)
    assert side.engine.backend.met.wait(scaled(10))
    for command in (reserve(NEXT), prefill(NEXT, to=None)):
        side.loop.submit(partial(side.role.command, router, command))
    side.loop.submit(ended.set)
    eventually(lambda: side.loop.failure is not None or (ended.is_set() and not side.engine.has_work()))
    side.loop.stop()
    return side


@pytest.mark.parametrize("error", LOST, ids=repr)
async def test_a_lost_gpu_ends_the_worker_and_its_lease(router, error):
    """One step meets the error. No request is failed, so that routers send them to other workers."""
    side = side_after(error, router)
    assert side.loop.failure is error
    assert not [event for event in router.events if event.WhichOneof("event") == "failed"]
    lease, settings = AsyncMock(), Mock(heartbeat_s=0.001, lease_s=0.06)
    info = info_of(D, Role.DECODE, side.engine)
    with pytest.raises(EngineFault, match=f"the engine thread failed: {type(error).__name__}"):
        await Beats(info, lease, side.loop, Mock(), Mock(), settings, FakeClock()).run(asyncio.Event())
    lease.renew.assert_not_called()


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_any_other_error_fails_the_requests_of_its_step_alone(router, error):
    side = side_after(error, router)
    assert side.loop.failure is None
    failed = [event.failed for event in router.events if event.WhichOneof("event") == "failed"]
    assert len(failed) == 1
    assert "finish" in router.kinds(NEXT)


async def test_a_job_that_finds_the_gpu_lost_ends_the_thread(started):
    loop, error = started(), torch.AcceleratorError(FAULT)
    with pytest.raises(torch.AcceleratorError):
        await asyncio.wrap_future(loop.call(Mock(side_effect=error)))
    assert loop._thread is not None
    loop._thread.join(scaled(10))
    assert loop.failure is error


def test_a_gpu_that_another_thread_lost_is_noticed_between_steps(monkeypatch):
    """A transfer thread met the error. An idle worker computes no step that could meet it."""
    stream = Mock(side_effect=torch.AcceleratorError(FAULT))
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: Mock(query=stream))
    backend = replace(load_model(Path(__file__).parents[3] / "models/demo"), device=torch.device("cpu"))
    backend.check()
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        replace(backend, device=torch.device("cuda:0")).check()
