"""Latency that the router adds to a request, and its token throughput.

    python benchmarks/router.py --quick         under 2 minutes on 2 cores
    python benchmarks/router.py                 longer phases
    python benchmarks/router.py --write-docs    the section in docs/measurements/router.md from it

Real routers and workers run as plain processes on the oracle engine. *Added* is the TTFT through a router minus that of
a client with a router's protocol on the same two workers (`lib/router_direct.py`), in turns. A router is called for
each request, so that client also calls the decode worker for each request (*called*). It is measured over permanent
streams too (*standing*), and so is a call of a server that does nothing (`lib/bare_call.py`). Then streams and short
requests saturate the cluster with 1, 2 and 4 routers. The client reads HTTP/2 itself (`lib/http2.py`) and fails if a
stream is incomplete. All processes share this machine. The table therefore also has the processor time (psutil) per
token or request of each kind of process, and the throughput per second of router CPU. The last line of stdout is one
JSON object with the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/router.py`

import psutil

from baton.cluster.state_dir import ClusterState
from baton.rpc.channel import PUBLIC, aio_channel
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from benchmarks.lib.bare_call import bare_server
from benchmarks.lib.cluster import cluster
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import finish, markdown
from benchmarks.lib.router_direct import Direct
from benchmarks.lib.streams import Passed, drive

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "router"
PROMPT, ANSWER = 16, 256  # tokens
STREAMS, CONNECTIONS = 48, 8  # several connections, because one would reach only one of several routers
KINDS = ("client", "router", "prefill", "decode")
SETS = (
    "router.local_prefill=never",  # the same path for all requests
    "model.max_model_len=512",
    "decode.kv_memory=8MiB",
    "prefill.kv_memory=8MiB",
)


@dataclass(frozen=True, slots=True)
class Load:
    """Throughput of `routers` routers, and the processor seconds of each kind of process."""

    routers: int
    passed: Passed
    cpu_s: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        return self.passed.tokens / self.passed.seconds

    @property
    def requests_per_s(self) -> float:
        return self.passed.requests / self.passed.seconds


def request_of(rng: random.Random, tokens: int) -> pb.GenerateRequest:
    """Return a request with a new prompt."""
    ids = common_pb2.TokenIds(ids=[rng.randrange(256) for _ in range(PROMPT)])
    sampling = common_pb2.Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, seed=1)
    return pb.GenerateRequest(token_ids=ids, sampling=sampling)


class Turn(NamedTuple):
    """Seconds to the first token through a router, by calling a worker, over standing streams, and of a bare call."""

    through: float
    called: float
    standing: float
    call: float


async def turns(state: ClusterState, rounds: int) -> list[Turn]:
    """Measure all ways in turns, so that they have the same machine."""
    rng, found = random.Random(1), list[Turn]()
    async with contextlib.AsyncExitStack() as leaving:
        bare_at = leaving.enter_context(bare_server())
        channels = [await leaving.enter_async_context(aio_channel(at, link=PUBLIC)) for at in (state.grpc, bare_at)]
        router, bare = [InferenceStub(channel) for channel in channels]
        direct = await leaving.enter_async_context(Direct(state.admin))
        for number in range(rounds + 10):
            through = await _first_token(router, request_of(rng, 2))
            called = await direct.first_token_of_a_call(request_of(rng, 2))
            standing = await direct.first_token(request_of(rng, 2))
            call = await _first_token(bare, request_of(rng, 2))
            if number >= 10:  # the first rounds warm up
                found.append(Turn(through, called, standing, call))
    return found


async def _first_token(stub: Any, request: pb.GenerateRequest) -> float:
    began, first = time.perf_counter(), 0.0
    async for event in stub.Generate(request):
        if event.HasField("tokens") and not first:
            first = time.perf_counter() - began
    return first


def loaded(state: ClusterState, routers: int, seconds: float, answer: int) -> Load:
    """Drive the load from a separate process."""
    before = _cpu_s(state)
    argv = [sys.executable, __file__, "--drive", state.grpc, "--seconds", str(seconds), "--answer", str(answer)]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    after, passed = _cpu_s(state), Passed(**json.loads(done.stdout.splitlines()[-1]))
    used = {kind: after[kind] - before[kind] for kind in KINDS if kind != "client"}
    return Load(routers, passed, {"client": passed.cpu_s, **used})


def _cpu_s(state: ClusterState) -> dict[str, float]:
    """Return the processor seconds by kind of process."""
    times = {name: sum(psutil.Process(who.pid).cpu_times()[:2]) for name, who in state.processes.items()}
    return {kind: sum(value for name, value in times.items() if name.startswith(kind)) for kind in KINDS}


def driven(address: str, seconds: float, answer: int) -> Passed:
    """Drive the load, in the separate process."""
    rng = random.Random(2)

    def request() -> bytes:
        return request_of(rng, answer).SerializeToString()

    return drive(address, request, answer=answer, streams=STREAMS, connections=CONNECTIONS, seconds=seconds)


def figures(extra: list[Turn], streams: list[Load], short: list[Load]) -> dict[str, float]:
    """Return figures by name. Those of load are with the first number of routers."""
    found = dict[str, float]()
    for name, seconds in (
        ("added_ttft", [turn.through - turn.called for turn in extra]),
        ("added_to_standing_streams", [turn.through - turn.standing for turn in extra]),
        ("bare_call", [turn.call for turn in extra]),
    ):
        found[f"{name}_p50_ms"], found[f"{name}_p99_ms"] = median(seconds) * 1e3, quantiles(seconds, n=100)[98] * 1e3
    found["tokens_per_s"] = streams[0].tokens_per_s
    found["tokens_per_router_cpu_s"] = streams[0].passed.tokens / streams[0].cpu_s["router"]
    found["tokens_per_event"] = streams[0].passed.tokens_per_event
    found["requests_per_router_cpu_s"] = short[0].passed.requests / short[0].cpu_s["router"]
    return {name: round(value, 3) for name, value in found.items()}


def ratios(found: Mapping[str, float], streams: list[Load], short: list[Load]) -> dict[str, float | None]:
    """Return the ratios that other programs use."""
    return {
        "added_ms_p50": found["added_ttft_p50_ms"],
        "added_ms_p99": found["added_ttft_p99_ms"],
        "tokens_per_s_one_process": round(streams[0].tokens_per_s, 1) if streams[0].routers == 1 else None,
        "requests_per_s_one_process": round(short[0].requests_per_s, 1) if short[0].routers == 1 else None,
        "choose_ms_1000_workers": choosing_ms(),
    }


def choosing_ms() -> float:
    """Return the slowest policy's median from `benchmarks/choose.py`."""
    argv = [sys.executable, str(Path(__file__).with_name("choose.py")), "--quick"]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    found = json.loads(done.stdout.splitlines()[-1])["ratios"]
    slowest: float = max(value for name, value in found.items() if "," in name)
    return round(slowest / 1e3, 4)


