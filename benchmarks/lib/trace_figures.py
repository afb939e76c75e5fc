"""Hits that a trace allows and those that a replay had, for benchmarks/traces.py."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.bench.traces import Arrival
from baton.planner.sim.block_pool import BlockHashes
from benchmarks.lib.disagg_figures import quantile


def ideal(load: Iterable[Arrival], block_size: int, most: int | None = None) -> float:
    """Return the share of prompt tokens in whole KV blocks of `block_size` tokens that one cache of `most` blocks hits
    (None: unlimited), evicting the least recently used. Requests follow each other, and the last position of a prompt
    is always computed. Blocks of one request age from its end, as in `baton.engine.block_pool`.
    """
    names, cache = BlockHashes(block_size), OrderedDict[int, None]()
    prompts = found = unshared = 0
    for one in load:
        hashes = list(names.of(one)[0].hashes)
        usable = hashes[: (one.prompt_tokens - 1) // block_size]
        known = next((place for place, name in enumerate(usable) if name not in cache), len(usable))
        prompts, found = prompts + one.prompt_tokens, found + known * block_size
        others = one.prompt_tokens // block_size - len(hashes)  # of its own tokens; answers need no room here
        own = range(unshared - others, unshared)  # below 0, and so different from all hashes
        unshared -= max(others, 0)
        for name in (*own, *reversed(hashes)):
            cache[name] = None
            cache.move_to_end(name)
        while most is not None and len(cache) > most:
            cache.popitem(last=False)
    return found / prompts if prompts else 0.0


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay on one side, measured or predicted. Times are seconds, shares are those of prompt tokens."""

    hit: float
    skipped: float  # KV that the decode worker had, and that was not moved
    ttft: tuple[float, float, float]  # p50, p90, p99
    gaps: tuple[float, float]  # p50, p99
    kv_bytes: float
    handoffs: float  # a prediction includes requests that end with their first token
    local: float  # prompts that a decode worker computed; all of colocated workers
    errors: float
    generator_cpu: float = 0.0


def measured(report: dict[str, Any], token_bytes: float) -> Replay:
    """Return the figures of a report of `baton bench --out`. `token_bytes`: KV of one token, all layers."""
    good = [one for one in report["samples"] if not one["error"]]
    moved = [one for one in good if one["decode_worker"] and one["prefill_worker"] != one["decode_worker"]]
    whole = sum(one["prompt_tokens"] for one in moved) * token_bytes
    kv_bytes = sum(one["kv_bytes"] for one in moved)
    ttft = [one["ttft_s"] for one in good]
    gaps = [gap for one in good for gap in one["gaps_s"]]
    return Replay(
        hit=sum(one["cached_tokens"] for one in good) / max(sum(one["prompt_tokens"] for one in good), 1),
        skipped=1 - kv_bytes / whole if whole else 0.0,
        ttft=(quantile(ttft, 0.5), quantile(ttft, 0.9), quantile(ttft, 0.99)),
        gaps=(quantile(gaps, 0.5), quantile(gaps, 0.99)),
        kv_bytes=kv_bytes,
        handoffs=len(moved),
        local=sum(one["prefill_worker"] == one["decode_worker"] for one in good),
        errors=len(report["samples"]) - len(good),
        generator_cpu=report["generator"]["cpu_share"],
    )


def predicted(report: dict[str, Any], requests: int, prompt_tokens: int, token_bytes: float) -> Replay:
    """Return the figures of the `report` of `baton plan --what-if --json`, for so many requests and prompt tokens."""
    pools = report["prefill"], report["decode"]
    cached, computed = (sum(pool[what] for pool in pools) for what in ("cached_tokens", "prompt_tokens"))
    part = requests / report["arrivals"]  # a plan repeats loads of less than a minute
    local = part * (report["local_prefills"] if report["prefill"]["workers"] else report["completed"])
    handoffs, kv_bytes = part * report["completed"] - local, part * report["moved_bytes"]
    whole = prompt_tokens * token_bytes * handoffs / requests  # local prompts of the mean length
    ttft, itl = report["ttft"], report["itl"]
    return Replay(
        hit=cached / max(cached + computed, 1),
        skipped=1 - kv_bytes / whole if whole else 0.0,
        ttft=(ttft["p50"], ttft["p90"], ttft["p99"]),
        gaps=(itl["p50"], itl["p99"]),
        kv_bytes=kv_bytes,
        handoffs=handoffs,
        local=local,
        errors=part * (report["arrivals"] - report["completed"]),
    )


def figures(one: Replay) -> dict[str, float]:
    """Return the figures of a table: shares, milliseconds and megabytes."""
    names = ("TTFT p50, ms", "TTFT p90, ms", "TTFT p99, ms", "gap p50, ms", "gap p99, ms")
    times = {name: seconds * 1e3 for name, seconds in zip(names, (*one.ttft, *one.gaps), strict=True)}
    moved = {"KV moved, MB": one.kv_bytes / 1e6, "handoffs": one.handoffs, "local prefills": one.local}
    return {"hit share": one.hit, "KV not moved, share": one.skipped, **times, **moved, "errors": one.errors}


def middle(all_: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: quantile([one[name] for one in all_], 0.5) for name in all_[0]}
