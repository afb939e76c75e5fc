"""What the router adds to a request, and how many tokens pass through it.

    python benchmarks/router.py --quick         under 2 minutes on 2 cores
    python benchmarks/router.py                 longer phases
    python benchmarks/router.py --write-docs    the section in docs/performance.md from it

Real routers and workers as plain processes, on the oracle engine. *Added* is the time to the first token through a
router less that of a client which speaks to the same two workers as a router does (`lib/router_direct.py`), in turns.
Then streams and short requests keep the cluster busy, with 1, 2 and 4 routers. Since all share this machine, what a
router process can carry is what passed through it per second of processor time that it used (psutil), beside what
really passed per second.
The last line of stdout is one JSON object with the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/router.py`

import psutil

from baton.cluster.state import ClusterState
from baton.rpc.channel import PUBLIC, aio_channel
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from benchmarks.lib.cluster import cluster
from benchmarks.lib.machine import machine
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import fill, markdown
from benchmarks.lib.router_direct import Direct

NAME = "router"
PROMPT, ANSWER = 16, 256  # tokens
STREAMS = 48
SETS = (
    "model.max_model_len=512",
    "decode.kv_memory=8MiB",
    "prefill.kv_memory=8MiB",
    *(f"router.{listener}=127.0.0.1:0" for listener in ("grpc", "admin", "metrics", "http")),
)


@dataclass(frozen=True, slots=True)
class Load:
    """What passed in `seconds`, and the processor time that the routers used for it."""

    routers: int
    seconds: float
    tokens: int
    requests: int
    cpu_s: float


def request_of(rng: random.Random, tokens: int) -> pb.GenerateRequest:
    """A prompt that nobody has asked before."""
    ids = common_pb2.TokenIds(ids=[rng.randrange(256) for _ in range(PROMPT)])
    sampling = common_pb2.Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, seed=1)
    return pb.GenerateRequest(token_ids=ids, sampling=sampling)


async def added(state: ClusterState, rounds: int) -> list[float]:
    """Seconds, request by request: through the router less without it."""
    rng, found = random.Random(1), list[float]()
    async with aio_channel(state.grpc, link=PUBLIC) as channel, Direct(state.admin) as direct:
        stub = InferenceStub(channel)
        for number in range(rounds + 10):
            through = await _first_token(stub, request_of(rng, 2))
            bare = await direct.first_token(request_of(rng, 2))
            if number >= 10:  # what wakes up first is not measured
                found.append(through - bare)
    return found


async def _first_token(stub: Any, request: pb.GenerateRequest) -> float:
    began, first = time.perf_counter(), 0.0
    async for event in stub.Generate(request):
        if event.HasField("tokens") and not first:
            first = time.perf_counter() - began
    return first


async def drive(address: str, seconds: float, answer: int, seed: int) -> tuple[int, int]:
    """Keep streams under way over a few connections; tokens and requests that came."""
    rng, tokens, requests, ends = random.Random(seed), 0, 0, time.monotonic() + seconds

    async def one(stub: Any) -> None:
        nonlocal tokens, requests
        while time.monotonic() < ends:
            async for event in stub.Generate(request_of(rng, answer)):
                tokens += len(event.tokens.ids)
            requests += 1

    async with contextlib.AsyncExitStack() as leaving:
        channels = [await leaving.enter_async_context(_own_channel(address, number)) for number in range(8)]
        stubs = [InferenceStub(channel) for channel in channels]
        await asyncio.gather(*(one(stubs[number % len(stubs)]) for number in range(STREAMS)))
    return tokens, requests


def _own_channel(address: str, number: int):  # type: ignore[no-untyped-def]  # of grpc.aio
    """Not one connection for all: several routers would not share it."""
    import grpc

    options = [("grpc.use_local_subchannel_pool", 1), ("baton.number", number)]
    return grpc.aio.insecure_channel(address, options=options)


def loaded(state: ClusterState, routers: int, seconds: float, answer: int) -> Load:
    """Load from a process of its own."""
    pids = [identity.pid for name, identity in state.processes.items() if name.startswith("router")]
    before, began = _cpu_s(pids), time.monotonic()
    argv = [sys.executable, __file__, "--drive", state.grpc, "--seconds", str(seconds), "--answer", str(answer)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=ROOT)
    tokens, requests = json.loads(done.stdout.splitlines()[-1])
    return Load(routers, time.monotonic() - began, tokens, requests, _cpu_s(pids) - before)


def _cpu_s(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def figures(extra: list[float], streams: list[Load], short: list[Load]) -> dict[str, float]:
    """By name."""
    found = {"added_ttft_p50_ms": median(extra) * 1e3, "added_ttft_p99_ms": quantiles(extra, n=100)[98] * 1e3}
    found["tokens_per_router_cpu_s"] = streams[0].tokens / streams[0].cpu_s
    found["requests_per_router_cpu_s"] = short[0].requests / short[0].cpu_s
    return {name: round(value, 3) for name, value in found.items()}


def table(streams: list[Load], short: list[Load]) -> str:
    """A row for each number of routers."""
    header = ["routers", "tokens/s", "tokens per s of router CPU", "requests/s", "requests per s of router CPU"]
    rows = [
        [
            str(long.routers),
            f"{long.tokens / long.seconds:,.0f}",
            f"{long.tokens / long.cpu_s:,.0f}",
            f"{brief.requests / brief.seconds:,.0f}",
            f"{brief.requests / brief.cpu_s:,.0f}",
        ]
        for long, brief in zip(streams, short, strict=True)
    ]
    return markdown(header, rows)


def measure(args: argparse.Namespace) -> tuple[list[float], list[Load], list[Load]]:
    """Latency with one router, and load with each number of them."""
    seconds = args.seconds or (4.0 if args.quick else 15.0)
    extra: list[float] = []
    streams, short = list[Load](), list[Load]()
    for routers in args.routers:
        with cluster(NAME, *SETS, f"router.replicas={routers}") as state:
            if not extra:
                extra = asyncio.run(added(state, 200 if args.quick else 1000))
            streams.append(loaded(state, routers, seconds, ANSWER))
            short.append(loaded(state, routers, seconds, 1))
    return extra, streams, short


def main(argv: list[str]) -> None:
    """Measure, print, and fill the section of the page if that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter phases: under 2 minutes")
    parser.add_argument("--routers", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, help="of each phase")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/performance.md")
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=int, default=ANSWER, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.drive:
        print(json.dumps(asyncio.run(drive(args.drive, args.seconds, args.answer, seed=2))))
        return
    load = os.getloadavg()[0]
    extra, streams, short = measure(args)
    found = figures(extra, streams, short)
    shown = "\n\n".join((table(streams, short), markdown(["figure", "value"], [[k, str(v)] for k, v in found.items()])))
    print(shown)
    if args.write_docs:
        page = ROOT / "docs" / "performance.md"
        facts = [f"- command: python benchmarks/router.py {shlex.join(argv)}", f"- load at the start: {load:.1f}"]
        facts += [f"- {name}: {value}" for name, value in machine().items()]
        page.write_text(fill(page.read_text(), "\n".join([*facts, "", shown]), NAME))
    print(json.dumps({"benchmark": NAME, "figures": found}))


if __name__ == "__main__":
    main(sys.argv[1:])
