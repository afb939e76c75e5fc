"""The cluster controller: repeatedly brings the workers to the plan in the control state, and reports its decisions.

`LocalControl` runs it in the process and thread of its supervisor, for workers that do not outlive it.
"""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

import structlog

from baton.clock import Clock, SystemClock
from baton.cluster.autoscaler import Autoscaler
from baton.cluster.backend_process import START_TIMEOUT_S, StartError
from baton.cluster.interfaces import Placement
from baton.cluster.reconcile import WorkerState, free_id, lacks_room, reconcile_step
from baton.cluster.signals import Stop
from baton.cluster.worker_supervisor import DecisionLog, WorkerSupervisor
from baton.config import ClusterConfig
from baton.control_plane import Plan, Slot, pool_size
from baton.core import Role, sizes_text
from baton.errors import ConfigError, LedgerError
from baton.ledger.control_state import ControlReport, ControlState
from baton.ledger.registry import Ledger

REPORT_S = 1.0
REPORT_LEASE_S = 10.0
HEARD_S = 15.0  # until each worker of an earlier controller has answered, or is judged by its lease
LOOK_S = 1.0  # interval of autoscaler decisions
READY_POLL_S = 0.05

log = structlog.get_logger(__name__)


class Controller:
    """Keeps the workers of one cluster as planned. All calls come from one thread and one event loop."""

    def __init__(
        self,
        config: ClusterConfig,
        placement: Placement,
        ledger: Ledger,
        control_state: ControlState,
        clock: Clock,
        autoscaler: Autoscaler | None = None,
    ) -> None:
        self.plan = Plan(config.prefill.replicas, config.decode.replicas, 0, 0, "file", "")
        self._placement, self._ledger, self._control_state = placement, ledger, control_state
        self._clock, self._autoscaler = clock, autoscaler
        self._scaling = config.scaling
        self._lease_s = config.ledger.lease_s
        self._lease_grace_s = config.ledger.lease_s / 2
        self._journal = DecisionLog(clock)
        self._supervisor = WorkerSupervisor(placement, self._journal, self._lease_grace_s, config.scaling.drain_s)
        self._units = self._supervisor.units
        pools = {(pool.tensor_parallel, pool.device) for pool in (config.prefill, config.decode)}
        self._turns = config.scaling.turn and len(pools) == 1
        self._away = False  # Redis does not answer
        self._no_kills_until = 0.0  # until then, a missing lease is no reason to kill a worker
        self._ordered: set[str] = set()  # workers that may have a command in the control state
        self._looked_at = 0.0
        self._outlook = ""
        self._reported: ControlReport | None = None
        self._reported_at = 0.0  # monotonic: after a step of the clock back, no report would be due for long
        ledger.follow(self._suspend_kills)

    @property
    def ready(self) -> bool:
        units = self._units.values()
        sizes = all(sum(unit.role is role for unit in units) == pool_size(self.plan, role) for role in Role)
        return sizes and all(unit.state == "ready" for unit in units)

    async def begin(self) -> None:
        """Take over the workers of an earlier controller, or begin with the cluster file's plan. Raises LedgerError."""
        found, last = self._placement.found(), await self._control_state.control()
        if found and last is None:
            last = await self._control_state.last_control()  # Ray was away for longer than the report's lease
        stored = await self._control_state.plan()
        live = {info.ref.worker_id: info for info in await self._ledger.workers()}
        if last is not None:
            self._journal.decisions.extend(last.decisions)
        self._begin_plan(stored, taken_over=bool(found) or last is not None)
        slots = {slot.worker_id: slot for slot in last.slots} if last is not None else {}
        self._ordered.update(slots)
        for worker_id, role in found.items():
            self._take_over(worker_id, live[worker_id].role if worker_id in live else role, slots.get(worker_id))
        if found:
            self._suspend_kills()
            self._no_kills_until = max(self._no_kills_until, self._clock.monotonic() + HEARD_S)
            self._journal.record("plan", f"took over {len(found)} workers of an earlier controller")

    def _begin_plan(self, stored: Plan | None, *, taken_over: bool) -> None:
        """Choose the first plan: the cluster file's, unless a running cluster was given another one by other means."""
        plan = self.plan
        kept = taken_over and stored is not None and stored.by != "file" and (stored.prefill > 0) == (plan.prefill > 0)
        if stored is None:
            plan = replace(plan, reason="set by the cluster file")
        elif (stored.prefill, stored.decode) == (plan.prefill, plan.decode):
            plan = stored
        elif kept:
            file, since = (f"{one.prefill} prefill and {one.decode} decode" for one in (plan, stored))
            text = f"the cluster file has {file} workers, but {stored.by} set {since} since: `baton scale` changes it"
            self._journal.record("plan", text)
            plan = stored
        else:
            reason = "the cluster file differs from the plan before"
            plan = replace(plan, number=stored.number + 1, generation=stored.generation, reason=reason)
        self._follow(plan)

    def _take_over(self, worker_id: str, role: Role, slot: Slot | None) -> None:
        now = self._clock.monotonic()
        unit = self._units[worker_id] = WorkerState(worker_id, role, self.plan.generation, born=now, taken_over=True)
        if slot is not None:
            unit.role, unit.generation, unit.restarts = Role(slot.role), slot.generation, slot.restarts
            if slot.state == "draining":
                unit.leave(now)

    async def poll(self) -> None:
        """Run one pass of milliseconds, or of seconds while Redis does not answer. Nothing is decided without Redis."""
        now = self._clock.monotonic()
        try:
            await self._look(now)
            suspended = now < self._no_kills_until
            self._supervisor.supervise(self.plan.generation, now, kill=not suspended)
            if not suspended:
                self._change(now)
            await self._put_orders()
            await self._scale(now)
            await self._report()
            self._away = False
        except LedgerError as error:
            if not self._away:
                log.warning("control_without_redis", error=str(error))
            self._away = True
            self._suspend_kills()

    def check_start(self) -> None:
        """Raise the BatonError for which a worker ended, or StartError if one is silent. For use during a start."""
        now = self._clock.monotonic()
        for worker_id, seen in self._placement.look().items():
            unit = self._units.get(worker_id)
            if unit is None or unit.leaving:
                continue
            if seen.state == "ended":
                raise seen.error or StartError(f"{worker_id} ended")
            if seen.state == "starting" and now - unit.born > START_TIMEOUT_S:
                raise seen.error or StartError(f"{worker_id} was silent for {START_TIMEOUT_S:g} s")

    async def end(self) -> None:
        """Remove this controller's report from the control state. Raises LedgerError."""
        await self._control_state.drop_control()

    def _suspend_kills(self) -> None:
        """Suspend kills for missing leases: Redis was away or lost its data, so workers must register again first."""
        now = self._clock.monotonic()
        self._no_kills_until = now + self._lease_s + self._lease_grace_s
        for unit in self._units.values():
            unit.missing_since = None
            unit.ordered_at = None if unit.ordered_at is None else now

    async def _look(self, now: float) -> None:
        """Read processes, leases and the plan. Processes come first: a lease seen after a ready process is its own."""
        seen = self._placement.look()
        live = {info.ref.worker_id: info for info in await self._ledger.workers()}
        for worker_id, unit in self._units.items():
            unit.look(seen.get(worker_id), live.get(worker_id), now)
        if all(unit.info is not None for unit in self._units.values() if unit.may_serve):
            self._no_kills_until = 0.0
        stored = await self._control_state.plan()
        if stored is None or stored.number < self.plan.number:
            await self._control_state.put_plan(self.plan)
        elif stored != self.plan:
            self._follow(stored)

    def _follow(self, plan: Plan) -> None:
        self.plan = plan
        sizes = sizes_text(plan.prefill, plan.decode)
        self._journal.record("plan", f"{sizes}, generation {plan.generation}: {plan.reason or plan.by}")
        self._supervisor.retry(self._units.values(), self._clock.monotonic())

    def _change(self, now: float) -> None:
        """Start all changes that may start now. The others follow in later passes."""
        started: list[tuple[str, str]] = []
        while (step := reconcile_step(list(self._units.values()), self.plan, now, turns=self._turns)) is not None:
            if step.unit is None:
                worker_id = free_id(step.role, self._units)
                self._supervisor.start(WorkerState(worker_id, step.role, self.plan.generation), now)
                started.append((step.reason, worker_id))
            elif step.kind == "turn":
                step.unit.change_role(step.role, now)
                self._journal.record("turn", f"{step.unit.worker_id} becomes {step.role.value}: {step.reason}")
            else:
                self._supervisor.leave(step.unit, step.reason, now)
        for reason, group in groupby(started, key=lambda one: one[0]):
            self._journal.record("start", f"{', '.join(name for _, name in group)}: {reason}")

    async def _put_orders(self) -> None:
        """Write pending commands to the control state, again if the store lost them, and remove obsolete ones."""
        now = self._clock.monotonic()
        for worker_id, unit in self._units.items():
            known = await self._control_state.order(unit.info.ref) if unit.info is not None else None
            unit.adopt_command(known, now)
            order = unit.order(self._scaling.drain_s)
            if known is not None or order is not None:
                self._ordered.add(worker_id)
            if order is not None and (known is None or known != order):
                await self._control_state.put_order(worker_id, order)
        for worker_id in list(self._ordered):
            ordered = self._units.get(worker_id)
            if ordered is not None and ordered.info is None:
                continue  # the command may be for the incarnation that is about to register again
            if ordered is None or not (ordered.unwanted or ordered.order(self._scaling.drain_s)):
                await self._control_state.drop_order(worker_id)
                self._ordered.discard(worker_id)

    async def _scale(self, now: float) -> None:
        """Run the autoscaler. A proposal is dropped while a change is in progress, and must be made again."""
        if self._autoscaler is None or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        live = [unit.info for unit in self._units.values() if unit.info is not None]
        wanted, self._outlook = self._autoscaler.look(self.plan, await self._control_state.routers(), live, now)
        if wanted is None or not self._settled(now):
            return
        plan = replace(wanted, number=self.plan.number + 1, by="autoscaler")
        if await self._control_state.put_plan(plan):
            self._follow(plan)

    def _settled(self, now: float) -> bool:
        """Return whether no change is in progress. Workers that failed or fit nowhere are not waited for."""
        units = [unit for unit in self._units.values() if not lacks_room(unit, now)]
        return all(unit.state in {"ready", "failed"} and unit.generation == self.plan.generation for unit in units)

    async def _report(self) -> None:
        at, now, last = self._clock.wall(), self._clock.monotonic(), self._reported
        report = ControlReport(
            plan=self.plan,
            at=at,
            slots=tuple(unit.slot for _, unit in sorted(self._units.items())),
            decisions=tuple(self._journal.decisions),
            host=socket.gethostname(),
            outlook=self._outlook,
        )
        if last is None or now - self._reported_at >= REPORT_S or report != last.model_copy(update={"at": at}):
            await self._control_state.put_control(report, REPORT_LEASE_S)
            self._reported, self._reported_at = report, now


