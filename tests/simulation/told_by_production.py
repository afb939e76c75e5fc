"""A story of production: the real router, roles, engines and senders in virtual time, without randomness."""

import random
import re
from typing import Any, cast

import pytest

from baton.core import HandoffId, Role, Sampling
from kvtransfer.handoff import TransferSettings
from prefill_workers.worker import PrefillWorker
from router.context import RouterSettings
from router.request.lifecycle import ChoiceRun
from router.workers.stream import WorkerStream
from tests.simulation.cluster import LEASE_S, Cluster, Plan
from tests.simulation.front import Ask, Client
from tests.simulation.patches import simulated
from tests.simulation.stories import BACK_S, BLOCKS, PROMPT, TOKENS, Case, Phase, Story, Striker
from tests.simulation.worker import WorkerPlan
from tests.simulation.world import World, in_virtual_time

TRANSFER = TransferSettings("auto", frame_size=64, credits=2, coalesce_below=0, frame_deadline_s=2.0, verify_kv=False)
_SHOWN = re.compile(r"(\w+)\((.+)/(\d+)\)")  # a command or an event, in the trace
_HEARD = {
    ("R>W", "reserve"): Phase.RESERVING,
    ("emit", "reserved"): Phase.RESERVED,
    ("R>W", "prefill"): Phase.COMPUTING,
    ("R>W", "repush"): Phase.COMPUTING,
    ("emit", "committed"): Phase.COMMITTED,
}
_LATER_S = {Phase.COMPUTING: 5e-3}  # until its arrival; a step takes longer
_SOON_S = 1e-4  # until sent messages have left
_FEW = 3  # messages of a decode worker with tokens


class Still(random.Random):
    """Returns means, never draws rare events, and lets messages arrive that are in transit when a stream breaks."""

    def expovariate(self, lambd: float = 1.0) -> float:
        return 1 / lambd

    def random(self) -> float:
        return 0.99

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def randint(self, a: int, b: int) -> int:
        return b


class StillWorld(World):
    """Reports the phases that the first request reaches."""

    striker: Striker

    def __init__(self) -> None:
        super().__init__(0)
        self.rng, self.slow = Still(), 0.0
        self.requests: dict[str, int] = {}  # numbers, by request id
        self._said = 0

    def random_for(self, name: str) -> random.Random:
        return Still()

    def number(self, request_id: str) -> int:
        return self.requests.setdefault(request_id, len(self.requests) + 1)

    def note(self, kind: str, *facts: object) -> None:
        super().note(kind, *facts)
        for found in (_SHOWN.fullmatch(str(fact)) for fact in facts[1:] if kind in {"R>W", "emit"}):
            if found and self.number(found[2]) == 1:
                phase = self._said_by(str(facts[0])) if found[1] == "tokens" else _HEARD.get((kind, found[1]))
                if phase is not None:
                    self.loop.call_later(_LATER_S.get(phase, _SOON_S), self.striker.reached, int(found[3]), phase)
                self._said *= phase != Phase.RESERVING

    def _said_by(self, worker: str) -> Phase | None:
        if worker.startswith("prefill"):
            return Phase.PUSHING
        self._said += 1
        return Phase.DECODING if self._said == _FEW else None


class StillCluster(Cluster):
    """`placed`: the handoff, P and D of each attempt of the first request."""

    back_s = (BACK_S,)

    def __init__(self, world: StillWorld, case: Case) -> None:
        super().__init__(world, plan_of(case))
        self.placed: dict[int, tuple[HandoffId, str, str]] = {}
        self.striker = world.striker = Striker(case.strikes, self._strike)

    def _strike(self, one: Any) -> None:
        _, prefill, decode = self.placed[one.attempt]
        wanted = decode if one.role is Role.DECODE else prefill
        host = next(host for host in self.live if host.plan.worker_id == wanted)
        if one.role is not None:
            host.process.kill()
            return
        role, (held, _, _) = cast("PrefillWorker", host.role), self.placed[one.attempt - 1]
        host.loop.submit(lambda: role._drop(held))

    def _allowed(self, client: Client) -> list[str]:
        return []  # the comparison checks it


def plan_of(case: Case) -> Plan:
    workers = [
        WorkerPlan(role, f"{role.value}-{number}", blocks, 64, 8, TRANSFER, LEASE_S, step_s=0.02)
        for role, count, blocks in ((Role.PREFILL, case.prefill, BLOCKS), (Role.DECODE, case.decode, case.blocks))
        for number in range(count)
    ]
    settings = RouterSettings(name="sim", model="oracle", colocated=not case.prefill, worker_silence_s=LEASE_S)
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    asks = [
        Ask(f"ask{n}", tuple(range(n, n + PROMPT)), sampling, 1.0 + 0.01 * n, leaves_after=None, stall=0.0, priority=0)
        for n in range(case.requests)
    ]
    return Plan(workers, 1, settings, asks, [])


def told_by_production(case: Case) -> Story:
    """Return production's story. Fails if something is left or wrong."""
    with simulated(), pytest.MonkeyPatch.context() as patch:
        return in_virtual_time(_told(case, patch))


async def _told(case: Case, patch: pytest.MonkeyPatch) -> Story:
    story, world = Story(), StillWorld()
    cluster = StillCluster(world, case)
    _watch(patch, story, cluster, world)
    found = await cluster.run()
    cluster.stop()
    assert not found, "\n".join([*found, *world.trace])
    story.outcomes.update("completed" if one.outcome == "finished" else "failed" for one in cluster.clients)
    assert not cluster.striker.pending, f"never reached: {', '.join(map(str, cluster.striker.pending))}\n{story}"
    return story


def _watch(patch: pytest.MonkeyPatch, story: Story, cluster: StillCluster, world: StillWorld) -> None:
    """Record the router's commands to workers, and its decision at the end of an attempt."""
    send, attempt, requeue = WorkerStream.send, ChoiceRun.attempt, ChoiceRun.requeue

    def leg_of(handoff: Any) -> Any:
        return story.leg(world.number(handoff.request_id), handoff.attempt)

    def sent(link: WorkerStream, **command: Any) -> None:
        [(kind, message)] = command.items()
        if kind != "release":
            leg_of(message.handoff).commands.append(kind)
        send(link, **command)

    def begun(run: ChoiceRun, *args: Any) -> Any:
        made = attempt(run, *args)
        leg_of(made.handoff).knows(len(made.spec.known))
        if world.number(run.request_id) == 1:
            cluster.placed[run.observer.attempts] = (made.handoff, *made.workers)
        return made

    async def over(run: ChoiceRun, made: Any, client: Any) -> None:
        leg = leg_of(made.handoff)
        leg.ended, leg.failed, leg.died, leg.held = made.retry_reason, made.lost is not None, made.died, made.held
        await requeue(run, made, client)
        story.recoveries[made.retry_reason] += 1  # no error was raised

    patch.setattr(WorkerStream, "send", sent)
    patch.setattr(ChoiceRun, "attempt", begun)
    patch.setattr(ChoiceRun, "requeue", over)
