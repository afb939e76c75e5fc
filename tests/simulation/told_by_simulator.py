"""A story of the simulator in `baton/planner/sim/`."""

from functools import wraps
from typing import Any

import pytest

from baton.bench.traces import Arrival
from baton.core import Role
from baton.planner.sim.cluster import Cluster
from baton.planner.sim.request import Attempt, Request, deliver
from baton.planner.sim.scenario import Death, Linear, Network, Pool, Router, Scenario, line
from baton.planner.sim.worker import DecodeWorker, PrefillWorker, Worker
from tests.simulation.stories import BACK_S, BLOCK, BLOCKS, PROMPT, TOKENS, Case, Phase, Story, Strike, Striker

COST = Linear(line(0.03), line(0.02))
NETWORK = Network(token_bytes=1e6)
ROUTER = Router(local_prefill=False)
_LATER_S = {Phase.COMPUTING: 5e-3, Phase.PUSHING: 1e-3, Phase.DECODING: 0.07}  # in the middle of the phase
_NOTICED_S = {Phase.RESERVING: 0.0}  # for other phases, messages in transit arrive before
_PHASES = {"reserve": Phase.RESERVING, "reserved": Phase.RESERVED, "prefill": Phase.COMPUTING}
_PHASES |= {"repush": Phase.COMPUTING, "adopted": Phase.COMMITTED}


def told_by_simulator(case: Case) -> Story:
    """Return the simulator's story. The simulator itself checks that nothing is left."""
    pool = {"cost": COST, "block_size": BLOCK}
    decode, prefill = Pool(case.decode, kv_blocks=case.blocks, **pool), Pool(case.prefill, kv_blocks=BLOCKS, **pool)  # type: ignore[arg-type]
    mode: Any = "disaggregated" if case.prefill else "colocated"
    story = Story()
    with pytest.MonkeyPatch.context() as patch:
        watch = _Watch(story, case.strikes)
        watch.watch(patch)
        watch.cluster = Cluster(Scenario(decode, prefill, mode, NETWORK, router=ROUTER))
        report = watch.cluster.run([Arrival(1.0 + 0.01 * n, PROMPT, TOKENS) for n in range(case.requests)])
    story.recoveries.update(report.recoveries)
    story.outcomes.update(completed=report.completed, failed=report.failed)
    story.outcomes += {}  # drops zeros
    assert report.completed + report.failed == case.requests
    assert not watch.striker.pending, f"never reached: {', '.join(map(str, watch.striker.pending))}\n{story}"
    return story


class _Watch:
    """Records the events of a simulation's parts."""

    cluster: Cluster

    def __init__(self, story: Story, strikes: tuple[Strike, ...]) -> None:
        self.story = story
        self.striker = Striker(strikes, self._strike)
        self.attempts: dict[int, Attempt] = {}  # of the first request

    def _strike(self, one: Strike) -> None:
        attempt = self.attempts[one.attempt]
        worker = attempt.decode if one.role is Role.DECODE else attempt.prefill
        assert worker is not None
        if one.role is None:
            deliver(worker, worker.release, self.attempts[one.attempt - 1])
        else:
            noticed_s = _NOTICED_S.get(one.phase, 0.002)
            self.cluster._kill(Death(self.cluster.kernel.now, worker.name, BACK_S, noticed_s))

    def reached(self, attempt: Attempt, phase: Phase | None) -> None:
        if phase and attempt.request.number == 1:
            self.cluster.kernel.after(_LATER_S.get(phase, 0.0), self.striker.reached, attempt.handoff.attempt, phase)

    def _told(self, attempt: Attempt, kind: str) -> None:
        leg = self.story.leg(attempt.request.number, attempt.handoff.attempt)
        if kind == "reserve":
            leg.knows(attempt.before)
            if attempt.request.number == 1:
                self.attempts[attempt.handoff.attempt] = attempt
        if kind != "release":
            leg.commands.append(kind)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Record the router's commands, its decision at the end of an attempt, and the workers' events."""
        send, first, adopted, end = Attempt._send, Attempt.first, Attempt.adopted, Request.over

        def sent(attempt: Attempt, worker: Any, act: Any, *facts: Any) -> None:
            kind = "prefill" if act.__name__ == "compute" else act.__name__
            self._told(attempt, kind)
            send(attempt, worker, act, *facts)
            self.reached(attempt, _PHASES.get(kind))

        @wraps(adopted)
        def decodes(attempt: Attempt) -> None:
            adopted(attempt)
            self.reached(attempt, Phase.DECODING)

        @wraps(first)
        def has_first(attempt: Attempt) -> None:
            first(attempt)
            if attempt.prefill is None:
                self.reached(attempt, Phase.DECODING)

        def over(request: Request, attempt: Attempt, reason: str) -> None:
            leg = self.story.leg(request.number, request.attempts)
            leg.ended, leg.failed, leg.died = reason, attempt.failed, attempt.died
            leg.held = attempt.failed and attempt.held
            end(request, attempt, reason)

        def told(worker: PrefillWorker, act: Any, *facts: Any) -> None:
            Worker.stream(worker, act, *facts)
            self.reached(act.__self__, Phase.PUSHING if act.__name__ == "first" else None)

        def said(worker: DecodeWorker, act: Any, *facts: Any) -> None:
            Worker.send(worker, act, *facts)
            self.reached(act.__self__, _PHASES.get(act.__name__))

        patch.setattr(Attempt, "_send", sent)
        patch.setattr(Attempt, "adopted", decodes)
        patch.setattr(Attempt, "first", has_first)
        patch.setattr(Request, "over", over)
        patch.setattr(PrefillWorker, "stream", told)
        patch.setattr(DecodeWorker, "send", said)
