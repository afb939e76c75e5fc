"""The engine thread: the only thread that touches the engine, its scheduler and its block pool.

All other threads (gRPC, transfers, the ledger) reach it through `submit`. Jobs run between steps, in order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import structlog

from baton.clock import Clock, SystemClock
from baton.core import Load, Pace
from baton.engine.model_backend import is_device_lost

if TYPE_CHECKING:
    from baton.engine.engine import Engine
    from baton.engine.step_result import StepResult

Job = Callable[[], object]
T = TypeVar("T")
log = structlog.get_logger(__name__)


class StepListener(Protocol):
    """The callbacks of the loop into the role, on the engine thread."""

    def stepped(self, result: StepResult) -> None:
        """Handle the outputs of a step that ended."""

    def tick(self) -> None:
        """Check deadlines: after each step and when idle, at least every `idle_s`."""


class Paces:
    """Total cost of steps by kind. Mixed steps: prompt part and time in `joint`, decode part in `beside`."""

    def __init__(self) -> None:
        self.prefill, self.decode = Pace(), Pace()
        self.joint, self.beside = Pace(), Pace()

    def note(self, result: StepResult, seconds: float) -> None:
        """Add the cost of a step. `seconds` includes delivering the outputs of the step before."""
        if result.computed and not result.failed:
            rest = result.computed - result.prefill, result.context - result.prefill_context
            self.add(result.prefill, result.prefill_context, *rest, seconds)

    def add(
        self, prompts: int, context: int, decodes: int, decode_context: int, seconds: float, *, steps: int = 1
    ) -> None:
        """Add steps of one kind: tokens and positions of prompts, then of decoding sequences."""
        if not prompts:
            self.decode = self.decode.plus(decodes, decode_context, seconds, steps)
        elif not decodes:
            self.prefill = self.prefill.plus(prompts, context, seconds, steps)
        else:
            self.joint = self.joint.plus(prompts, context, seconds, steps)
            self.beside = self.beside.plus(decodes, decode_context, 0.0, steps)

    def into(self, load: Load) -> Load:
        return replace(
            load, prefill_pace=self.prefill, decode_pace=self.decode, joint_pace=self.joint, beside_pace=self.beside
        )


class EngineLoop:
    """Runs `engine.step()` while there is work, and submitted jobs between steps. `iterations` grows while the thread
    is alive, idle or not, and also within a long step (`progressed`). The lease is renewed only while it grows.
    """

    def __init__(self, engine: Engine, *, idle_s: float = 0.2, clock: Clock | None = None) -> None:
        self.engine = engine
        self.paces = Paces()
        self._clock = clock or SystemClock()
        self.iterations = 0
        self.step_began = 0.0  # monotonic seconds
        self._delivery_s = 0.0  # to deliver the outputs of the last step
        self.failure: BaseException | None = None
        self._idle_s = idle_s
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Run `job` on the engine thread, after earlier jobs. From any thread; never blocks."""
        self._jobs.put(job)

    def call(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` as `submit` does. The future gets its result, or its error, which does not end the thread unless
        the device is lost.
        """
        answer: Future[T] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # the caller has given up
            try:
                answer.set_result(job())
            except Exception as error:
                answer.set_exception(error)
                if is_device_lost(error):
                    raise

        self.submit(run)
        return answer

    def progressed(self) -> None:
        """Count progress within a step, such as a finished layer. On the engine thread."""
        self.iterations += 1

    def start(self, listener: StepListener) -> None:
        self._thread = threading.Thread(target=self._run, args=(listener,), name="engine", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End after the current step. Jobs already submitted still run."""
        self._stop.set()
        self.submit(lambda: None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, listener: StepListener) -> None:
        try:
            idle = True
            while not self._stop.is_set():
                self._drain(wait=idle)
                idle = not self._step(listener)
                listener.tick()
                self.iterations += 1
            self._drain()
        except Exception as error:
            # An invariant is broken, so the process must end: `failure` makes the host exit.
            log.exception("engine_thread_failed")
            self.failure = error

    def _step(self, listener: StepListener) -> bool:
        """Run one step if there is work. Returns False if it did nothing, so the loop may wait for a job."""
        if not self.engine.has_work():
            return False
        self.step_began = self._clock.monotonic()
        result = self.engine.step()
        computed = self._clock.monotonic()
        self.paces.note(result, computed - self.step_began + self._delivery_s)
        listener.stepped(result)
        self._delivery_s = self._clock.monotonic() - computed
        return not result.idle

    def _drain(self, *, wait: bool = False) -> None:
        """Run submitted jobs. `wait` allows up to `idle_s` for the first one."""
        while True:
            try:
                job = self._jobs.get(block=wait, timeout=self._idle_s)
            except queue.Empty:
                return
            job()
            wait = False
