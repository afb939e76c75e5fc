"""How much slower a prefill step is while its KV is read, compared with equal computation on the second core.

The prefill process and all its threads are pinned to the first core. The second core has, in turn: a loop without
memory traffic (`busy`, the baseline); reads of the engine's whole pool without a pause (`read`); and a receiver of
handoffs without a pause (`shm`, `gloo`), whose sender is in the prefill process. Ratios are within a round.
"""

from __future__ import annotations

import os
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.lib.protocol import ChildFailed
from benchmarks.lib.report import markdown
from benchmarks.lib.transfer_measure import START_S, ask

if TYPE_CHECKING:
    from benchmarks.lib.transfer_measure import Plan, Results, Where

BASELINE, LOADS = "busy", ("read", "shm", "gloo")
TOKENS, REPEATS, KV_TOKENS = 128, 3, 2048
TITLES = {
    "read": "one-sided reads without a pause",
    "shm": "handoffs over shm without a pause",
    "gloo": "handoffs over gloo without a pause",
}


def measure_slowdown(plan: Plan, where: Where, results: Results) -> None:
    """Measure steps of the 1.1 B shape under each load. Raises ChildFailed with fewer than two cores."""
    if len(os.sched_getaffinity(0)) < 2:
        raise ChildFailed("needs two cores: one computes, the other one reads")
    with where.child("transfer_slowed", where.large, KV_TOKENS) as child:
        child.start(START_S)
        for number in range(plan.rounds):
            kinds = (BASELINE, *LOADS) if number % 2 else (*reversed(LOADS), BASELINE)
            round_ = {kind: ask(child, "steps", load=kind, tokens=TOKENS, repeats=REPEATS) for kind in kinds}
            results.raw.extend({"load": kind, "round": number, **answer} for kind, answer in round_.items())
            for kind in LOADS:
                ratio = round_[kind]["seconds"] / round_[BASELINE]["seconds"]
                results.slowed.setdefault(kind, []).append((ratio, round_[kind]["bytes_per_s"]))


def slowdown(results: Results) -> float | None:
    """Return the figure `prefill_slowdown`. None means not measured."""
    ratios = [ratio for ratio, _ in results.slowed.get("read", ())]
    return round(median(ratios), 4) if ratios else None


def slowdown_table(results: Results) -> str:
    """Return the ratios of all loads with their spread, and the bytes per second that were moved."""
    rows = [
        [
            TITLES[kind],
            f"{median(ratio for ratio, _ in found):.3f}",
            f"{min(found)[0]:.3f} to {max(found)[0]:.3f}",
            f"{median(rate for _, rate in found) / 1e9:.2f}",
        ]
        for kind, found in results.slowed.items()
    ]
    return markdown(["on the second core", "step / step beside a busy core", "spread", "GB/s"], rows) if rows else ""
