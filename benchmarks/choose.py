"""Time to choose a pair among 1,000 workers with 100,000 cached blocks, for prompts of 128 blocks.

    python benchmarks/choose.py --quick       a few seconds
    python benchmarks/choose.py               more rounds

A choice includes the lookup of the request's blocks and the policy's pass over all workers. For `predicted` it also
includes the check for a local prefill. Measured separately: the cost of a worker's report, and of hashing all blocks of
a prompt, which happens once per request and only up to the first block that no worker has. The last line of stdout is
one JSON object with medians in microseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/choose.py`

from baton.core import (
    BlockCounts,
    Incarnation,
    KVLayout,
    Load,
    Pace,
    Role,
    Sampling,
    SequenceSpec,
    WorkerInfo,
    WorkerRef,
)
from baton.engine.prefix_cache import BlockHashChain, scope_key
from baton.ledger.prefix_index import NAME_BYTES, Change, Holder, PrefixIndex
from benchmarks.lib.machine import machine
from benchmarks.lib.report import markdown
from router.placement.fleet import Fleet
from router.placement.policy import POLICIES, local_prefill_if_faster
from router.placement.snapshot import WorkerView

if TYPE_CHECKING:
    from collections.abc import Sequence

LAYOUT = KVLayout(layers=32, kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
MODEL = "f" * 24
BLOCKS = 128  # per prompt
CHANGED = 10  # workers with a changed load since the last choice
LIMIT_US = 100.0


@dataclass
class Worker:
    """A connected worker without a stream."""

    view: WorkerView
    usable: bool = True

    @property
    def info(self) -> WorkerInfo:
        return self.view.info


def workers(count: int, rng: random.Random) -> list[Worker]:
    """Return busy workers, half of each role, each with its own speed."""
    made = []
    for number in range(count):
        role = Role.PREFILL if number % 2 else Role.DECODE
        ref = WorkerRef(f"{role}-{number}", Incarnation(1, number), "x:1")
        info = WorkerInfo(ref, role, MODEL, "m", 8192, 20000, LAYOUT)
        pace, beside = Pace(1000, 400_000, 80_000_000, rng.uniform(20, 30)), Pace(100, 4_000, 800_000)
        joint = Pace(100, 40_000, 8_000_000, rng.uniform(4, 6))
        owned = rng.randint(1000, 10000)
        blocks = BlockCounts(20000, free=15000 - owned, owned=owned, cached=5000)
        waiting = rng.randint(0, 4000) if role is Role.PREFILL or rng.random() < 0.3 else 0
        load = Load(1000, rng.randint(1, 60), 0, waiting, blocks=blocks, prefill_pace=pace, decode_pace=pace)
        load = replace(load, joint_pace=joint, beside_pace=beside)
        made.append(Worker(WorkerView(info, load, dispatched=rng.randint(1, 20))))
    return made


def prompt(rng: random.Random, begins: Sequence[int] = ()) -> SequenceSpec:
    """Return a request of `BLOCKS` blocks and one token."""
    rest = BLOCKS * LAYOUT.block_size + 1 - len(begins)
    return SequenceSpec((*begins, *(rng.randrange(100_000) for _ in range(rest))), Sampling())


def publish(prefixes: PrefixIndex, fleet: list[Worker], per_worker: int, rng: random.Random) -> dict[str, list[int]]:
    """Give each worker `per_worker` cached blocks. Returns prefixes that none, all or some of them have."""
    shared = [rng.randrange(100_000) for _ in range(8 * LAYOUT.block_size)]  # prefix of every prompt, on every worker
    deep = list(prompt(rng, shared).prompt)
    names = {"shared": _names(deep)[:8], "deep": _names(deep)}
    for number, worker in enumerate(fleet):
        held = names["deep"][: rng.randint(9, BLOCKS)] if number % 50 < 2 else names["shared"]
        own = [rng.randbytes(NAME_BYTES) for _ in range(max(0, per_worker - len(held)))]
        holder = Holder(worker.info.ref.worker_id, worker.info.ref.incarnation)
        prefixes.apply(Change(holder, 1, True, [*held[:per_worker], *own]))
    return {"no worker has it": [], "all have 8 blocks": shared, "40 have 9 to 128 blocks": deep[:-1]}


def _names(tokens: Sequence[int]) -> list[bytes]:
    chain = BlockHashChain(scope_key(MODEL, ""), tokens, LAYOUT.block_size)
    return [chain.digest(block)[:NAME_BYTES] for block in range(BLOCKS)]


def reporting(fleet: Fleet, members: list[Worker], rng: random.Random) -> float:
    """Return the median seconds to apply a report."""
    seconds = []
    for worker in members:
        load = worker.view.load
        more = load.decode_pace.plus(30, 30_000, rng.uniform(0.02, 0.03))
        worker.view.load = replace(load, step=load.step + 1, prefill_pace=more, decode_pace=more)
        began = time.perf_counter()
        fleet.touch(worker.info.ref)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure(
    policy: str, fleet: Fleet, members: list[Worker], asks: list[SequenceSpec], rng: random.Random
) -> list[float]:
    """Return the seconds of each choice. An unmeasured first choice for a prompt computes its hashes."""
    seconds = []
    for turn, spec in enumerate(asks):
        fleet.ask(len(spec), turn, None, spec)
        for worker in rng.sample(members, CHANGED):
            worker.view.queued_tokens += 1
            fleet.touch(worker.info.ref)
        began = time.perf_counter()
        snapshot, ask = fleet.snapshot(), fleet.ask(len(spec), turn, None, spec)
        pair = POLICIES[policy](snapshot, ask)
        if policy == "predicted" and pair is not None:
            local_prefill_if_faster(snapshot, ask, pair)  # as `router.local_prefill: auto` does
        seconds.append(time.perf_counter() - began)
        assert pair is not None
    return seconds


def naming(asks: list[SequenceSpec]) -> float:
    """Return the median seconds to hash all blocks of a prompt."""
    seconds = []
    for spec in asks:
        began = time.perf_counter()
        _names(spec.tokens)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def run(count: int, blocks: int, rounds: int) -> dict[str, float]:
    """Print the table and return medians in microseconds."""
    rng = random.Random(7)
    members, prefixes = workers(count, rng), PrefixIndex()
    beginnings = publish(prefixes, members, blocks // count, rng)
    fleet = Fleet(prefixes, slo_itl_s=0.1)
    for worker in members:
        fleet.add(worker)
    fleet.snapshot()
    figures, rows = dict[str, float](), list[list[str]]()
    for name, begins in beginnings.items():
        asks = [prompt(rng, begins) for _ in range(rounds)]
        for policy in POLICIES:
            found = sorted(1e6 * s for s in measure(policy, fleet, members, asks, rng))
            figures[f"{policy}, {name}"] = round(statistics.median(found), 1)
            rows.append([name, policy, f"{statistics.median(found):.0f}", f"{found[int(0.99 * len(found))]:.0f}"])
    figures["naming"] = round(1e6 * naming(asks[:100]), 1)
    figures["report"] = round(1e6 * statistics.median(reporting(fleet, members, rng) for _ in range(20)), 1)
    print(markdown(["prompt", "policy", "median us", "p99 us"], rows))
    print(f"a worker's report: {figures['report']:.0f} us; naming {BLOCKS} blocks: {figures['naming']:.0f} us")
    return figures


def main() -> None:
    """Measure, and compare with the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=100_000, help="cached, on all workers together")
    args = parser.parse_args()
    print(*(f"{name}: {value}" for name, value in machine().items()), sep="\n")
    figures = run(args.workers, args.blocks, 200 if args.quick else 2000)
    worst = max(value for name, value in figures.items() if "," in name)
    print(f"the slowest median is {worst:.0f} us, the limit {LIMIT_US:.0f} us")
    print(json.dumps({"benchmark": "choose", "ratios": figures}))


if __name__ == "__main__":
    main()
