"""One schedule: runs a seed and returns its problems, with the trace."""

from collections import Counter
from dataclasses import dataclass

from tests.simulation.clock import Stuck
from tests.simulation.cluster import Cluster, constrained, deterministic, ordered, plan_of, resumed, urgent
from tests.simulation.world import World, in_virtual_time


@dataclass(frozen=True)
class Report:
    """The result of a schedule: problems, last steps, and `met`, the number of each kind of step and message."""

    seed: int
    found: list[str]
    trace: list[str]
    outcomes: Counter[str]
    struck: list[str]
    met: Counter[str]
    steps: int

    def __str__(self) -> str:
        lines = [f"schedule {self.seed}:", *self.found, f"faults: {self.struck}", "last steps:", *self.trace]
        return "\n  ".join(lines)


def run(seed: int) -> Report:
    """Run the schedule of `seed` to its end, within `patches.simulated`."""
    return in_virtual_time(_run(seed))


async def _run(seed: int) -> Report:
    world = World(seed)
    plan = urgent(plan_of(world.rng), world.random_for("urgent"))
    plan = resumed(constrained(plan, world.random_for("constrained")), world.random_for("resumed"))
    plan = ordered(plan, world.random_for("ordered"))
    cluster = Cluster(world, deterministic(plan, world.random_for("bits")))
    try:
        found = await cluster.run()
    except Stuck as error:
        found = [f"stuck: {error}"]
    trace, steps = list(world.trace), world.steps
    cluster.stop()
    outcomes = Counter(client.outcome for client in cluster.clients)
    return Report(seed, found, trace, outcomes, cluster.faults.struck, world.met, steps)