def table(loads: list[Load], what: str) -> str:
    """Return a row per number of routers: rate of `what` (tokens or requests), and CPU time by kind of process."""
    header = ["routers", f"{what}s/s passed", f"{what}s per s of router CPU", "tokens per event"]
    header += [f"{kind}, us of CPU" for kind in KINDS]
    rows = []
    for load in loads:
        count = load.passed.tokens if what == "token" else load.passed.requests
        costs = [f"{load.cpu_s[kind] / count * 1e6:,.1f}" for kind in KINDS]
        passed = [count / load.passed.seconds, count / load.cpu_s["router"]]
        rows.append(
            [str(load.routers), *(f"{value:,.0f}" for value in passed), f"{load.passed.tokens_per_event:.2f}", *costs]
        )
    return markdown(header, rows)


def measure(args: argparse.Namespace) -> tuple[list[Turn], list[Load], list[Load]]:
    """Measure latency with one router, and load with each number of routers."""
    seconds = args.seconds or (4.0 if args.quick else 15.0)
    extra = list[Turn]()
    streams, short = list[Load](), list[Load]()
    for routers in args.routers:
        with cluster(NAME, *SETS, f"router.replicas={routers}") as state:
            if not extra:
                extra = asyncio.run(turns(state, 200 if args.quick else 1000))
            streams.append(loaded(state, routers, seconds, ANSWER))
            short.append(loaded(state, routers, seconds, 1))
    return extra, streams, short


def main(argv: list[str]) -> None:
    """Measure, print, and fill the section of the page if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter phases: under 2 minutes")
    parser.add_argument("--routers", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, help="of each phase")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/measurements/")
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=int, default=ANSWER, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.drive:
        print(json.dumps(asdict(driven(args.drive, args.seconds, args.answer))))
        return
    load = os.getloadavg()[0]
    extra, streams, short = measure(args)
    found = figures(extra, streams, short)
    values = markdown(["figure", "value"], [[name, str(value)] for name, value in found.items()])
    shown = "\n\n".join((table(streams, "token"), table(short, "request"), values))
    finish(NAME, argv, load, shown, ratios(found, streams, short), found, write_docs=args.write_docs)


if __name__ == "__main__":
    main(sys.argv[1:])
