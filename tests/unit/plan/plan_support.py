"""A fake simulation that computes a shape's capacity arithmetically, and the status of a cluster."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.bench.lengths import Lengths
from baton.bench.traces import Arrival
from baton.client.types import ClusterStatus, WorkerStatus
from baton.core import Incarnation, KVLayout, Load, Role, WorkerInfo, WorkerRef
from baton.planner.profile import Profile, load_profile
from baton.planner.search import Planner, Site, Workload
from baton.planner.sim.scenario import Scenario
from baton.planner.sim.stats import Report

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")
EASY = {"step_s": 0.01, "token_s": 1e-4, "context_s": 0.0}


def profile(**changes: object) -> Profile:
    """Return a profile of round numbers: 0.1 ms per prompt token, so 100 prompts of 100 tokens per second."""
    layout = {"tensor_parallel": 1, "kv_tokens": 100_000, "prompt": EASY, "decode": [EASY]}
    names: dict[str, object] = {"name": "easy", "model": "m", "hardware": "h", "source": "made up"}
    costs = {"token_bytes": 1000, "layers": 2, "link": {"bytes_per_s": 1e9}, "layouts": [layout]}
    return Profile.model_validate(names | costs | changes)


@dataclass
class Fake:
    """A simulation in which each worker serves so many requests per second. Records the requested scenarios."""

    prefill: float
    decode: float
    colocated: float
    asked: list[Scenario] = field(default_factory=list)

    def __call__(self, scenario: Scenario, load: Iterable[Arrival]) -> Report:
        self.asked.append(scenario)
        times = [one.at_s for one in load]
        rate = len(times) / times[-1]
        first, second = scenario.prefill.workers * self.prefill, scenario.decode.workers * self.decode
        if scenario.mode == "colocated":
            first = second = scenario.decode.workers * self.colocated
        ttft, itl = len(times) * (rate <= first), len(times) * (rate <= second)
        good = min(ttft, itl)
        return Report(arrivals=len(times), good=good, good_ttft=ttft, good_itl=itl, duration_s=times[-1])


def planner(fake: Fake, *, gpus: int = 16, name: str = "", times: str = "constant") -> Planner:
    """Return a planner for requests with 100 prompt tokens and 11 new ones."""
    site = Site(load_profile(name) if name else profile())
    return Planner(fake, site, Workload(Lengths.parse("100", "11"), times, requests=50), gpus=gpus)


def cluster(*workers: tuple[Role, int], loads: Sequence[Load] = ()) -> ClusterStatus:
    found = []
    for number, (role, blocks) in enumerate(workers):
        ref = WorkerRef(f"{role.value}-{number}", Incarnation(1, 1), "h:1")
        info = WorkerInfo(ref, role, "f", "m", 640, blocks, LAYOUT)
        found.append(WorkerStatus(info, loads[number] if loads else Load(), "connected", 0))
    return ClusterStatus("c", "r", "1", "m", 0.0, 0, 0, 0, 0, 0, 0, 0, tuple(found))
