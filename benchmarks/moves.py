"""Sequences that move from a decode worker that leaves: computed tokens, and the gap in their streams.

    python benchmarks/moves.py            16 sequences of the demo model with about 1,000 tokens each
    python benchmarks/moves.py --quick    8 sequences of 100 tokens

Two decode workers run as plain processes. When all streams have that many tokens, an operator plans one decode worker,
and `scaling.drain_s` is near 0. Half of the sequences move. Each answer is compared with an undisturbed one. The last
line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/moves.py`

import grpc

from baton.client import Client
from baton.rpc.v1 import admin_pb2
from baton.rpc.v1.admin_pb2_grpc import AdminStub
from benchmarks.lib.cluster import cluster

if TYPE_CHECKING:
    from baton.cluster.state_dir import ClusterState

PROMPT = "The color of dog"
REST = 900  # tokens after the order
PATIENCE_S = 120.0
SETS = (
    "model.path=models/demo",
    "model.max_model_len=2048",
    "decode.replicas=2",
    "decode.kv_memory=128MiB",
    "scaling.drain_s=0.1",
    "ledger.heartbeat_s=0.1",
    "log.level=warning",
    *(f"router.{listener}=127.0.0.1:0" for listener in ("grpc", "admin", "metrics", "http")),
)


class Stream(NamedTuple):
    """One answer: ids, seconds between messages before and after the order, whether it moved, and the bytes of KV."""

    ids: tuple[int, ...]
    early: list[float]
    late: list[float]
    moved: bool
    kv_bytes: int
    prompt_tokens: int


def main(argv: list[str]) -> int:
    """Run and print. The exit code is 1 if an answer is wrong, or none moved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 sequences of 100 tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the last line to this file")
    args = parser.parse_args(argv)
    with cluster("moves", *SETS) as state:
        result = measured(state, *((8, 100) if args.quick else (16, 1000)))
    line = json.dumps({"benchmark": "moves", **result})
    if args.json is not None:
        args.json.write_text(line + "\n")
    print(line)
    return 0 if result["moved"] and not result["wrong"] else 1


def measured(state: ClusterState, count: int, tokens: int) -> dict[str, float]:
    """Stream `count` answers, shrink the decode pool when each has `tokens` tokens, and return the figures."""
    with Client(state.grpc, admin=state.admin) as client:
        found = disturbed(client, state.admin, count, tokens)
        again = computed(client) - sum(each.prompt_tokens for each in found)  # the worker that left computed none
        expected = [streamed(client, number, tokens, threading.Semaphore()) for number in range(count)]
    moved = [each for each in found if each.moved]
    longest = {
        kind: max((max(each.late) for each in found if each.moved is kind), default=0.0) for kind in (True, False)
    }
    return {
        "sequences": count,
        "moved": len(moved),
        "wrong": sum(each.ids != right.ids for each, right in zip(found, expected, strict=True)),
        "recomputed_tokens": max(0, again),
        "kv_bytes": max((each.kv_bytes for each in moved), default=0),
        "step_ms": round(median(gap for each in found for gap in each.early) * 1e3, 3),
        "longest_gap_ms": round(longest[True] * 1e3, 1),
        "stayed_gap_ms": round(longest[False] * 1e3, 1),
    }


def disturbed(client: Client, admin: str, count: int, tokens: int) -> list[Stream]:
    """Return the answers of `count` streams, half of which lose their decode worker."""
    reached = threading.Semaphore(0)
    with ThreadPoolExecutor(count) as pool, grpc.insecure_channel(admin) as channel:
        running = [pool.submit(streamed, client, number, tokens, reached) for number in range(count)]
        late = sum(not reached.acquire(timeout=PATIENCE_S) for _ in running)
        if late:
            raise TimeoutError(f"{late} streams have fewer than {tokens} tokens after {PATIENCE_S:g} s")
        AdminStub(channel).Scale(admin_pb2.ScaleRequest(decode=1))
        return [each.result() for each in running]


def streamed(client: Client, number: int, tokens: int, reached: threading.Semaphore) -> Stream:
    """Stream one answer. `reached` is released when it has `tokens` tokens."""
    early, late, before = list[float](), list[float](), time.perf_counter()
    with client.stream(f"{number}. {PROMPT}", max_tokens=tokens + REST, temperature=0, ignore_eos=True) as stream:
        for _ in stream:
            now = time.perf_counter()
            (late if len(stream.tokens) > tokens else early).append(now - before)
            if len(stream.tokens) > tokens and len(late) == 1:
                reached.release()
            before = now
        placement, usage = stream.placement, stream.usage
    moved = placement is not None and placement.attempts > 1
    kv_bytes = placement.kv_bytes if placement is not None else 0
    return Stream(stream.tokens, early, late, moved, kv_bytes, usage.prompt_tokens if usage is not None else 0)


def computed(client: Client) -> int:
    """Return the prompt tokens that all connected workers have computed."""
    return sum(worker.load.prefill_tokens for worker in client.cluster().workers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
