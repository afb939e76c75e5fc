"""The cluster of one schedule: its processes, requests and faults, and the checks after its end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from baton.core import Constraint, Role, Sampling
from baton.engine.determinism.shapes import FixedShapes
from kvtransfer.handoff import TransferSettings
from router.context import RouterSettings
from router.request.lifecycle import DEATH_LIMIT
from tests.simulation.front import Ask, Client, RouterHost
from tests.simulation.transfer import SimTransport
from tests.simulation.worker import WorkerHost, WorkerPlan
from tests.simulation.world import Process, SimLedger, Stream, T, World

LEASE_S = 3.0
BOUND_S = 150.0  # virtual seconds for a request: far beyond all its waits and its deadline
DEADLINE_S = 100.0
QUIET_S = 8.0  # virtual seconds in which everything held is freed
ATTEMPTS = 3
CONSTRAINTS = (
    None,
    Constraint("regex", ("([a-z]{3} )+[0-9]",)),
    Constraint("choices", ("yes", "yesterday", "no")),
    Constraint("json_schema", ('{"type": "array", "items": {"type": "integer"}}',)),
)
SHAPES = tuple(FixedShapes(32 // tokens, tokens) for tokens in (2, 4, 8, 16))
KINDS = [f"{what} {role}" for what in ("crash", "pause") for role in Role]
KINDS += ["cut worker", "cut peer", "break channel", "flip", "crash router", "leave prefill", "leave decode"]
WEIGHTS = (4, 4, 2, 2, 2, 3, 3, 3, 1, 1, 1)
ORDERS = ("drain prefill", "drain decode", "turn prefill", "turn decode")
"""Orders of an operator. They are no faults: each request ends as without them."""


@dataclass(frozen=True)
class Fault:
    """A fault after `step` of the trace. `number` chooses among its possible targets; `long_s`: duration of a pause."""

    kind: str
    step: int
    number: int
    long_s: float

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step}"


def draw(rng: random.Random, lease_s: float, *, routers: int) -> list[Fault]:
    """Draw up to six faults. Every eighth schedule has none."""
    count = rng.choice((0, 1, 1, 2, 2, 3, 4, 6))
    kinds = rng.choices(KINDS, WEIGHTS, k=count)
    faults = [
        Fault(kind, int(rng.expovariate(1 / 200.0)), rng.randrange(1000), lease_s * rng.choice((0.1, 0.5, 1.2, 2.0)))
        for kind in kinds
    ]
    return [fault for fault in faults if fault.kind != "crash router" or routers > 1]


def orders(rng: random.Random) -> list[Fault]:
    kinds = rng.choices(ORDERS, k=rng.randint(1, 4))
    return [Fault(kind, int(rng.expovariate(1 / 200.0)), rng.randrange(1000), 0.0) for kind in kinds]


class Faults:
    """Injects faults into a cluster. `struck`: the kinds of those that took effect."""

    def __init__(self, cluster: Cluster, faults: list[Fault]) -> None:
        self.struck: list[str] = []
        self._cluster, self._world = cluster, cluster.world
        for fault in faults:
            self._world.at(max(1, fault.step), lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def _strike(self, fault: Fault) -> None:
        what, _, target = fault.kind.partition(" ")
        if what in {"crash", "pause", "leave", "drain", "turn"} and target != "router":
            hit = self._worker(fault, what, Role(target))
        else:
            acts = {"crash": self._crash_router, "cut": self._cut, "break": self._break, "flip": self._flip}
            hit = acts[what](fault, target)
        if hit and fault.kind in ORDERS:
            self._world.note("ORDER", fault.kind, hit)
        elif hit:
            self.struck.append(fault.kind)
            self._world.note("FAULT", fault.kind, hit)

    def _worker(self, fault: Fault, what: str, role: Role) -> str:
        hosts = [host for host in self._cluster.live if host.plan.role is role and not host.process.paused]
        if what in {"drain", "turn"}:
            hosts = [host for host in hosts if not (host.told or host.role.draining)]
        if what == "turn":  # operators would not turn a role's last worker, or its last one with shapes
            exact = {host for host in hosts if host.plan.shapes is not None}
            hosts = [host for host in hosts if (exact if host in exact else set(hosts)) - {host}]
        if not hosts:
            return ""
        host = hosts[fault.number % len(hosts)]
        if what == "crash":
            host.process.kill()
        elif what == "leave":
            host.leave()
        elif what in {"drain", "turn"}:
            host.drain(turn=what == "turn")
        else:
            self._pause(host, fault.long_s)
        return host.name

    def _pause(self, host: WorkerHost, long_s: float) -> None:
        host.process.pause()
        self._world.loop.call_later(long_s, self._resume, host.process)

    def _resume(self, process: Process) -> None:
        self._world.note("RESUME", process)
        process.resume()

    def _crash_router(self, fault: Fault, target: str) -> str:
        alive = [router.process for router in self._cluster.routers if router.process.alive]
        return self._one(fault, alive if len(alive) > 1 else [], Process.kill)

    def _cut(self, fault: Fault, target: str) -> str:
        return self._one(fault, [s for s in self._world.streams if s.kind == target and s.open], Stream.cut)

    def _break(self, fault: Fault, target: str) -> str:
        transport = self._cluster.transport
        open_ones = [name for name, meeting in transport.meetings.items() if not meeting.closed]
        return self._one(fault, open_ones, lambda broken: transport.break_all(lambda name: name == broken))

    def _one(self, fault: Fault, targets: list[T], act: Callable[[T], object]) -> str:
        """Act on one of the targets. Return its name, or an empty string without any."""
        if not targets:
            return ""
        target = targets[fault.number % len(targets)]
        act(target)
        return str(target)

    def _flip(self, fault: Fault, target: str) -> str:
        self._cluster.transport.flips += 1
        return "the next frame"


@dataclass(frozen=True)
class Plan:
    """Everything that a seed decides in advance."""

    workers: list[WorkerPlan]
    routers: int
    settings: RouterSettings
    asks: list[Ask]
    faults: list[Fault]


def plan_of(rng: random.Random) -> Plan:
    transfer = TransferSettings(
        transport="auto",
        frame_size=rng.choice((64, 128, 256, 4096)),
        credits=rng.choice((1, 2, 4)),
        coalesce_below=rng.choice((0, 100, 1 << 20)),
        frame_deadline_s=2.0,
        staging_memory=rng.choice((1 << 30, 1 << 30, 1)),
        verify_kv=rng.random() < 0.3,
    )
    rest = transfer, LEASE_S, rng.choice((0.001, 0.005, 0.02))  # seconds of a step
    workers = [
        WorkerPlan(
            role, f"{role.value}-{number}", rng.choice(blocks), rng.choice((4, 8, 64)), rng.choice((2, 8)), *rest
        )
        for role, blocks in ((Role.PREFILL, (16, 24, 40)), (Role.DECODE, (14, 14, 18, 30)))
        for number in range(rng.choice((1, 1, 2, 3)))
    ]
    routers = rng.choice((1, 1, 2))
    settings = RouterSettings(
        name="sim",
        model="oracle",
        policy=rng.choice(("predicted", "round_robin")),
        attempts=ATTEMPTS,
        queue_max_wait_s=60.0,
        max_request_s=DEADLINE_S,
        worker_silence_s=LEASE_S,
    )
    return Plan(workers, routers, settings, _asks(rng), draw(rng, LEASE_S, routers=routers))


def urgent(plan: Plan, rng: random.Random) -> Plan:
    """In one schedule of five, prompts preempt others in a prefill worker during their pushes."""
    if rng.random() > 0.2:
        return plan
    transfer = replace(plan.workers[0].transfer, coalesce_below=0, staging_memory=1 << 30)
    workers = [
        replace(worker, blocks=16, batched=4, running=8, step_s=0.004, transfer=transfer)
        if worker.role is Role.PREFILL
        else replace(worker, blocks=60, running=8, transfer=transfer)
        for worker in plan.workers
    ]
    asks = [
        replace(ask, prompt=_prompt(rng, 30 + rng.randrange(14)), at=0.02 * number * rng.random(), priority=number)
        for number, ask in enumerate(plan.asks)
    ]
    return replace(plan, workers=workers, asks=asks)


def constrained(plan: Plan, rng: random.Random) -> Plan:
    """In one schedule of five, answers have constraints, which every later attempt must keep."""
    if rng.random() > 0.2:
        return plan
    asks = [
        replace(ask, constraint=rng.choice(CONSTRAINTS), sampling=replace(ask.sampling, ignore_eos=False))
        for ask in plan.asks
    ]
    return replace(plan, asks=asks)


def resumed(plan: Plan, rng: random.Random) -> Plan:
    """In one schedule of four there are two routers. One dies, and its clients resume at the other one."""
    if rng.random() > 0.25:
        return plan
    asks = [replace(ask, resumable_s=rng.choice((0.0, 0.05, 5.0, 5.0)), stall=0.5) for ask in plan.asks]
    crash = Fault("crash router", int(rng.expovariate(1 / 300.0)), rng.randrange(1000), 0.0)
    return replace(plan, routers=2, asks=asks, faults=[*plan.faults, crash])


def ordered(plan: Plan, rng: random.Random) -> Plan:
    """In one schedule of three, workers drain or change their role."""
    return plan if rng.random() > 0.33 else replace(plan, faults=[*plan.faults, *orders(rng)])


def deterministic(plan: Plan, rng: random.Random) -> Plan:
    """In one schedule of four, most requests are deterministic, and some workers are incompatible. In one of four of
    these, the requests arrive together and preempt each other in decode workers.
    """
    if rng.random() > 0.25:
        return plan
    (shapes, other), strays, crowded = rng.sample(SHAPES, 2), rng.choice((0.0, 0.1, 0.5, 1.0)), rng.random() < 0.25
    workers = [
        replace(worker, strays=strays, shapes=rng.choice((shapes,) * 6 + (other, None))) for worker in plan.workers
    ]
    workers = [replace(worker, shapes=shapes) if worker.worker_id.endswith("-0") else worker for worker in workers]
    workers = [_exact(worker, rng.choice((0, 0, 2, 64)), rng.random() < 0.3) for worker in workers]
    asks = [_deterministic(ask, rng) for ask in plan.asks[:5]]
    if crowded:
        workers = [replace(w, blocks=10, running=8) if w.role is Role.DECODE else w for w in workers]
        asks = [_crowded(ask, rng) for ask in asks]
    return replace(plan, workers=workers, asks=asks)


def scored(plan: Plan, rng: random.Random) -> Plan:
    """In one schedule of four, most prompts are scored, and some requests want no answer."""
    if rng.random() > 0.25:
        return plan
    return replace(plan, asks=[_scored(ask, rng) for ask in plan.asks])


def _scored(ask: Ask, rng: random.Random) -> Ask:
    tokens = ask.sampling.max_tokens if rng.random() < 0.7 else 0
    sampling = replace(ask.sampling, max_tokens=tokens)
    return replace(ask, sampling=sampling, prompt_logprobs=rng.choice((None, 0, 1, 2)))


def _exact(worker: WorkerPlan, rows: int, everywhere: bool) -> WorkerPlan:
    """Make decode steps of up to `rows` rows exact, or all forwards, without a verify pass. The bits stay the same."""
    if worker.shapes is None:
        return worker
    return replace(worker, shapes=replace(worker.shapes, exact_rows=rows, everywhere=everywhere))


def _deterministic(ask: Ask, rng: random.Random) -> Ask:
    if rng.random() > 0.7:
        return ask
    more: dict[str, Any] = {"max_tokens": rng.choice((1, 4, 8, 12, 12))}
    if ask.constraint is None:
        more |= rng.choice(({}, {}, {"presence_penalty": 0.5}, {"stop_token_ids": tuple(range(97, 107))}))
    logprobs = rng.choice((None, None, 0, 2))
    return replace(ask, sampling=replace(ask.sampling, **more), deterministic=True, logprobs=logprobs)


def _crowded(ask: Ask, rng: random.Random) -> Ask:
    sampling = replace(ask.sampling, max_tokens=16)
    return replace(ask, prompt=ask.prompt[:20], sampling=sampling, at=0.05 * rng.random(), leaves_after=None)


def _prompt(rng: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(256) for _ in range(tokens))


def _asks(rng: random.Random) -> list[Ask]:
    """Draw prompts with common prefixes, so that caches have hits."""
    roots = [tuple(rng.randrange(256) for _ in range(32)) for _ in range(2)]
    asks = []
    for number in range(rng.randint(2, 8)):
        shared, own = rng.choice((0, 0, 8, 13, 24, 32)), rng.choice((1, 2, 7, 12))
        prompt = rng.choice(roots)[:shared] + tuple(rng.randrange(256) for _ in range(own))
        temperature = rng.choice((0.0, 1.0))
        sampling = Sampling(
            max_tokens=rng.choice((1, 2, 4, 8, 12, 12)),
            temperature=temperature,
            seed=rng.randrange(1 << 20),
            ignore_eos=rng.random() < 0.5,
        )
        leaves_after = rng.choice((None,) * 14 + (0, 1, 2, 4))
        at, stall = rng.choice((0.0, 0.0, 0.1, 1.0)) * rng.random(), rng.choice((0.0, 0.0, 0.2, 0.6))
        priority = rng.choice((0, 0, 0, 0, 1, 2))
        asks.append(Ask(f"ask{number}", prompt, sampling, at, leaves_after, stall, priority))
    return asks


class Cluster:
    """Runs a plan in its world. The next incarnation follows each worker that ends, after one of `back_s`."""

    back_s: tuple[float, ...] = (0.01, 0.5, 2.0)

    def __init__(self, world: World, plan: Plan) -> None:
        self.world, self.plan = world, plan
        self.transport = SimTransport(world)
        self.ledger = SimLedger(world, LEASE_S)
        self.live: list[WorkerHost] = []
        self._minted = 0
        for worker in plan.workers:
            self._start(worker)
        self.routers = [RouterHost(world, f"router-{n}", plan.settings, self.ledger) for n in range(plan.routers)]
        self.faults = Faults(self, plan.faults)
        self.clients = [
            Client(world, self.routers[number % len(self.routers)], ask, self.routers)
            for number, ask in enumerate(plan.asks)
        ]

    def _start(self, plan: WorkerPlan) -> None:
        self._minted += 1
        host = WorkerHost(self.world, plan, self._minted, self.ledger, self.transport)
        self.live.append(host)
        host.process.on_death.append(lambda: self._died(host))

    def _died(self, host: WorkerHost) -> None:
        self.live.remove(host)
        self.world.loop.call_later(self.world.rng.choice(self.back_s), self._start, host.next_plan)

    async def run(self) -> list[str]:
        asked = [asyncio.create_task(client.run()) for client in self.clients]
        done, hung = await asyncio.wait(asked, timeout=BOUND_S)
        for task in done:
            task.result()
        found = [f"{client.ask.name} hangs" for client, task in zip(self.clients, asked, strict=True) if task in hung]
        await asyncio.sleep(QUIET_S)
        for client in self.clients:
            found += client.check()
            found += self._allowed(client)
        for host in self.live:
            found += host.leftovers() if not host.process.paused else []
        for router in self.routers:
            found += router.leftovers() if router.process.alive else []
        return found + self.world.violations

    def _allowed(self, client: Client) -> list[str]:
        """Return a problem if the schedule's faults cannot explain the end of a request."""
        struck, outcome = self.faults.struck, client.outcome
        tight = self.plan.workers[0].transfer.staging_memory == 1  # a busy receiver rejects channels: an attempt each
        fine = {
            "finished": True,
            "left": client.ask.leaves_after is not None,
            "router crashed": not client.router.process.alive,
            "WorkerLost": tight or len(struck) >= ATTEMPTS,
            "EngineFault": len(struck) >= DEATH_LIMIT,  # both lost workers computed it
        }
        return [] if fine.get(outcome) else [f"{client.ask.name} ended as {outcome!r} with faults {struck}"]

    def stop(self) -> None:
        for host in list(self.live):
            host.process.on_death.clear()
            host.process.kill()
        for router in self.routers:
            router.process.kill()
