"""A small cluster in simulated time that follows plans. The router's own code computes the reports."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import cast

from baton.cluster.autoscaler import Autoscaler
from baton.config import ClusterConfig
from baton.control_plane import Plan, pool_size
from baton.core import BlockCounts, Incarnation, KVLayout, Load, Pace, Role, WorkerInfo, WorkerRef
from baton.ledger.control_state import RouterReport
from router.placement.snapshot import BLANK, Facts, WorkerView
from router.workers.pool import TypicalRequest, expected
from tests.support.plans import first_plan

TICK_S = 0.05
LOADS_S, TURNS_S = 4.0, 1.0
BLOCKS = 3000  # KV blocks of a worker
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, block_size=16, dtype="float32")
PROMPTS = {"step_s": 0.004, "token_s": 2e-4, "context_s": 1e-8, "queued_s": 2e-4}
STEPS = {"step_s": 0.010, "token_s": 8e-4, "context_s": 2e-7}
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(eq=False)
class Request:
    tokens: int
    output: int
    came: float
    first: float = 0.0
    made: float = 0.0  # generated tokens
    itl_s: float = 0.0
    blocks: int = 0
    decode: Worker | None = None


@dataclass(eq=False)
class Worker:
    name: str
    role: Role
    ready: float  # time from which it takes requests
    turns: bool = False
    leaves: bool = False
    prompts: deque[Request] = field(default_factory=deque)
    left_s: float = 0.0
    busy_s: float = 0.0
    rows: list[Request] = field(default_factory=list)
    reserved: int = 0
    owned: int = 0

    def positions(self) -> float:
        """Return the positions in the KV of all sequences that it decodes."""
        return sum(one.tokens + one.made for one in self.rows)

    def seen(self) -> tuple[WorkerView, Facts[float]]:
        ref = WorkerRef(self.name, Incarnation(1, 1), "x:1")
        info = WorkerInfo(ref, self.role, "f" * 64, "m", 4096, BLOCKS, LAYOUT)
        counts = BlockCounts(BLOCKS, BLOCKS - self.reserved - self.owned, self.reserved, self.owned)
        waiting = sum(one.tokens for one in self.prompts)
        pace = Pace(seconds=self.busy_s)
        load = Load(running=len(self.rows), queued_tokens=waiting, blocks=counts, prefill_pace=pace)
        costs = PROMPTS if self.role is Role.PREFILL else STEPS
        facts = BLANK._replace(able=1.0, backlog=waiting, requests=len(self.rows), kv_tokens=self.positions(), **costs)
        return WorkerView(info, load), facts


class Cluster:
    """Simulates requests at `rate` a second with `tokens` and `output` on average."""

    def __init__(self, config: ClusterConfig, seed: float) -> None:
        self.autoscaler = Autoscaler(config)
        self.plan = first_plan(config.prefill.replicas, config.decode.replicas)
        self.plans: list[tuple[float, Plan]] = []
        self.outlook = ""
        self.most = 0  # maximum number of workers at the same time
        self.now = 1000.0
        self.done: list[Request] = []
        self._random = random.Random(seed)
        self._names = iter(f"worker-{n}" for n in range(10_000))
        self._typical = TypicalRequest()
        self._queue: deque[Request] = deque()
        self.workers: list[Worker] = []
        for role in Role:
            for _ in range(pool_size(self.plan, role)):
                self._add(role, 0.0)

    def run(self, seconds: float, rate: float, tokens: int = 1, output: int = 1) -> None:
        for tick in range(round(seconds / TICK_S)):
            self.now += TICK_S
            if self._random.random() < rate * TICK_S:
                known, new = (max(1, round(mean * self._random.uniform(0.5, 1.5))) for mean in (tokens, output))
                self._queue.append(Request(known, new, self.now))
            for worker in self.workers:
                self._prefill(worker) if worker.role is Role.PREFILL else self._decode(worker)
            self._admit()
            if tick % round(1 / TICK_S) == 0:
                self._control()

    def _here(self, role: Role) -> list[Worker]:
        return [one for one in self.workers if one.role is role and one.ready <= self.now and not one.leaves]

    def _admit(self) -> None:
        """Reserve capacity first, as the router does: it is reserved while the prompt waits."""
        while self._queue and (decodes := self._here(Role.DECODE)) and (prefills := self._here(Role.PREFILL)):
            request = self._queue[0]
            decode = min(decodes, key=lambda one: one.reserved + one.owned)
            request.blocks = -(-(request.tokens + request.output) // 16)
            if decode.reserved + decode.owned + request.blocks > BLOCKS:
                return
            self._queue.popleft()
            request.decode = decode
            decode.reserved += request.blocks
            prefill = min(prefills, key=lambda one: sum(each.tokens for each in one.prompts))
            prefill.prompts.append(request)
            self._typical.add(request.tokens, 0)

    def _prefill(self, worker: Worker) -> None:
        left = TICK_S
        while worker.prompts and left > 0:
            request = worker.prompts[0]
            if worker.left_s <= 0:
                context = request.tokens * (request.tokens + 1) / 2
                worker.left_s = PROMPTS["step_s"] + PROMPTS["token_s"] * request.tokens + PROMPTS["context_s"] * context
            spent = min(left, worker.left_s)
            worker.left_s, worker.busy_s, left = worker.left_s - spent, worker.busy_s + spent, left - spent
            if worker.left_s <= 1e-12:
                worker.left_s = 0.0
                worker.prompts.popleft()
                self._hand_over(request)

    def _hand_over(self, request: Request) -> None:
        decode = request.decode
        assert decode is not None
        request.first = self.now
        decode.reserved -= request.blocks
        decode.owned += request.blocks
        decode.rows.append(request)

    def _decode(self, worker: Worker) -> None:
        rows, positions = len(worker.rows), worker.positions()
        steps = TICK_S / (STEPS["step_s"] + STEPS["token_s"] * rows + STEPS["context_s"] * positions)
        for request in list(worker.rows):
            request.made += steps
            if request.made >= request.output:
                worker.rows.remove(request)
                worker.owned -= request.blocks
                request.itl_s = (self.now - request.first) / request.output
                self.done.append(request)

    def _control(self) -> None:
        waited = self.now - self._queue[0].came if self._queue else 0.0
        report = expected("router-a", [one.seen() for role in Role for one in self._here(role)], self._typical)
        ttft_s = report.ttft_s and report.ttft_s + waited
        seen: RouterReport = report.model_copy(
            update={"queued": len(self._queue), "queue_s": waited, "oldest_s": waited, "ttft_s": ttft_s}
        )
        here = cast("list[WorkerInfo]", [one for role in Role for one in self._here(role)])
        new, self.outlook = self.autoscaler.look(self.plan, [seen], here, self.now)
        if new is not None:
            self.plan = new
            self.plans.append((self.now, new))
        self._reconcile()

    def _reconcile(self) -> None:
        """Surplus workers change to the role that lacks workers, or stop. Start workers for the rest."""
        staying = [one for one in self.workers if one.turns or not one.leaves]
        count = {role: sum((one.role is role) is not one.turns for one in staying) for role in Role}
        for worker in self.workers:
            role, other = worker.role, OTHER[worker.role]
            if count[role] > pool_size(self.plan, role) and not worker.leaves:
                worker.leaves, worker.turns = True, count[other] < pool_size(self.plan, other)
                count[role], count[other] = count[role] - 1, count[other] + worker.turns
        for worker in [one for one in self.workers if one.leaves and not (one.prompts or one.rows or one.reserved)]:
            self.workers.remove(worker)
            if worker.turns:
                self._add(OTHER[worker.role], TURNS_S)
        for role in Role:
            for _ in range(pool_size(self.plan, role) - count[role]):
                self._add(role, LOADS_S)
        self.most = max(self.most, len(self.workers))

    def _add(self, role: Role, takes_s: float) -> None:
        self.workers.append(Worker(next(self._names), role, self.now + takes_s))