async def check_alone(name: str, state: ControlState, wait_s: float = 3 * REPORT_S) -> None:
    """Raise ConfigError if another controller of this name reports within `wait_s`. The report of a killed one stays
    for a while, but does not change. Two controllers would replace each other's workers without end.
    """
    first = found = await state.control()
    deadline = time.monotonic() + wait_s
    while first is not None and found is not None and time.monotonic() < deadline:
        if found.at != first.at:
            text = f"another controller of cluster {name!r} runs on {found.host} with this Redis"
            raise ConfigError(f"name: {text}; use another name, another Redis, or stop it")
        await asyncio.sleep(LOOK_S / 10)
        found = await state.control()


class LocalControl:
    """A `Control` around a `Controller` in this process. Its event loop runs only within these calls."""

    def __init__(self, config: ClusterConfig, placement: Placement) -> None:
        self._config, self._placement = config, placement
        self._runner = asyncio.Runner()
        self._ledger: Ledger | None = None
        self._controller: Controller | None = None

    def start(self, redis_url: str) -> None:
        self._placement.open()
        self._runner.run(self._begin(redis_url))

    async def _begin(self, redis_url: str) -> None:
        config, clock = self._config, SystemClock()
        if self._ledger is not None:  # of a start that failed
            await self._ledger.close()
        self._ledger = await Ledger.connect(redis_url, f"baton:{config.name}", config.ledger.lease_s, clock)
        control_state = ControlState(self._ledger.connection)
        controller = Controller(config, self._placement, self._ledger, control_state, clock, Autoscaler(config))
        await check_alone(config.name, control_state)
        await controller.begin()
        await controller.poll()
        self._controller = controller

    @property
    def _started(self) -> Controller:
        assert self._controller is not None, "start comes first"
        return self._controller

    def wait_ready(self, stop: Stop) -> None:
        while not self.ready():
            self.poll()
            stop.drain.wait(READY_POLL_S)
            stop.check()

    def ready(self) -> bool:
        """Return whether as many workers are ready as planned. Raises the errors of `wait_ready`, except Cancelled."""
        if not self._started.ready:
            self._started.check_start()
        return self._started.ready

    def poll(self) -> None:
        self._runner.run(self._started.poll())

    def pids(self) -> dict[str, int]:
        return {worker_id: seen.pid for worker_id, seen in self._placement.look().items() if seen.pid is not None}

    @property
    def size(self) -> int:
        return self._started.plan.prefill + self._started.plan.decode

    def stop(self, grace_s: float) -> None:
        self._placement.stop(grace_s)
        self._runner.run(self._end())
        self._runner.close()

    async def _end(self) -> None:
        if self._controller is not None:
            with suppress(LedgerError):
                await self._controller.end()
        if self._ledger is not None:
            await self._ledger.close()
