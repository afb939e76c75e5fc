"""Sequences that move from a decode worker that leaves: computed tokens, and the gap in their streams.

    python benchmarks/moves.py            2 rounds: 16 sequences of the demo model with about 1,000 tokens move
    python benchmarks/moves.py --quick    1 round: 4 sequences of 100 tokens

Two decode workers run as plain processes and share the streams. Each round streams all answers twice. The first time
nothing happens. The second time, when all streams have that many tokens, an operator plans one decode worker, and
`scaling.drain_s` is near 0, so half of the streams move. The answers are compared. The last line of stdout is one JSON
object. `receive_ms` is the median time from a moved sequence's first frame to its last, `commit_ms` the longest time
from there to the commit.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/moves.py`

import grpc

from baton.client import Client
from baton.core import Role
from baton.rpc.v1 import admin_pb2
from baton.rpc.v1.admin_pb2_grpc import AdminStub
from benchmarks.lib.cluster import cluster

if TYPE_CHECKING:
    from baton.cluster.state_dir import ClusterState

PROMPT = "The color of dog"
REST = 600  # tokens after the order
PATIENCE_S = 120.0
SETS = (
    "model.path=models/demo",
    "model.max_model_len=2048",
    "decode.replicas=2",
    "decode.kv_memory=256MiB",
    "scaling.drain_s=0.1",
    "ledger.heartbeat_s=0.1",
    "log.level=warning",
)


class Stream(NamedTuple):
    """One answer: ids, seconds between messages after the order, its last decode worker, and figures of its move."""

    ids: tuple[int, ...]
    late: list[float]
    moved: bool
    worker: str
    kv_bytes: int
    prompt_tokens: int
    receive_s: float
    commit_s: float


def main(argv: list[str]) -> int:
    """Run and print. The exit code is 1 if an answer is wrong, or none moved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 round, 4 sequences of 100 tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the last line to this file")
    args = parser.parse_args(argv)
    with cluster("moves", *SETS) as state:
        result = measured(state, *((1, 4, 100) if args.quick else (2, 16, 1000)))
    line = json.dumps({"benchmark": "moves", **result})
    if args.json is not None:
        args.json.write_text(line + "\n")
    print(line)
    return 0 if result["moved"] and not result["wrong"] else 1


def measured(state: ClusterState, rounds: int, count: int, tokens: int) -> dict[str, float]:
    """Run all rounds with twice `count` streams, and return the figures."""
    calm, found, again = list[Stream](), list[Stream](), 0
    with Client(state.grpc, admin=state.admin) as client, grpc.insecure_channel(state.admin) as channel:
        admin = AdminStub(channel)
        for _ in range(rounds):
            admin.Scale(admin_pb2.ScaleRequest(decode=2))
            connected(client, 2)
            calm += answers(client, 2 * count, tokens, lambda: None)
            before = computed(client)
            found += answers(client, 2 * count, tokens, lambda: admin.Scale(admin_pb2.ScaleRequest(decode=1)))
            print(Counter((each.worker, each.moved) for each in found[-2 * count :]), file=sys.stderr)
            again += sum(after - before.get(name, 0) for name, after in computed(client).items())
            connected(client, 1)
    moved, stayed = ([each for each in found if each.moved is kind] for kind in (True, False))
    step_s = median(gap for each in found for gap in each.late)
    return {
        "sequences": rounds * count,
        "moved": len(moved),
        "wrong": sum(each.ids != right.ids for each, right in zip(found, calm, strict=True)),
        "recomputed_tokens": max(0, again - sum(each.prompt_tokens for each in found)),
        "kv_bytes": max((each.kv_bytes for each in moved), default=0),
        "receive_ms": round(median([each.receive_s for each in moved] or [0.0]) * 1e3, 1),
        "commit_ms": round(max((each.commit_s for each in moved), default=0.0) * 1e3, 1),
        "step_ms": round(step_s * 1e3, 3),
        "moved_gap_ms": longest_ms(moved),
        "stayed_gap_ms": longest_ms(stayed),
        "calm_gap_ms": longest_ms(calm),
        "moved_gap_median_ms": round(median([max(each.late) for each in moved] or [0.0]) * 1e3, 1),
        "calm_gap_median_ms": round(median(max(each.late) for each in calm) * 1e3, 1),
    }


def longest_ms(streams: list[Stream]) -> float:
    """Return the longest gap of all streams."""
    return round(max((max(each.late) for each in streams), default=0.0) * 1e3, 1)


def connected(client: Client, decode: int) -> None:
    """Wait until so many decode workers are connected."""
    until = time.monotonic() + PATIENCE_S
    while sum(one.state == "connected" and one.info.role is Role.DECODE for one in client.cluster().workers) != decode:
        if time.monotonic() > until:
            raise TimeoutError(f"not {decode} decode workers after {PATIENCE_S:g} s")
        time.sleep(0.1)


def answers(client: Client, count: int, tokens: int, order: Callable[[], object]) -> list[Stream]:
    """Return `count` answers. `order` is called when each has `tokens` tokens."""
    reached = threading.Semaphore(0)
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(streamed, client, number, tokens, reached) for number in range(count)]
        late = sum(not reached.acquire(timeout=PATIENCE_S) for _ in running)
        if late:
            raise TimeoutError(f"{late} streams have fewer than {tokens} tokens after {PATIENCE_S:g} s")
        order()
        return [each.result() for each in running]


def streamed(client: Client, number: int, tokens: int, reached: threading.Semaphore) -> Stream:
    """Stream one answer. `reached` is released when it has `tokens` tokens."""
    late, before = list[float](), time.perf_counter()
    prompt, most = f"{number}. {PROMPT}", tokens + REST
    with client.stream(prompt, max_tokens=most, temperature=0, ignore_eos=True, trace=True) as stream:
        for _ in stream:
            now = time.perf_counter()
            if len(stream.tokens) > tokens:
                late.append(now - before)
            if len(late) == 1:
                reached.release()
            before = now
        placement, usage = stream.placement, stream.usage
    spent = {span.name: span.duration_s for span in stream.trace if span.attempt > 1 and span.role == "decode"}
    moved = placement is not None and placement.attempts > 1
    kv_bytes = placement.kv_bytes if placement is not None else 0
    prompt_tokens = usage.prompt_tokens if usage is not None else 0
    return Stream(
        stream.tokens,
        late,
        moved,
        placement.decode_worker if placement is not None else "",
        kv_bytes,
        prompt_tokens,
        spent.get("receive", 0.0),
        spent.get("commit", 0.0),
    )


def computed(client: Client) -> dict[str, int]:
    """Return the prompt tokens that each connected worker has computed."""
    return {str(worker.info.ref): worker.load.prefill_tokens for worker in client.cluster().workers}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
